"""Jobs that are not like the others: few samples, lines of any length, noise, streams, frozen layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import rehearse, values, worst_error
from small_plans import ALONE, PLANS
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from foreshard.runtime.gradient_check import gradient_error
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.layer_builders import SEEDING

WORDS = 16


class Lines:
    """Lines of two to nine words."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        made = torch.Generator().manual_seed(index)
        return torch.randint(1, WORDS, (2 + index % 8,), generator=made)


class Stream:
    """The lines one after another, with nothing else to hold on to."""

    def __init__(self, count: int):
        self.lines = Lines(count)

    def __iter__(self) -> Any:
        return (self.lines[index] for index in range(self.lines.count))


class Mixing(nn.Module):
    """A causal mean of the words before, and a word's own part: what stands behind a line changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.before = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        return x + torch.tanh(self.own(x) + self.before(x.cumsum(1) / places))


class Noise(nn.Module):
    """No parameters, but noise in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape[0], 1, x.shape[2], dtype=x.dtype)


def word_loss(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    target = batch[:, 1:].flatten()
    total = functional.cross_entropy(output.flatten(0, 1), target, ignore_index=0, reduction="sum")
    return total, (target != 0).sum()


class Turned(nn.Module):
    """Gives a view of what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)).transpose(0, 1).contiguous().transpose(0, 1)


class Changed(nn.Module):
    """Changes what it is given, as `nn.ReLU(inplace=True)` does behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.1
        return self.own(functional.relu(x, inplace=True))


def job(dataset: Any, middle: Callable[[], list[nn.Module]], **more: Any) -> Job:
    with SEEDING:
        torch.manual_seed(0)
        layers = [nn.Embedding(WORDS, 8), *middle(), nn.Linear(8, WORDS)]
    assert len(layers) == 8
    return Job.of(
        [layer.double() for layer in layers],
        dataset,
        word_loss,
        lambda params: torch.optim.Adam(params, lr=1e-2),
        collate=lambda lines: pad_sequence(lines, batch_first=True),
        inputs=lambda batch: batch[:, :-1],
        fixed_shapes=False,
        **more,
    )


def mixing(count: int = 6) -> list[nn.Module]:
    return [Mixing() for _ in range(count)]


def noisy() -> list[nn.Module]:
    return [Mixing(), nn.Tanh(), nn.Identity(), nn.Tanh(), Noise(), Mixing()]


def frozen() -> list[nn.Module]:
    return [*(layer.requires_grad_(False) for layer in mixing(5)), Mixing()]


CHANGES = "layers that change what they are given"
JOBS = {
    "lines of any length": lambda: job(Lines(40), mixing),
    "fewer samples than a step takes": lambda: job(Lines(5), mixing),
    "one sample": lambda: job(Lines(1), mixing),
    "a stream": lambda: job(Stream(17), mixing),
    "layers without parameters": lambda: job(Lines(40), noisy),
    "frozen layers": lambda: job(Lines(40), frozen),
    CHANGES: lambda: job(Lines(40), lambda: [Changed() for _ in range(6)]),
    "layers that give views": lambda: job(Lines(40), lambda: [Turned() for _ in range(6)]),
}
PIPELINES = [
    "uneven replicas",
    "four stages",
    "three stages, zb-h1",
    "interleaved",
    "two uneven pipelines",
    "recompute",
]


CASES = {(name, plan) for name in JOBS for plan in PIPELINES} - {(CHANGES, "recompute")}
"""A recomputation needs what it was given as it was, as everywhere in torch."""


@pytest.mark.parametrize(("name", "plan"), sorted(CASES))
def test_gradients_are_those_of_one_process(name: str, plan: str) -> None:
    assert gradient_error(JOBS[name](), PLANS[plan]) <= 1e-13


@pytest.mark.parametrize("name", ["fewer samples than a step takes", "a stream", "layers without parameters"])
def test_twelve_steps_over_several_passes_and_changes(name: str) -> None:
    alone = rehearse(JOBS[name](), ALONE, steps=12, after=values)
    changes = {3: PLANS["four stages"], 6: PLANS["uneven replicas"], 9: PLANS["interleaved"]}
    found = rehearse(
        JOBS[name](), PLANS["two uneven pipelines"], steps=12, changes=changes, after=values, ranks=range(4)
    )
    assert found[0][0] == pytest.approx(alone[0][0], rel=1e-12)
    assert worst_error(found, alone[0][1]) <= 1e-10


def test_lines_weigh_by_their_words() -> None:
    """The loss is the mean over words, not over micro-batches or lines."""
    losses = rehearse(job(Lines(40), mixing), PLANS["uneven replicas"], steps=1)[0][0]
    made = job(Lines(40), mixing)
    from foreshard.runtime.job.data import Feed

    batch = Feed(made.dataset, made.collate, global_batch=12, prefetch=0).batch(range(12))
    x = made.inputs(batch)
    for layer in range(8):
        x = made.layer(layer)(x)
    total, count = made.loss(x, batch)
    mean = float(total.detach()) / float(count)
    assert losses[0] == pytest.approx(mean, rel=1e-12)
    assert float(count) > 12
