"""Whatever the plan, training is the training of one process: gradients, losses, parameters, through changes.

Errors are norms of a tensor's difference over the norm of the reference's tensor; the worst tensor counts.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import gradients, rehearse, values, worst_error
from small_jobs import JOBS, gpt
from small_plans import ALONE, PLANS

from foreshard.runtime.state import buckets
from foreshard.runtime.trainer import Options

RANKS = range(4)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
GRADIENT_ERROR = {"fp32": 1e-6, "fp64": 1e-14}


@functools.cache
def reference(job: str, dtype: str, steps: int, clip: float | None = None) -> tuple[list[float], dict, dict]:
    """One process, one micro-batch: losses, gradients of the first step, parameters after the last."""
    options = Options(clip_norm=clip)
    first = rehearse(JOBS[job](DTYPES[dtype]), ALONE, steps=1, after=gradients, options=options)[0][1]
    losses, last = rehearse(JOBS[job](DTYPES[dtype]), ALONE, steps=steps, after=values, options=options)[0]
    return losses, first, last


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("job", JOBS)
def test_gradients_are_those_of_one_process(job: str, dtype: str, plan: str) -> None:
    """34 plans and dtypes of each model."""
    found = rehearse(JOBS[job](DTYPES[dtype]), PLANS[plan], steps=1, after=gradients, ranks=RANKS)
    _, expected, _ = reference(job, dtype, 4)
    assert {key for _, held in found.values() for key in held} == set(expected)
    assert worst_error(found, expected) <= GRADIENT_ERROR[dtype]


@pytest.mark.parametrize(
    "plan", ["uneven replicas", "interleaved", "two uneven pipelines", "three stages, zb-h1", "recompute"]
)
@pytest.mark.parametrize("job", JOBS)
def test_gradients_are_exact_where_each_is_a_bucket(
    job: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sum starts inside the last backward, as those of large models do."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    found = rehearse(JOBS[job](torch.float64), PLANS[plan], steps=1, after=gradients, ranks=RANKS)
    assert worst_error(found, reference(job, "fp64", 4)[1]) <= GRADIENT_ERROR["fp64"]


def through(names: list[str], every: int) -> dict:
    return {1 + every * i: PLANS[name] for i, name in enumerate(names)}


CHANGES = {
    "shares": ["even replicas", "uneven replicas", "even replicas", "uneven replicas", "even replicas"],
    "cuts": ["four stages", "four stages, gpipe", "four stages", "three stages, zb-h1", "four stages"],
    "groups": [
        "two uneven pipelines",
        "a pipeline and a device",
        "uneven replicas",
        "four stages",
        "interleaved",
    ],
    "sharding": [
        "four ranks in a stage, zero 1",
        "uneven data in both stages, zero 2",
        "even replicas",
        "three ranks sharded whole beside one, zero 3",
        "sharded pipeline with recompute, zero 3",
        "four ranks in a stage, zero 1",
    ],
    "ranks leave and come": [
        "an idle rank",
        "two uneven pipelines",
        "an idle rank",
        "many micro-batches",
        "recompute",
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("job", ["gpt", pytest.param("cnn", marks=pytest.mark.slow)])
def test_fifty_steps_with_five_live_changes_in_double_precision(job: str, change: str) -> None:
    losses, _, last = reference(job, "fp64", 52)
    names = CHANGES[change]
    found = rehearse(
        JOBS[job](torch.float64),
        PLANS[names[-1]],
        steps=52,
        changes=through(names, 8),
        after=values,
        ranks=RANKS,
    )
    assert max(abs(a - b) / b for a, b in zip(found[0][0], losses, strict=True)) <= 1e-9
    assert worst_error(found, last) <= 1e-9


@pytest.mark.parametrize("job", ["gpt", pytest.param("cnn", marks=pytest.mark.slow)])
def test_losses_in_single_precision_stay_within_1e_4(job: str) -> None:
    losses, _, _ = reference(job, "fp32", 52)
    found = rehearse(
        JOBS[job](), PLANS["four stages"], steps=52, changes=through(CHANGES["groups"], 9), ranks=RANKS
    )
    assert max(abs(a - b) / b for a, b in zip(found[0][0], losses, strict=True)) <= 1e-4


def test_clipping_is_by_the_norm_of_the_whole_gradient() -> None:
    losses, _, last = reference("gpt", "fp64", 6, 0.3)
    found = rehearse(
        gpt(torch.float64),
        PLANS["two uneven pipelines"],
        steps=6,
        after=values,
        options=Options(clip_norm=0.3),
    )
    free, _, _ = reference("gpt", "fp64", 6)
    assert found[0][0] == pytest.approx(losses, rel=1e-12)
    assert worst_error(found, last) <= 1e-11
    assert abs(free[-1] - losses[-1]) > 1e-6, "the limit must bind, or the test says nothing"


def test_frozen_layers_get_no_gradient_and_stay() -> None:
    alone = rehearse(gpt(torch.float64, frozen=True), ALONE, steps=3, after=values)
    found = rehearse(gpt(torch.float64, frozen=True), PLANS["four stages"], steps=3, after=values)
    assert worst_error(found, alone[0][1]) <= 1e-9
    start = gpt(torch.float64, frozen=True)
    for layer in (1, 2, 3):
        for name, parameter in start.layer(layer).named_parameters():
            assert torch.equal(alone[0][1][layer, name], parameter)


def test_the_changes_move_something() -> None:
    """Neighbouring plans of a chain differ in who holds what, or the chain proves less than it says."""
    for names in CHANGES.values():
        assert all(PLANS[a] != PLANS[b] for a, b in pairwise(names))


def test_shards_by_memory_train_the_same() -> None:
    """Ranks of one, two, four and eight parts of memory hold the optimizer's states in that proportion."""
    losses, _, _ = reference("gpt", "fp64", 4)
    memory_bytes = iter([1e9, 2e9, 4e9, 8e9])
    plan = PLANS["four ranks in a stage, zero 1"]

    def states(trainer: Any) -> tuple[int, float]:
        return sum(p.numel() for p in trainer.state.updated.values()), trainer.context.memory_bytes

    found = rehearse(gpt(torch.float64), plan, steps=4, after=states, memory_bytes=lambda: next(memory_bytes))
    assert found[0][0] == pytest.approx(losses, rel=1e-12)
    shares = sorted((memory_bytes, held) for _, (held, memory_bytes) in found.values())
    total = sum(held for _, held in shares)
    assert [held / total for _, held in shares] == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15], abs=0.02)
