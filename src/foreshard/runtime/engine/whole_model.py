"""The whole model as one callable, for evaluation: its layers stay on the ranks of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreshard.profile.batches import as_tuple, loss_input, moved
from foreshard.runtime.engine.exchange import header_of, parse_header
from foreshard.runtime.engine.executor import Executor


class WholeModel:
    """Gives outputs of the last layer for inputs of the first, in evaluation mode and without gradients.

    All ranks of the pipeline call it with the same inputs, in one order. Each computes its own layers. What a
    stage gives goes to all ranks through host memory (`group`): evaluation is rare, and each of them needs
    the outputs.
    """

    def __init__(self, executor: Executor, group: Any):
        self._executor, self._group = executor, group

    def __call__(self, *inputs: Any) -> Any:
        """Return what `loss` takes as its output, for what `inputs(batch)` gives."""
        executor = self._executor
        given = as_tuple(inputs[0] if len(inputs) == 1 else inputs)
        values = [moved(value, executor.device) for value in given]
        stages = executor.group.stages
        for virtual in range(executor.num_virtual):
            chunk, place = divmod(virtual, len(stages))
            if place == executor.seat.stage:
                values = executor.infer(chunk, values)
            if self._group is not None:
                values = self._shown(values, stages[place].ranks[0])
        return loss_input(values, executor.layout.plan.precision)

    def _shown(self, values: list[Tensor], source: int) -> list[Tensor]:
        """Return the tensors that a rank has, on all ranks."""
        mine = source == self._executor.rank
        shapes = tuple((value.dtype, tuple(value.shape)) for value in values) if mine else ()
        header = header_of(shapes, 0.0)
        place = self._group.ranks.index(source)
        self._group.broadcast(header, place).wait()
        found = []
        for number, (dtype, shape) in enumerate(parse_header(header)[0]):
            whole = values[number].cpu().contiguous() if mine else torch.empty(shape, dtype=dtype)
            sent = whole.view(torch.uint8) if dtype is torch.bool else whole
            self._group.broadcast(sent, place).wait()
            found.append(whole.to(self._executor.device))
        return found
