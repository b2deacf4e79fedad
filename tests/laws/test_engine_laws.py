"""What must hold for both engines, whatever the plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants
from foreshard.errors import SpecError
from foreshard.predict import predict
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times
from foreshard.predict.tasks.collectives import shard_times
from foreshard.spec.plan import Group, Plan
from foreshard.spec.plan_file import parse_plan
from foreshard.spec.prediction import TIME_PARTS

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, cluster_of, faster, model_of, relabelled, runs

ENGINES = ("analytical", "graph")


def parts_of(engine, model, cluster, plan):
    """Return the parts of the step on the critical rank.

    The laws hold for any constants inside their ranges, so the shipped ones may change without this file.
    """
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    batch = build_batch([case], TrainingConstants())
    if engine == "graph":
        return graph_times(case, batch, timeline=False)[0]
    step = step_times(batch)
    return {name: float(step.parts[name][step.total.argmax()]) for name in TIME_PARTS}


def seconds(engine, model, cluster, plan):
    return sum(parts_of(engine, model, cluster, plan).values())


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40, deadline=None)
@given(runs())
def test_parts_sum_to_the_step(engine, run):
    model, cluster, plan, _ = built(run)
    prediction = predict(model, cluster, plan, engine=engine, timeline=False)
    parts = prediction.time_breakdown_s
    assert tuple(parts) == TIME_PARTS
    assert min(parts.values()) >= 0.0
    assert sum(parts.values()) == pytest.approx(prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize("what", ["nic", "link", "flops", "memory"])
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(runs(), st.sampled_from([1.01, 1.5, 4.0]))
def test_faster_hardware_is_never_slower(engine, what, run, factor):
    model, cluster, plan, _ = built(run)
    before = seconds(engine, model, cluster, plan)
    after = seconds(engine, model, faster(cluster, **{what: factor}), plan)
    # A faster weight product hides less of the collective beside it; zb-h1 moves the product into the bubble
    # and not the collective, so there it may show: 3e-5 of a step seen.
    slack = 1e-3 if plan.groups[0].schedule == "zb-h1" else 1e-9
    assert after <= before * (1.0 + slack)


@pytest.mark.parametrize("framework", ["megatron-core", "deepspeed", "ddp", "nemo", "torchtitan"])
def test_both_engines_call_the_same_work_optimizer(framework):
    """Weights that are gathered behind it are data-parallel traffic, whichever engine lines them up."""
    model, cluster = model_of("gpt3-13b"), cluster_of("2x8xa100-sxm-80gb")
    plan = api.make_plan(model, cluster, framework=framework, tp=4, zero=1, seq_len=1024, global_batch=16)
    analytical, graph = (parts_of(engine, model, cluster, plan) for engine in ENGINES)
    assert analytical["optimizer"] == pytest.approx(graph["optimizer"], rel=1e-9)
    assert analytical["data_comm"] == pytest.approx(graph["data_comm"], rel=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_one_computation_hides_of_several_collectives_shows_once(engine):
    """Attention hides a ring, a backward the reduction of gradients, both the exchanges of the other pass."""
    model, cluster = model_of("deepseek-v3"), cluster_of("4x4xa100-sxm-80gb@100Gb/s")
    degrees = {"pp": 2, "cp": 2, "ep": 8, "zero": 2, "seq_len": 4096, "global_batch": 16}
    plan = api.make_plan(model, cluster, schedule="dualpipev", framework="nemo", **degrees)
    plan = replace(plan, comm={"grad_overlap": True})
    before, after = (seconds(engine, model, on, plan) for on in (cluster, faster(cluster, flops=4.0)))
    assert after <= before * (1.0 + 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(runs(), st.randoms(use_true_random=False))
def test_relabelling_ranks_changes_nothing(engine, run, random):
    """Equal nodes, and the devices inside each, are interchangeable."""
    model, cluster, plan, _ = built(run)
    per_node = cluster.nodes[0].per_node
    nodes, inside = list(range(cluster.num_nodes)), list(range(per_node))
    random.shuffle(nodes)
    random.shuffle(inside)
    other = relabelled(plan, lambda rank: nodes[rank // per_node] * per_node + inside[rank % per_node])
    assert seconds(engine, model, cluster, other) == pytest.approx(
        seconds(engine, model, cluster, plan), rel=1e-9
    )


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(runs())
def test_plan_file_and_flags_agree(engine, run):
    model, cluster, plan, _ = built(run)
    read = parse_plan(json.loads(json.dumps(plan.to_dict())))
    assert read == plan
    from_file, from_flags = (parts_of(engine, model, cluster, p) for p in (read, plan))
    assert from_file == from_flags


def split_groups(plan: Plan) -> Plan:
    """Return the plan with each inner data-parallel rank as a group of its own."""
    (group,) = plan.groups
    dp = group.stages[0].inner_dp
    groups = []
    for d in range(dp):
        stages = [replace(s, ranks=s.ranks[d * s.tp * s.cp : (d + 1) * s.tp * s.cp]) for s in group.stages]
        groups.append(
            Group(
                share=group.share // dp,
                stages=tuple(stages),
                micro_batch=group.micro_batch // dp,
                schedule=group.schedule,
                sp=group.sp,
            )
        )
    return replace(plan, groups=tuple(groups))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(runs(zeros=(0,), models=("llama3-8b", "gpt3-13b")))
def test_inner_and_outer_data_parallelism_agree(engine, run):
    model, cluster, plan, _ = built(run)
    assert seconds(engine, model, cluster, split_groups(plan)) == pytest.approx(
        seconds(engine, model, cluster, plan), rel=1e-9
    )


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(runs(), st.integers(1, 3))
def test_more_samples_take_longer(engine, run, times):
    model, cluster, _, choices = built(run)
    unit = choices["global_batch"]
    steps = [
        seconds(engine, model, cluster, api.make_plan(model, cluster, **choices | {"global_batch": unit * n}))
        for n in (times, times + 1)
    ]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=20, deadline=None)
@given(runs(zeros=(0, 1)))
def test_time_is_affine_in_micro_batches_without_pipeline(engine, run):
    """Every further micro-batch of a single stage costs the same."""
    model, cluster, _plan, choices = built(run)
    assume(choices["pp"] == 1)
    unit = choices["global_batch"]
    one, two, four = (
        seconds(engine, model, cluster, api.make_plan(model, cluster, **choices | {"global_batch": unit * n}))
        for n in (1, 2, 4)
    )
    assert four - two == pytest.approx(2.0 * (two - one), rel=1e-6)


def without_ends(model):
    """Return the model with ends that weigh nothing, so that equal layers make equal stages."""
    return replace(model, vocab=128, head_matmul_params=128 * model.hidden)


@settings(max_examples=60, deadline=None)
@given(runs(frameworks=("megatron-core", "megatron-lm@2021")))
def test_engines_agree_where_nothing_overlaps(run):
    model, cluster, plan, choices = built(run)
    assume(choices["schedule"] != "zb-h1" and model.num_layers % (choices["pp"] * choices["vpp"]) == 0)
    # The analytical engine prices all boundaries of a pipeline like the first.
    width, per_node = len(plan.groups[0].stages[0].ranks), cluster.nodes[0].per_node
    assume(width >= per_node or width * choices["pp"] <= per_node)
    plan = replace(
        plan, comm={name: False for name in ("grad_overlap", "param_gather_overlap", "p2p_overlap")}
    )
    model = without_ends(model)
    analytical, graph = (parts_of(engine, model, cluster, plan) for engine in ENGINES)
    expected = sum(analytical.values())
    # Opposite messages that meet in one call overlap, and a stage at an end has one neighbour: the closed
    # form counts all messages of a stage in the middle.
    passages = 1.0 + (choices["pp"] - 1.0) / plan.groups[0].num_micro_batches
    assume(analytical["pipeline_comm"] * passages < 0.015 * expected)
    assert sum(graph.values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("nic_gbps", [50, 100, 200, 400, 800, 1600, 3200])
@pytest.mark.parametrize("framework", ["megatron-bridge", "ddp"])
@pytest.mark.parametrize("model", ["gpt3-13b", "llama3-8b"])
def test_engines_stay_close_where_gradients_and_weights_travel_beside_compute(model, framework, nic_gbps):
    """Compute that a collective slows counts only where compute is what the step waits for.

    They are furthest apart where both are as long: the closed form knows two buckets, the graph all.
    """
    model, cluster = api.load_model(model), api.load_cluster(f"4x8xh100-sxm@{nic_gbps}Gb/s")
    plan = api.make_plan(model, cluster, framework=framework, seq_len=2048, zero=int(framework != "ddp"))
    analytical, graph = (sum(parts_of(engine, model, cluster, plan).values()) for engine in ENGINES)
    assert 0.98 * graph < analytical < 1.01 * graph


@pytest.mark.parametrize("framework", ["torchtitan", "hf", "megatron-fsdp", "composer", "deepspeed", "ddp"])
def test_engines_agree_whatever_binds(framework):
    """Launches, collectives or computation: the same tasks hide the same others in both engines.

    Experts of small models are bound by launches, dense models on slow networks by their gathers.
    """
    random, apart, compared = Random(16), [], 0
    models = ("deepseek-v2-lite", "qwen3-30b-a3b", "gpt2-xl", "gpt3-13b", "llama3-8b")
    clusters = ("8xh100", "2x8xb200", "8x8xh800", "4x4xa100-sxm-40gb@100Gb/s")
    while compared < 24:
        model, cluster = model_of(random.choice(models)), cluster_of(random.choice(clusters))
        zero = {"deepspeed": random.choice([1, 2, 3]), "ddp": 0}.get(framework, 3)
        choices = {
            "tp": 1 if framework in ("hf", "deepspeed", "ddp") else random.choice([1, 4]),
            "pp": random.choice([1, 2]) if framework == "torchtitan" else 1,  # weights move once a step
            "micro_batch": random.choice([1, 2]),
            "seq_len": random.choice([2048, 4096]),
            "recompute": random.choice(["none", "full"]),
            "global_batch": random.choice([64, 256]),
            "ep": random.choice([2, 4]) if model.blocks[-1].num_experts else 1,
        }
        try:
            plan = api.make_plan(model, cluster, framework=framework, zero=zero, **choices)
        except SpecError:  # degrees that the model or the cluster does not divide
            continue
        analytical, graph = (seconds(engine, model, cluster, plan) for engine in ENGINES)
        compared += 1
        if abs(analytical / graph - 1.0) > 0.03:
            apart.append((analytical / graph - 1.0, model.name, cluster.name, choices))
    assert not apart


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-h2", "zbv"])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_single_stage_has_no_bubble_to_fill(engine, schedule, zero):
    """Whatever the schedule, gradients are reduced beside the same backward, and as much is in flight."""
    options = {"tp": 4, "framework": "megatron-bridge", "global_batch": 32, "seq_len": 2048, "zero": zero}
    plain, other = (
        api.predict("llama3-8b", "4x8xh100-sxm@400Gb/s", engine=engine, schedule=one, **options)
        for one in ("1f1b", schedule)
    )
    assert other.step_time_s == pytest.approx(plain.step_time_s, rel=1e-9)
    assert other.memory == plain.memory


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", ["full", "selective:moe"])
def test_exchanges_that_are_sent_again_hide_behind_another_pass_once(engine, recompute):
    """A second of work that a pair of passes lacks shows once, however many exchanges it has."""
    model, cluster = model_of("mixtral-8x7b"), cluster_of("8x4xh100-sxm@200Gb/s")
    options = {"schedule": "dualpipe", "pp": 2, "ep": 8, "global_batch": 64, "seq_len": 4096}
    plan = api.make_plan(model, cluster, recompute=recompute, overrides={"cuda_graphs": "full"}, **options)
    slow, fast = (seconds(engine, model, faster(cluster, flops=f), plan) for f in (1.0, 1.6))
    assert fast < slow


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("nic", ["25Gb/s", "1600Gb/s"])
def test_a_trainer_reduces_gradients_behind_the_last_micro_batch(recompute, nic):
    """accelerate from 1.11 on: one more micro-batch scatters nothing, and adds to whole gradients."""
    asked = {"recompute": recompute, "seq": 2048, "micro_batch": 1}
    found = {
        (framework, engine, count): api.predict(
            "llama3.2-1b",
            f"2x4xh100-sxm@{nic}",
            engine=engine,
            framework=framework,
            global_batch=8 * count,
            **asked,
        )
        for framework in ("hf@4", "hf@5")
        for engine in (*ENGINES, "event")
        for count in (1, 3, 4)
    }
    for (framework, _, count), one in found.items():
        assert one.step_time_s == pytest.approx(found[framework, "graph", count].step_time_s, rel=3e-3)
        parts = one.time_breakdown_s
        assert sum(parts.values()) == pytest.approx(one.step_time_s, rel=1e-9)
        assert parts["host"] < 0.5 * one.step_time_s
    more = {
        framework: found[framework, "graph", 4].step_time_s - found[framework, "graph", 3].step_time_s
        for framework in ("hf@4", "hf@5")
    }
    slow = nic == "25Gb/s"
    assert more["hf@5"] < (0.72 if slow else 1.0) * more["hf@4"]  # of two gathers and a scatter, two gathers
    held = [found[framework, "graph", 4].memory.peak_allocated_bytes for framework in ("hf@4", "hf@5")]
    params = load_model("llama3.2-1b").num_params
    assert held[1] - held[0] == pytest.approx(
        (2.0 - 4.0 / 8) * params, rel=0.05
    )  # whole, over shards in fp32


@pytest.mark.parametrize("schedule", ["zb-h2", "zbv", "dualpipe", "dualpipev"])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_engines_agree_on_schedules_that_are_followed_op_by_op(schedule, data):
    """Where ends weigh nothing and layers divide, the chunks of a stage are equal."""
    pp, tp = data.draw(st.sampled_from([(2, 4), (4, 2), (8, 1)]))
    model, cluster = without_ends(model_of("llama3-8b")), cluster_of("2x8xh100-sxm")
    rounds = data.draw(st.integers(2 * pp, 3 * pp)) // 2 * 2
    dp, missing = 16 // (pp * tp), data.draw(st.integers(0, 3))  # samples that the last micro-batch lacks
    plan = api.make_plan(
        model,
        cluster,
        pp=pp,
        tp=tp,
        schedule=schedule,
        seq_len=data.draw(st.sampled_from([2048, 8192])),
        recompute=data.draw(st.sampled_from(["none", "full"])),
        micro_batch=4,
        global_batch=dp * (4 * max(rounds, 2 * pp) - missing),
    )
    plan = replace(plan, comm={"grad_overlap": False, "param_gather_overlap": False})
    analytical, graph = (seconds(engine, model, cluster, plan) for engine in ENGINES)
    assert graph == pytest.approx(analytical, rel=0.01)


@pytest.mark.parametrize("samples", [1, 4, 5, 13])
@pytest.mark.parametrize("framework", ["ddp", "megatron-bridge", "nemo"])
@pytest.mark.parametrize("nic_gbps", [25, 200, 1600])
def test_a_short_micro_batch_hides_less_of_gradients_and_weights(framework, samples, nic_gbps):
    """Gradients leave beside the last of them, which here has 1 sample of 4, or is whole."""
    model, cluster = model_of("gpt3-13b"), cluster_of(f"4x4xa100-sxm-80gb@{nic_gbps}Gb/s")
    options = {"framework": framework, "micro_batch": 4, "global_batch": 16 * samples, "seq_len": 1024}
    plan = api.make_plan(model, cluster, zero=int(framework != "ddp"), **options)
    analytical, graph = (seconds(engine, model, cluster, plan) for engine in ENGINES)
    assert analytical == pytest.approx(graph, rel=0.02)


@pytest.mark.parametrize("framework", ["hf@4", "deepspeed", "megatron-fsdp", "torchtitan"])
@pytest.mark.parametrize(("name", "on"), [("nemotron3-nano-30b", "2x8xmi300x"), ("gpt-oss-20b", "1x8xl40s")])
def test_weights_of_a_layer_are_gathered_beside_the_layer_before_it(name, on, framework):
    """Of layers of several kinds, those of many weights may lie behind those of little work."""
    model, cluster = model_of(name), cluster_of(on)
    plan = api.make_plan(model, cluster, framework=framework, zero=3, micro_batch=2, seq_len=2048)
    analytical, graph = (seconds(engine, model, cluster, plan) for engine in ENGINES)
    assert analytical == pytest.approx(graph, rel=0.02)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("zero", "overlaps"), [(0, False), (1, False), (2, False), (3, True)])
def test_deepspeed_hides_gradients_at_stage_three_only(engine, zero, overlaps):
    model, cluster = model_of("llama3-8b"), cluster_of("2x8xh100-sxm")
    plan = api.make_plan(model, cluster, zero=zero, framework="deepspeed", global_batch=32)
    stated = replace(plan, comm={"grad_overlap": overlaps, "param_gather_overlap": overlaps})
    assert seconds(engine, model, cluster, stated) == seconds(engine, model, cluster, plan)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("zero", [1, 2])
def test_deepspeed_sums_gradients_on_every_rank(engine, zero):
    """Its ZeRO 1 and 2 all-reduce, twice the bytes of a scatter; weights are gathered as everywhere."""
    model, cluster = model_of("llama3-8b"), cluster_of("2x8xh100-sxm@100Gb/s")
    options = {"zero": zero, "global_batch": 16, "grad_overlap": False, "param_gather_overlap": False}
    colossal, deepspeed = (
        parts_of(engine, model, cluster, api.make_plan(model, cluster, framework=name, **options))
        for name in ("colossalai", "deepspeed")
    )
    # By ZeRO 1 the graph counts the gather, as long as a scatter, as optimizer; both are 16 bits an element.
    moved = [parts["data_comm"] + parts["optimizer"] for parts in (colossal, deepspeed)]
    assert moved[1] == pytest.approx(1.5 * moved[0], rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bf16_optimizer_of_deepspeed_sums_gradients_on_every_rank(engine):
    """FRAMEWORKS section 11: fp32 gradients all-reduced in 16-bit buckets, then weights gathered."""
    model, cluster = model_of("llama3-8b"), cluster_of("2x8xh100-sxm@100Gb/s")
    options = {"zero": 1, "tp": 4, "sp": False, "global_batch": 16}
    framework = load_framework("megatron-deepspeed@2022")
    plan = api.make_plan(model, cluster, framework=framework.label, **options)
    megatron = replace(framework, name="megatron-lm")
    moved = []
    for one in (megatron, framework):
        case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=one)
        batch = build_batch([case], TrainingConstants())
        if engine == "graph":
            parts = graph_times(case, batch, timeline=False)[0]
        else:
            parts = {name: float(values[0]) for name, values in step_times(batch).parts.items()}
        moved.append(parts["data_comm"] + parts["optimizer"])
    assert 1.25 * moved[0] < moved[1] < 1.55 * moved[0]


@pytest.mark.parametrize("lora", [None, "16"])
@pytest.mark.parametrize("framework", ["hf", "torchtitan", "deepspeed", "ddp", "megatron-core"])
def test_one_device_sends_nothing(framework, lora):
    """fully_shard on one rank casts and copies its weights, before both passes; nothing is communicated."""
    asked = {"framework": framework, "lora": lora, "seq": 1024, "global_batch": 4}
    found = {
        engine: api.predict("llama3.2-1b", "1xrtx-4090", engine=engine, **asked)
        for engine in (*ENGINES, "event")
    }
    for prediction in found.values():
        sent = {n: s for n, s in prediction.time_breakdown_s.items() if n.endswith("_comm")}
        assert sent == pytest.approx(dict.fromkeys(sent, 0.0), abs=1e-12)
    assert found["event"].step_time_s == pytest.approx(found["graph"].step_time_s, rel=1e-9)
    assert found["analytical"].step_time_s == pytest.approx(found["graph"].step_time_s, rel=0.02)


def test_frozen_weights_are_not_cast():
    """Weights in 32 bit take 10 bytes to cast and copy before a pass, frozen ones in 16 bit 4."""
    case = PlannedRun(
        model=load_model("llama3.2-1b"),
        cluster=load_cluster("1xh100-sxm"),
        plan=api.make_plan("llama3.2-1b", "1xh100-sxm", framework="hf"),
        framework=load_framework("hf"),
    )
    machine = build_batch([case], TrainingConstants()).machine
    whole, frozen = (
        float(np.asarray(shard_times(1e12, 0.0, machine, trained=(held, 0.0)).copy_weights).flat[0])
        for held in (1e12, 0.0)
    )
    assert whole / frozen == pytest.approx(2.5, rel=1e-3)  # but for the launch
