"""Conclusions from statuses: who finishes a step, who has nothing, who reports it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from foreshard.runtime.engine.loss_scale import LossScale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.membership.recovery import Recovery, Status, parse_status

HELD = frozenset({("value", 0, "weight"), ("state", 0, "weight"), ("value", 1, "weight")})
KEPT = frozenset({("value", 0, "weight"), ("state", 0, "weight")})
VOTE = Vote(loss=6.0, count=3.0, square_norm=4.0)
DONE = Status(
    step=8,
    reduced=False,
    vote=VOTE,
    reported=6,
    last=7,
    held=HELD,
    kept=KEPT,
    memory_bytes=1e9,
    loss_scale=LossScale(value=8.0, good_steps=3),
)
CUT_OFF = replace(DONE, step=7, reduced=True, vote=replace(VOTE, loss=9.0), last=6, loss_scale=None)
FRESH = Status(
    step=0,
    reduced=False,
    vote=None,
    reported=-1,
    last=-1,
    held=frozenset(),
    kept=frozenset(),
    memory_bytes=None,
    loss_scale=None,
)


@pytest.mark.parametrize("status", [DONE, CUT_OFF, FRESH])
def test_a_status_survives_json(status: Status) -> None:
    assert parse_status(status.to_json()) == status


def test_who_was_cut_off_in_the_vote_finishes_with_the_sums_of_another() -> None:
    recovery = Recovery({0: CUT_OFF, 1: DONE, 2: FRESH})
    assert recovery.step == 8 and recovery.vote == VOTE and not recovery.is_first
    assert recovery.held() == {0: KEPT, 1: HELD}, "a fresh rank has nothing at that step"
    assert [recovery.vote_to_finish(rank) for rank in range(3)] == [VOTE, None, None]
    assert recovery.loss_scale == LossScale(value=8.0, good_steps=3)
    assert recovery.memory_bytes == {0: 1e9, 1: 1e9, 2: None}


@pytest.mark.parametrize("behind", [replace(CUT_OFF, reduced=False), replace(CUT_OFF, step=6)])
def test_who_cannot_finish_the_step_holds_nothing(behind: Status) -> None:
    recovery = Recovery({0: behind, 1: DONE})
    assert recovery.held() == {1: HELD} and recovery.vote_to_finish(0) is None


def test_no_vote_is_left_where_all_come_from_a_checkpoint() -> None:
    recovery = Recovery({0: replace(CUT_OFF), 1: replace(DONE, vote=None)})
    assert recovery.vote is None and recovery.held() == {1: HELD} and recovery.vote_to_finish(0) is None


def test_the_last_step_is_reported_by_the_lowest_rank_that_knows_it() -> None:
    assert Recovery({0: CUT_OFF, 1: DONE, 2: DONE}).unreported_step() == (1, 7)
    assert Recovery({0: CUT_OFF, 1: DONE, 2: replace(DONE, reported=7)}).unreported_step() is None
    assert Recovery({0: replace(CUT_OFF, reported=7), 1: FRESH}).unreported_step() is None, (
        "no rank knows it better"
    )
    assert Recovery({0: FRESH, 1: FRESH}).unreported_step() is None and Recovery({0: FRESH}).is_first
