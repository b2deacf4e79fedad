"""The space of plans that degree flags span: which are valid, and seeded draws from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from foreshard.predict.plan_table import COLUMNS, PlanTable
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import TABLED

RULES = (
    "none",
    "selective:core_attn",
    "selective:core_attn+mlp+layernorm",
    "full",
    "full:uniform:2",
    "full:block:1",
    "full:block:4",
    "every-2",
)
_INTERLEAVED = TABLED.index("interleaved")


def divisors(number: int) -> np.ndarray:
    """Return the divisors of a number in rising order."""
    small = np.arange(1, math.isqrt(number) + 1)
    small = small[number % small == 0]
    return np.union1d(small, number // small)


def valid_plans(model: Model, cluster: Cluster, table: PlanTable, *, seq_len: int) -> np.ndarray:
    """Return which plans keep the rules of `spec.layout.plan_from_degrees` and `spec.checks`, a bool each."""
    t = table
    width = t.tp * t.cp * t.dp
    ok = (width * t.pp == cluster.num_devices) & (width % (t.ep * t.etp) == 0)
    ok &= t.pp * t.vpp <= model.num_layers
    for block, _ in model.block_kinds():
        ok &= (block.num_heads % t.tp == 0) & (block.ffn % t.tp == 0) & (block.shared_ffn % t.tp == 0)
        if block.num_experts:
            ok &= (block.num_experts % t.ep == 0) & (block.expert_ffn % t.etp == 0)
    if not any(block.num_experts for block, _ in model.block_kinds()):
        ok &= (t.ep == 1) & (t.etp == 1)
    ok &= (t.schedule == _INTERLEAVED) | (t.vpp == 1)
    ok &= (t.vpp == 1) | (t.pp == 1) | (t.num_micro_batches % t.pp == 0)
    ok &= seq_len % np.where(t.sp > 0, t.cp * t.tp, t.cp) == 0
    return ok & ((t.shard == 0) | ((t.zero > 0) & (t.dp * t.cp % np.maximum(t.shard, 1) == 0)))


def draw_plans(
    model: Model,
    cluster: Cluster,
    num_plans: int,
    rng: np.random.Generator,
    *,
    global_batch: int,
    seq_len: int,
    rules: tuple[str, ...] = RULES,
) -> PlanTable:
    """Return valid plans drawn from the whole space; equal plans may repeat.

    Every degree is drawn among the divisors it may take and every option among all of its values (recompute
    among `rules`), independently; half of the draws each leave out context parallelism, virtual stages, shard
    groups and offload. Only pipelines of several stages get virtual ones. Invalid draws are thrown away.
    """
    found: list[PlanTable] = []
    missing = num_plans
    while missing > 0:
        some = _draw(model, cluster, 64 * num_plans, rng, global_batch, rules)
        some = some.take(valid_plans(model, cluster, some, seq_len=seq_len) & (some.num_micro_batches > 0))
        some = some.take(some.global_batch == global_batch)
        found.append(some)
        missing -= len(some)
    joined = {name: np.concatenate([getattr(t, name) for t in found])[:num_plans] for name in COLUMNS}
    return PlanTable(**joined, rules=rules)


def _draw(
    model: Model,
    cluster: Cluster,
    size: int,
    rng: np.random.Generator,
    global_batch: int,
    rules: tuple[str, ...],
) -> PlanTable:
    devices, blocks = cluster.num_devices, model.block_kinds()
    experts = max(block.num_experts for block, _ in blocks)
    heads = np.gcd.reduce([block.num_heads for block, _ in blocks])
    parts = divisors(devices)

    def among(values: np.ndarray) -> np.ndarray:
        return rng.choice(values, size)

    def half(neutral: int, values: np.ndarray) -> np.ndarray:
        return np.where(rng.random(size) < 0.5, neutral, among(values))

    tp, cp = among(divisors(int(np.gcd(heads, devices)))), half(1, parts)
    pp, dp = among(parts[parts <= model.num_layers]), among(parts)
    micro_batch = among(divisors(global_batch))
    chunks = 1 + np.floor(rng.random(size) * (model.num_layers // pp)).astype(np.int64)
    vpp = np.where((pp == 1) | (rng.random(size) < 0.5), 1, chunks)
    one = np.ones(size, dtype=np.int64)
    table = PlanTable(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=among(divisors(experts)) if experts else one,
        etp=among(parts[parts <= max(1, cluster.nodes[0].per_node)]) if experts else one,
        vpp=vpp,
        micro_batch=micro_batch,
        num_micro_batches=global_batch // (dp * micro_batch),
        zero=among(np.arange(4)),
        shard=half(0, parts),
        sp=among(np.arange(2)),
        recompute=among(np.arange(len(rules))),
        schedule=np.where(vpp > 1, _INTERLEAVED, among(np.arange(len(TABLED)))),
        offload=half(0, np.arange(4)),
        rules=rules,
    )
    return replace(table, shard=np.where(table.zero > 0, table.shard, 0))
