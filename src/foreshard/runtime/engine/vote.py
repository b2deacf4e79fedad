"""The small all-reduce that ends a step: what everybody must know before anybody updates.

Who comes out of it knows that all gradients have been summed everywhere; a rank that was cut off in the
middle of it can finish the step with the result of any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_LINKS = 4
"""Links a rank tells of in a step: those that carried most."""
_LINK = 4
Links = dict[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Sums over all ranks.

    Attributes
    ----------
    loss, count : float
        Sum of losses and what it is divided by (tokens).
    square_norm : float
        Of the summed gradient, not yet divided.
    boundary : bool
        Whether a rank wants the membership to change before the next step.
    plan_number : int
        Of the plan to adopt before the next step; 0 for none.
    work_s, samples : dict of rank
        Own work in the step and samples it was done for.
    links : dict of (source, target) to (bytes, seconds)
        The mean message of each link that was told of.
    """

    loss: float
    count: float
    square_norm: float
    boundary: bool = False
    plan_number: int = 0
    work_s: dict[int, float] = field(default_factory=dict)
    samples: dict[int, float] = field(default_factory=dict)
    links: Links = field(default_factory=dict)

    @property
    def sample_s(self) -> dict[int, float]:
        """Return the seconds per sample of the ranks that had samples."""
        return {rank: self.work_s[rank] / count for rank, count in self.samples.items() if count > 0}

    @property
    def idle_s(self) -> dict[int, float]:
        """Return the seconds per sample of what ranks without samples were timed with."""
        idle = [rank for rank, count in self.samples.items() if not count]
        return {rank: self.work_s[rank] for rank in idle if self.work_s[rank] > 0}


def cast(
    group: Any,
    ranks: Sequence[int],
    rank: int,
    *,
    loss: float,
    count: float,
    square_norm: float,
    boundary: bool,
    plan_number: int,
    work_s: float,
    samples: float,
    carried: Mapping[int, tuple[float, float, float]] | None = None,
) -> Vote:
    """Return the sums over all ranks; `group` is None for a rank alone.

    Parameters
    ----------
    carried : mapping of target to (messages, bytes, seconds), optional
        What this rank's links have carried; all ranks give it or none does.

    Raises
    ------
    RuntimeError
        From torch.distributed, when a peer is gone.
    """
    place, size = list(ranks).index(rank), len(ranks)
    told = MOST_LINKS * _LINK if carried is not None else 0
    ballot = torch.zeros(5 + (2 + told) * size, dtype=torch.float64)
    ballot[:5] = torch.tensor(
        [loss, count, square_norm, float(boundary), float(plan_number)], dtype=torch.float64
    )
    ballot[5 + place], ballot[5 + size + place] = work_s, samples
    if carried:
        _tell(ballot[5 + 2 * size + told * place :], carried)
    if group is not None:
        group.allreduce([ballot]).wait()
    values = ballot.tolist()
    return Vote(
        loss=values[0],
        count=values[1],
        square_norm=values[2],
        boundary=values[3] > 0,
        plan_number=round(values[4]),
        work_s=dict(zip(ranks, values[5 : 5 + size], strict=True)),
        samples=dict(zip(ranks, values[5 + size : 5 + 2 * size], strict=True)),
        links=_heard(ranks, values[5 + 2 * size :], told),
    )


def _tell(part: torch.Tensor, carried: Mapping[int, tuple[float, float, float]]) -> None:
    """Write the links that carried most: target, messages, bytes, seconds."""
    most = sorted(carried.items(), key=lambda one: -one[1][1])[:MOST_LINKS]
    for number, (target, amounts) in enumerate(most):
        part[number * _LINK : (number + 1) * _LINK] = torch.tensor([target, *amounts], dtype=torch.float64)


def _heard(ranks: Sequence[int], values: Sequence[float], told: int) -> Links:
    links: Links = {}
    for place, rank in enumerate(ranks):
        mine = values[told * place : told * (place + 1)]
        for at in range(0, told, _LINK):
            target, messages, size, seconds = mine[at : at + _LINK]
            if messages > 0:
                links[rank, round(target)] = (size / messages, seconds / messages)
    return links
