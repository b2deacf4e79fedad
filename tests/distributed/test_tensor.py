"""Ranks that compute a layer together train what one process trains: gradients, losses, changes, checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_jobs import gpt
from small_plans import ALONE
from rehearsal import plan_of, rehearse, worst_error

from foreshard.runtime.equality import joined
from foreshard.spec.plan import Plan

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
GRADIENT_ERROR = {"fp32": 1e-6, "fp64": 1e-12}


def plan(*groups: dict, **defaults: Any) -> Plan:
    return plan_of(groups, global_batch=12, **defaults)


def one(ranks: list[int], tp: int, share: int = 12, micro_batch: int = 5, **more: Any) -> dict:
    """A pipeline of one stage."""
    return {"share": share, "micro_batch": micro_batch, "stages": [(ranks, [[0, 8]], {"tp": tp, **more})]}


PLANS = {
    "tp 2": plan(one([0, 1], 2)),
    "tp 4": plan(one([0, 1, 2, 3], 4)),
    "tp 2 beside tp 2, uneven": plan(one([0, 1], 2, 9, 4), one([2, 3], 2, 3, 2)),
    "tp 2 beside two alone, uneven": plan(one([1, 3], 2, 7, 3), one([0], 1, 4, 2), one([2], 1, 1, 1)),
    "tp 2 and two parts of the data": plan(one([0, 1, 2, 3], 2, rank_shares=[4, 1]), zero=0),
    "tp 2, zero 1": plan(one([0, 1, 2, 3], 2, rank_shares=[3, 2]), zero=1),
    "tp 2, zero 2": plan(one([0, 1, 2, 3], 2), zero=2),
    "tp 2, zero 3": plan(one([3, 1, 2, 0], 2), zero=3),
    "tp 2 in two stages": plan(
        {"share": 12, "micro_batch": 5, "stages": [([0, 1], [[0, 3]], {"tp": 2}), ([2, 3], [[3, 8]], {"tp": 2})]}
    ),
    "tp 2 before one, zb-h1": plan(
        {"share": 12, "micro_batch": 2, "schedule": "zb-h1",
         "stages": [([0, 1], [[0, 3]], {"tp": 2}), ([2], [[3, 8]])]}
    ),
    "one before tp 2, gpipe, recompute": plan(
        {"share": 12, "micro_batch": 5, "schedule": "gpipe",
         "stages": [([3], [[0, 3]]), ([0, 2], [[3, 8]], {"tp": 2})]}, recompute="full"
    ),
    "interleaved": plan(
        {"share": 12, "micro_batch": 2, "schedule": "interleaved",
         "stages": [([0, 1], [[0, 1], [3, 5]], {"tp": 2}), ([2, 3], [[1, 3], [5, 8]], {"tp": 2})]}
    ),
}  # fmt: skip


def slices(trainer: Any) -> tuple[dict, dict]:
    """What a rank holds of gradients, and where it was cut."""
    found = {key: part.clone() for bucket in trainer.holding.buckets for key, part in bucket.named()}
    return found, trainer.parameters.cuts


def parts(trainer: Any) -> tuple[dict, dict]:
    """What a rank holds of parameters."""
    pieces = [piece for piece in trainer._held if piece[0] == "value"]
    found = {item[1:]: t.clone() for piece in pieces for item, t in trainer.holding.items_of(piece)}
    return found, trainer.parameters.cuts


def whole(found: dict[int, Any]) -> dict[int, Any]:
    """Parts of all ranks put together."""
    merged = {key: tensor for _, (tensors, _) in found.values() for key, tensor in tensors.items()}
    return {0: (None, joined(merged, found[0][1][1]))}


@functools.cache
def reference(dtype: str, inner: float = 0.0) -> dict:
    found = rehearse(gpt(DTYPES[dtype], inner=inner), ALONE, steps=1, after=slices)
    return whole(found)[0][1]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_one_process(dtype: str, name: str) -> None:
    found = whole(rehearse(gpt(DTYPES[dtype]), PLANS[name], steps=1, after=slices, ranks=range(4)))
    assert set(found[0][1]) == set(reference(dtype))
    assert worst_error(found, reference(dtype)) <= GRADIENT_ERROR[dtype]
