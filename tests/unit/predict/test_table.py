"""A table of plans against the same plans one by one: stages, batch, times and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants
from foreshard.cost.memory import stage_memory
from foreshard.cost.memory_activations import recompute_of
from foreshard.errors import SpecError
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.analytical.table import TableStages, evaluate
from foreshard.predict.batch import PlannedRun, build_batch, layer_counts
from foreshard.predict.memory import plan_memory
from foreshard.predict.plan_table import PlanTable
from foreshard.predict.run_setup import RunSetup
from foreshard.predict.space import RULES, draw_plans, valid_plans
from foreshard.predict.stage_rows import recompute_columns, stage_rows_of
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import layer_spans

SPACES = {
    "dense, thousands of devices": (
        "gpt3-175b",
        "512x8xa100-sxm-80gb",
        1536,
        2048,
        "bf16",
        "megatron-lm@2022",
    ),
    "dense, one node": ("gpt-22b", "1x8xa100-sxm-80gb", 192, 2048, "bf16", "megatron-deepspeed@2022"),
    "wide vocabulary": ("llama3-70b", "8x8xh100-sxm", 512, 8192, "bf16", "torchtitan@2024"),
    "experts, 8 bit": ("mixtral-8x7b", "8x8xh100-sxm", 512, 4096, "fp8", "megatron-bridge@26.06"),
    "two kinds of blocks, next-token module": (
        "deepseek-v3",
        "32x8xh100-sxm",
        1024,
        4096,
        "bf16",
        "megatron-core",
    ),
    "windows": ("gpt-oss-20b", "2x8xh100-sxm", 128, 8192, "bf16", "megatron-core"),
    "stages across nodes": ("llama3.2-1b", "6x7xh100-sxm@25Gb/s", 48, 4096, "bf16", "megatron-core"),
    "experts across nodes": ("mixtral-8x7b", "2x6xa100-sxm-80gb", 48, 4096, "bf16", "megatron-core"),
    "no fast links": ("gpt-22b", "4x4xt4", 64, 1024, "fp16", "ddp"),
}


@pytest.fixture(params=SPACES.values(), ids=SPACES)
def space(request):
    name, cluster, global_batch, seq_len, precision, framework = request.param
    model, cluster = load_model(name), load_cluster(cluster)
    rng = np.random.default_rng(7)
    table = draw_plans(model, cluster, 60, rng, global_batch=global_batch, seq_len=seq_len)
    options = {"precision": precision, "seq_len": seq_len}
    framework = load_framework(framework)
    plans = [table.plan(i, model, **options) for i in range(len(table))]
    cases = [PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework) for plan in plans]
    return model, cluster, table, framework, options, cases


def stages_of(model, cluster, table, framework, options):
    setup = RunSetup(model=model, framework=framework, **options)
    return TableStages(setup, cluster, table, stage_rows_of(model, table.pp, table.vpp))


def test_step_times_are_those_of_the_plans(space):
    model, cluster, table, framework, options, cases = space
    constants = TrainingConstants()
    one_by_one = step_times(build_batch(cases, constants))
    result = evaluate(model, cluster, table, framework=framework, constants=constants, **options)
    np.testing.assert_allclose(result.step_time_s, one_by_one.total, rtol=1e-9)
    np.testing.assert_allclose(sum(result.parts.values()), result.step_time_s, rtol=1e-9)
    # Of stages with equally long paths another may set the pace: its messages differ, and what it waits for.
    joined, close = ("pipeline_comm", "bubble"), {"rtol": 1e-9, "atol": 1e-9 * result.step_time_s.min()}
    groups = [(name,) for name in one_by_one.parts if name not in joined] + [joined]
    for names in groups:
        made, part = (sum(parts[name] for name in names) for parts in (result.parts, one_by_one.parts))
        np.testing.assert_allclose(made, part, **close)
    for name in joined:
        assert np.isclose(result.parts[name], one_by_one.parts[name], **close).mean() > 0.98


def test_memory_is_that_of_the_plans(space):
    model, cluster, table, framework, options, cases = space
    result = stages_of(model, cluster, table, framework, options).memory()
    one_by_one = [plan_memory(case)[0] for case in cases]
    np.testing.assert_allclose(result.peak_bytes, [memory.peak_bytes for memory in one_by_one], rtol=1e-9)
    assert result.fits.tolist() == [memory.fits for memory in one_by_one]
    assert result.capacity_bytes == one_by_one[0].capacity_bytes


@pytest.mark.parametrize("name", ["tp_overlap", "expert_overlap"])
def test_what_hides_collectives_is_in_the_memory_of_the_plans(name):
    """Userbuffers of tensor parallelism; one more chunk in flight where experts' exchanges are hidden."""
    model, cluster = load_model("mixtral-8x7b"), load_cluster("4x8xh100-sxm")
    table = draw_plans(model, cluster, 90, np.random.default_rng(7), global_batch=128, seq_len=4096)
    options = {"precision": "bf16", "seq_len": 4096, "comm": {name: True}}
    framework = load_framework("megatron-core")
    plans = [replace(table.plan(i, model, seq_len=4096), comm={name: True}) for i in range(len(table))]
    cases = [PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework) for plan in plans]
    peaks = stages_of(model, cluster, table, framework, options).memory().peak_bytes
    np.testing.assert_allclose(peaks, [plan_memory(case)[0].peak_bytes for case in cases], rtol=1e-9)
    plain = stages_of(model, cluster, table, framework, options | {"comm": {}}).memory().peak_bytes
    more = {"tp_overlap": (table.tp > 1) & (table.sp > 0), "expert_overlap": (table.vpp > 1) & (table.ep > 1)}
    assert np.count_nonzero(more[name]) > 5
    assert np.all((peaks > plain) <= more[name])
    assert np.count_nonzero(peaks > plain) > 3


def test_memory_parts_are_those_of_the_first_stage_of_each_row(space):
    model, cluster, table, framework, options, cases = space
    rows = stage_rows_of(model, table.pp, table.vpp)
    parts = stage_memory(stages_of(model, cluster, table, framework, options).load(), framework)
    for i, case in enumerate(cases):
        expected = plan_memory(case)[1].peak
        rows_used = rows.multiplicity[:, i] > 0
        np.testing.assert_allclose(
            parts.peak[rows_used, i], expected[rows.first_stage[rows_used, i].astype(int)], rtol=1e-9
        )


def test_drawn_plans_keep_every_rule(space):
    model, cluster, _, _, _, cases = space
    for case in cases:
        check_plan(case.plan, model, cluster)
        assert len(case.plan.ranks) == cluster.num_devices


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("tp does not divide the heads", "tp", 64),
        ("more virtual stages than blocks", "vpp", 97),
        ("devices left idle", "dp", 1),
        ("experts of a dense model", "ep", 2),
        ("virtual stages without interleaving", "schedule", 0),
        ("shard group cuts a replica", "shard", 3),
    ],
)
def test_a_broken_rule_is_seen(name, column, value):
    model, cluster = load_model("gpt3-175b"), load_cluster("512x8xa100-sxm-80gb")
    good = {"tp": 8, "pp": 8, "dp": 64, "vpp": 4, "micro_batch": 1, "num_micro_batches": 32, "schedule": 2}
    assert valid_plans(model, cluster, PlanTable.from_columns(good), seq_len=2048).all(), name
    bad = PlanTable.from_columns(good | {column: value})
    assert not valid_plans(model, cluster, bad, seq_len=2048).any(), name


@pytest.mark.parametrize("name", ["gpt3-175b", "deepseek-v3", "llama3-70b"])
def test_stage_rows_are_the_stages_of_the_layout(name):
    """Every way to cut the model: each real stage is in exactly one row, with the counts of its layers."""
    model = load_model(name)
    limit = model.num_layers
    pairs = [(p, v) for p in range(1, limit + 1) for v in range(1, limit // p + 1)][:: 1 if limit < 90 else 3]
    pp, vpp = np.array(pairs).T
    rows = stage_rows_of(model, pp, vpp)
    kinds = {block: i for i, block in enumerate(rows.blocks)}
    for i, (p, v) in enumerate(pairs):
        expected: dict[tuple, int] = {}
        for s, spans in enumerate(layer_spans(limit, p, v)):
            counts = layer_counts(model, _Layers(spans), kinds)
            key = (counts, s == 0, s == p - 1)
            expected[key] = expected.get(key, 0) + 1
        found: dict[tuple, int] = {}
        for r in np.flatnonzero(rows.multiplicity[:, i]):
            key = (
                tuple(c[r, i] for c in rows.counts),
                rows.has_embedding[r, i] == 1,
                rows.has_head[r, i] == 1,
            )
            found[key] = found.get(key, 0) + int(rows.multiplicity[r, i])
        assert found == expected, (p, v)


class _Layers:
    def __init__(self, spans):
        self.layers = spans


def test_recompute_columns_are_the_rules_of_the_stages():
    model = load_model("gpt-22b")  # 48 blocks: 5 stages are uneven
    rules = (*RULES, "every-3", "full:uniform:100", "selective:moe+moe_act+shared_experts+mla_up_proj+op")
    pp = np.repeat([1, 5, 7, 48], len(rules))
    table = PlanTable.from_columns({"pp": pp, "recompute": np.tile(np.arange(len(rules)), 4)}, rules)
    rows = stage_rows_of(model, table.pp, table.vpp)
    columns = recompute_columns(rules, table.recompute, rows, table.vpp)
    shape = rows.multiplicity.shape
    for r, i in zip(*np.nonzero(rows.multiplicity), strict=True):
        expected = recompute_of(rules[table.recompute[i]], round(rows.counts[0][r, i]))
        for name in expected.__slots__:
            assert np.broadcast_to(getattr(columns, name), shape)[r, i] == getattr(expected, name)


def test_comm_options_optimizer_and_fidelity_reach_the_result():
    model, cluster = load_model("gpt-22b"), load_cluster("1x8xa100-sxm-80gb")
    table = PlanTable.from_columns({"dp": 8, "num_micro_batches": 4, "vpp": [1, 1]})
    options = {
        "framework": load_framework("megatron-core"),
        "constants": TrainingConstants(),
        "seq_len": 2048,
    }
    base = evaluate(model, cluster, table, **options)
    shown = evaluate(model, cluster, table, comm={"grad_overlap": True}, **options)
    assert (shown.step_time_s < base.step_time_s).all()
    assert (evaluate(model, cluster, table, optimizer="sgd", **options).peak_bytes < base.peak_bytes).all()
    assert (
        evaluate(model, cluster, table, fidelity="datasheet", **options).step_time_s < base.step_time_s
    ).all()


def test_offload_lowers_memory_as_in_plans():
    model, cluster = load_model("gpt-22b"), load_cluster("1x8xa100-sxm-80gb")
    table = PlanTable.from_columns({"tp": 8, "num_micro_batches": 8, "offload": np.arange(4)})
    framework = load_framework("megatron-core")
    result = stages_of(model, cluster, table, framework, {"precision": "bf16", "seq_len": 2048}).memory()
    plans = [table.plan(i, model, seq_len=2048) for i in range(4)]
    expected = [
        plan_memory(PlannedRun(model=model, cluster=cluster, plan=p, framework=framework))[0] for p in plans
    ]
    np.testing.assert_allclose(result.peak_bytes, [memory.peak_bytes for memory in expected], rtol=1e-12)
    assert result.peak_bytes[0] > max(result.peak_bytes[1], result.peak_bytes[2]) > result.peak_bytes[3]


def test_a_cluster_of_different_nodes_is_refused():
    model, cluster = load_model("gpt-22b"), load_cluster("1x8xa100-sxm-80gb+1x8xh100-sxm")
    table = PlanTable.from_columns({"tp": 8, "dp": 2, "num_micro_batches": 4})
    with pytest.raises(SpecError, match="kinds of nodes"):
        evaluate(
            model,
            cluster,
            table,
            framework=load_framework("megatron-core"),
            constants=TrainingConstants(),
            seq_len=2048,
        )


def test_the_committed_plans_are_a_thousand_valid_ones():
    file = Path(__file__).parents[3] / "bench" / "plans_1000.json"
    sets = json.loads(file.read_text(encoding="utf-8"))["sets"]
    total = 0
    for entry in sets:
        model, cluster = load_model(entry["model"]), load_cluster(entry["cluster"])
        table = PlanTable.from_columns(entry["columns"], tuple(entry["rules"]))
        assert valid_plans(model, cluster, table, seq_len=entry["seq_len"]).all()
        assert (table.global_batch == entry["global_batch"]).all()
        total += len(table)
    assert total == 1000
    assert {entry["model"] for entry in sets} == {"gpt3-175b", "gpt-22b", "llama3-70b", "mixtral-8x22b"}
