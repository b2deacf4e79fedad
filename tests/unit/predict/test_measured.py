"""A step from measured costs, against a second reading of the schedule and against cases done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.errors import SpecError
from foreshard.graph.pipeline_schedules import Op, stage_order
from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts, load_costs
from foreshard.predict.measured.engine import predict_measured, rank_times, step_seconds
from foreshard.predict.measured.links import LinkCost, MeasuredLinks
from foreshard.spec.plan import Group, Plan, Stage

RATE, LATENCY = 1e9, 1e-4


def layer(fixed=1e-3, each=2e-3, **more):
    made = {
        "forward_s": (fixed, each),
        "backward_s": (2 * fixed, 2 * each),
        "backward_input_s": (fixed, each),
        "optimizer_s": 3e-4,
        "parameter_bytes": 4e6,
        "state_bytes": 8e6,
        "saved_bytes_per_sample": 1e6,
        "boundary_bytes_per_sample": 1e5,
    }
    return LayerCost(**(made | more))


def costs(layers=4, **more):
    table = tuple(layer(each=2e-3 * (1 + i % 3)) for i in range(layers))
    told = {
        "layers": table,
        "slow": {"a": 1.0, "b": 2.0, "c": 5.0},
        "spread": (0.9, 1.2),
        "clock": "cpu",
        "tokens_per_sample": 16.0,
        "path": "costs.json",
    }
    return MeasuredCosts(**(told | more))


def lab(devices="abc", memory_bytes=None):
    return Lab(
        clock="cpu",
        slow=(1.0,) * len(devices),
        devices=tuple(devices),
        bandwidth_bytes_per_s=RATE,
        latency_s=LATENCY,
        memory_bytes=(memory_bytes,) * len(devices),
    ).cluster()


def virtual_stage(schedule, count, stage, chunk):
    """Return which virtual stage a chunk is: V-shaped schedules go back with the second."""
    return 2 * count - 1 - stage if chunk and schedule in ("zbv", "dualpipev") else stage + chunk * count


def pipeline(cuts, ranks, share=6, micro_batch=2, schedule="1f1b", chunks=1):
    spans = list(pairwise(cuts))
    stages = tuple(
        Stage(
            ranks=(rank,),
            layers=tuple(spans[virtual_stage(schedule, len(ranks), s, c)] for c in range(chunks)),
            zero=0,
        )
        for s, rank in enumerate(ranks)
    )
    return Group(share=share, micro_batch=micro_batch, schedule=schedule, stages=stages)


def plan(*groups):
    return Plan(
        global_batch=sum(g.share for g in groups),
        seq_len=16,
        groups=groups,
        precision="fp32",
        optimizer="adamw",
        framework="foreshard",
    )


def played(told, cluster, group):
    """Return when each stage has ended: clocks of ranks that wait for messages, action by action."""
    count, chunks = len(group.stages), group.num_chunks
    sizes = [min(group.micro_batch, group.share - lo) for lo in range(0, group.share, group.micro_batch)]
    orders = [
        o.tolist()
        for o in stage_order(
            group.schedule, num_stages=count, num_micro_batches=len(sizes), num_chunks=chunks
        )
    ]
    clock, done, free, arrived = [0.0] * count, [0] * count, {}, {}
    last = count * chunks - 1
    place = {virtual_stage(group.schedule, count, s, c): (s, c) for s in range(count) for c in range(chunks)}

    def send(s, to, what, span, size, key):
        if to == s:  # the turn of a V
            arrived[key] = clock[s]
            return
        num_bytes = told.layers[span[1] - 1].boundary_bytes_per_sample * size
        leaves = max(clock[s], free.get((s, to, what), 0.0)) + num_bytes / RATE + LATENCY
        free[s, to, what] = leaves
        arrived[key] = leaves

    while any(done[s] < len(orders[s]) for s in range(count)):
        moved = False
        for s, stage in enumerate(group.stages):
            if done[s] == len(orders[s]):
                continue
            op, chunk, m = orders[s][done[s]]
            virtual = virtual_stage(group.schedule, count, s, chunk)
            need = None
            if op == Op.FORWARD and virtual > 0:
                need = ("F", virtual, m)
            elif op in (Op.BACKWARD, Op.BACKWARD_INPUT) and virtual < last:
                need = ("B", virtual, m)
            if need is not None and need not in arrived:
                continue
            clock[s] = max(clock[s], arrived.get(need, 0.0))
            device, span = cluster.device_of(stage.ranks[0]).name, stage.layers[chunk]
            whole, inputs = (
                told.work_s(device, span, n, sizes[m]) for n in ("backward_s", "backward_input_s")
            )
            inputs = inputs if virtual else 0.0
            clock[s] += {
                Op.FORWARD: told.work_s(device, span, "forward_s", sizes[m]),
                Op.BACKWARD: whole,
                Op.BACKWARD_INPUT: inputs,
                Op.BACKWARD_WEIGHT: whole - inputs,
            }[op]
            if op == Op.FORWARD and virtual < last:
                send(s, place[virtual + 1][0], "F", span, sizes[m], ("F", virtual + 1, m))
            elif op in (Op.BACKWARD, Op.BACKWARD_INPUT) and virtual > 0:
                to, its = place[virtual - 1]
                send(s, to, "B", group.stages[to].layers[its], sizes[m], ("B", virtual - 1, m))
            done[s] += 1
            moved = True
        assert moved, "the schedule waits for itself"
    return clock


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("interleaved", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_pipelines_end_when_a_second_reading_of_the_schedule_says(schedule, chunks, data):
    count = data.draw(st.integers(2, 3))
    layers = tuple(
        layer(fixed=data.draw(st.floats(1e-4, 1e-2)), each=data.draw(st.floats(1e-4, 1e-2)))
        for _ in range(count * chunks + 2)
    )
    told, cluster = costs(), lab("abc"[:count])
    told = replace(told, layers=layers)
    cuts = [0, *sorted(data.draw(st.permutations(range(1, len(layers))))[: count * chunks - 1]), len(layers)]
    fewest = 2 if schedule == "dualpipev" else 1  # micro-batches of each stage
    share = (
        2 * count * data.draw(st.integers(fewest, 3))
    )  # whole micro-batches: messages are priced by the first
    group = pipeline(cuts, range(count), share=share, schedule=schedule, chunks=chunks)
    found = rank_times(told, cluster, plan(group))
    ends = [r.compute_s + r.waiting_s for r in found]
    assert ends == pytest.approx(played(told, cluster, group), rel=1e-9)


def test_one_rank_takes_the_sum_of_its_work():
    told, step = costs(), plan(pipeline([0, 4], [1], share=5, micro_batch=2))
    work = sum(3 * (3 * 1e-3) + 5 * 3 * one.forward_s[1] for one in told.layers)
    assert step_seconds(told, lab(), step) == pytest.approx(2.0 * (work + 4 * 3e-4))


def test_replicas_wait_for_each_other_and_for_the_ring():
    told = costs()
    groups = (pipeline([0, 4], [0], share=4), pipeline([0, 4], [1], share=2))
    ring_s = 2 * LATENCY + 16e6 / RATE
    found = {r.rank: r for r in rank_times(told, lab(), plan(*groups))}
    slowest = max(r.compute_s for r in found.values())
    for r in found.values():
        assert r.compute_s + r.sync_s == pytest.approx(slowest + ring_s)
    assert found[1].optimizer_s == pytest.approx(2 * found[0].optimizer_s)


def test_stages_of_different_cuts_are_summed_by_segment():
    told = costs()
    groups = (pipeline([0, 2, 4], [0, 1]), pipeline([0, 4], [2], share=2))
    found = {r.rank: r for r in rank_times(told, lab(), plan(*groups))}
    assert found[2].sync_s >= 2 * (2 * LATENCY + 8e6 / RATE) - 1e-12  # both halves, one after the other


def test_ranks_of_a_stage_share_its_samples():
    told = costs()
    stage = Stage(ranks=(0, 1), layers=((0, 4),), zero=0, rank_shares=(2, 1))
    step = plan(Group(share=6, micro_batch=3, stages=(stage,)))
    found = rank_times(told, lab(), step)
    alone = [
        rank_times(told, lab(), plan(pipeline([0, 4], [r], share=n, micro_batch=n // 2)))[0]
        for r, n in ((0, 4), (1, 2))
    ]
    for together, one in zip(found, alone, strict=True):
        assert together.compute_s == pytest.approx(one.compute_s)


def test_recompute_runs_the_forward_again_and_keeps_less():
    told = costs()
    group = pipeline([0, 4], [0])
    stages = (replace(group.stages[0], recompute="full"),)
    plain, again = (predict_measured(told, lab(), plan(g)) for g in (group, replace(group, stages=stages)))
    forward_s = sum(told.work_s("a", (0, 4), "forward_s", 2) for _ in range(3))
    assert again.time_breakdown_s["recompute"] == pytest.approx(forward_s)
    assert again.memory.breakdown_bytes["activations"] < plain.memory.breakdown_bytes["activations"]
    assert again.memory.breakdown_bytes["temporary"] == 2e6


@settings(max_examples=30, deadline=None)
@given(
    cut=st.integers(1, 3),
    share=st.integers(2, 12),
    micro=st.integers(1, 4),
    slow=st.floats(1.0, 9.0),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
)
def test_parts_sum_and_a_slower_device_never_helps(cut, share, micro, slow, schedule):
    groups = (
        pipeline([0, cut, 4], [0, 1], share=share, micro_batch=min(micro, share), schedule=schedule),
        pipeline([0, 4], [2], share=3, micro_batch=1),
    )
    told = costs()
    made = predict_measured(told, lab(), plan(*groups), tokens=1e6)
    assert sum(made.time_breakdown_s.values()) == pytest.approx(made.step_time_s, rel=1e-9)
    assert min(made.time_breakdown_s.values()) >= 0
    assert sum(made.memory.breakdown_bytes.values()) == pytest.approx(made.memory.peak_bytes)
    assert made.step_time_interval_s == pytest.approx((0.9 * made.step_time_s, 1.2 * made.step_time_s))
    assert made.tokens_per_s * made.step_time_s == pytest.approx(made.plan.global_batch * 16)
    worse = replace(told, slow=dict(told.slow) | {"b": 2.0 * slow})
    assert step_seconds(worse, lab(), plan(*groups)) >= made.step_time_s * (1 - 1e-12)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 3)])
def test_what_is_kept_is_what_is_under_way(schedule, most):
    step = plan(pipeline([0, 2, 4], [0, 1], schedule=schedule))
    memory = predict_measured(costs(), lab(), step).memory
    assert memory.per_stage_peak_bytes[0][0] == 2 * (4e6 + 4e6 + 8e6) + most * 2 * 2e6
    assert memory.peak_rank == 0 and memory.fits


def test_a_rank_too_small_does_not_fit():
    memory = predict_measured(costs(), lab(memory_bytes=1e6), plan(pipeline([0, 4], [0]))).memory
    assert not memory.fits and memory.capacity_bytes == 1e6


def test_a_device_of_its_own_table_is_priced_by_it():
    own = tuple(layer(each=1e-2) for _ in range(4))
    told = replace(costs(), tables={"c": own}, slow={"a": 1.0, "c": 1.0})
    assert told.work_s("c", (1, 3), "forward_s", 2) == pytest.approx(2 * (1e-3 + 2e-2))
    assert told.work_s("a", (1, 2), "forward_s", 2) == pytest.approx(1e-3 + 8e-3)


def test_links_that_were_measured_win_over_the_cluster_on_the_same_side():
    link = LinkCost(floor_s=1e-3, bytes_per_s=1e8, hop_s=1e-3, ring_bytes_per_s=1e8, relative_error=0.1)
    cluster = lab()  # a node each
    assert costs(links=MeasuredLinks(across=link)).message_s(cluster, 0, 1, 1e6) == pytest.approx(1e-2)
    assert costs(links=MeasuredLinks(across=link)).message_s(cluster, 0, 1, 8) == pytest.approx(1e-3)
    assert costs(links=MeasuredLinks(within=link)).message_s(cluster, 0, 1, 1e6) == pytest.approx(1.1e-3)
    assert costs(links=MeasuredLinks(across=link)).ring_s(cluster, (0, 1, 2), 3e6) == pytest.approx(4e-2)
    assert costs().ring_s(cluster, (0, 1, 2), 3e6) == pytest.approx(4 * LATENCY + 4e6 / RATE)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (plan(pipeline([0, 3], [0])), "3 layers"),
        (plan(pipeline([0, 4], [7])), "rank 7"),
        (plan(Group(share=2, micro_batch=2, stages=(Stage(ranks=(0, 1), layers=((0, 4),), tp=2),))), "tp"),
        (
            plan(Group(share=2, micro_batch=2, stages=(Stage(ranks=(0, 1), layers=((0, 4),), zero=3),))),
            "zero 3",
        ),
    ],
)
def test_plans_that_were_not_measured_are_refused(step, what):
    with pytest.raises(SpecError, match=what):
        predict_measured(costs(), lab(), step)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(SpecError, match="'z'"):
        predict_measured(costs(), lab("z"), plan(pipeline([0, 4], [0])))


def good_file():
    row = {
        "forward_s": [1e-3, 1e-3],
        "backward_s": [1e-3, 1e-3],
        "backward_input_s": [0, 0],
        "optimizer_s": 1e-4,
        "parameter_bytes": 8,
        "frozen_bytes": 0,
        "state_bytes": 16,
        "saved_bytes_per_sample": 4,
        "boundary_bytes_per_sample": 4,
    }
    return {
        "schema_version": 1,
        "kind": "measured costs",
        "layers": [row, row],
        "tables": {},
        "devices": {"a": 1.0},
        "spread": [0.9, 1.1],
        "clock": "cpu",
        "tokens_per_sample": 1,
        "links": None,
        "samples": [1, 2],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "profile"},
        {"schema_version": 2},
        {"layers": []},
        {"layers": [{}]},
        {"devices": {"a": 0}},
        {"devices": []},
        {"spread": [1]},
        {"spread": [-1.0, 2.0]},
        {"spread": [2.0, 1.0]},
        {"samples": []},
        {"samples": [0]},
        {"tokens_per_sample": 0},
        {"tokens_per_sample": -1.0},
        {"clock": "formula"},
        {"tied": [{"layers": [0, 2], "bytes": 4.0}]},
        {"fingerprint": {"precision": 1e300}},
        {"tables": {"b": []}},
        {"links": {"within": {"x": 1}}},
        {"layers": [good_file()["layers"][0] | {"optimizer_s": float("nan")}]},
        {"layers": [good_file()["layers"][0] | {"forward_s": [-1, 0]}]},
    ],
)
def test_files_that_are_no_costs_are_refused(tmp_path, change):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(good_file()))
    assert len(load_costs(str(file)).layers) == 2
    file.write_text(json.dumps(good_file() | change))
    with pytest.raises(SpecError):
        load_costs(str(file))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"'])
def test_files_that_are_no_object_are_refused(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(SpecError):
        load_costs(str(file))


def test_numpy_stays_out_of_the_prediction():
    made = predict_measured(costs(), lab(), plan(pipeline([0, 2, 4], [0, 1])))
    assert not any(isinstance(v, np.generic) for v in (made.step_time_s, *made.time_breakdown_s.values()))


def test_ranks_that_cut_the_sequence_hand_on_their_part_of_it():
    told, cluster = costs(), lab("aaaa")
    told = replace(told, parts={"": {2: told.layers}})
    stages = tuple(
        Stage(ranks=(2 * s, 2 * s + 1), layers=((2 * s, 2 * s + 2),), zero=0, tp=2) for s in (0, 1)
    )
    whole = Group(share=2, micro_batch=2, stages=stages)
    seconds = [step_seconds(told, cluster, plan(replace(whole, sp=sp))) for sp in (False, True)]
    message_bytes = 2 * told.layers[1].boundary_bytes_per_sample
    assert seconds[0] - seconds[1] == pytest.approx(2 * message_bytes / 2 / RATE)  # there and back
    assumed = [
        predict_measured(told, cluster, plan(replace(whole, sp=sp))).assumptions for sp in (False, True)
    ]
    assert set(assumed[1]) - set(assumed[0]) == {
        "sp: work and memory of layers as timed without it; messages between stages in parts"
    }


def test_two_copies_of_every_layer_are_refused():
    with pytest.raises(SpecError, match="schedule dualpipe with measured costs"):
        predict_measured(costs(), lab("ab"), plan(pipeline([0, 2, 4], [0, 1], schedule="dualpipe")))
