"""Predicted bytes of FSDP2 against torch itself: its FSDPMemTracker on fake ranks, without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.prices import group_prices
from foreshard.predict.memory import plan_memory
from foreshard.spec.block import Block
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.model import decoder

torch = pytest.importorskip("torch")
reference = pytest.importorskip("tests.validation.fsdp2_reference")

from tests.validation.fsdp2_reference import (
    FULL,
    NUM_SHARDS,
    SELECTIVE,
    Sizes,
    flat_peak,
    stage_peak,
)

LIMIT = 0.03
DENSE = Sizes()
EXPERTS = Sizes(num_experts=8, ffn=1024)
WIDE_VOCABULARY = Sizes(vocab=32000, layers=4)
FEW_TOKENS = Sizes(hidden=2048, ffn=5632, seq_len=512, layers=4)
HEAD_HEAVY = Sizes(vocab=64000, seq_len=64, samples=1, layers=3)
RECOMPUTE = ("none", SELECTIVE, pytest.param(FULL, marks=pytest.mark.slow))


@pytest.fixture(scope="module", autouse=True)
def fake_ranks():
    """A process group of 32 ranks of which 31 do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4 * NUM_SHARDS)
    yield
    torch.distributed.destroy_process_group()


def predicted(
    sizes: Sizes, recompute: str, release: str, *, stages: int = 1, stage: int = 0, count: int = 1, **units
):
    """Allocated bytes of a stage as predicted for torchtitan."""
    width = sizes.hidden // sizes.heads
    block = Block(
        hidden=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=width,
        value_head_dim=width,
        ffn=0 if sizes.num_experts else sizes.ffn,
        gated=True,
        num_experts=sizes.num_experts,
        top_k=sizes.top_k * (sizes.num_experts > 0),
        expert_ffn=sizes.ffn * (sizes.num_experts > 0),
    )
    model = decoder(
        name="reference",
        blocks=(block,) * sizes.layers,
        vocab=sizes.vocab,
        tied_embeddings=False,
        max_seq_len=sizes.seq_len,
    )
    plan = plan_from_degrees(
        sizes.layers,
        stages * NUM_SHARDS,
        pp=stages,
        dp=NUM_SHARDS,
        micro_batch=sizes.samples,
        global_batch=NUM_SHARDS * sizes.samples * count,
        seq_len=sizes.seq_len,
        zero=3,
        recompute=recompute,
    )
    plan = replace(plan, **units)
    framework = replace(load_framework(f"torchtitan@{release}"), vocab_multiple=1)
    cluster = load_cluster(f"{stages}x{NUM_SHARDS}xh100-sxm")
    _, parts = plan_memory(PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework))
    return float(parts.allocated[stage])


ODD_SIZES = (WIDE_VOCABULARY, FEW_TOKENS, HEAD_HEAVY)


QUICK = [(DENSE, SELECTIVE), (EXPERTS, "none")]
OTHERS = [
    (sizes, recompute)
    for sizes in (DENSE, EXPERTS, *ODD_SIZES)
    for recompute in ("none", SELECTIVE, FULL)
    if (sizes, recompute) not in QUICK
]


@pytest.mark.parametrize(
    ("sizes", "recompute"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_without_pipeline(sizes, recompute):
    assert predicted(sizes, recompute, "2024") == pytest.approx(flat_peak(sizes, recompute), rel=LIMIT)


@pytest.mark.parametrize(
    "sizes",
    [DENSE, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in (EXPERTS, WIDE_VOCABULARY))],
    ids=["dense", "experts", "vocabulary"],
)
def test_gradients_of_several_micro_batches_are_summed_in_shards(sizes):
    measured = flat_peak(sizes, SELECTIVE, num_steps=2)
    assert predicted(sizes, SELECTIVE, "2024", count=2) == pytest.approx(measured, rel=LIMIT)


@pytest.mark.parametrize(
    ("sizes", "recompute", "units"),
    [
        (DENSE, "none", {}),
        pytest.param(HEAD_HEAVY, "none", {"wrap": "model"}, marks=pytest.mark.slow),
        pytest.param(DENSE, FULL, {"wrap": "model"}, marks=pytest.mark.slow),
        pytest.param(EXPERTS, "none", {}, marks=pytest.mark.slow),
        pytest.param(HEAD_HEAVY, FULL, {}, marks=pytest.mark.slow),
    ],
)
def test_gradients_that_the_last_micro_batch_alone_reduces_stay_whole(sizes, recompute, units, monkeypatch):
    """As accelerate has it: `set_requires_gradient_sync`, reductions in 16 bit."""
    whole = replace(load_framework("torchtitan@2024"), accumulates_whole=True, grad_reduce_bytes=2)
    monkeypatch.setattr(sys.modules[__name__], "load_framework", lambda _: whole)
    measured = flat_peak(sizes, recompute, num_steps=2, reduces_last=True, **units)
    assert predicted(sizes, recompute, "2024", count=2, **units) == pytest.approx(measured, rel=LIMIT)


@pytest.mark.parametrize(
    "sizes",
    [
        HEAD_HEAVY,
        pytest.param(WIDE_VOCABULARY, marks=pytest.mark.slow),
        pytest.param(replace(DENSE, vocab=64000, layers=2), marks=pytest.mark.slow),
    ],
)
def test_loss_in_chunks(sizes):
    measured = flat_peak(sizes, SELECTIVE, num_chunks=8)
    assert predicted(sizes, SELECTIVE, "0.3") == pytest.approx(measured, rel=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "units"),
    [
        (FEW_TOKENS, {"prefetch": 2}),
        (FEW_TOKENS, {"prefetch": 1, "wrap": 3}),  # units of 3 blocks and of 1
        (FEW_TOKENS, {"wrap": "model"}),
    ],
)
def test_other_units_and_more_of_them_ahead(sizes, units):
    measured = flat_peak(sizes, FULL, **units)
    assert predicted(sizes, FULL, "2024", **units) == pytest.approx(measured, rel=LIMIT)


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [
        (DENSE, "none"),
        (EXPERTS, SELECTIVE),
        pytest.param(DENSE, SELECTIVE, marks=pytest.mark.slow),
        pytest.param(EXPERTS, FULL, marks=pytest.mark.slow),
    ],
    ids=["dense-none", "experts-selective", "dense-selective", "experts-full"],
)
@pytest.mark.parametrize(
    ("stages", "stage", "count"),
    [*(pytest.param(*some, marks=pytest.mark.slow) for some in ((2, 0, 2), (2, 1, 4))), (4, 1, 5)],
)
def test_stage_of_a_pipeline(sizes, recompute, stages, stage, count):
    measured = stage_peak(sizes, recompute, num_stages=stages, stage=stage, num_micro_batches=count)
    made = predicted(sizes, recompute, "2024", stages=stages, stage=stage, count=count)
    assert made == pytest.approx(measured, rel=LIMIT)


def test_stage_on_one_data_parallel_rank(monkeypatch):
    """Nothing is cut there, yet the 16-bit copies of the weights and the gradients are held as elsewhere."""
    for module in (reference, sys.modules[__name__]):
        monkeypatch.setattr(module, "NUM_SHARDS", 1)
    measured = stage_peak(DENSE, "none", num_stages=4, stage=3, num_micro_batches=8)
    made = predicted(DENSE, "none", "2024", stages=4, stage=3, count=8)
    assert made == pytest.approx(measured, rel=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "stages", "stage", "count"),
    [
        (WIDE_VOCABULARY, 2, 1, 4),
        (WIDE_VOCABULARY, 4, 0, 8),
        (WIDE_VOCABULARY, 4, 3, 8),
        (DENSE, 4, 0, 4),
        (FEW_TOKENS, 2, 0, 2),
    ],
)
def test_ends_and_short_pipelines(sizes, stages, stage, count):
    measured = stage_peak(sizes, SELECTIVE, num_stages=stages, stage=stage, num_micro_batches=count)
    made = predicted(sizes, SELECTIVE, "2024", stages=stages, stage=stage, count=count)
    assert made == pytest.approx(measured, rel=LIMIT)


def test_the_embedding_is_gathered_again_before_its_backward_and_the_head_stays(monkeypatch):
    """Units that torch gathers in a forward and in the backward behind it, and those that are priced."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    group, gathered = _fsdp_param_group.FSDPParamGroup, []
    unshard = group.unshard

    def recorded(self, *args, **kwargs):
        if self.is_sharded and not self._all_gather_result:
            gathered.append(self._module_fqn)
        return unshard(self, *args, **kwargs)

    monkeypatch.setattr(group, "unshard", recorded)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4 * NUM_SHARDS,))
    stage = torch.nn.Sequential(torch.nn.Embedding(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    for unit, reshards in zip(stage, (True, True, False), strict=True):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(stage, mesh=mesh)
    outputs = stage(torch.zeros(3, dtype=torch.int64))
    in_forward = tuple(gathered)
    gathered.clear()
    outputs.sum().backward()
    assert (in_forward, gathered) == (("0", "1", "2"), ["1", "0"])

    model = replace(load_model("llama3-8b"), blocks=load_model("llama3-8b").blocks[:1])
    cluster, framework = load_cluster("1x8xh100-sxm"), load_framework("torchtitan")
    plan = plan_from_degrees(1, 8, global_batch=8, seq_len=1024, zero=3, framework="torchtitan")
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework)
    (prices,) = group_prices(case, build_batch([case], TrainingConstants()))
    (units,) = prices.units[0]
    assert (units.gather_s > 0).all()
    assert (units.regather_s > 0).tolist() == [True, True, False]
