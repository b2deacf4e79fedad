"""The graph engine on plans small enough to reckon by hand from the price table."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest

import foreshard
from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.graph.program import Kind
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph import engine
from foreshard.predict.graph.engine import graph_times
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices
from foreshard.spec.plan import Group
from foreshard.spec.prediction import TIME_PARTS

CONSTANTS = TrainingConstants()
FORWARD, BACKWARD = 0, 1


def case_of(cluster="2x8xh100-sxm", model="llama3-8b", framework="megatron-core", comm=None, **choices):
    model, cluster = api.load_model(model), api.load_cluster(cluster)
    choices = {"seq_len": 4096, "framework": framework} | choices
    plan = api.make_plan(model, cluster, **choices)
    return PlannedRun(
        model=model, cluster=cluster, plan=replace(plan, comm=comm or {}), framework=load_framework(framework)
    )


def parts_of(case, constants=CONSTANTS, **options):
    return graph_times(case, build_batch([case], constants), timeline=False, **options)[0]


def step_of(case, constants=CONSTANTS):
    return sum(parts_of(case, constants).values())


def prices_of(case):
    return group_prices(case, build_batch([case], CONSTANTS))


def with_groups(case, shares, micro_batch=1):
    """Split the one group of a plan into as many as there are shares, each of one data-parallel rank."""
    (group,) = case.plan.groups
    groups = []
    for d, share in enumerate(shares):
        stages = tuple(replace(s, ranks=s.ranks[d * s.tp : (d + 1) * s.tp], zero=0) for s in group.stages)
        groups.append(
            Group(share=share, stages=stages, micro_batch=micro_batch, schedule=group.schedule, sp=group.sp)
        )
    return replace(case, plan=replace(case.plan, global_batch=sum(shares), groups=tuple(groups)))


def test_one_rank_takes_its_micro_batches_one_after_another():
    case = case_of("1x1xh100-sxm", global_batch=3)
    (prices,) = prices_of(case)
    by_hand = 3 * prices.op_s[[FORWARD, BACKWARD], 0, 0, 0].sum() + prices.optimizer_s[0]
    assert step_of(case) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("framework", ["megatron-core", "megatron-bridge@26.06", "composer"])
def test_every_part_is_named_and_none_is_negative(framework, pp):
    parts = parts_of(case_of(framework=framework, pp=pp, tp=2, global_batch=64))
    assert tuple(parts) == TIME_PARTS
    assert min(parts.values()) >= 0.0


def test_pipeline_of_two_by_hand():
    """1F1B, two stages, two micro-batches: F F | B, message, F, then the last backward and its message."""
    case = case_of("1x2xh100-sxm", pp=2, global_batch=2, zero=0)
    (prices,) = prices_of(case)
    (f0, f1), (b0, b1) = prices.op_s[FORWARD, :, 0, 0], prices.op_s[BACKWARD, :, 0, 0]
    message = prices.send_s[0]
    # Stage 1 is the longer: its first backward ends after stage 0 has the second forward ready.
    assert f1 + b1 > f0
    last_start = f0 + message + f1 + b1 + message + f1 + b1 + message
    by_hand = max(last_start, f0 + message + f1 + b1 + message + b0) + b0 + prices.optimizer_s.max()
    busy = sum(v for k, v in parts_of(case).items() if k != "straggler")
    assert busy == pytest.approx(by_hand, rel=1e-9)


def test_short_last_micro_batch_costs_less():
    full = case_of("1x1xh100-sxm", global_batch=8, micro_batch=4)
    short = replace(
        full, plan=replace(full.plan, global_batch=5, groups=(replace(full.plan.groups[0], share=5),))
    )
    (prices,) = prices_of(short)
    device = {part: value for part, value in prices.parts.items() if part != "host"}
    total = sum(device.values())
    assert total[..., 1] == pytest.approx(total[..., 0] / 4)
    assert step_of(short) < step_of(full)


def test_equal_groups_are_lowered_once():
    case = with_groups(case_of("1x8xh100-sxm", tp=2, zero=0, global_batch=8), [2, 2, 2, 2])
    assert len(prices_of(case)) == 1
    uneven = with_groups(case_of("1x8xh100-sxm", tp=2, zero=0, global_batch=8), [2, 2, 1, 3])
    assert [price.index for price in prices_of(uneven)] == [0, 2, 3]


def test_step_waits_for_the_slowest_group():
    even, uneven = (
        with_groups(case_of("1x8xh100-sxm", tp=2, zero=0, global_batch=8), shares)
        for shares in ([3, 3, 3, 3], [1, 1, 3, 1])
    )
    assert step_of(uneven) == pytest.approx(step_of(even), rel=1e-9)
    assert parts_of(uneven)["compute"] == pytest.approx(parts_of(even)["compute"], rel=1e-9)


def test_gradients_of_uneven_groups_meet_bucket_by_bucket():
    """A group that ends early cannot reduce before the others have the same layers."""
    case = case_of("1x8xh100-sxm", tp=2, zero=0, global_batch=8, comm={"grad_overlap": True})
    case = with_groups(case, [1, 1, 3, 1])
    batch = build_batch([case], CONSTANTS)
    step = lower(group_prices(case, batch), 0.3)
    from foreshard.sim import critical_path

    times = critical_path.run(step.program)
    fast, slow = step.groups
    reduces = [
        [t for t in group.data[0] if step.program.kind[t] == Kind.GRADIENT_REDUCE] for group in (fast, slow)
    ]
    assert len(reduces[0]) == len(reduces[1]) > 1
    assert times.start_s[reduces[0]] == pytest.approx(times.start_s[reduces[1]])


def test_overlap_hides_gradient_sync():
    settings = {"pp": 1, "tp": 1, "global_batch": 16, "zero": 1}
    off, on = (
        parts_of(case_of(comm={"grad_overlap": x, "param_gather_overlap": x}, **settings))
        for x in (False, True)
    )
    assert 0.0 < on["data_comm"] < 0.7 * off["data_comm"]
    assert on["compute"] == pytest.approx(off["compute"])


def test_sharded_without_overlap_is_the_sum_of_its_tasks():
    case = case_of(framework="composer", zero=3, global_batch=32, comm={"grad_overlap": False})
    (prices,) = prices_of(case)
    units = prices.units[0][0]
    moved = (units.gather_s + units.regather_s + units.scatter_s + units.copy_gradients_s).sum()
    copies = (units.copy_weights_s + units.copy_again_s).sum()
    assert parts_of(case)["data_comm"] == pytest.approx(2 * (moved + copies), rel=1e-9)


def test_ends_of_a_sharded_model_stay_gathered_between_forward_and_backward():
    (prices,) = prices_of(case_of(framework="composer", zero=3, global_batch=16))
    units = prices.units[0][0]
    assert units.regather_s[0] == units.regather_s[-1] == 0.0
    assert (units.regather_s[1:-1] == units.gather_s[1:-1]).all()


def test_torchtitan_moves_held_weights_and_gradients_once_a_step():
    """FRAMEWORKS section 9, FSDP2 with PP: gathered once a step, reduced after the last backward."""
    options = {"framework": "torchtitan", "pp": 2, "tp": 4, "zero": 3, "cluster": "2x8xh100-sxm@100Gb/s"}
    few, many = (case_of(global_batch=batch, **options) for batch in (8, 32))
    moved = [parts_of(case)["data_comm"] for case in (few, many)]
    assert moved[1] == pytest.approx(moved[0], rel=0.05)
    batch = build_batch([few], CONSTANTS)
    step, times, _ = engine.PricedStep.of(few, batch).executed()
    for lowered in step.groups:
        for stage, tasks in enumerate(lowered.data):
            reduce = [task for task in tasks if step.program.kind[task] == Kind.GRADIENT_REDUCE]
            last = lowered.last[lowered.last_gradient(stage, 0)]
            assert reduce and min(times.start_s[reduce]) >= times.end_s[last]
            units = len(lowered.prices.units[stage][0].params)
            assert len(tasks) - len(reduce) == units


def test_fsdp_at_level_two_gathers_once_a_micro_batch():
    """SHARD_GRAD_OP, reshard_after_forward False: weights are freed after the backward all the same."""
    options = {"framework": "composer", "global_batch": 32, "comm": {"grad_overlap": False}}
    kept, freed = (prices_of(case_of(zero=zero, **options))[0].units[0][0] for zero in (2, 3))
    assert kept.regather_s.sum() == 0.0 < freed.regather_s.sum()
    assert (kept.gather_s == freed.gather_s).all() and (kept.scatter_s == freed.scatter_s).all()


def test_zero_3_of_deepspeed_keeps_what_it_needs_again_soon():
    """FRAMEWORKS section 11: weights used again within 1e9 elements, there and back, are not released."""
    (prices,) = prices_of(case_of(framework="deepspeed", zero=3, global_batch=16, model="llama2-7b"))
    units = prices.units[0][0]
    behind = units.params[::-1].cumsum()[::-1] - units.params
    kept = units.regather_s[1:-1] == 0.0
    assert 0 < kept.sum() < len(kept) and (kept == (behind[1:-1] < 5e8)).all()
    (small,) = prices_of(case_of(framework="deepspeed", zero=3, global_batch=16, model="gpt2"))
    assert small.units[0][0].regather_s.sum() == 0.0


def test_counting_tokens_of_experts_holds_up_the_next_gather():
    """FRAMEWORKS section 9: a host sync in the layer kills the overlap unless prefetch is explicit."""
    asked = {"model": "mixtral-8x7b", "zero": 3, "global_batch": 32, "cluster": "2x8xh100-sxm@200Gb/s"}
    case, grouped = (case_of(framework=name, **asked) for name in ("hf@4", "hf@5"))
    explicit = replace(case, framework=replace(case.framework, explicit_prefetch=True))
    (prices,) = prices_of(case)
    units = prices.units[0][0]
    forward = sum(units.forward_s.values())
    held = units.counting_s[2:]
    assert units.counting_s[:2].sum() == 0.0 and held == pytest.approx(forward[1:-1])
    for other in (explicit, grouped):  # one launch takes the tokens of experts from the device
        assert prices_of(other)[0].units[0][0].counting_s.sum() == 0.0
    assert sum(parts_of(explicit).values()) < sum(parts_of(case).values())


def test_tied_table_is_summed_between_the_ends():
    tied, untied = (
        case_of(pp=2, tp=8, zero=0, global_batch=4, model=name) for name in ("gpt3-1.3b", "llama3-8b")
    )
    assert tied.model.tied_embeddings and not untied.model.tied_embeddings
    assert prices_of(tied)[0].tied_s > 0.0
    assert prices_of(untied)[0].tied_s == 0.0


def test_stages_in_one_link_domain_use_the_links():
    """Four devices to a node, but NVLink joins 72."""
    inside, outside = (
        prices_of(case_of(cluster, pp=2, tp=4, global_batch=8, framework="megatron-core"))[0].send_s[0]
        for cluster in ("2x4xgb200-nvl72", "2x4xh100-sxm")
    )
    assert outside > 3.0 * inside


def test_deepspeed_exchanges_messages_in_turn():
    times = [
        parts_of(case_of(framework=framework, pp=4, tp=4, global_batch=32, zero=0))["pipeline_comm"]
        / prices_of(case_of(framework=framework, pp=4, tp=4, global_batch=32, zero=0))[0].send_s[0]
        for framework in ("megatron-lm@2021", "megatron-deepspeed@2022")
    ]
    assert times[1] > 1.5 * times[0]


def test_virtual_stages_of_a_single_stage_are_one():
    case = case_of("1x1xh100-sxm", global_batch=2)
    (group,) = case.plan.groups
    stage = replace(group.stages[0], layers=((0, 17), (17, 34)))
    cut = replace(
        case, plan=replace(case.plan, groups=(replace(group, schedule="interleaved", stages=(stage,)),))
    )
    assert step_of(cut) == pytest.approx(step_of(case), rel=1e-12)


def test_uneven_devices_pace_their_own_stages():
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("1x4xh100-sxm+1x4xa100-sxm-40gb")
    plan = api.make_plan(model, cluster, pp=2, tp=4, global_batch=8, seq_len=4096)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework("megatron-core"))
    (prices,) = prices_of(case)
    assert prices.op_s[FORWARD, 1, 0, 0] > 1.5 * prices.op_s[FORWARD, 0, 0, 0]
    assert parts_of(case)["bubble"] < parts_of(case)["compute"]


def test_compiled_gives_the_same_parts():
    pytest.importorskip("numba")
    case = case_of(pp=4, vpp=2, tp=2, global_batch=64, framework="megatron-bridge@26.06")
    assert parts_of(case, compiled=True) == parts_of(case)


@pytest.mark.parametrize(
    "choices",
    [
        {"pp": 4, "vpp": 2, "tp": 2, "framework": "megatron-bridge@26.06", "recompute": "full"},
        {"framework": "composer", "zero": 3},
        {"pp": 2, "tp": 4, "schedule": "zb-h1"},
        {"tp": 2, "model": "mixtral-8x7b", "ep": 4},
    ],
    ids=["interleaved", "sharded", "zero-bubble", "experts"],
)
def test_timeline_holds_the_parts(choices):
    """Streams never run two events at once, and the compute chain of the critical rank has its parts."""
    case = case_of(global_batch=64, **choices)
    parts, timeline = graph_times(case, build_batch([case], CONSTANTS), timeline=True)
    assert timeline.step_time_s == pytest.approx(sum(parts.values()), rel=1e-12)
    assert max(event.end_s for event in timeline.events) == pytest.approx(timeline.step_time_s)
    key = lambda e: (e.rank, e.stream)  # noqa: E731
    for _, events in groupby(sorted(timeline.events, key=lambda e: (*key(e), e.start_s)), key):
        events = list(events)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(events))
    ranks = {event.rank for event in timeline.events}
    assert ranks == {stage.ranks[0] for stage in case.plan.groups[0].stages}
    computed = {
        rank: sum(e.end_s - e.start_s for e in timeline.events if e.rank == rank and e.part == "compute")
        for rank in ranks
    }
    assert any(value == pytest.approx(parts["compute"], rel=1e-9) for value in computed.values())


def test_timeline_starts_every_op_after_what_it_needs():
    case = case_of(pp=4, tp=4, global_batch=16)
    _, timeline = graph_times(case, build_batch([case], CONSTANTS), timeline=True)
    at = {(e.name, e.stage, e.micro_batch): e for e in timeline.events if e.name in ("forward", "backward")}
    for (name, stage, micro_batch), event in at.items():
        before = {"forward": ("forward", stage - 1), "backward": ("backward", stage + 1)}[name]
        needed = at.get((*before, micro_batch))
        if needed is not None:
            assert event.start_s >= needed.end_s
        if name == "backward":
            assert event.start_s >= at["forward", stage, micro_batch].end_s


def test_large_pipelines_are_quick_to_price():
    """Chunk by chunk, not layer by layer: the number of tasks is what bounds the time."""
    case = case_of(
        "256x8xh100-sxm", "llama3.1-405b", "megatron-bridge@26.06", tp=8, pp=16, vpp=7, global_batch=2048
    )
    step = lower(prices_of(case), 0.3)
    ops = 2 * 16 * 7 * 128
    assert ops < step.program.num_tasks < 2.1 * ops
    assert np.all(step.data_s >= 0.0)


@pytest.mark.parametrize(
    "choices",
    [
        {"framework": "composer", "zero": 3, "global_batch": 16 * 60},
        {"framework": "composer", "zero": 3, "global_batch": 16 * 120 + 16, "micro_batch": 2},
        {"pp": 4, "tp": 4, "global_batch": 240},
        {"pp": 4, "tp": 4, "vpp": 4, "global_batch": 240, "framework": "megatron-bridge@26.06"},
        {"pp": 4, "tp": 2, "zero": 3, "global_batch": 480, "framework": "composer"},
        {"pp": 4, "tp": 4, "schedule": "zb-h1", "global_batch": 241},
        {"model": "gpt3-13b", "pp": 8, "tp": 2, "schedule": "gpipe", "global_batch": 400},
    ],
    ids=["sharded", "short", "1f1b", "interleaved", "sharded-stages", "zero-bubble", "gpipe"],
)
def test_folding_the_steady_state_changes_nothing(choices, monkeypatch):
    case = case_of(**choices)
    whole = parts_of(case)
    lowered = []
    monkeypatch.setattr(engine, "MAX_TASKS", 0)
    monkeypatch.setattr(engine, "lower", lambda prices, *rest: lowered.append(prices) or lower(prices, *rest))
    folded = parts_of(case)
    assert len(lowered) == 3
    assert sum(folded.values()) == pytest.approx(sum(whole.values()), rel=1e-6)
    assert folded == pytest.approx(whole, rel=1e-3, abs=1e-4 * sum(whole.values()))


def test_a_folded_steady_state_shares_the_network_as_the_whole(monkeypatch):
    case = case_of("4x8xh100-sxm", tp=2, pp=4, global_batch=4 * 256, comm={"grad_overlap": True})
    batch = build_batch([case], CONSTANTS)
    whole, _, classes = engine.shared_times(case, batch, timeline=False, compiled=False)
    monkeypatch.setattr(engine, "MAX_TASKS", 100)
    folded, _, told = engine.shared_times(case, batch, timeline=False, compiled=False)
    assert folded == pytest.approx(whole, rel=1e-6, abs=1e-9)
    for one, other in zip(classes, told, strict=True):
        assert one.collective == other.collective
        assert one.flow_s == pytest.approx(other.flow_s, rel=1e-6)
        assert one.utilisation == pytest.approx(other.utilisation, rel=1e-6)


def test_rounding_is_no_bubble():
    """Layers that gather their weights sum to the step but for the last bits, which are no time of a part."""
    found = foreshard.predict("llama3-8b", "1x8xh100-sxm", framework="hf")
    assert found.engine == "graph" and found.time_breakdown_s["bubble"] == 0.0
    assert sum(found.time_breakdown_s.values()) == pytest.approx(found.step_time_s, rel=1e-12)
