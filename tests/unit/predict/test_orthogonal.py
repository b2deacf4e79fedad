"""Muon: iterations on whole matrices, shared by replicas, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import TrainingConstants
from foreshard.cost.memory import optimizer_state_bytes
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.tasks.orthogonal import matrices, orthogonal_s

NEUTRAL = replace(
    TrainingConstants(), gemm_derate=1.0, gemm_derate_hopper=1.0, gemm_derate_blackwell=1.0, gemm_power=0.0
)


def batch_of(model="llama3-8b", cluster="8xh100-sxm", **choices):
    model, where = api.load_model(model), api.load_cluster(cluster)
    plan = api.make_plan(model, where, **({"optimizer": "muon"} | choices))
    case = PlannedRun(model=model, cluster=where, plan=plan, framework=load_framework(plan.framework))
    return build_batch([case], NEUTRAL)


def seconds(batch, **rank):
    machine = replace(batch.machine, rank=replace(batch.machine.rank, **rank))
    return np.asarray(orthogonal_s(batch.kinds, batch.counts, machine)).item()


def test_the_matrices_of_a_layer_are_its_parameters():
    for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"):
        blocks = [block for block, _ in api.load_model(name).block_kinds()]
        for layer, block in zip(batch_of(name).kinds, blocks, strict=True):
            dense, (rows, columns, each) = matrices(layer)
            found = sum(np.asarray(r) * c * many for r, c, many in dense)
            found = np.asarray(found + each * rows * columns * block.num_experts).item()
            assert found == pytest.approx(block.num_params, rel=1e-3), "all but norms and biases"


def test_five_iterations_of_six_cubes_at_the_datasheet_rate():
    """On kernels without losses: 5 (4 m m n + 2 m m m) operations a matrix of 8B, over the peak."""
    batch = batch_of()
    device = api.load_cluster("8xh100-sxm").nodes[0].device
    ideal = kernel_model(device, "bf16", fidelity="datasheet")
    batch = replace(batch, machine=replace(batch.machine, kernels=ideal))
    sides = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    work = 32 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)
    beside = 32 * sum(5 * 6 * m * (m + n) for m, n in sides)
    expected = work / ideal.peak_flops_per_s + beside / ideal.memory_bytes_per_s
    assert seconds(batch, zero=0.0) == pytest.approx(expected, rel=1e-3)


def test_replicas_share_whole_matrices():
    batch = batch_of()
    whole = seconds(batch, zero=0.0)
    assert seconds(batch, zero=1.0, shard=8.0) == pytest.approx(whole / 8)
    many = seconds(batch, zero=1.0, shard=1e6, dp=1e6)
    assert 0 < many == seconds(batch, zero=1.0, shard=2e6, dp=2e6) < whole / 32, "the largest is one rank's"


def test_step_and_memory_of_muon():
    """One moment of matrices and two of tables; both engines add its iterations alike."""
    asked = {"global_batch": 8, "micro_batch": 1, "seq_len": 1024, "zero": 0}
    model = api.load_model("llama3-8b")
    tables = model.embedding_params + model.head_params
    found = {
        (name, engine): api.predict(model, "8xh100-sxm", optimizer=name, engine=engine, **asked)
        for name in ("adamw", "muon", "lion", "sgd")
        for engine in ("analytical", "graph")
    }
    states = {
        name: found[name, "graph"].memory.breakdown_bytes["optimizer"]
        for name in ("adamw", "muon", "lion", "sgd")
    }
    assert states["adamw"] - states["lion"] == pytest.approx(4 * model.num_params, rel=1e-3)
    assert states["muon"] - states["lion"] == pytest.approx(4 * tables, rel=1e-3)
    for engine in ("analytical", "graph"):
        parts = {
            name: found[name, engine].time_breakdown_s["optimizer"]
            for name in ("adamw", "muon", "lion", "sgd")
        }
        assert parts["muon"] > parts["adamw"] > parts["lion"] == parts["sgd"]
    more = [found["muon", engine].time_breakdown_s["optimizer"] for engine in ("analytical", "graph")]
    assert more[0] == pytest.approx(more[1], rel=1e-6)
    assert optimizer_state_bytes("muon") == optimizer_state_bytes("lion") == 4
