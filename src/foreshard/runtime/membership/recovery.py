"""Ranks that meet after a loss or a join: what each tells, and what follows for all of them.

All read the same statuses and come to the same answers, so nothing is negotiated. The run goes on from the
latest step that anybody has committed. A rank that was cut off in the vote of that step finishes it with the
sums of any other; one that is further behind holds nothing any more. What nobody holds a checkpoint has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from foreshard.runtime.engine.loss_scale import LossScale, heard_scale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.state.shard_keys import Held, heard
from foreshard.runtime.state.shard_keys import told as told_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a rank tells the others when it meets them.

    Attributes
    ----------
    step : int
        It would train next.
    reduced : bool
        Whether its gradients of that step are summed, and only the vote is missing.
    vote : Vote or None
        Of the last step; only the sums are told.
    told, last : int
        The last step that it told the run's log of, and the last that it could tell of; -1 for none.
    held, kept : frozenset of pieces
        What it has at `step`, and what of that is not overwritten by others of its stage as a step ends.
    room_bytes : float or None
    loss_scale : LossScale or None
    """

    step: int
    reduced: bool
    vote: Vote | None
    told: int
    last: int
    held: Held
    kept: Held
    room_bytes: float | None
    loss_scale: LossScale | None

    def to_json(self) -> str:
        """Return it as text."""
        vote, scale = self.vote, self.loss_scale
        return json.dumps(
            {
                "step": self.step,
                "reduced": self.reduced,
                "told": self.told,
                "last": self.last,
                "vote": None if vote is None else [vote.loss, vote.count, vote.square_norm],
                "held": told_pieces(self.held),
                "kept": told_pieces(self.kept),
                "room_bytes": self.room_bytes,
                "loss_scale": None if scale is None else scale.told(),
            }
        )


def heard_status(text: str | bytes) -> Status:
    """Return a status from its text."""
    data = json.loads(text)
    vote = data["vote"]
    return Status(
        step=data["step"],
        reduced=data["reduced"],
        told=data["told"],
        last=data["last"],
        vote=None if vote is None else Vote(loss=vote[0], count=vote[1], square_norm=vote[2]),
        held=heard(data["held"]),
        kept=heard(data["kept"]),
        room_bytes=data["room_bytes"],
        loss_scale=heard_scale(data["loss_scale"]),
    )


class Recovery:
    """The ranks of a generation by what they tell.

    Parameters
    ----------
    statuses : mapping of rank to Status
    """

    def __init__(self, statuses: Mapping[int, Status]):
        self.statuses = statuses
        self.step = max(status.step for status in statuses.values())
        """The latest that anybody would train next: the run goes on from there."""

    @property
    def rooms(self) -> dict[int, float | None]:
        """Memory of each rank."""
        return {rank: status.room_bytes for rank, status in self.statuses.items()}

    @property
    def is_first(self) -> bool:
        """Whether nobody holds anything."""
        return not any(status.held for status in self.statuses.values())

    @property
    def vote(self) -> Vote | None:
        """The vote of the last step; None where all who are at the latest have it from a checkpoint."""
        votes = (s.vote for s in self.statuses.values() if s.step == self.step and s.vote is not None)
        return next(votes, None)

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor on the loss of who is at the latest step."""
        return next(
            (s.loss_scale for s in self.statuses.values() if s.step == self.step and s.loss_scale), None
        )

    def held(self) -> dict[int, Held]:
        """Return what ranks have at the latest step, those that can finish the one before included."""
        held: dict[int, Held] = {}
        for rank, status in self.statuses.items():
            behind = self.step - status.step
            if behind == 0:
                held[rank] = status.held
            elif behind == 1 and status.reduced and self.vote is not None:
                held[rank] = status.kept  # what others of its stage update it has as it was before
        return held

    def cut_off(self, rank: int) -> Vote | None:
        """Return the vote by which a rank finishes the step that it was cut off in; None if it was not."""
        return self.vote if rank in self.held() and self.statuses[rank].step < self.step else None

    def late_teller(self) -> tuple[int, int] | None:
        """Return who tells of the last step if who conducted it was lost before it could, and the step."""
        last = max(max(status.told, status.last) for status in self.statuses.values())
        knows = [rank for rank, status in self.statuses.items() if status.last == last]
        untold = max(status.told for status in self.statuses.values()) < last
        return (min(knows), last) if untold and knows else None
