"""Ranks that compute a layer together train what one process trains, through changes and checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import plan_of, rehearse, values, worst_error
from small_jobs import gpt
from small_plans import ALONE

from foreshard.errors import SpecError
from foreshard.lab.lab import Lab
from foreshard.runtime.checkpoint.format import load
from foreshard.runtime.gradient_check import joined
from foreshard.runtime.state.layout import layout_of
from foreshard.runtime.state.parameters import parameters_of
from foreshard.runtime.tensor.checks import check_split
from foreshard.runtime.trainer import Options
from foreshard.spec.plan import Plan

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
GRADIENT_ERROR = {"fp32": 1e-6, "fp64": 1e-12}


def plan(*groups: dict, **defaults: Any) -> Plan:
    return plan_of(groups, global_batch=12, **defaults)


def one(ranks: list[int], tp: int, share: int = 12, micro_batch: int = 6, **more: Any) -> dict:
    """A pipeline of one stage."""
    return {"share": share, "micro_batch": micro_batch, "stages": [(ranks, [[0, 8]], {"tp": tp, **more})]}


PLANS = {
    "tp 2": plan(one([0, 1], 2)),
    "tp 4": plan(one([0, 1, 2, 3], 4)),
    "tp 2 beside tp 2, uneven": plan(one([0, 1], 2, 9, 4), one([2, 3], 2, 3, 2)),
    "tp 2 beside two alone, uneven": plan(one([1, 3], 2, 7, 3), one([0], 1, 4, 2), one([2], 1, 1, 1)),
    "tp 2 and two parts of the data": plan(one([0, 1, 2, 3], 2, rank_shares=[4, 2]), zero=0),
    "tp 2, zero 1": plan(one([0, 1, 2, 3], 2, rank_shares=[4, 2]), zero=1),
    "tp 2, zero 2": plan(one([0, 1, 2, 3], 2), zero=2),
    "tp 2, zero 3": plan(one([3, 1, 2, 0], 2), zero=3),
    "tp 2 in two stages": plan(
        {
            "share": 12,
            "micro_batch": 5,
            "stages": [([0, 1], [[0, 3]], {"tp": 2}), ([2, 3], [[3, 8]], {"tp": 2})],
        }
    ),
    "tp 2 before one, zb-h1": plan(
        {
            "share": 12,
            "micro_batch": 2,
            "schedule": "zb-h1",
            "stages": [([0, 1], [[0, 3]], {"tp": 2}), ([2], [[3, 8]])],
        }
    ),
    "one before tp 2, gpipe, recompute": plan(
        {
            "share": 12,
            "micro_batch": 5,
            "schedule": "gpipe",
            "stages": [([3], [[0, 3]]), ([0, 2], [[3, 8]], {"tp": 2})],
        },
        recompute="full",
    ),
    "interleaved": plan(
        {
            "share": 12,
            "micro_batch": 2,
            "schedule": "interleaved",
            "stages": [([0, 1], [[0, 1], [3, 5]], {"tp": 2}), ([2, 3], [[1, 3], [5, 8]], {"tp": 2})],
        }
    ),
}


SINGLE = ("tp 4", "tp 2 beside two alone, uneven", "tp 2 in two stages")


def slices(trainer: Any) -> tuple[dict, dict]:
    """What a rank holds of gradients, and where it was cut."""
    found = {key: part.clone() for bucket in trainer.state.buckets for key, part in bucket.named()}
    return found, trainer.parameters.cuts


def parts(trainer: Any) -> tuple[dict, dict]:
    """What a rank holds of parameters."""
    shards = [shard for shard in trainer.state.held if shard[0] == "value"]
    found = {key[1:]: t.clone() for shard in shards for key, t in trainer.state.tensors_of(shard)}
    return found, trainer.parameters.cuts


def whole(found: dict[int, Any]) -> dict[int, Any]:
    """Parts of all ranks put together."""
    merged = {key: tensor for _, (tensors, _) in found.values() for key, tensor in tensors.items()}
    return {0: (None, joined(merged, found[0][1][1]))}


@functools.cache
def reference(dtype: str, inner: float = 0.0) -> dict:
    found = rehearse(gpt(DTYPES[dtype], inner=inner), ALONE, steps=1, after=slices)
    return whole(found)[0][1]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("fp64", name) for name in PLANS),
        *(pytest.param("fp32", name, marks=pytest.mark.slow) for name in PLANS if name in SINGLE),
    ],
)
def test_gradients_are_those_of_one_process(dtype: str, name: str) -> None:
    found = whole(rehearse(gpt(DTYPES[dtype]), PLANS[name], steps=1, after=slices, ranks=range(4)))
    assert set(found[0][1]) == set(reference(dtype))
    assert worst_error(found, reference(dtype)) <= GRADIENT_ERROR[dtype]


@pytest.mark.parametrize("name", ["tp 4", "tp 2 beside two alone, uneven"])
def test_parts_draw_what_the_whole_would(name: str) -> None:
    """Dropout of attention and of channels, which a rank has a part of."""
    found = whole(rehearse(gpt(torch.float64, inner=0.3), PLANS[name], steps=1, after=slices, ranks=range(4)))
    assert worst_error(found, reference("fp64", 0.3)) <= 1e-12
    assert worst_error(found, reference("fp64")) > 1e-3, "it draws, or the test says nothing"


WORDS = {
    "tp 4": {(0, "words.weight"), (7, "scores.weight")},
    "tp 2 beside two alone, uneven": {(0, "words.weight"), (7, "scores.weight")},
    "one before tp 2, gpipe, recompute": {(7, "scores.weight")},
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_shared_out_where_nothing_ties_them(name: str) -> None:
    alone = rehearse(gpt(torch.float64, tied=False), ALONE, steps=1, after=slices)[0][1][0]
    found = rehearse(gpt(torch.float64, tied=False), PLANS[name], steps=1, after=slices, ranks=range(4))
    parted = {
        (layer, key.partition("@")[0]) for _, (held, _) in found.values() for layer, key in held if "@" in key
    }
    assert {key for key in parted if key[0] in (0, 7)} == WORDS[name]
    assert worst_error(whole(found), alone) <= 1e-12


CHANGES = {
    "tp 2 to 1 and back": ["tp 2", "alone", "tp 2"],
    "in groups, stages, shards": [
        "tp 2 beside two alone, uneven",
        "tp 2 in two stages",
        "tp 2, zero 3",
        "one before tp 2, gpipe, recompute",
        "tp 2, zero 1",
    ],
    "between degrees": ["tp 4", "tp 2 beside tp 2, uneven", "interleaved"],
}
LONG = ("between degrees",)


@functools.cache
def alone(steps: int, clip: float | None = None) -> tuple[list[float], dict]:
    return rehearse(gpt(torch.float64), ALONE, steps=steps, after=values, options=Options(clip_norm=clip))[0]


def test_words_follow_changes_of_degree() -> None:
    job = functools.partial(gpt, torch.float64, tied=False)
    losses, last = rehearse(job(), ALONE, steps=6, after=values)[0]
    changes = {1: PLANS["tp 2 beside two alone, uneven"], 3: PLANS["tp 4"]}
    found = rehearse(job(), PLANS["tp 2"], steps=6, changes=changes, after=parts, ranks=range(4))
    assert found[0][0] == pytest.approx(losses, rel=1e-12)
    assert worst_error(whole(found), last) <= 1e-9


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CHANGES]
)
def test_live_changes_keep_losses_and_parameters(change: str) -> None:
    plans = {**PLANS, "alone": ALONE}
    names = CHANGES[change]
    changes = {1 + 2 * number: plans[name] for number, name in enumerate(names[1:])}
    found = rehearse(
        gpt(torch.float64), plans[names[0]], steps=9, changes=changes, after=parts, ranks=range(4)
    )
    losses, last = alone(9)
    assert max(abs(a - b) / b for a, b in zip(found[0][0], losses, strict=True)) <= 1e-9
    assert worst_error(whole(found), last) <= 1e-9


def test_a_virtual_clock_waits_for_the_slower_and_for_sums() -> None:
    """One of two ranks is four times as slow: the step is its work, and what both sum."""
    lab = Lab(
        clock="table",
        slow=(1.0, 4.0),
        devices=("a", "b"),
        bandwidth_bytes_per_s=2e7,
        latency_s=3e-4,
        table_s={"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4},
    )
    speeds, steps = iter(lab.slow), []

    def clock() -> Any:
        made = lab.make_clock([0])
        made.slow = next(speeds)
        return made

    rehearse(
        gpt(torch.float64),
        plan(one([0, 1], 2, micro_batch=12)),
        steps=1,
        clock=clock,
        on_step=lambda: steps.append,
    )
    size = 12 * 8 * 16 * 8  # of what crosses: samples, words, channels, bytes
    whole = sum(
        t.numel() * 8
        for (layer, name), t in reference("fp64").items()
        if layer in (0, 7) or "norm" in name or name in ("out.bias", "down.bias")
    )
    ring_s = lab.make_clock([0]).all_reduce_s
    sums_s = 24 * ring_s(size, (0, 1)) + ring_s(whole, (0, 1)) + ring_s(0, (0, 1))  # two a block and pass
    assert steps[0].time_s == pytest.approx(4 * (12 * 8 * 3e-3 + 8 * 5e-4) + sums_s, rel=1e-9)


def test_the_norm_counts_every_slice_once() -> None:
    options = Options(clip_norm=0.3)
    found = rehearse(gpt(torch.float64), PLANS["tp 2 beside two alone, uneven"], steps=5, options=options)
    losses, _ = alone(5, 0.3)
    assert found[0][0] == pytest.approx(losses, rel=1e-12)
    assert abs(alone(5)[0][-1] - losses[-1]) > 1e-6, "the limit must bind, or the test says nothing"


@pytest.mark.parametrize(("before", "after"), [("tp 2, zero 1", "tp 4"), ("alone", "tp 2")])
def test_a_checkpoint_is_gone_on_from_at_another_degree(before: str, after: str, tmp_path: Path) -> None:
    plans = {**PLANS, "alone": ALONE}
    more = {"options": Options(checkpoint_every=3), "checkpoints": tmp_path, "ranks": range(4)}
    rehearse(gpt(torch.float64), plans[before], steps=3, **more)
    second = rehearse(gpt(torch.float64), plans[after], steps=2, after=parts, resume=True, **more)
    losses, last = alone(5)
    assert second[0][0] == pytest.approx(losses[3:], rel=1e-12)
    assert worst_error(whole(second), last) <= 1e-9
    saved = load(tmp_path, 3)
    for (layer, name), gradient in reference("fp64").items():
        assert saved[f"layers.{layer}.{name}"].shape == gradient.shape


def test_sequences_of_a_jobs_own_layers_are_not_cut() -> None:
    told = plan_of([{**one([0, 1], 2), "sp": True}], global_batch=12)
    with pytest.raises(SpecError, match=r"groups\[0\].sp: layer 0 takes whole sequences only"):
        check_split(layout_of(told), parameters_of(gpt(torch.float64)))
