"""Agreement of the ranks of a new generation, after a loss or a join: where they continue, and with what.

All ranks read the same statuses and reach the same conclusions, so nothing is negotiated. The run continues
from the latest step that any rank has committed. A rank that was cut off in the vote of that step finishes it
with the sums of any other; the state of a rank further behind is worthless. What nobody holds comes from a
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from foreshard.runtime.engine.loss_scale import LossScale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.state.shard_keys import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a rank as it joins a generation.

    It would train `step` next; `reduced` says that its gradients of that step are summed, and only the vote
    is missing. `vote` is that of the last step, of which only the sums are passed on. `reported` and `last`
    are the last step that it wrote to the run's metrics, and the last that it could write; -1 for none. It
    holds `held` at `step`, of which the end of the step does not overwrite `kept`.
    """

    step: int
    reduced: bool
    vote: Vote | None
    reported: int
    last: int
    held: Shards
    kept: Shards
    memory_bytes: float | None
    loss_scale: LossScale | None

    def to_json(self) -> str:
        """Return it as text."""
        vote = self.vote
        sums = None if vote is None else Vote(loss=vote.loss, count=vote.count, square_norm=vote.square_norm)
        return json.dumps(asdict(replace(self, vote=sums)), default=sorted)


def parse_status(text: str | bytes) -> Status:
    """Return a status from its text."""
    data = json.loads(text)
    held, kept = (frozenset(map(tuple, data.pop(name))) for name in ("held", "kept"))
    vote, scale = data.pop("vote"), data.pop("loss_scale")
    vote, scale = vote and Vote(**vote), scale and LossScale(**scale)
    return Status(held=held, kept=kept, vote=vote, loss_scale=scale, **data)


class Recovery:
    """The conclusions from the statuses of all ranks of a generation."""

    def __init__(self, statuses: Mapping[int, Status]):
        self.statuses = statuses
        self.step = max(status.step for status in statuses.values())
        """The latest step that any rank would train next: the run continues from there."""

    @property
    def memory_bytes(self) -> dict[int, float | None]:
        """Memory of each rank."""
        return {rank: status.memory_bytes for rank, status in self.statuses.items()}

    @property
    def is_first(self) -> bool:
        """Whether no rank holds anything."""
        return not any(status.held for status in self.statuses.values())

    @property
    def vote(self) -> Vote | None:
        """The vote of the last step; None if all ranks at the latest step come from a checkpoint."""
        votes = (s.vote for s in self.statuses.values() if s.step == self.step and s.vote is not None)
        return next(votes, None)

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor on the loss of a rank at the latest step."""
        scales = (s.loss_scale for s in self.statuses.values() if s.step == self.step and s.loss_scale)
        return next(scales, None)

    def held(self) -> dict[int, Shards]:
        """Return what ranks hold at the latest step, including ranks that can finish the step before it."""
        held: dict[int, Shards] = {}
        for rank, status in self.statuses.items():
            behind = self.step - status.step
            if behind == 0:
                held[rank] = status.held
            elif behind == 1 and status.reduced and self.vote is not None:
                held[rank] = status.kept  # of what other ranks update it has the old values
        return held

    def vote_to_finish(self, rank: int) -> Vote | None:
        """Return the vote with which a rank finishes a step that it was cut off in; None if it was not."""
        return self.vote if rank in self.held() and self.statuses[rank].step < self.step else None

    def unreported_step(self) -> tuple[int, int] | None:
        """Return (rank, step) of a last step whose reporter was lost, and who reports it instead."""
        last = max(max(status.reported, status.last) for status in self.statuses.values())
        knows = [rank for rank, status in self.statuses.items() if status.last == last]
        unreported = max(status.reported for status in self.statuses.values()) < last
        return (min(knows), last) if unreported and knows else None
