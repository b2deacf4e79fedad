"""What nobody uses is measured too: a piece of the job on idle ranks, a message on every link of a ring.

Without it a controller that has left a slow rank or link would never learn that it has recovered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foreshard.profile.batches import as_tuple
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import Job

PROBE_EVERY = 2
"""Steps between measurements of what is idle."""
PROBED_LAYERS = 2
"""The first layers of a job, which idle ranks are timed with: their inputs are at hand."""
MESSAGE_BYTES = 2**16
"""Of a probe of a link, which is sent within a step."""
_TAG = 1 << 28
"""Of no message of a step."""


class Probe:
    """Times idle ranks and links."""

    def __init__(self, job: Job, rank: int, clock: Clock, device: torch.device):
        self._job, self._rank, self._clock, self._device = job, rank, clock, device
        self._layers: list[nn.Module] = []

    def sample_s(self, feed: Feed, positions: range) -> float:
        """Return the seconds per sample of a forward and a backward of the first layers.

        On copies: nothing that is trained is touched, and no random number is drawn that others draw.
        """
        if not self._layers:
            count = min(PROBED_LAYERS, self._job.num_layers)
            self._layers = [copy.deepcopy(self._job.layer(i)).to(self._device) for i in range(count)]
        values = as_tuple(self._job.inputs(feed.batch(positions)))
        values = tuple(value.to(self._device) for value in values)
        began_s = self._clock.now()
        with torch.random.fork_rng(devices=[]):
            self._clock.begin()
            for layer in self._layers:
                values = as_tuple(layer(*values))
            sums = [value.float().sum() for value in values if value.requires_grad]
            if sums:
                torch.stack(sums).sum().backward()
            self._clock.end("probe", len(positions), len(self._layers))
        for layer in self._layers:
            layer.zero_grad(set_to_none=True)
        return (self._clock.now() - began_s) / len(positions)

    def links(self, world: Any, ranks: Sequence[int]) -> None:
        """Send a message to the next rank in a ring of all, where the clock times links."""
        if world is None or not self._clock.virtual:
            return
        place, size = list(ranks).index(self._rank), len(ranks)
        sent, received = (torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2))
        self._clock.sent(MESSAGE_BYTES, self._rank, ranks[(place + 1) % size])
        work = world.send([sent], (place + 1) % size, _TAG)
        world.recv([received], (place - 1) % size, _TAG).wait()
        work.wait()
