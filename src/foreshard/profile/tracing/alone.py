"""One layer of torch by itself, as operations of each pass: what tables of measured kernels time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.traced_module import Operation

__all__ = ["PASSES", "convolution_passes", "recurrent_passes"]

Passes = Mapping[str, tuple[Operation, ...]]
PASSES = ("forward", "inputs", "weights")
"""Forward, and the gradients of what is read and of the weights."""
_RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "vanilla": nn.RNN}


class _AfterAnother(nn.Module):
    """A layer that reads what has a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.shift = layer, nn.Parameter(torch.empty(1))

    def forward(self, read: Any) -> Any:
        made = self.layer(read + self.shift)
        return made[0] if isinstance(made, tuple) else made


@cache
def convolution_passes(
    channels: int,
    image: tuple[int, int],
    filters: int,
    taps: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
    precision: str,
) -> Passes:
    """Return the operations of `nn.Conv2d` with channels first, by pass; without a bias.

    Sizes of two dimensions are of rows and columns.
    """
    layer = nn.Conv2d(channels, filters, taps, stride, padding, bias=False)
    forward, inputs, weights = _passes(layer, torch.empty(1, channels, *image), precision)
    of_convolution = (
        [operation for operation in operations if operation.kind in ("convolution", "layout")]
        for operations in (forward, inputs, weights)
    )
    return dict(zip(PASSES, map(tuple, of_convolution), strict=True))


@cache
def recurrent_passes(kind: str, width: int, steps: int, precision: str) -> Passes:
    """Return the operations of a recurrent layer by pass, without products of its inputs.

    Parameters
    ----------
    kind : {'lstm', 'gru', 'vanilla'}
    width : int
        Of the states.
    steps : int
    precision : str
    """
    # an input of one number, so that the products of inputs can be told from those of states
    layer = _RECURRENT[kind](1, width, batch_first=True)
    forward, inputs, weights = _passes(layer, torch.empty(1, steps, 1), precision)
    return {
        "forward": tuple(_recurrences(forward)),
        "inputs": tuple(_recurrences(inputs)),
        "weights": tuple(o for o in weights if o.name == "recurrent" and o.sizes[1].fixed == width),
    }


def _recurrences(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    return (operation for operation in operations if operation.kind == "recurrence")


def _passes(layer: nn.Module, read: Any, precision: str) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations of the forward, and of the gradients of inputs and of weights."""
    traced = trace_module(_AfterAnother(layer.requires_grad_(False)), read, precision=precision)
    yield tuple(operation for part in traced.layers for operation in part.forward)
    yield tuple(operation for part in traced.layers for operation in part.backward)
    traced = trace_module(layer.requires_grad_(True), read, loss=_summed, precision=precision)
    yield tuple(operation for part in traced.layers for operation in part.backward)


def _summed(made: Any) -> Any:
    return (made[0] if isinstance(made, tuple) else made).sum()
