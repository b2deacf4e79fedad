"""What one rank does of a trace: all of it, or its part where several compute each layer together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foreshard.profile.tracing.attention import ATTENTION
from foreshard.profile.tracing.constants import place_of
from foreshard.profile.tracing.operations import Call, calls_of, storage_of
from foreshard.profile.tracing.recorder import Applied, Recorder
from foreshard.profile.tracing.split_dims import SplitDim, local_tensor
from foreshard.profile.tracing.split_rules import RULES, by_element
from foreshard.profile.tracing.splitting import Splitting, Unsummed

_CONVOLUTIONS = {torch.ops.aten.convolution.default: 8, torch.ops.aten.convolution_backward.default: 9}


@dataclass(slots=True, kw_only=True)
class RankPart:
    """Kernels, kept tensors and sums of one rank."""

    recorder: Recorder
    # forward and backward: kernels of each operation
    forward: list[list[Call]]
    backward: list[list[Call]]
    # sums_forward and sums_backward: (operation after which ranks sum what it makes, bytes)
    sums_forward: list[tuple[int, float]] = field(default_factory=list)
    sums_backward: list[tuple[int, float]] = field(default_factory=list)
    splitting: Splitting | None = None  # how ranks hold each tensor; without one, each holds all of it

    def share(self, tensor: Any) -> float:
        """Return the share of a tensor that a rank holds."""
        return 1.0 / self.splitting.degree if self.splitting and self.is_split(tensor) else 1.0

    def is_split(self, tensor: Any) -> bool:
        """Return whether ranks share out a tensor."""
        return self.splitting is not None and isinstance(self.splitting.state(tensor), SplitDim)

    def elements(self, weight: Any) -> int:
        """Return the elements of a parameter or buffer that a rank holds."""
        split = self.splitting is not None and storage_of(weight) in self.splitting.splits
        return int(weight.numel() // self.splitting.degree if self.splitting and split else weight.numel())

    def is_unsummed(self, weight: Any) -> bool:
        """Return whether ranks hold summands of the gradient of a parameter that each has whole."""
        gradient = self.recorder.gradients.get(storage_of(weight))
        state = self.splitting.state(gradient) if self.splitting and gradient is not None else None
        return isinstance(state, Unsummed)


def all_of(recorder: Recorder) -> RankPart:
    """Return what a rank does that is alone with the module."""
    return RankPart(
        recorder=recorder,
        forward=[done.calls for done in recorder.forward],
        backward=[done.calls for done in recorder.backward],
    )


def part_of(recorder: Recorder, weights: Sequence[Any], degree: int) -> RankPart:
    """Return what each of `degree` ranks does that share out the weights that can be split."""
    steps, split_at = [*recorder.forward, *recorder.backward], len(recorder.forward)

    def fixed(tensor: Any) -> bool:
        return recorder.known.knows(tensor) or storage_of(tensor) in recorder.constants

    splitting = Splitting(
        steps=steps,
        num_forward=split_at,
        weights=weights,
        fixed=fixed,
        gradient_of={place_of(gradient): returned for gradient, returned in recorder.output_gradients},
        degree=degree,
    )
    splitting.solve(RULES, by_element)
    kernels = [
        _local(step, held, degree, recorder.channels_last)
        for step, held in zip(steps, splitting.held, strict=True)
    ]
    return RankPart(
        recorder=recorder,
        forward=kernels[:split_at],
        backward=kernels[split_at:],
        sums_forward=[(at, size) for at, size in splitting.sums if at < split_at],
        sums_backward=[(at - split_at, size) for at, size in splitting.sums if at >= split_at],
        splitting=splitting,
    )


def _local(step: Applied, held: dict[int, SplitDim], degree: int, channels_last: bool) -> list[Call]:
    """Return the kernels of an operation on a rank's parts of its tensors."""
    if not held or not step.calls:
        return step.calls
    if step.func == ATTENTION:
        return [_heads(call, degree) for call in step.calls]

    def local(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return local_tensor(value, held.get(id(value)), degree)
        if isinstance(value, tuple | list):
            return type(value)(map(local, value))
        return value

    args = list(local((*step.args, *step.kwargs.values())))
    place = _CONVOLUTIONS.get(step.func)
    if place is not None and args[place] > 1:
        args[place] //= degree
    return list(calls_of(step.func, tuple(args), local(step.out), channels_last=channels_last))


def _heads(call: Call, degree: int) -> Call:
    """Return fused attention over a rank's heads."""
    sequences, heads, *others = call.sizes
    return replace(
        call,
        sizes=(sequences, heads / degree, *others),
        bytes=call.bytes / degree,
        flops=call.flops / degree,
    )
