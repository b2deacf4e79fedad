"""Ranks that compute layers together, killed: the others go on, from replicas or from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import rehearse, values, worst_error
from small_jobs import gpt
from small_plans import ALONE
from test_tensor import PLANS, parts
from theatre import Theatre

from foreshard.runtime.gradient_check import joined

STEPS = 6
FAULTS = {
    "one of a row beside others": ("tp 2 beside two alone, uneven", {(3, 0): ("backward", 5)}, ()),
    "one of four, and away": ("tp 4", {(2, 0): ("forward", 8)}, (2,)),
    "one of each row": (
        "tp 2 and two parts of the data",
        {(0, 0): ("vote", 3), (3, 0): ("update", 3)},
        (0, 3),
    ),
    "one in a migration": ("tp 2, zero 2", {(1, 0): ("all-reduce", 4), (0, 0): ("migration", 2)}, ()),
    "one in a checkpoint": ("tp 2 in two stages", {(2, 0): ("checkpoint", 1), (1, 0): ("backward", 9)}, ()),
}


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], Any]:
    return rehearse(gpt(torch.float64), ALONE, steps=STEPS, after=values)[0]


LONG = ("one of a row beside others", "one of each row", "one in a migration")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in FAULTS]
)
def test_killed_ranks_change_nothing(name: str, tmp_path: Path, alone: Any) -> None:
    plan, faults, away = FAULTS[name]
    theatre = Theatre(tmp_path, gpt(torch.float64), PLANS[plan], steps=STEPS, faults=faults, stays_away=away)
    found = theatre.play(parts)
    assert theatre.crashes == []
    assert theatre.spent, "no fault was met"
    assert (found.steps, found.lost, found.repeated) == (STEPS, (), ())
    assert [theatre.losses[step] for step in range(STEPS)] == pytest.approx(alone[0], rel=1e-12)
    tensors = {key: t for held, _ in theatre.found.values() for key, t in held.items()}
    made = joined(tensors, next(iter(theatre.found.values()))[1])
    assert set(made) >= {(1, "qkv.weight"), (6, "down.weight")}
    assert worst_error({0: (0, made)}, alone[1]) <= 1e-9
