"""Ranks killed in every window of a step, a rebuild and a checkpoint, under plans of every kind.

Each run must end by itself, with every sample once, every step told, and the parameters of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import rehearse, values, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS
from theatre import Killed, Theatre

from foreshard.runtime import trainer as trainer_module
from foreshard.runtime.checkpoint import format
from foreshard.runtime.checkpoint.folders import latest
from foreshard.runtime.membership.wire import PeerLost

STEPS = 8
FAULTS = {
    "one in its backward": ("two uneven pipelines", {(1, 0): ("backward", 5)}),
    "two in one step": ("four stages, gpipe", {(1, 0): ("forward", 9), (2, 0): ("all-reduce", 3)}),
    "one while the others rebuild": (
        "uneven data in both stages, zero 2",
        {(2, 0): ("vote", 3), (1, 0): ("rebuild", 2)},
    ),
    "one that is let in again, at the door": (
        "a pipeline and a device",
        {(0, 0): ("backward", 4), (0, 1): ("rebuild", 1), (0, 2): ("migration", 1)},
    ),
    "the one that names the checkpoint": ("interleaved", {(0, 0): ("checkpoint", 2)}),
    "two, one of them in a migration": (
        "sharded pipeline with recompute, zero 3",
        {(0, 0): ("backward", 6), (3, 0): ("migration", 2)},
    ),
    "the one that conducts, behind the vote": (
        "even replicas",
        {(0, 0): ("update", 3), (1, 0): ("update", 5)},
    ),
    "a rank that has nothing to do": ("an idle rank", {(1, 0): ("vote", 3), (3, 0): ("vote", 5)}),
    "one before it has its first layers": ("recompute", {(3, 0): ("migration", 1), (2, 0): ("rebuild", 1)}),
}


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], Any]:
    return rehearse(JOBS["gpt"](torch.float64), ALONE, steps=STEPS, after=values)[0]


def check(theatre: Theatre, alone: tuple[list[float], Any]) -> None:
    found = theatre.play(values)
    assert theatre.crashes == []
    assert (found.steps, found.lost, found.repeated) == (STEPS, (), ())
    assert [theatre.losses[step] for step in range(STEPS)] == pytest.approx(alone[0], rel=1e-12)
    held = {rank: (0, tensors) for rank, tensors in theatre.found.items() if tensors}
    assert held and worst_error(held, alone[1]) <= 1e-9


def run_of(tmp_path: Path, plan: str, faults: Any = (), **more: Any) -> Theatre:
    return Theatre(
        tmp_path, JOBS["gpt"](torch.float64), PLANS[plan], steps=STEPS, faults=dict(faults), **more
    )


@pytest.mark.parametrize("name", FAULTS)
def test_killed_ranks_change_nothing(name: str, tmp_path: Path, alone: Any) -> None:
    plan, faults = FAULTS[name]
    theatre = run_of(tmp_path, plan, faults)
    check(theatre, alone)
    assert theatre.spent, "no fault was met"


def test_who_does_not_come_back_leaves_its_work_to_the_others(tmp_path: Path, alone: Any) -> None:
    faults = {(1, 0): ("backward", 7), (2, 0): ("all-reduce", 5)}
    check(run_of(tmp_path, "two uneven pipelines", faults, stays_away=(1, 2)), alone)


def test_idle_ranks_go_on_when_everybody_of_the_plan_stays_away(tmp_path: Path, alone: Any) -> None:
    """From a checkpoint: nobody left holds anything."""
    check(run_of(tmp_path, "many micro-batches", {(0, 0): ("backward", 14)}, stays_away=(0,)), alone)


@pytest.mark.parametrize(
    "plan", ["two uneven pipelines", "uneven data in both stages, zero 1", "four ranks in a stage, zero 1"]
)
@pytest.mark.parametrize("cut_off", [0, 3])
def test_a_rank_cut_off_behind_the_vote_takes_from_its_peers_what_they_updated(
    plan: str, cut_off: int, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own copy of what the others of its stage update is of the step before."""
    cast, seen = trainer_module.cast, []

    def cut(group: Any, ranks: Any, rank: int, **told: Any) -> Any:
        vote = cast(group, ranks, rank, **told)
        if rank == cut_off:
            seen.append(rank)
            if len(seen) == 4:
                raise PeerLost("connection closed by peer")
        return vote

    monkeypatch.setattr(trainer_module, "cast", cut)
    check(run_of(tmp_path, plan), alone)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_the_rename_of_a_checkpoint(
    when: str, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all die: they begin again from a whole checkpoint, or from the one before."""
    name_it, lives = format._name_folder, []

    def naming(*given: Any) -> None:
        lives.append(1)
        if len(lives) == 2 and when == "before":
            raise Killed
        name_it(*given)
        if len(lives) == 2 and when == "after":
            raise Killed

    monkeypatch.setattr(format, "_name_folder", naming)
    faults = {(rank, 0): ("forward", 24) for rank in range(1, 4)}
    check(run_of(tmp_path, "uneven replicas", faults), alone)


@pytest.mark.slow
def test_the_last_checkpoint_is_made_though_a_rank_dies_in_it(tmp_path: Path, alone: Any) -> None:
    check(run_of(tmp_path, "two uneven pipelines", {(3, 0): ("checkpoint", 2)}, every=4), alone)
    assert latest(tmp_path / "ckpt") == STEPS
