"""The small all-reduce that ends a step: what every rank must know before any rank updates.

A rank that comes out of the vote knows that all gradients have been summed everywhere. A rank that was cut
off in the middle of it can finish the step with the result of any other rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_LINKS = 4
"""Links that a rank reports in a step: those with most bytes. It bounds the size of the all-reduce."""
_LINK_FIELDS = 4  # target, messages, bytes, seconds
Links = dict[tuple[int, int], tuple[float, float]]
"""(source, target) -> bytes and seconds of the mean message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Sums over all ranks.

    The loss is divided by the count (tokens); `square_norm` is that of the summed gradient, not yet divided.
    `boundary` says that a rank wants the membership to change before the next step, `plan_number` is that of
    the plan to adopt before it, 0 for none. A checkpoint follows the step if it `saves`, training ends with
    it if it `stops`; `written` says that all ranks have written the checkpoint that is under way. `work_s` is
    the own work of each rank, done for its `samples`; links have the mean message of each link that was
    reported.
    """

    loss: float
    count: float
    square_norm: float
    boundary: bool = False
    plan_number: int = 0
    saves: bool = False
    stops: bool = False
    written: bool = False
    work_s: dict[int, float] = field(default_factory=dict)
    samples: dict[int, float] = field(default_factory=dict)
    links: Links = field(default_factory=dict)

    @property
    def sample_s(self) -> dict[int, float]:
        """Seconds per sample of the ranks that had samples."""
        return {rank: self.work_s[rank] / count for rank, count in self.samples.items() if count > 0}

    @property
    def idle_s(self) -> dict[int, float]:
        """Seconds per sample of the probe on ranks that had no samples."""
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
    saves: bool = False,
    stops: bool = False,
    written: bool = False,
    traffic: Mapping[int, tuple[float, float, float]] | None = None,
) -> Vote:
    """Return the sums over all ranks; `group` is None for a single rank.

    Traffic is that of this rank's links: all ranks give it or none does.
    """
    place, size = list(ranks).index(rank), len(ranks)
    width = MAX_LINKS * _LINK_FIELDS if traffic is not None else 0
    said = [loss, count, square_norm, float(boundary), float(plan_number), float(saves), float(stops)]
    said.append(float(written))
    head = len(said)
    ballot = torch.zeros(head + (2 + width) * size, dtype=torch.float64)
    ballot[:head] = torch.tensor(said, dtype=torch.float64)
    ballot[head + place], ballot[head + size + place] = work_s, samples
    if traffic:
        _write_links(ballot[head + 2 * size + width * place :], traffic)
    if group is not None:
        group.allreduce([ballot]).wait()
    values = ballot.tolist()
    return Vote(
        loss=values[0],
        count=values[1],
        square_norm=values[2],
        boundary=values[3] > 0,
        plan_number=round(values[4]),
        saves=values[5] > 0,
        stops=values[6] > 0,
        written=round(values[7]) == size,
        work_s=dict(zip(ranks, values[head : head + size], strict=True)),
        samples=dict(zip(ranks, values[head + size : head + 2 * size], strict=True)),
        links=_read_links(ranks, values[head + 2 * size :], width),
    )


def _write_links(part: torch.Tensor, traffic: Mapping[int, tuple[float, float, float]]) -> None:
    busiest = sorted(traffic.items(), key=lambda link: -link[1][1])[:MAX_LINKS]
    for number, (target, amounts) in enumerate(busiest):
        fields = torch.tensor([target, *amounts], dtype=torch.float64)
        part[number * _LINK_FIELDS : (number + 1) * _LINK_FIELDS] = fields


def _read_links(ranks: Sequence[int], values: Sequence[float], width: int) -> Links:
    links: Links = {}
    for place, rank in enumerate(ranks):
        own = values[width * place : width * (place + 1)]
        for at in range(0, width, _LINK_FIELDS):
            target, messages, size, seconds = own[at : at + _LINK_FIELDS]
            if messages > 0:
                links[rank, round(target)] = (size / messages, seconds / messages)
    return links
