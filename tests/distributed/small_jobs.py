"""Small jobs for the tests: a language model with ties and dropout, a CNN, a model with frozen layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.runtime.job.job import Job
from foreshard.runtime.job.layer_builders import SEEDING

WORDS, WIDTH, HEADS = 32, 16, 4


class Text:
    """Random words, the same for the same index."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, WORDS, (9,), generator=torch.Generator().manual_seed(index))


class Images:
    """Random images with a class."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=made, dtype=torch.float64).to(self.dtype), index % 5


class Embedding(nn.Module):
    """Words to vectors."""

    tensor_plan: ClassVar = {"words": "words"}

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.words(ids))


class Block(nn.Module):
    """Attention and a feed-forward part; `inner` is the dropout of what tensor-parallel ranks share out."""

    tensor_plan: ClassVar = {"qkv": "column:3", "out": "row", "up": "column", "down": "row"}

    def __init__(self, inner: float = 0.0) -> None:
        super().__init__()
        self.inner = inner
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.inner)
        seen = seen.transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.down(functional.dropout(functional.gelu(self.up(x)), self.inner)))


class Head(nn.Module):
    """Vectors to scores of words."""

    tensor_plan: ClassVar = {"scores": "gather"}

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


def text_loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    target = batch[:, 1:]
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def image_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def gpt(
    dtype: torch.dtype = torch.float32, *, tied: bool = True, frozen: bool = False, inner: float = 0.0
) -> Job:
    """Eight layers: embedding, six blocks, head."""
    with SEEDING:  # ranks of an earlier test may still read ahead
        torch.manual_seed(0)
        layers: list[nn.Module] = [Embedding(), *[Block(inner) for _ in range(6)], Head()]
    if tied:
        layers[-1].scores.weight = layers[0].words.weight  # type: ignore[union-attr]
    for layer in layers:
        layer.to(dtype)
    if frozen:
        for layer in layers[1:4]:
            layer.requires_grad_(False)
    return Job.of(
        layers,
        Text(),
        text_loss,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        inputs=lambda batch: batch[:, :-1],
        lr=lambda step: 1.0 / (1 + 0.1 * step),
    )


def cnn(dtype: torch.dtype = torch.float32, **_: Any) -> Job:
    """Eight layers of a CNN, built one by one."""

    def conv(inputs: int, outputs: int, stride: int = 1) -> Any:
        return lambda: nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(1, outputs), nn.SiLU()
        ).to(dtype)

    layers = [
        conv(3, 8),
        conv(8, 8),
        conv(8, 16, 2),
        conv(16, 16),
        conv(16, 16),
        conv(16, 32, 2),
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        lambda: nn.Linear(32, 5).to(dtype),
    ]
    return Job.of(
        layers, Images(dtype), image_loss, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    )


JOBS = {"gpt": gpt, "cnn": cnn}
