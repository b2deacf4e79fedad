"""Laws of memory: each names the mistake it would catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard import api
from foreshard.catalog.shipped import shipped
from foreshard.cost.memory import StageLoad, stage_memory
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "comm_buffers", "reserved")
RULES = (
    "none",
    "full",
    "full:uniform:2",
    "full:block:3",
    "every-2",
    "selective:mlp+layernorm+core_attn",
    "selective:moe",
    "selective:op",
)
POWERS = st.integers(0, 3).map(lambda n: 2**n)


@st.composite
def blocks(draw):
    head_dim = draw(st.sampled_from((64, 128)))
    heads = draw(st.integers(1, 8)) * 8
    experts = draw(st.sampled_from((0, 0, 8, 64)))
    return Block(
        hidden=heads * head_dim,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        value_head_dim=head_dim,
        ffn=0 if experts else draw(st.integers(1, 16)) * 1024,
        gated=draw(st.booleans()),
        num_experts=experts,
        top_k=2 if experts else 0,
        expert_ffn=1024 if experts else 0,
        dropout=draw(st.sampled_from((0.0, 0.1))),
    )


@st.composite
def loads(draw):
    block, layers = draw(blocks()), draw(st.integers(2, 16))
    dp = draw(POWERS)
    return StageLoad(
        kinds=((block, layers),),
        has_embedding=draw(st.integers(0, 1)),
        has_head=draw(st.integers(0, 1)),
        hidden=block.hidden,
        vocab=32768,
        in_flight=draw(st.integers(1, 8)),
        num_micro_batches=draw(st.integers(1, 32)),
        micro_batch=draw(st.integers(1, 8)),
        seq_len=1024 * draw(POWERS),
        tp=draw(POWERS),
        cp=draw(POWERS),
        dp=dp,
        shard_size=dp,
        expert_dp=dp,
        zero=draw(st.integers(0, 3)),
        sp=draw(st.integers(0, 1)),
        fp8=draw(st.integers(0, 1)),
        recompute=recompute_of(draw(st.sampled_from(RULES)), layers),
    )


frameworks = st.builds(
    Framework,
    name=st.just("any"),
    memory=st.sampled_from(sorted(shipped("memory_profiles.toml"))),
    grad_bytes=st.sampled_from((2, 4)),
    attention=st.sampled_from(("unfused", "cudnn")),
    cross_entropy=st.sampled_from(("te", "native", "unfused", "eager", "chunked")),
)


@given(loads(), frameworks)
def test_parts_are_positive_and_sum_to_the_peak(load, framework):
    """A part forgotten in the sum, or a negative byte."""
    parts = stage_memory(load, framework)
    values = [float(getattr(parts, name)) for name in PARTS]
    assert all(value >= 0 for value in values)
    assert sum(values) == pytest.approx(float(parts.peak), rel=1e-12)
    assert 0 <= float(parts.outside) <= float(parts.reserved)
    assert float(parts.allocated) <= float(parts.cached) <= float(parts.peak)


@given(loads(), frameworks, st.sampled_from(("micro_batch", "in_flight", "seq_len", "vocab")))
def test_more_work_never_takes_less(load, framework, name):
    """A term with the wrong sign."""
    more = replace(load, **{name: 2 * getattr(load, name)})
    assert float(stage_memory(more, framework).peak) >= float(stage_memory(load, framework).peak)


@given(loads(), frameworks)
def test_more_tensor_ranks_never_take_more(load, framework):
    """A tensor that tensor parallelism multiplies; communicators are apart."""
    wide = replace(load, tp=2 * load.tp)
    one, two = (float(stage_memory(x, framework).allocated) for x in (load, wide))
    assert two <= one * (1 + 1e-12)


@given(loads(), frameworks)
def test_sharding_states_never_takes_more(load, framework):
    """A shard larger than the whole."""
    kept = []
    for zero in range(4):
        parts = stage_memory(replace(load, zero=zero), framework)
        kept.append(float(parts.parameters + parts.optimizer))
    assert kept == sorted(kept, reverse=True)


@given(loads(), frameworks)
def test_recompute_keeps_no_more_activations(load, framework):
    """Recompute that adds to what it should discard."""
    none = stage_memory(replace(load, recompute=Recompute(), zero=0), framework)
    full = stage_memory(replace(load, recompute=Recompute(full=1.0), zero=0), framework)
    assert float(full.activations) <= float(none.activations + none.temporary)


@given(loads(), frameworks, st.integers(1, 4))
def test_splitting_a_kind_changes_nothing(load, framework, first):
    """A count that is not linear, or a largest layer counted twice."""
    ((block, layers),) = load.kinds
    first = min(first, layers - 1)
    halves = replace(load, kinds=((block, first), (block, layers - first)))
    whole, split = (float(stage_memory(x, framework).peak) for x in (load, halves))
    assert split == pytest.approx(whole)


@settings(max_examples=30)
@given(st.lists(st.tuples(POWERS, POWERS, st.integers(0, 3), POWERS), min_size=1), frameworks)
def test_a_batch_prices_each_row_alone(rows, framework):
    """A broadcast that mixes rows."""
    block = Block(
        hidden=1024, num_heads=16, num_kv_heads=16, head_dim=64, value_head_dim=64, ffn=4096, gated=False
    )

    def price(tp, dp, zero, in_flight):
        return stage_memory(
            StageLoad(
                kinds=((block, 4),),
                has_embedding=1,
                has_head=1,
                hidden=1024,
                vocab=32768,
                seq_len=1024,
                tp=tp,
                dp=dp,
                shard_size=dp,
                expert_dp=dp,
                zero=zero,
                in_flight=in_flight,
            ),
            framework,
        ).peak

    together = price(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))
    for row, value in zip(rows, together, strict=True):
        assert value == pytest.approx(float(price(*row)), rel=1e-12)


@given(loads(), frameworks)
def test_one_rank_alone_gathers_nothing(load, framework):
    """A gathered copy of weights that are whole on the rank."""
    alone = replace(load, dp=1, shard_size=1, expert_dp=1)
    peaks = [float(stage_memory(replace(alone, zero=zero), framework).peak) for zero in (2, 3)]
    assert peaks[1] <= peaks[0]


def test_stages_hold_each_parameter_once_and_a_tied_table_twice():
    """Learned positions are the embedding's: stages behind it held them too."""
    asked = api.request(api.load_model("gpt2-medium"), api.load_cluster("1x4xa100-sxm-40gb"), pp=4)
    held = [parts["parameters"] / 2.0 for parts in asked.stage_memory()[0]]
    model = asked.model
    block = model.blocks[0].num_params * model.num_layers / 4
    assert held[1] == held[2] == block
    padded = -(-model.vocab // 128) * 128
    assert held[0] == block + (padded + model.learned_positions) * model.hidden
    assert held[3] == pytest.approx(block + padded * model.hidden, rel=1e-4)  # and the last norm
