"""Warm-ups of compressed sums, and Adam with the second moments that it has at their end."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from foreshard.comm.compression.methods import compression_method
from foreshard.transport.compression.compressor import WarmUp
from foreshard.transport.compression.registry import compressor_of
from foreshard.transport.compression.second_moments import FrozenAdam, has_second_moments, momentum_of

METHODS = ("powersgd:1", "topk:0.25", "onebit", "int8", "fp8")


class Alone:
    """One rank by itself: what it sends is what arrives."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sums += 1

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        return parts


@pytest.mark.parametrize("method", METHODS)
def test_sums_are_whole_until_the_warm_up_is_over(method: str) -> None:
    """No bit changes and nothing is kept; then the sum and what is left out are the gradient."""
    warm_up, ranks = WarmUp(steps=2), Alone()
    compressor = compressor_of(compression_method(method))(((6, 5), (7,)), warm_up)
    drawn = torch.Generator().manual_seed(3)
    for step in range(2):
        warm_up.step = step
        gradient = torch.randn(37, generator=drawn)
        flat = gradient.clone()
        compressor.sum(flat, ranks)
        assert torch.equal(flat, gradient) and compressor.error is None and ranks.sums == step + 1
    warm_up.step = 6
    flat = gradient.clone()
    compressor.sum(flat, ranks)
    assert not torch.equal(flat, gradient) and compressor.error is not None
    assert torch.allclose(flat + compressor.error, gradient, atol=1e-5)


def test_the_density_of_top_k_falls_to_its_fraction() -> None:
    warm_up = WarmUp(steps=4)
    compressor = compressor_of(compression_method("topk:0.01"))(((1000,),), warm_up)
    sent = []
    for step in range(4, 10):
        warm_up.step, compressor.error = step, None
        flat = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        compressor.sum(flat, Alone())
        sent.append(int(flat.count_nonzero()))
    assert sent == [1000, 317, 100, 32, 10, 10]


def momenta(method: str, momentum: float, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Momentum of an optimizer that sees one rank's sums, step by step, and all that it has seen."""
    warm_up = WarmUp(steps=1, step=10, momentum=momentum)
    compressor = compressor_of(compression_method(method))(((40,),), warm_up)
    held, total, seen = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64), []
    for gradient in gradients:
        flat = gradient.clone()
        compressor.sum(flat, Alone())
        held, total = 0.9 * held + flat, total + flat
        seen.append(held)
    return torch.stack(seen), total


def test_top_k_sends_what_momentum_makes_of_gradients() -> None:
    """By hand: an entry that waits adds its momenta, and moves by all of them when it is sent."""
    drawn = torch.Generator().manual_seed(5)
    gradients = [torch.randn(40, generator=drawn, dtype=torch.float64) for _ in range(30)]
    found, _ = momenta("topk:0.1", 0.9, gradients)
    velocity, waiting = torch.zeros(2, 40, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        velocity = 0.9 * velocity + gradient
        waiting = waiting + velocity
        places = torch.topk(waiting.abs(), 4).indices
        arrived = torch.zeros_like(waiting)
        arrived[places], waiting[places] = waiting[places], 0.0
        assert torch.allclose(found[step], arrived, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["topk:0.1", "onebit"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_all_of_a_gradient_arrives_with_and_without_momentum(method: str, momentum: float) -> None:
    drawn = torch.Generator().manual_seed(6)
    gradients = [torch.randn(40, generator=drawn, dtype=torch.float64) for _ in range(20)]
    quiet = [torch.zeros(40, dtype=torch.float64)] * 400
    _, total = momenta(method, momentum, gradients + quiet)
    left = 1e-6 if method == "topk:0.1" else 0.1  # signs swing around what is left
    assert torch.allclose(total, torch.stack(gradients).sum(0), atol=left)


def test_ranks_agree_on_the_momentum_of_those_that_update() -> None:
    class Other(Alone):
        size = 2

        def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            return [tensor, torch.full_like(tensor, 0.9) if len(tensor) == 1 else tensor]

    compressor = compressor_of(compression_method("topk:1"))(((4,),), WarmUp(steps=1, step=10))
    for _ in range(3):
        flat = torch.ones(4, dtype=torch.float64)
        compressor.sum(flat, Other())
        assert torch.allclose(flat, torch.full_like(flat, 2.0))  # all is sent: two ranks' gradients


def test_which_momentum_an_optimizer_has() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    assert momentum_of(torch.optim.AdamW(weights, betas=(0.8, 0.99))) == 0.8
    assert momentum_of(torch.optim.Adam(weights, amsgrad=True)) == 0.0
    assert momentum_of(torch.optim.SGD(weights, lr=0.1)) == 0.0
    assert momentum_of(torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)) == 0.0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_frozen_steps_are_those_of_the_formula(kind: type) -> None:
    """First moments, decay and rates go on; the second moments are those after the third step."""
    drawn = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, generator=drawn, dtype=torch.float64) for _ in range(8)]
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = kind([weight], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.05)
    frozen, x = FrozenAdam(optimizer, 3), torch.ones(5, dtype=torch.float64)
    first, second = torch.zeros(2, 5, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        if step == 5:
            optimizer.param_groups[0]["lr"] = rate = 0.02
        else:
            rate = optimizer.param_groups[0]["lr"]
        weight.grad = gradient.clone()
        (optimizer if step < 3 else frozen).step()
        if kind is torch.optim.AdamW:
            x, g = x * (1 - rate * 0.05), gradient
        else:
            g = gradient + 0.05 * x
        first = 0.8 * first + 0.2 * g
        if step < 3:
            second = 0.9 * second + 0.1 * g * g
        mean = second / (1 - 0.9 ** min(step + 1, 3))
        x = x - rate * first / (1 - 0.8 ** (step + 1)) / (mean.sqrt() + 1e-3)
        assert torch.allclose(weight.data, x, rtol=1e-12, atol=0.0)
    assert float(optimizer.state[weight]["step"]) == 8


def test_which_optimizers_have_second_moments() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    assert has_second_moments(torch.optim.AdamW(weights)) and has_second_moments(torch.optim.Adam(weights))
    assert not has_second_moments(torch.optim.SGD(weights, lr=0.1))
    assert not has_second_moments(torch.optim.Adam(weights, amsgrad=True))


def test_updates_are_linear_in_late_gradients() -> None:
    """Twenty gradients at once move a weight as far as one after another: the law that freezing restores."""

    def moved(gradients: list[float], *, freezes: bool) -> float:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.5, 0.9))
        for _ in range(50):
            weight.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
        begin = float(weight.data)
        stepper = FrozenAdam(optimizer, 50) if freezes else optimizer
        for gradient in gradients:
            weight.grad = torch.full((1,), gradient, dtype=torch.float64)
            stepper.step()
        return float(weight.data) - begin

    late = [0.0] * 19 + [20.0] + [0.0] * 60
    evenly = [1.0] * 20 + [0.0] * 60
    assert moved(late, freezes=True) == pytest.approx(moved(evenly, freezes=True), rel=1e-9)
    assert moved(late, freezes=False) / moved(evenly, freezes=False) < 0.7
