"""What follows from what ranks tell each other: who finishes a step, who has nothing, who tells of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from foreshard.runtime.engine.loss_scale import LossScale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.membership.recovery import Recovery, Status, heard_status

HELD = frozenset({("value", 0, "weight"), ("state", 0, "weight"), ("value", 1, "weight")})
KEPT = frozenset({("value", 0, "weight"), ("state", 0, "weight")})
VOTE = Vote(loss=6.0, count=3.0, square_norm=4.0)
DONE = Status(
    step=8,
    reduced=False,
    vote=VOTE,
    told=6,
    last=7,
    held=HELD,
    kept=KEPT,
    room_bytes=1e9,
    loss_scale=LossScale(value=8.0, good_steps=3),
)
CUT_OFF = replace(DONE, step=7, reduced=True, vote=replace(VOTE, loss=9.0), last=6, loss_scale=None)
FRESH = Status(
    step=0,
    reduced=False,
    vote=None,
    told=-1,
    last=-1,
    held=frozenset(),
    kept=frozenset(),
    room_bytes=None,
    loss_scale=None,
)


@pytest.mark.parametrize("status", [DONE, CUT_OFF, FRESH])
def test_a_status_is_heard_as_it_was_told(status: Status) -> None:
    assert heard_status(status.to_json()) == status


def test_who_was_cut_off_in_the_vote_finishes_with_the_sums_of_another() -> None:
    met = Recovery({0: CUT_OFF, 1: DONE, 2: FRESH})
    assert met.step == 8 and met.vote == VOTE and not met.is_first
    assert met.held() == {0: KEPT, 1: HELD}, "a fresh rank has nothing at that step"
    assert [met.cut_off(rank) for rank in range(3)] == [VOTE, None, None]
    assert met.loss_scale == LossScale(value=8.0, good_steps=3)
    assert met.rooms == {0: 1e9, 1: 1e9, 2: None}


@pytest.mark.parametrize("behind", [replace(CUT_OFF, reduced=False), replace(CUT_OFF, step=6)])
def test_who_cannot_finish_the_step_holds_nothing(behind: Status) -> None:
    met = Recovery({0: behind, 1: DONE})
    assert met.held() == {1: HELD} and met.cut_off(0) is None


def test_no_vote_is_left_where_all_come_from_a_checkpoint() -> None:
    met = Recovery({0: replace(CUT_OFF), 1: replace(DONE, vote=None)})
    assert met.vote is None and met.held() == {1: HELD} and met.cut_off(0) is None


def test_the_last_step_is_told_by_the_least_rank_that_knows_it() -> None:
    assert Recovery({0: CUT_OFF, 1: DONE, 2: DONE}).late_teller() == (1, 7)
    assert Recovery({0: CUT_OFF, 1: DONE, 2: replace(DONE, told=7)}).late_teller() is None
    assert Recovery({0: replace(CUT_OFF, told=7), 1: FRESH}).late_teller() is None, "nobody knows it better"
    assert Recovery({0: FRESH, 1: FRESH}).late_teller() is None and Recovery({0: FRESH}).is_first
