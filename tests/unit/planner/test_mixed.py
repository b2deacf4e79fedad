"""Plans of mixed devices: what is left out, what cannot be, that all are valid and above their bound."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import InfeasibleError
from foreshard.planner.baselines.registry import BASELINES
from foreshard.planner.finalists import searching
from foreshard.planner.mixed import best_so_far as found_module
from foreshard.planner.mixed import search as search_module
from foreshard.planner.mixed.best_so_far import MixedFound
from foreshard.planner.mixed.even_plans import EvenPlans
from foreshard.planner.mixed.infeasible import least_devices
from foreshard.planner.mixed.interleaving import interleaved
from foreshard.planner.mixed.node_sets import capped, node_sets
from foreshard.planner.mixed.search import MixedSearch
from foreshard.planner.mixed.subspaces import Subspace
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import checked_request
from foreshard.planner.result import PlanResult
from foreshard.planner.search import plan
from foreshard.planner.solver import solve as solving
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.solve import ProblemSearch
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import plan_from_degrees

pytest.importorskip("scipy", reason="planning mixed devices needs the extra `plan`")

SMALL = "2x4xv100-sxm-16gb+2x4xa100-sxm-40gb@100Gb/s"


def search(model: str, cluster: str, batch: int = 32, seq_len: int = 2048, **asked) -> PlanResult:
    found = plan(
        load_model(model),
        load_cluster(cluster),
        global_batch=batch,
        seq_len=seq_len,
        **{"budget_s": 3.0, **asked},
    )
    for one in found.plans:
        check_plan(one.plan, load_model(model), load_cluster(cluster))
        assert one.prediction.memory.fits
        if not asked.get("objective"):
            assert found.lower_bound_step_time_s <= one.prediction.step_time_s * (1 + 1e-9)
    return found


def test_late_predictions_are_of_the_plans_that_cost_least(monkeypatch):
    """Plans judged in time are not lost to the clock, which would leave the fastest, dearest one alone."""
    request = checked_request(
        load_model("llama3.2-1b"),
        load_cluster(SMALL),
        global_batch=8,
        precision="fp16",
        objective=("cost",),
        top=2,
    )
    shown = {"groups": (), "precision": "fp16", "comm": {}}
    plans = [SimpleNamespace(ranks=tuple(range(n)), **shown) for n in (16, 8, 4, 1)]
    monkeypatch.setattr(
        search_module,
        "predicted",
        lambda request, plan: SimpleNamespace(plan=plan, memory=SimpleNamespace(fits=True)),
    )

    def late(request):
        found = MixedSearch(request)
        found.found.timed = list(zip((1.0, 1.5, 2.5, 20.0), plans, strict=True))
        found.budget = TimeBudget(-1.0)
        return [len(one.plan.ranks) for one in found._predictions()]

    assert late(request) == [4, 8]
    assert late(replace(request, objectives=("time",))) == [16]


def test_slow_device_beside_a_fast_one_is_used_or_left_idle_whichever_is_faster(even_clock):
    cluster = "1x1xrtx-3090+1x1xa100-sxm-40gb@10Gb/s"
    found = search("llama3.2-1b", cluster, budget_s=20.0)
    alone = search("llama3.2-1b", "1x1xa100-sxm-40gb")
    # The grid of equal devices also tries ZeRO 3 on one device, which spares some gradient traffic.
    assert found.plans[0].prediction.step_time_s <= alone.plans[0].prediction.step_time_s * 1.06
    assert found.gap < 0.02


@pytest.mark.slow
def test_device_without_the_precision_is_left_out_and_named(even_clock):
    found = search("llama3.2-1b", SMALL)
    assert all(rank >= 8 for one in found.plans for rank in one.plan.ranks)
    assert any("v100-sxm-16gb" in note and "bf16" in note for note in found.notes)
    fast = SMALL.replace("100Gb/s", "800Gb/s")
    both = search("llama3.2-1b", fast, batch=256, precision="fp16")
    assert not any("v100" in note for note in both.notes)
    assert any(rank < 8 for one in both.plans for rank in one.plan.ranks)


def test_vendors_train_apart():
    found = search("llama3-8b", "1x8xmi300x+1x8xh100-sxm@400Gb/s", seq_len=4096)
    for one in found.plans:
        assert len({rank < 8 for rank in one.plan.ranks}) == 1
    assert any("amd" in note and "nvidia" in note for note in found.notes)


def test_no_more_devices_than_allowed():
    found = search("llama3.2-1b", SMALL, precision="fp16", max_devices=6)
    assert found.plans and all(len(one.plan.ranks) <= 6 for one in found.plans)


@pytest.mark.slow
def test_cost_counts_the_nodes_in_use(even_clock):
    fast = search("llama3.2-1b", SMALL, precision="fp16", budget_s=1.5)
    cheap = search("llama3.2-1b", SMALL, precision="fp16", objective=("cost",), budget_s=1.5)
    prices = [one.prediction.cost.usd_per_step for one in cheap.plans]
    assert prices == sorted(prices)
    assert prices[0] <= fast.plans[0].prediction.cost.usd_per_step * (1 + 1e-9)


@pytest.mark.parametrize(
    "cluster", ["1x7xa100-sxm-80gb+1x3xh100-sxm@100Gb/s", "5x1xa100-sxm-40gb+3x1xl40s@10Gb/s"]
)
@pytest.mark.slow
def test_prime_counts(cluster):
    found = search("llama3.2-1b", cluster, batch=31)
    assert found.plans and sum(group.share for group in found.plans[0].plan.groups) == 31


def test_a_range_without_plans_is_no_end_of_the_search():
    """Three and one devices: the first numbers of pipelines that are looked at hold no plan."""
    found = search("llama2-7b", "1x3xa100-sxm-80gb+1x1xh100-sxm@400Gb/s", batch=16, seq_len=4096)
    assert found.plans and found.gap < np.inf


def test_nothing_fits_names_memory_and_a_change_that_does(even_clock):
    cluster = "1x2xrtx-3090+1x1xa100-sxm-40gb@10Gb/s"
    found = search("llama3-8b", cluster)
    assert not found.plans and isinstance(found.infeasible, InfeasibleError)
    assert found.infeasible.key == "memory" and "82 GiB" in found.infeasible.what
    assert "6 % of memory left free" in found.infeasible.what
    fix = found.infeasible.fix
    assert fix.removeprefix("It fits with ").startswith(
        ("--memory-margin", "--optimizer", "--seq", "2 times")
    ), fix
    changed = {"optimizer": fix.split()[-1]} if "--optimizer" in fix else {}
    bigger = "2x2xrtx-3090+2x1xa100-sxm-40gb@10Gb/s" if "2 times" in fix else cluster
    seq_len = int(fix.split()[-1]) if "--seq" in fix else 2048
    assert search("llama3-8b", bigger, seq_len=seq_len, **changed).plans


@pytest.mark.parametrize("tick_s", [2e-3, 2e-2])
@pytest.mark.parametrize(
    ("model", "cluster", "budget_s"),
    [
        ("llama2-13b", "1x2xrtx-3090+1x1xl4@10Gb/s", 2.0),
        pytest.param("llama3-8b", "1x1xl4+1x2xt4+1x1xrtx-3090@10Gb/s", 4.0, marks=pytest.mark.slow),
        ("llama3-70b", "1x2xrtx-3090", 3.0),
    ],
)
def test_a_budget_is_kept_where_nothing_fits(model, cluster, budget_s, tick_s, monkeypatch):
    """However slow the machine: the clock goes on by a tick each time it is asked."""
    # What is compiled now does not ask the clock later.
    search("gpt2-large", "1x1xl4+1x1xt4", precision="fp16", budget_s=1.0)
    asked = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(asked) * tick_s)
    found = search(model, cluster, batch=8, precision="fp16", budget_s=budget_s)
    assert not found.plans and found.infeasible is not None
    assert next(asked) * tick_s <= 1.1 * budget_s


def test_sets_of_many_groups_stay_few():
    kinds = (
        "a100-sxm-80gb",
        "a100-sxm-40gb",
        "h100-sxm",
        "h200-sxm",
        "l40s",
        "a100-pcie-80gb",
        "l4",
        "h100-pcie",
    )
    request = checked_request(
        load_model("llama3-8b"), load_cluster("+".join(f"1x2x{kind}" for kind in kinds)), global_batch=8
    )
    sets = node_sets(request)
    assert sets[0] == tuple(range(8)) and len(sets) == 1 + 8 + 8


def test_capped_problem_keeps_the_fastest_devices():
    request = checked_request(
        load_model("llama3.2-1b"), load_cluster(SMALL), global_batch=8, precision="fp16"
    )
    problem = capped(price_stages(request, (0, 1)), 9)
    assert problem.counts == (1, 8)
    assert np.isfinite(least_devices(problem)) and least_devices(problem) >= 1


@pytest.mark.parametrize("most", [None, 1])
def test_device_without_memory_is_left_idle_and_takes_nothing_from_the_bound(tmp_path, most):
    path = tmp_path / "cluster.toml"
    nodes = '[[nodes]]\ncount = 1\nper_node = 1\ndevice = "{}"\n'
    tiny = '[[devices]]\nname = "tiny"\nbase = "h100-sxm"\nmemory = "64 MiB"\n'
    path.write_text(nodes.format("h100-sxm") + nodes.format("tiny") + tiny, encoding="utf-8")
    found = search("gpt2-xl", str(path), batch=8, seq_len=1024, max_devices=most)
    assert found.plans[0].plan.ranks == (0,)
    assert found.lower_bound_step_time_s > 0.0 and found.gap < 1.0


def test_devices_left_out_for_their_precision_are_the_first_change_that_fits():
    found = search(
        "llama3-8b", "1x1xh100-sxm+3x1xv100-sxm-32gb", batch=8, framework="torchtitan", memory_margin=0
    )
    assert not found.plans
    assert "the one device that may be used" in found.infeasible.what
    assert found.infeasible.fix == "It fits with --dtype fp16, which all of them have"


@pytest.mark.slow
def test_a_change_fits_when_it_fits_the_devices_of_each_kind():
    """The least pipeline in fp16 takes more L4 than there are, though no more devices than there are."""
    asked = {"batch": 32, "seq_len": 2048, "framework": "nemo"}
    found = search("llama3-8b", "1x4xl4+1x4xt4@25Gb/s", **asked, precision="bf16")
    assert found.infeasible.fix == "It fits with 4 times as many nodes"
    assert search("llama3-8b", "1x1xh100-sxm+3x1xv100-sxm-32gb", batch=8, precision="fp16").plans


NEAR = "1x2xh100-sxm+1x2xa100-sxm-80gb"


@pytest.mark.parametrize("at", [3, 6])
def test_an_interrupt_ends_every_part_of_the_search(monkeypatch, at):
    calls, advance = [], ProblemSearch.advance

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == at:
            raise KeyboardInterrupt
        return advance(*arguments)

    monkeypatch.setattr(ProblemSearch, "advance", interrupted)
    whole = search("gpt2-xl", NEAR, batch=16, seq_len=1024, budget_s=60.0)
    assert whole.plans and whole.stopped and whole.interrupted
    assert len(calls) == at


def test_an_interrupt_before_any_plan_ends_the_program(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(EvenPlans, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search("gpt2-xl", NEAR, batch=16, seq_len=1024)


def test_an_interrupt_outside_a_solver_keeps_the_plans_found(monkeypatch):
    calls, ended, price, take = [], [], search_module.price_stages, MixedFound.take

    def taken(*arguments):
        calls.append(0)
        return take(*arguments)

    def interrupted(*arguments, **options):
        if calls and not ended:
            ended.append(0)
            raise KeyboardInterrupt
        return price(*arguments, **options)

    monkeypatch.setattr(MixedFound, "take", taken)
    monkeypatch.setattr(search_module, "price_stages", interrupted)
    found = search("gpt2-xl", NEAR, batch=16, seq_len=1024)
    assert found.plans and found.stopped


def test_an_interleaved_plan_is_chosen_as_soon_as_it_is_faster_by_the_graph(monkeypatch):
    """A gap may be wider for it: what is faster is never set aside for a better proof."""
    model, cluster = load_model("gpt2-xl"), load_cluster(NEAR)
    request = checked_request(model, cluster, global_batch=16, seq_len=1024)
    plain = plan_from_degrees(model.num_layers, 4, pp=4, global_batch=16, seq_len=1024)
    cut = interleaved(plain, 2)
    graph_s = predict(model, cluster, cut).step_time_s
    monkeypatch.setattr(found_module, "engine_seconds", lambda *_: [0.0])
    for best_s in (graph_s * 1.01, graph_s * 0.99):
        found = MixedFound(request=request, timed=[(best_s, plain)])
        assert found.take_interleaved(cut) <= graph_s * (1.0 + 1e-9)
        assert found.is_interleaved == (best_s > graph_s)
        assert found.graph_s > 0.0


def test_the_most_pipelines_are_bounded_by_one_round_once_time_is_over():
    request = checked_request(load_model("gpt2-xl"), load_cluster(NEAR), global_batch=16, seq_len=1024)
    problem = price_stages(request, (0, 1), every=True)
    states = [
        SearchState(problem=problem, budget=TimeBudget(0.0, end), target_gap=0.003) for end in (0.0, np.inf)
    ]
    late, whole = (solving._most_pipelines(state) for state in states)
    assert states[0].evaluated == 1 < states[1].evaluated
    assert late >= whole > 0


def test_depths_near_that_of_the_fastest_plan_are_the_likeliest(monkeypatch):
    """With any number of chunks alike, and anew once a plan of another depth is faster."""
    model = load_model("gpt2-xl")
    search = MixedSearch(checked_request(model, load_cluster(NEAR), global_batch=16, seq_len=1024))
    monkeypatch.setattr(MixedFound, "take_interleaved", lambda *_: np.inf)
    for seconds, stages in ((2.0, 2), (1.0, 4)):
        made = plan_from_degrees(
            model.num_layers, 4, pp=stages, tp=4 // stages, global_batch=16, seq_len=1024
        )
        search.found.timed.append((seconds, made))
        search._add_interleaved()
        weights = {depth: subspace.weight for depth, subspace in search._depths.items()}
        likeliest = {depth for depth, weight in weights.items() if weight == max(weights.values())}
        assert likeliest == {(4, stages), (2, stages)}
        assert all(weights[4, own] == weights[2, own] for _, own in weights)
    assert len({id(one) for one in search.others}) == len(search.others)


def test_time_is_left_for_the_graph_to_time_what_is_shown(monkeypatch):
    model, cluster = load_model("gpt2-xl"), load_cluster(NEAR)
    request = checked_request(model, cluster, global_batch=16, seq_len=1024, budget_s=100.0)
    search = MixedSearch(searching(request))
    plain = plan_from_degrees(model.num_layers, 4, pp=4, global_batch=16, seq_len=1024)
    search.found.timed.append((np.inf, plain))
    before = search.budget.ends_at
    for graph_s, left_s in ((0.0, None), (1.0, None), (4.0, 20.0), (50.0, 25.0)):
        search.found.graph_s = graph_s
        search._leave_time()
        ends_at = before if left_s is None else search.whole.ends_at - left_s
        assert search.budget.ends_at == pytest.approx(ends_at)
    timing = []
    monkeypatch.setattr(found_module, "predicted", lambda *_: timing.append(1))
    late = TimeBudget.of(10.0)  # less than the graph takes
    assert search.found.take_interleaved(interleaved(plain, 2), late) == np.inf
    assert not timing


def test_plans_a_little_over_the_memory_are_looked_for_with_more_room(monkeypatch):
    reserves, price = [0.0], search_module.price_stages

    def priced(*arguments, reserve_bytes=0.0, **options):
        reserves.append(reserve_bytes)
        return price(*arguments, reserve_bytes=reserve_bytes, **options)

    monkeypatch.setattr(search_module, "price_stages", priced)
    monkeypatch.setattr(found_module, "missing_bytes", lambda *_: 0.0 if max(reserves) >= 3e8 else 1e8)
    found = search("gpt2-xl", NEAR, batch=16, seq_len=1024)
    assert found.plans and max(reserves) == pytest.approx(3e8)


@pytest.fixture(scope="module")
def searched() -> MixedSearch:
    """Return a search of two devices that has ended near its bound."""
    model = load_model("gpt2-large")
    request = checked_request(
        replace(model, blocks=model.blocks[:3]),
        load_cluster("1x2xt4"),
        global_batch=8,
        seq_len=256,
        precision="fp16",
        budget_s=5.0,
    )
    made = MixedSearch(request)
    made.run()
    return made


def test_a_search_with_nothing_left_says_why_a_gap_is(searched, monkeypatch):
    bound_s = searched.by_set[0].bound_s
    assert searched._why_a_gap(1.005 * bound_s) == ""
    monkeypatch.setattr(Subspace, "ideal_s", property(lambda _: bound_s))
    assert f"pipelines take {bound_s:.3g} s" in searched._why_a_gap(1.2 * bound_s)
    monkeypatch.setattr(Subspace, "ideal_s", property(lambda _: 1.1 * bound_s))
    assert "too many to exclude" in searched._why_a_gap(1.2 * bound_s)


def test_searches_start_from_cheap_planners_and_time_one_plan_of_each_when_late(monkeypatch, even_clock):
    model = load_model("gpt2")
    model = replace(model, blocks=model.blocks[:4])
    cluster = load_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb@400Gb/s")
    request = checked_request(model, cluster, global_batch=16, seq_len=512, budget_s=2.0)
    search, asked = MixedSearch(request), []

    def late(name: str) -> SimpleNamespace:
        def best(problem, budget):
            asked.append(name)
            search.budget = TimeBudget(0.0) if name == "lb-bsp" else search.budget
            found = BASELINES[name].best(problem)
            assert name == "hetpipe" or len(found.by_number) > 1
            return found

        return SimpleNamespace(best=best)

    monkeypatch.setattr(search_module, "BASELINES", {name: late(name) for name in ("hetpipe", "lb-bsp")})
    search.run()
    assert asked == ["hetpipe", "lb-bsp"]
    before = len(search.found.timed)
    search.found.taken_s.clear()
    search.budget = TimeBudget(1e9)
    search._offer_published(("lb-bsp",), usual=True)
    assert len(search.found.timed) == before + 1


def test_pipelines_at_their_best_are_those_of_sound_prices():
    problem = price_stages(
        checked_request(load_model("gpt2"), load_cluster("1x2xa100-sxm-80gb"), global_batch=8), (0,)
    )
    part = Subspace(price=lambda: problem, time_plans=lambda *_: np.inf, floor_s=lambda: 0.0)
    assert part.ideal_s == np.inf
    part.search = ProblemSearch(problem, target_gap=0.003, filling="full")
    part.search.advance(TimeBudget.of(600.0))
    assert part.search.is_sound and part.ideal_s == pytest.approx(part.bound_s)


@pytest.mark.parametrize(("cluster", "batch"), [("1x4xt4@25Gb/s", 11), ("1x2xl4+1x2xt4@10Gb/s", 9)])
def test_no_1f1b_plan_of_a_search_is_faster_than_its_bound(cluster, batch, monkeypatch, even_clock):
    """Not even one with few micro-batches on unequal stages, which fill while the slowest one works."""
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    model = load_model("gpt2-xl")
    request = checked_request(
        replace(model, blocks=model.blocks[:5]),
        load_cluster(cluster),
        global_batch=batch,
        seq_len=1024,
        precision="fp16",
        budget_s=1.0,
    )
    made = MixedSearch(request)
    made.run()
    fastest_s = min(seconds for seconds, plan in made.found.plain(99) if plan not in made.found.even)
    assert 0.0 < made._plain_bound_s <= fastest_s * (1 + 1e-9)
    # What the search expects is no bound: without a proof that from work is left.
    usual, subspace = made.others[0], made.by_set[0]
    assert usual.floor_s() < usual.expected_s
    assert usual.bound_s == usual.floor_s()
    subspace.proof = None
    assert made._bounded_by_work()[0] == "1f1b plans"


def test_a_proof_starts_from_the_pipelines_of_searches_at_other_prices(searched, monkeypatch):
    """It needs no search of its own problem first."""
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    found, usual = searched.found, ProblemSearch(searched._usual((0,)), target_gap=0.003, filling="full")
    while not usual.has_plan:
        usual.advance(TimeBudget.of(60.0))
    beside = SimpleNamespace(search=usual)
    proving = replace(searched.by_set[0], search=None, proof=None, beside=lambda: [beside])
    proving.prove(found, TimeBudget.of(60.0))
    proving.prove(found, TimeBudget.of(60.0))
    assert proving.search.ranges is None  # priced, no step done
    assert set(usual.state.columns) <= set(proving.proof.state.columns)


def test_the_fastest_plan_is_changed_however_near_its_bound_is(searched, monkeypatch):
    """The engines know more of a plan than the problem does."""
    changed = []

    def improved(request, plan, seconds, budget):
        changed.append(plan)
        return plan, seconds

    monkeypatch.setattr(search_module, "improved", improved)
    searched._change(TimeBudget.of(60.0))
    assert changed == [searched.found.plain(1)[0][1]]


@pytest.mark.parametrize(("bound_s", "is_changed"), [(0.996, True), (0.998, False)])
def test_1f1b_plans_are_left_as_they_are_where_none_is_faster_than_an_interleaved_one(
    searched, monkeypatch, bound_s, is_changed
):
    """By a bound that holds, within what subspaces are closed at."""
    changed = []

    def improved(request, plan, seconds, budget):
        changed.append(plan)
        return plan, seconds

    fastest = 1.0, searched.found.plain(1)[0][1]
    monkeypatch.setattr(search_module, "improved", improved)
    monkeypatch.setattr(search_module, "is_interleaved", lambda plan: True)
    monkeypatch.setattr(type(searched), "_plain_bound_s", bound_s)
    monkeypatch.setattr(type(searched), "_add_interleaved", lambda self: None)
    monkeypatch.setattr(type(searched), "_change_in_chunks", lambda self, budget: None)
    monkeypatch.setattr(type(searched.found), "best", fastest)
    searched._change(TimeBudget.of(60.0))
    assert bool(changed) == is_changed


def test_changes_of_1f1b_plans_leave_time_for_chunks(searched, monkeypatch):
    """They took all of it, and no plan a change away was tried in chunks."""
    ends_at = {}

    def improved(request, plan, seconds, budget):
        ends_at["whole"] = budget.ends_at
        return plan, seconds

    def in_chunks(self, budget):
        ends_at["in chunks"] = budget.ends_at

    monkeypatch.setattr(search_module, "improved", improved)
    monkeypatch.setattr(type(searched), "_add_interleaved", lambda self: None)
    monkeypatch.setattr(type(searched), "_change_in_chunks", in_chunks)
    now = time.perf_counter()
    searched._change(TimeBudget(now + 60.0))
    assert ends_at["in chunks"] == now + 60.0
    assert ends_at["whole"] < now + 45.0


def test_the_fastest_plan_is_changed_once_before_its_bound_is_raised(searched, monkeypatch):
    """A change costs hundredths of a second on a few devices; searches ended before any was tried."""
    changed = []
    monkeypatch.setattr(
        type(searched), "_change", lambda self, budget, fastest_alone: changed.append(fastest_alone)
    )
    monkeypatch.setattr(searched, "_changed", None)
    monkeypatch.setattr(searched, "_changing_s", 0.0)
    searched._change_early()
    searched._change_early()
    assert changed == [True]


def test_steps_end_where_the_time_for_changes_begins(searched):
    """As long as there is no plan they have all of the search."""
    part, whole = TimeBudget(1.0), TimeBudget(2.0)
    searched.budget, before = whole, searched.budget
    try:
        assert searched._within(part) is part
        timed, searched.found.timed = searched.found.timed, []
        assert searched._within(part) is whole
    finally:
        searched.budget, searched.found.timed = before, timed
