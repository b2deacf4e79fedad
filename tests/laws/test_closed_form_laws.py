"""The closed form against the graph, and both against bytes over rates, on random plans of the space."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import training_constants
from foreshard.errors import SpecError
from foreshard.graph.pace import PipelineRows, pipeline_span
from foreshard.graph.pipeline import pipeline_durations, pipeline_shape, program_of
from foreshard.graph.pipeline_schedules import BY_ORDER, FOLDED
from foreshard.planner.grid.space import GridRequest, cells_of, passes_of, rows_of
from foreshard.predict.analytical.engine import slowest_parts, step_times
from foreshard.predict.analytical.stage import stage_times
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times
from foreshard.predict.placement import crosses_node, link_domains
from foreshard.predict.step import predict
from foreshard.sim import critical_path
from foreshard.spec.plan import Group, Plan, Stage

MODELS = ("gpt2-large", "llama3-8b", "llama2-13b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")
DEVICES = ("h100-sxm", "a100-sxm-80gb", "a100-sxm-40gb", "rtx-4090", "h200-sxm", "b200-sxm", "l40s")
NETWORKS = ("@25Gb/s", "@50Gb/s", "@100Gb/s", "@400Gb/s", "")
MOST_OPS = 4000


def drawn(seed, framework="megatron-core"):
    """Yield a few plans of the space of one random request, as (case, seconds in the table)."""
    rng = random.Random(seed)
    model = api.load_model(rng.choice(MODELS))
    nodes, per_node = rng.choice([1, 2, 2, 3, 4, 5, 8, 16]), rng.choice([1, 2, 4, 8, 8])
    cluster = api.load_cluster(f"{nodes}x{per_node}x{rng.choice(DEVICES)}{rng.choice(NETWORKS)}")
    request = GridRequest(
        model=model,
        cluster=cluster,
        framework=load_framework(framework),
        constants=training_constants(),
        global_batch=rng.choice([8, 16, 32, 48, 64, 96, 128, 256]),
        seq_len=rng.choice([1024, 2048, 4096, 8192]),
    )
    table = cells_of(request)
    for more in (passes_of, rows_of):
        if not len(table):
            return
        table = more(request, table.take(np.array([rng.randrange(len(table)) for _ in range(12)])))
    if not len(table):
        return
    table = table.take(np.array([rng.randrange(len(table)) for _ in range(40)]))
    table = table.take(np.flatnonzero(request.memory(table).fits)[:3])
    times = step_times(request.batch(table)).total if len(table) else ()
    for i, seconds in enumerate(times):
        if table.num_micro_batches[i] * table.pp[i] * table.vpp[i] > MOST_OPS:
            continue
        plan = table.plan(
            i,
            model,
            seq_len=request.seq_len,
            framework=request.framework.label,
            precision=request.precision,
            optimizer=request.optimizer,
        )
        yield PlannedRun(model=model, cluster=cluster, plan=plan, framework=request.framework), float(seconds)


def graph_s(case):
    batch = build_batch([case], training_constants())
    return sum(graph_times(case, batch, timeline=False)[0].values())


def is_interleaved(case):
    return case.plan.groups[0].num_chunks > 1


def port_s(case):
    """Return the bytes of pipeline messages that leave the busiest node over its NIC rate."""
    plan, nodes = case.plan, case.cluster.nodes[0]
    domains = link_domains(case.cluster)
    sent = np.zeros(int(domains.max()) + 1)
    for group in plan.groups:
        stages, count = group.stages, len(group.stages)
        for i, chunk in ((i, c) for c in range(group.num_chunks) for i in range(count)):
            if count == 1 or (i == count - 1 and chunk == group.num_chunks - 1):
                continue
            here, there = stages[i], stages[(i + 1) % count]
            if not crosses_node(here, there, domains):
                continue
            split = here.tp if group.sp or case.framework.p2p_scatter else 1
            size = 2.0 * plan.seq_len * case.model.hidden * group.share / here.inner_dp / here.cp / split
            for stage in (here, there):  # outputs one way, their gradients the other
                for rank in stage.ranks:
                    sent[domains[rank]] += size
    return float(sent.max()) / nodes.nic_bytes_per_s if nodes.nic_bytes_per_s else 0.0


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_the_closed_form_is_within_three_percent_of_the_graph(part):
    """Interleaved plans too; the last part has sharded weights, and is in 5 of 6 cases.

    Of chunks of one or two layers a round was taken to last as long as the mean one: up to 11 % too little.
    """
    plain, cut, sharded = [], [], part == 3
    for seed in range(100 * part, 100 * part + 50):
        for case, seconds in drawn(seed, "torchtitan" if sharded else "megatron-core"):
            if sharded or case.plan.groups[0].stages[0].zero < 2:
                (cut if is_interleaved(case) else plain).append(abs(seconds / graph_s(case) - 1.0))
    assert len(plain) > 25 and len(cut) > 25
    assert np.mean(np.array(plain) < 0.03) > 0.98 and max(plain) < 0.15
    assert np.mean(np.array(cut) < 0.03) > (0.83 if sharded else 0.95)
    assert max(cut) < (0.12 if sharded else 0.045)


def zero_bubble_s(forward, backward, weight, send, passes):
    """Return seconds of a zb-h1 pipeline by its closed form, and op by op."""
    stages = len(forward)
    column = [np.array(values, dtype=float)[:, None] for values in (forward, backward, weight)]
    none, one = np.zeros((stages, 1)), np.ones((stages, 1))
    after = np.where(np.arange(stages)[:, None] < stages - 1, send, 0.0)
    rows = PipelineRows(
        count=one,
        forward_s=column[0],
        backward_s=column[1],
        after_forward_s=none,
        after_backward_s=none,
        behind_s=none,
        inside_s=none,
        after_s=after,
        wrap_s=np.zeros(1),
        beside_s=none,
        widest_s=np.full((stages, 1), send),
        period_s=sum(column),
        call_first_s=none,
        call_s=none,
        late_s=column[2],
        warm_up=(stages - 1.0 - np.arange(stages))[:, None],
        per_stage=one,
        ready_s=none,
        tail_s=none,
        slowed_s=none,
        wait_s=none,
        last_share=one,
        layers=one,
        layer_forward_s=column[0],
        layer_backward_s=column[1],
        rounds=np.array([float(passes)]),
        chunks=np.ones(1),
        stages=np.array([float(stages)]),
    )
    shape = pipeline_shape(
        "zb-h1", num_stages=stages, num_micro_batches=passes, num_chunks=1, overlap_p2p=True
    )
    durations_s = pipeline_durations(
        shape,
        forward_s=column[0],
        backward_s=column[1] + column[2],
        backward_input_s=column[1],
        backward_weight_s=column[2],
        send_forward_s=np.full(stages - 1, send),
        send_backward_s=np.full(stages - 1, send),
    )
    return float(pipeline_span(rows).seconds[0]), float(
        critical_path.run(program_of(shape, durations_s)).end_s.max()
    )


def test_a_zero_bubble_pipeline_of_equal_stages_takes_what_its_order_of_work_does():
    """And what the paper says: all work, and a bubble that is shorter by the weights'."""
    for stages in (2, 3, 4, 8):
        for passes in (stages, stages + 1, 2 * stages, 4 * stages):
            for times in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.3), (2.0, 1.0, 1.0)):
                closed, played = zero_bubble_s(*([time] * stages for time in times), 0.0, passes)
                forward, backward, weight = times
                stated = passes * sum(times) + (stages - 1) * (forward + backward - weight)
                assert closed == pytest.approx(played, rel=1e-9) == pytest.approx(stated, rel=1e-9)


def test_zero_bubble_pipelines_of_unequal_stages_take_about_what_their_order_of_work_does():
    rng, off = random.Random(0), []
    for _ in range(300):
        stages = rng.choice([2, 3, 4, 8])
        forward = [rng.uniform(0.7, 1.3) for _ in range(stages)]
        backward = [time * rng.uniform(0.8, 1.2) for time in forward]
        weight = [time * rng.uniform(0.3, 1.0) for time in forward]
        passes = rng.randint(stages, 4 * stages)
        closed, played = zero_bubble_s(forward, backward, weight, rng.choice([0.0, 0.05]), passes)
        off.append(closed / played - 1.0)
    assert np.mean(np.abs(off) < 0.01) > 0.9 and max(map(abs, off)) < 0.05


def few_passes(schedule, number, network=None):
    """Yield random plans of a schedule with one to four times as many micro-batches as stages.

    Over a stated network those of torchtitan have sharded weights.
    """
    rng, models = random.Random(schedule), ("gpt2-xl", "llama3-8b", "llama2-13b", "gpt3-13b", "qwen3-30b-a3b")
    names = ("8xh100-sxm", "2x8xa100-sxm-80gb", "4x8xh100-sxm", "4x4xa100-sxm-40gb@100Gb/s")
    if network is not None:
        names = (f"4x8xh100-sxm{network}", f"8x8xh100-sxm{network}")
    while number:
        model, cluster = api.load_model(rng.choice(models)), api.load_cluster(rng.choice(names))
        pp, tp, micro_batch = rng.choice([2, 4, 8]), rng.choice([1, 1, 2, 4]), rng.choice([1, 2])
        replicas = cluster.num_devices // (pp * tp)
        choices = {"pp": pp, "tp": tp, "micro_batch": micro_batch, "zero": rng.choice([0, 1])}
        choices |= {"vpp": rng.choice([2, 3, 4])} if schedule == "interleaved" else {"schedule": schedule}
        choices |= {"framework": rng.choice(("megatron-core", "torchtitan", "nemo", "megatron-deepspeed"))}
        choices |= {"recompute": rng.choice(("none", "selective", "full"))}
        fewest = 2 if schedule in FOLDED else 1
        choices |= {"global_batch": rng.randint(fewest, 4) * pp * replicas * micro_batch}
        if network is not None and choices["framework"] == "torchtitan":
            choices["zero"] += 2
        try:
            plan = api.make_plan(model, cluster, seq_len=rng.choice([2048, 8192]), **choices)
        except SpecError:
            continue
        number -= 1
        framework = load_framework(plan.framework)
        yield PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework)


def test_zero_bubble_plans_of_few_micro_batches_are_within_three_percent_of_the_graph():
    """Where the host binds and gradients are overlapped, too; they were up to 24 % apart."""
    off = []
    for case in few_passes("zb-h1", 60):
        batch = build_batch([case], training_constants())
        off.append(sum(slowest_parts(step_times(batch)).values()) / graph_s(case) - 1.0)
    assert max(map(abs, off)) < 0.03, sorted(off)


@pytest.mark.parametrize("schedule", ("zb-h1", *BY_ORDER))
def test_plans_over_slow_networks_are_within_three_percent_of_the_graph(schedule):
    """Messages that fill ports, weights and gradients chunk by chunk: they were up to 57 % apart."""
    off = []
    for case in few_passes(schedule, 16, "@25Gb/s"):
        batch = build_batch([case], training_constants())
        off.append(sum(slowest_parts(step_times(batch)).values()) / graph_s(case) - 1.0)
    assert np.mean(np.abs(off) < 0.03) > 0.8 and max(map(abs, off)) < 0.06, sorted(off)


def test_interleaved_plans_of_few_micro_batches_are_within_three_percent_of_the_graph():
    """Nearly all: of 40 layers in 32 chunks some have two, and the others wait; they were up to 9 % apart."""
    off = []
    for case in few_passes("interleaved", 80):
        batch = build_batch([case], training_constants())
        off.append(sum(slowest_parts(step_times(batch)).values()) / graph_s(case) - 1.0)
    assert np.mean(np.abs(off) < 0.03) > 0.95 and max(map(abs, off)) < 0.06, sorted(off)


@pytest.mark.parametrize(
    ("framework", "cluster", "choices"),
    [
        ("nemo", "8x8xh100-sxm@400Gb/s", {"tp": 2, "micro_batch": 2, "seq": 4096, "global_batch": 64}),
        ("megatron-fsdp", "4x8xh100-sxm@100Gb/s", {"micro_batch": 4, "seq": 4096, "global_batch": 128}),
        ("ddp", "8x8xh100-sxm@400Gb/s", {"micro_batch": 4, "seq": 1024, "global_batch": 256, "lora": 16}),
    ],
)
def test_no_gradient_leaves_before_the_backward_of_the_head(framework, cluster, choices):
    """A head that shares its table has none: its backward was taken to hide 5 to 8 % of these steps."""
    closed, graph = (
        api.predict("llama3.2-1b", cluster, framework=framework, zero=0, engine=engine, **choices).step_time_s
        for engine in ("analytical", "graph")
    )
    assert closed == pytest.approx(graph, rel=0.02)


@pytest.mark.parametrize("vpp", [2, 3])
def test_chunks_of_a_stage_wait_for_their_own_launches(vpp):
    """A chunk of few layers is launched slower than it computes; the one with the head hides its launches."""
    asked = {"pp": 4, "vpp": vpp, "tp": 2, "micro_batch": 2, "seq": 4096, "global_batch": 96}
    closed, graph = (
        api.predict("llama3.2-1b", "2x8xh100-sxm", schedule="interleaved", engine=engine, **asked)
        for engine in ("analytical", "graph")
    )
    assert closed.time_breakdown_s["host"] == pytest.approx(graph.time_breakdown_s["host"], rel=0.01)
    assert closed.step_time_s == pytest.approx(graph.step_time_s, rel=0.01)


@pytest.mark.parametrize(
    ("framework", "model", "choices"),
    [
        ("internevo", "mixtral-8x7b", {"tp": 1, "schedule": "1f1b", "global_batch": 128}),
        ("ddp", "gpt3-13b", {"tp": 4, "schedule": "1f1b", "global_batch": 32}),
        ("ddp", "gpt3-13b", {"tp": 4, "schedule": "gpipe", "global_batch": 32}),
    ],
)
def test_gradients_beside_last_backwards_hold_up_the_stages_before(framework, model, choices):
    """One last backward after the other is slowed on its way up: were only one, 3 to 6 % would be lacking."""
    asked = {"framework": framework, "pp": 4, "zero": 1, "micro_batch": 2, "seq": 4096, **choices}
    closed, graph = (
        api.predict(model, "8x8xh100-sxm@400Gb/s", engine=engine, **asked).step_time_s
        for engine in ("analytical", "graph")
    )
    assert closed == pytest.approx(graph, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "within"), [("1f1b", 0.05), ("gpipe", 0.08), ("zb-h1", 0.015), ("zb-h2", 0.015)]
)
def test_an_idle_stage_waits_for_no_weights_of_the_pass_to_come(schedule, within):
    """Sharded weights in pipelines over slow networks: the closed form was 9 to 20 % above the graph."""
    off = []
    for name, nodes, rounds in product(
        ("llama3.2-1b", "llama3-8b"), ("5x8xh100-sxm@50Gb/s", "6x4xrtx-4090@25Gb/s"), (4, 12)
    ):
        model, cluster = api.load_model(name), api.load_cluster(nodes)
        choices = {"framework": "megatron-core", "grad_overlap": True, "schedule": schedule}
        choices |= {"pp": 4, "zero": 3, "seq_len": 2048, "global_batch": rounds * cluster.num_devices // 4}
        plan = api.make_plan(model, cluster, **choices)
        framework = load_framework(plan.framework)
        case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework)
        batch = build_batch([case], training_constants())
        off.append(sum(slowest_parts(step_times(batch)).values()) / graph_s(case) - 1.0)
    assert max(map(abs, off)) < within, off


def unequal(seed, num_groups):
    """Return 1f1b pipelines of unequal stages on two kinds of devices, side by side, with any shares."""
    rng = random.Random(seed)
    model = api.load_model(rng.choice(("gpt2-large", "llama3-8b", "llama2-13b")))
    kinds = rng.sample(("h100-sxm", "a100-sxm-80gb", "a100-sxm-40gb", "rtx-4090", "l40s"), 2)
    cluster = api.load_cluster(f"2x4x{kinds[0]}+2x4x{kinds[1]}{rng.choice(NETWORKS[:4])}")
    per_group, last = 16 // num_groups, model.num_layers + 2
    groups = []
    for at in range(0, 16, per_group):
        count, size = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 2, 4])
        cuts = [0, *sorted(rng.sample(range(2, last - 1), count - 1)), last]
        if rng.random() < 0.6:
            cuts = [round(i * last / count) for i in range(count + 1)]
        stages, first = [], at
        for i in range(count):
            left = at + per_group - first - (count - 1 - i)
            ranks = min(rng.choice([n for n in (1, 2, 4) if n <= left]), 4 - first % 4)
            ranks = ranks if ranks != 3 else 2
            tp = rng.choice([n for n in (1, 2, 4) if ranks % n == 0])
            stages.append(
                Stage(
                    ranks=tuple(range(first, first + ranks)), layers=((cuts[i], cuts[i + 1]),), tp=tp, zero=1
                )
            )
            first += ranks
        inner = math.lcm(*(stage.inner_dp for stage in stages))
        share = rng.randint(
            inner * size, 40 * inner * size
        )  # a short last one need not divide over all ranks
        groups.append(
            Group(share=share, micro_batch=size * inner, schedule="1f1b", sp=True, stages=tuple(stages))
        )
    plan = Plan(
        global_batch=sum(group.share for group in groups),
        seq_len=rng.choice([1024, 4096]),
        framework="megatron-core",
        groups=tuple(groups),
    )
    return PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))


@pytest.mark.parametrize("num_groups", (1, 2, pytest.param(4, marks=pytest.mark.slow)))
def test_unequal_pipelines_take_as_long_as_by_the_graph(num_groups):
    """With short last micro-batches, messages between unlike stages, and gradients of unlike cuts."""
    off = []
    for seed in range(60):
        case = unequal(seed, num_groups)
        times = step_times(build_batch([case], training_constants()), joined=True)
        off.append(sum(slowest_parts(times).values()) / graph_s(case) - 1.0)
    assert np.mean(np.abs(off) < 0.005) > 0.95
    assert min(off) > -0.015 and max(off) < 0.015


def test_stages_that_are_priced_alone_know_nothing_of_each_other():
    """Prices of stages are rows of one batch as well, but no pipeline."""
    waited = 0
    for seed in range(40):
        batch = build_batch([unequal(seed, 1)], training_constants())
        places = batch.boundaries
        alone = stage_times(replace(batch, boundaries=replace(places, first=0.0))).messages
        own_s = np.where(places.far_last > 0, alone.far, alone.near)
        np.testing.assert_array_equal(alone.after, own_s)
        waited += int(np.any(stage_times(batch).messages.after > own_s))
    assert waited > 5


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_step_is_shorter_than_the_bytes_that_leave_a_node(part):
    tight = 0
    for seed in range(1000 + 100 * part, 1050 + 100 * part):
        for case, seconds in drawn(seed):
            least = port_s(case)
            tight += least > 0.3 * seconds
            assert seconds >= least * (1.0 - 1e-9)
            assert graph_s(case) >= least * (1.0 - 1e-9)
    assert tight > 2


def test_a_tied_table_is_summed_where_its_ends_lie():
    """Both ends in one node and the middle in another: the sum does not take the network."""
    model = api.load_model("gpt2-xl")
    model = replace(model, blocks=model.blocks[:6])
    cluster = api.load_cluster("1x2xrtx-3090+1x2xrtx-4090@400Gb/s")
    spans = [(0, 3), (3, 6), (6, 8)]
    for ranks in permutations(range(4), 3):
        stages = tuple(
            Stage(ranks=(r,), layers=(span,), zero=1) for r, span in zip(ranks, spans, strict=True)
        )
        group = Group(share=12, stages=stages, micro_batch=4, schedule="1f1b", sp=False)
        made = Plan(
            global_batch=12,
            seq_len=512,
            precision="fp16",
            optimizer="adamw",
            framework="megatron-core",
            groups=(group,),
        )
        closed, graph = (
            predict(model, cluster, made, engine=engine).step_time_s for engine in ("analytical", "graph")
        )
        assert closed == pytest.approx(graph, rel=5e-3), ranks
