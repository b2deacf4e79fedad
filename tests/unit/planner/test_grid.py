"""The search against pricing every plan of a space enumerated by other code."""

from itertools import product

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.offers import offers_of
from foreshard.catalog.training import training_constants
from foreshard.cost.energy import BUSY_PARTS, WAITING_POWER
from foreshard.planner.grid import bounds
from foreshard.planner.grid.best_so_far import Found
from foreshard.planner.grid.bounds import cell_bounds, device_seconds_floor, pass_bounds
from foreshard.planner.grid.search import search_rows
from foreshard.planner.grid.space import (
    GridRequest,
    cells_of,
    least_memory_rows,
    passes_of,
    rows_of,
    shapes_of,
    with_rules,
)
from foreshard.predict.analytical.table import evaluate
from foreshard.predict.plan_table import COLUMNS, OFFLOADS, PlanTable
from foreshard.predict.space import RULES, valid_plans
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import TABLED

# Model, cluster, framework, global batch, sequence: pipelines, experts, unlike blocks, tight memory.
SPACES = (
    ("llama3-8b", "1x4xh100-sxm", "megatron-core", 4, 4096),
    ("llama3-8b", "3x1xl40s", "megatron-core", 6, 2048),
    ("gpt2-xl", "2x2xa100-sxm-40gb", "torchtitan", 4, 1024),
    ("mixtral-8x7b", "1x8xh200-sxm", "nemo", 2, 4096),
    ("gpt-22b", "1x8xa100-sxm-80gb", "megatron-lm", 4, 2048),
    ("llama3-8b", "1x2xh100-sxm", "deepspeed", 6, 8192),
    ("deepseek-v2-lite", "2x2xh100-sxm", "megatron-core", 2, 2048),
)
OBJECTIVES = ("time", "energy")


def _request(model, cluster, framework, global_batch, seq_len, **options):
    return GridRequest(
        model=load_model(model),
        cluster=load_cluster(cluster),
        framework=load_framework(framework),
        constants=training_constants(),
        global_batch=global_batch,
        seq_len=seq_len,
        **options,
    )


def _divide(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def _shapes(request):
    """Yield degrees, micro-batch and the number of micro-batches."""
    devices, degrees = request.cluster.num_devices, offers_of(request.framework).degrees
    moe = any(block.num_experts for block in request.model.blocks)
    for tp, pp, cp in product(_divide(devices), repeat=3):
        if devices % (tp * pp * cp) or request.global_batch % (devices // (tp * pp * cp)):
            continue
        if any(size > 1 and name not in degrees for name, size in (("tp", tp), ("pp", pp), ("cp", cp))):
            continue
        dp = devices // (tp * pp * cp)
        for micro_batch in _divide(request.global_batch // dp):
            for ep, etp in product(range(1, 65), range(1, devices + 1)) if moe else ((1, 1),):
                if (ep > 1 and "ep" not in degrees) or (etp > 1 and "etp" not in degrees):
                    continue
                yield dp, tp, pp, cp, ep, etp, micro_batch, request.global_batch // dp // micro_batch


def _rows(request):
    """Yield every plan that keeps the rules a framework states, as its columns."""
    offers = offers_of(request.framework)
    whole = {"none", "full"} | ({"every-2"} if "every" in offers.recompute else set())
    rules = [i for i, rule in enumerate(RULES) if "selective" in offers.recompute or rule in whole]
    rules = [i for i in rules if RULES[i] != "every-2" or "every" in offers.recompute]
    for dp, tp, pp, cp, ep, etp, micro_batch, rounds in _shapes(request):
        names = [name for name in offers.schedules if name != "interleaved"] if pp > 1 else ["1f1b"]
        deepest = request.model.num_layers // pp if "interleaved" in offers.schedules and pp > 1 else 1
        for vpp in range(1, deepest + 1 if "vpp" in offers.degrees else 2):
            for schedule, sp, rule, zero in product(
                names if vpp == 1 else ["interleaved"],
                (0, 1) if tp > 1 and offers.cuts_sequences else (0,),
                rules,
                sorted(
                    {1, *offers.levels(pp)} if 0 not in offers.zero and dp * cp == 1 else offers.levels(pp)
                ),
            ):
                groups = _divide(dp * cp)[1:-1] if zero in offers.in_groups else []
                for shard, offload in product([0, *groups], offers.offload):
                    yield (
                        dp,
                        tp,
                        pp,
                        cp,
                        ep,
                        etp,
                        vpp,
                        micro_batch,
                        rounds,
                        zero,
                        shard,
                        sp,
                        rule,
                        TABLED.index(schedule),
                        OFFLOADS.index(offload),
                    )


def _everything(request):
    columns = np.array(list(_rows(request)), dtype=np.int64).T
    table = PlanTable(**dict(zip(COLUMNS, columns, strict=True)), rules=RULES)
    return table.take(valid_plans(request.model, request.cluster, table, seq_len=request.seq_len))


def _priced(request):
    """Return the table of all valid plans, seconds and joules of each by objective, and whether it fits."""
    table = _everything(request)
    seconds, joules, fits = [], [], []
    for start in range(0, len(table), 4096):
        some = table.take(slice(start, start + 4096))
        result = evaluate(
            request.model,
            request.cluster,
            some,
            framework=request.framework,
            constants=request.constants,
            seq_len=request.seq_len,
            precision=request.precision,
            optimizer=request.optimizer,
        )
        busy = sum(result.parts[name] for name in BUSY_PARTS)
        watts = sum(nodes.device.tdp_w * nodes.num_devices for nodes in request.cluster.nodes)
        joules.append(watts * (busy + WAITING_POWER * (result.step_time_s - busy)))
        seconds.append(result.step_time_s)
        fits.append(result.fits)
    return table, {"time": np.concatenate(seconds), "energy": np.concatenate(joules)}, np.concatenate(fits)


def _degrees(table, i):
    return tuple(int(getattr(table, name)[i]) for name in ("tp", "pp", "cp", "ep", "etp"))


def _best_of_each(table, score, fits):
    """Return the least score of every choice of degrees that has a plan, in rising order."""
    best = {}
    for i in np.flatnonzero(fits):
        key = _degrees(table, i)
        best[key] = min(best.get(key, np.inf), score[i])
    return sorted(best.values())


@pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{space[0]}-{space[1]}-{space[2]}")
def test_search_equals_pricing_everything(space):
    table, scores, fits = _priced(_request(*space))
    for objective, score in scores.items():
        found = search_rows(_request(*space, objective=objective), keep=4)
        assert found.evaluated + found.pruned == len(table)
        wanted = _best_of_each(table, score, fits)[:4]
        assert found.score == pytest.approx(wanted, rel=1e-12)
        assert not found.interrupted
        assert found.bound == pytest.approx(wanted[0] if wanted else np.inf, rel=1e-12)


def test_rows_of_a_kind_of_pass_are_listed_once(monkeypatch):
    """Hundreds of thousands of passes share a few lists of rows."""
    from foreshard.planner.grid import space as module

    kinds, listed = [], module._listed

    def noted(request, *kind):
        kinds.append(kind)
        return listed(request, *kind)

    monkeypatch.setattr(module, "_listed", noted)
    search_rows(_request(*SPACES[0]), keep=1)
    assert 0 < len(kinds) == len(set(kinds))


@pytest.mark.parametrize("space", SPACES[:3], ids=lambda space: space[0])
def test_bounds_lie_below_every_plan_when_the_search_stops_early(space):
    request = _request(*space)
    _, scores, fits = _priced(request)
    found = search_rows(request, keep=1, deadline=0.0, patience_s=60.0)
    assert found.bound <= scores["time"][fits].min() * (1 + 1e-12)
    assert found.floor_s <= scores["time"].min()


@pytest.mark.parametrize("space", SPACES[:2], ids=lambda space: space[0])
def test_limit_on_the_step_keeps_only_faster_plans(space):
    table, scores, fits = _priced(_request(*space))
    score, seconds = scores["energy"], scores["time"]
    limit = float(np.quantile(seconds[fits], 0.1))
    found = search_rows(_request(*space, objective="energy", max_step_s=limit), keep=1)
    assert found.score[0] == pytest.approx(score[fits & (seconds <= limit)].min(), rel=1e-12)
    assert found.step_time_s[0] <= limit
    nothing = search_rows(_request(*space, objective="energy", max_step_s=1e-9), keep=1)
    assert len(nothing.score) == 0
    assert nothing.evaluated + nothing.pruned == len(table)


def test_plans_found_are_valid_and_predicted_alike():
    request = _request(*SPACES[0])
    found = search_rows(request, keep=4)
    for table, seconds in zip(found.tables, found.step_time_s, strict=True):
        plan = table.plan(0, request.model, seq_len=request.seq_len, framework=request.framework.label)
        check_plan(plan, request.model, request.cluster)
        prediction = predict(request.model, request.cluster, plan, engine="analytical")
        assert prediction.step_time_s == pytest.approx(seconds, rel=1e-9)
        assert prediction.memory.fits


def test_bounds_prune_most_of_a_space():
    found = search_rows(_request("llama3-70b", "8x8xh100-sxm", "megatron-core", 256, 8192), keep=5)
    assert found.pruned > 10 * found.evaluated


def test_what_another_search_found_prunes():
    request = _request(*SPACES[0])
    best = search_rows(request, keep=1)
    again = search_rows(request, keep=1, beat=float(best.score[0]))
    assert not again.tables
    assert again.evaluated <= best.evaluated
    assert again.evaluated + again.pruned == best.evaluated + best.pruned


def test_kept_plans_differ_in_degrees():
    request = _request(*SPACES[0])
    table, scores, fits = _priced(request)
    seconds = scores["time"]
    found = Found(keep=4)
    found.add(table.take(fits), seconds[fits], seconds[fits])
    assert found.score == pytest.approx(_best_of_each(table, seconds, fits)[:4])
    assert len({_degrees(one, 0) for one in found.tables}) == 4


@pytest.mark.parametrize("space", [SPACES[0], SPACES[2]], ids=("megatron", "torchtitan"))
def test_of_each_degrees_the_best_wanted_plan_is_kept(space):
    request = _request(*space)
    table, scores, fits = _priced(request)

    def wanted(rows):
        return (rows.recompute == 0) & (rows.offload == 0) & ((rows.zero + rows.micro_batch) % 2 == 1)

    found = search_rows(request, keep=5, refusals=lambda row: () if wanted(row)[0] else ("unwanted",))
    assert found.refused["unwanted"] > 0
    best = _best_of_each(table, scores["time"], fits & wanted(table))
    assert found.score == pytest.approx(best[:5])
    assert found.bound == pytest.approx(best[0])


def test_interrupt_keeps_what_was_found(monkeypatch):
    import foreshard.planner.grid.search as grid

    calls, priced = [], grid._price_rows

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) > 1:
            raise KeyboardInterrupt
        priced(*arguments)

    whole = search_rows(_request(*SPACES[3]), keep=1)
    monkeypatch.setattr(grid, "_price_rows", interrupted)
    found = search_rows(_request(*SPACES[3]), keep=1)
    assert found.interrupted
    assert len(found.score) == 1
    assert found.bound <= whole.score[0]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{space[0]}-{space[1]}-{space[2]}")
def test_the_least_memory_rows_need_no_more_than_any_row_of_their_pass(space):
    request = _request(*space)
    passes = passes_of(request, cells_of(request)).take(slice(None, None, 7))
    rows, index = least_memory_rows(request, passes)
    least = np.full(len(passes), np.inf)
    np.minimum.at(least, index, request.memory(rows).peak_bytes)
    for i in range(len(passes)):
        some = rows_of(request, passes.take(slice(i, i + 1)))
        assert request.memory(some).peak_bytes.min() >= least[i] * (1 - 1e-12)


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "gpt3-175b", "mamba2-1.3b"])
def test_no_number_of_devices_needs_less_than_the_floor(model):
    whole = _request(model, "12x8xh100-sxm", "megatron-core", 96, 2048)
    floor = device_seconds_floor(whole)
    for nodes in (1, 2, 3, 5, 7, 8, 12):
        part = _request(model, f"{nodes}x8xh100-sxm", "megatron-core", 96, 2048)
        cells = cells_of(part)
        if len(cells):
            assert cell_bounds(part, cells)[1] * part.cluster.num_devices >= floor * (1 - 1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{space[0]}-{space[1]}-{space[2]}")
def test_a_shape_bounds_every_recompute_rule_of_it(space, objective):
    request = _request(*space, objective=objective)
    shapes = shapes_of(request, cells_of(request)).take(slice(None, None, 5))
    passes, shape = with_rules(request, shapes)
    assert np.all(pass_bounds(request, shapes)[shape] <= pass_bounds(request, passes) * (1 + 1e-12))


@pytest.mark.parametrize(
    "space",
    [
        *SPACES,
        ("deepseek-v3", "3x8xh800-sxm", "megatron-core", 48, 4096),
        ("mamba2-130m", "2x8xh100-sxm", "megatron-core", 16, 2048),  # no heads that could decide tp
    ],
    ids=str,
)
def test_the_bound_of_a_cell_is_its_own(space):
    request = _request(*space)
    cells = cells_of(request)
    cells = cells.take(slice(None, None, len(cells) // 200 + 1))
    together, floor_s = cell_bounds(request, cells)
    alone = [_afresh(request, cells.take(slice(i, i + 1))) for i in range(len(cells))]
    assert together == pytest.approx([bound[0] for bound, _ in alone], rel=1e-12)
    assert floor_s == pytest.approx(min(floor for _, floor in alone), rel=1e-12)


def _afresh(request, cells):
    """Return the bounds of cells of which nothing is known from other cells."""
    bounds._known_work.cache_clear()
    return cell_bounds(request, cells)


@pytest.mark.parametrize("device", ["h100-sxm", "rtx-4090", "gb200"])
@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3"])
@pytest.mark.slow
def test_work_known_from_other_numbers_of_nodes_is_that_of_these(model, device):
    sizes = (
        ["1x4", "1x8", "2x8", "3x8", "8x8", "12x8"] if device != "gb200" else ["1x4", "2x4", "9x4", "18x4"]
    )
    for first, then in product(sizes, sizes):
        one, other = (
            _request(model, f"{size}x{device}", "megatron-core", 96, 2048) for size in (first, then)
        )
        cells = cells_of(other).take(slice(None, None, 37))
        _afresh(one, cells_of(one).take(slice(None, None, 5)))
        known, floor_s = cell_bounds(other, cells)
        fresh, fresh_floor_s = _afresh(other, cells)
        assert known == pytest.approx(fresh, rel=1e-12)
        assert floor_s == pytest.approx(fresh_floor_s, rel=1e-12)
