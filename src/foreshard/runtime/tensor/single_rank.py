"""Runs one rank's part of tensor-parallel layers without the other ranks, to time it.

Parts, products and the overhead of DTensors are those of a run. Collectives go to a fake group that returns
at once, and their bytes are recorded: links are priced separately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreshard.runtime.engine.executor import through
from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.state.parameters import parameters_of
from foreshard.runtime.tensor.checks import check_degree
from foreshard.runtime.tensor.draws import TensorDraws
from foreshard.runtime.tensor.ranks import TensorRanks
from foreshard.runtime.tensor.split import cut_module


class TensorPart:
    """The layers of a job as the first of `degree` ranks holds them, if they can be cut so."""

    def __init__(self, job: Job, degree: int, device: torch.device | str):
        from torch._C._distributed_c10d import FakeProcessGroup

        device = torch.device(device)
        parameters = parameters_of(job)
        check_degree(parameters.splits, degree, "--tp")
        self._ranks = TensorRanks()
        self._ranks.connect(PeerGroup(FakeProcessGroup._create_internal(0, degree), range(degree), 0), device)
        self._ranks.bytes_summed = []
        self._draws = TensorDraws(job, parameters.splits, self._ranks)
        self.modules: list[nn.Module] = []
        for layer in range(job.num_layers):
            module = job.layer(layer)
            if layer in parameters.splits:
                cut_module(module, parameters.splits[layer], self._ranks, 0, degree)
            self.modules.append(module.to(device))

    def through(
        self, module: nn.Module, layer: int, values: tuple[Any, ...], positions: range
    ) -> tuple[Any, ...]:
        """Return the outputs of this rank's part of a layer."""
        made = through(module, layer, values, positions, windows=self._draws.windows(layer, values))
        self._ranks.forget_input()
        return made

    def summed(self) -> list[tuple[int, float]]:
        """Return the collectives since the last call: bytes, and which part of a ring all-reduce each is."""
        assert self._ranks.bytes_summed is not None
        found = list(self._ranks.bytes_summed)
        self._ranks.bytes_summed.clear()
        return found

    def close(self) -> None:
        """Let go of the group."""
        self._ranks.disconnect()
