"""A backward in two halves gives the gradients of one in one piece, whatever the layers are like."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from foreshard.runtime.engine.split_backward import input_half, weight_half

WIDTH = 4


def linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(count)]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x,)


class TiedInside(Plain):
    """The second and the last layer share their weights, not their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[1].weight


class Loop(Plain):
    """One layer four times."""

    def forward(self, x: Any) -> Any:
        for _ in range(4):
            x = torch.tanh(self.layers[0](x))
        return (x,)


class View(Plain):
    def forward(self, x: Any) -> Any:
        return (super().forward(x)[0].t().contiguous().t(),)


class ApartFromInputs(Plain):
    """A second output that is of parameters only, as a table of biases that later layers add."""

    def forward(self, x: Any) -> Any:
        return self.layers[1](torch.tanh(self.layers[0](x))), self.layers[2].weight * self.layers[3].bias


class Unused(Plain):
    def forward(self, x: Any) -> Any:
        return (self.layers[0](x),)


class Again(TiedInside):
    """Computes its middle again in the backward."""

    def forward(self, x: Any) -> Any:
        return (checkpoint(lambda y: super(Again, self).forward(y)[0], x, use_reentrant=False),)


@pytest.mark.parametrize("kind", [Plain, TiedInside, Loop, View, ApartFromInputs, Unused, Again])
def test_two_halves_make_the_whole(kind: type[nn.Module]) -> None:
    module = kind()
    weights = list(module.parameters())
    start = torch.randn(3, WIDTH, dtype=torch.float64)
    whole_in = start.clone().requires_grad_()
    outputs = module(whole_in)
    grads = [torch.randn_like(t) for t in outputs]
    wanted = torch.autograd.grad(outputs, [whole_in, *weights], grads, allow_unused=True)
    for passes in (1, 2):  # gradients add up
        split_in = start.clone().requires_grad_()
        delayed = input_half(list(module(split_in)), grads, [split_in], weights)
        torch.testing.assert_close(split_in.grad, wanted[0])
        weight_half(weights, delayed)
        for weight, grad in zip(weights, wanted[1:], strict=True):
            assert (weight.grad is None) == (grad is None)
            if grad is not None:
                torch.testing.assert_close(weight.grad, passes * grad)
