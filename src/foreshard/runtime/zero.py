"""Which rank of a stage updates which parameter, and how the others get the new values (ZeRO).

Parameters are dealt out whole, largest first, to the rank that is least loaded for its room: any optimizer works
on whole parameters, and rooms may be uneven. Gradients are summed over all holders first; from level 2 on a rank
need not keep those it does not use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foreshard.runtime.job import Job
from foreshard.runtime.layout import Layout

Key = tuple[int, str]


def updater_of(
    ranks: Sequence[int], sizes: Mapping[Key, int], room: Mapping[int, float] | None = None
) -> dict[Key, int]:
    """Return the rank that updates each parameter.

    Parameters
    ----------
    ranks : sequence of int
        Of a stage.
    sizes : mapping of (layer, name) to elements
    room : mapping of rank to bytes, optional
        In proportion to which states are dealt; equal where not given.

    Examples
    --------
    >>> updater_of([3, 4], {(0, "a"): 4, (0, "b"): 3, (1, "c"): 2})
    {(0, 'a'): 3, (0, 'b'): 4, (1, 'c'): 4}
    """
    load = dict.fromkeys(ranks, 0.0)
    found: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        rank = min(ranks, key=lambda r: ((load[r] + sizes[key]) / (room[r] if room else 1.0), r))
        load[rank] += sizes[key]
        found[key] = rank
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The trainable parameters of a model; tied ones are one, under the first of their names.

    Attributes
    ----------
    sizes : dict of (layer, name) to elements
    users : dict of (layer, name) to layers
    """

    sizes: dict[Key, int]
    users: dict[Key, tuple[int, ...]]

    def of(self, layers: Iterable[int]) -> dict[Key, int]:
        """Return the sizes of the parameters that layers use."""
        held = set(layers)
        return {key: size for key, size in self.sizes.items() if held.intersection(self.users[key])}


def parameters_of(job: Job) -> Parameters:
    """Return the trainable parameters of a job's model, from modules without storage."""
    first = {name: min(group) for group in map(tuple, job.tied) for name in group}
    sizes: dict[Key, int] = {}
    users: dict[Key, list[int]] = {}
    for layer in range(job.num_layers):
        with torch.device("meta"):
            module = job.layer(layer)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                key = first.get((layer, name), (layer, name))
                sizes[key] = parameter.numel()
                users.setdefault(key, []).append(layer)
    return Parameters(sizes=sizes, users={key: tuple(layers) for key, layers in users.items()})


def updated_keys(
    layout: Layout, rank: int, parameters: Parameters, room: Mapping[int, float] | None = None
) -> frozenset[Key]:
    """Return the parameters that a rank updates under a layout, of the layers it holds."""
    own = parameters.of(layout.layers_of(rank))
    if not own:
        return frozenset()
    stage = layout.stage_of(rank)
    if stage.zero == 0 or stage.inner_dp == 1:
        return frozenset(own)
    return frozenset(key for key, r in updater_of(stage.ranks, own, room).items() if r == rank)


class Spread:
    """Sends updated parameters from their updaters to the other ranks of the stage.

    Parameters
    ----------
    group : ProcessGroup
        Of the ranks of the stage, in order.
    ranks : sequence of int
    updaters : mapping of (layer, name) to rank
    parameters : mapping of (layer, name) to Parameter
    """

    def __init__(
        self, group: Any, ranks: Sequence[int], updaters: Mapping[Key, int], parameters: Mapping[Key, nn.Parameter]
    ):
        self._group, self._ranks = group, list(ranks)
        self._dealt: list[tuple[int, list[nn.Parameter]]] = []
        for place, rank in enumerate(ranks):
            for dtype in sorted({p.dtype for p in parameters.values()}, key=str):
                chosen = [parameters[k] for k in sorted(parameters)
                          if updaters[k] == rank and parameters[k].dtype == dtype]  # fmt: skip
                if chosen:
                    self._dealt.append((place, chosen))

    def run(self, rank: int) -> int:
        """Bring every parameter of the stage up to date; return the bytes that passed."""
        total = 0
        for place, parameters in self._dealt:
            flat = torch.cat([p.data.reshape(-1) for p in parameters])
            options = dist.BroadcastOptions()
            options.rootRank = place
            self._group.broadcast([flat], options).wait()
            total += flat.numel() * flat.element_size()
            if self._ranks[place] != rank:
                _fill(parameters, flat)
        return total


def _fill(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        parameter.data.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size
