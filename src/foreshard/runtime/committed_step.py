"""A committed step, and how far a rank has come."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foreshard.runtime.engine.loss_scale import LossScale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.membership.recovery import Status
from foreshard.runtime.state.rank_state import RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A committed step.

    Attributes
    ----------
    step : int
    loss : float
        Mean over what the job counts (tokens), of the whole step.
    count : float
    gradient_norm : float or None
        Of the mean gradient, where it was asked for.
    time_s : float or None
        On the run's clock, of the slowest rank where time is virtual; None for a step that a change of
        generation interrupted.
    vote : Vote
    """

    step: int
    loss: float
    count: float
    gradient_norm: float | None
    time_s: float | None
    vote: Vote


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """How far a rank has come.

    It trains `step` next; `reduced` says that its gradients of that step are summed, in the generation
    `trained_in`, and only the vote is missing. `last` is the last step, `reported` the last one that this
    rank wrote to the run's metrics; -1 for none.
    """

    step: int = 0
    reduced: bool = False
    trained_in: int = 0
    last: StepDone | None = None
    reported: int = -1

    def committed(self, vote: Vote, norm: float | None) -> None:
        """Count the step as done."""
        self.last = StepDone(
            step=self.step,
            loss=vote.loss / vote.count if vote.count else math.nan,
            count=vote.count,
            gradient_norm=norm,
            time_s=None,
            vote=vote,
        )
        self.step, self.reduced = self.step + 1, False

    def done(self, time_s: float | None) -> StepDone:
        """Return the last step with its time."""
        assert self.last is not None
        return replace(self.last, time_s=time_s)

    def status(self, state: RankState, memory_bytes: float | None, scale: LossScale | None) -> Status:
        """Return the status with which the rank joins a generation."""
        return Status(
            step=self.step,
            reduced=self.reduced,
            vote=None if self.last is None else self.last.vote,
            reported=self.reported,
            last=-1 if self.last is None else self.last.step,
            held=state.held,
            kept=state.kept,
            memory_bytes=memory_bytes,
            loss_scale=scale,
        )
