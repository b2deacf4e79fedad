"""A small CNN on made-up images, with a norm that does not look at other samples.

CNN_NORM=batch puts BatchNorm in its place: each rank then takes means over its own micro-batch, and the
result depends on the plan (docs/runtime_jobs.md).
"""

import os

import torch
from torch import nn
from torch.nn import functional

CLASSES, SIZE, SAMPLES = 10, 16, 4096
WIDTH, DEPTH = int(os.environ.get("CNN_WIDTH", 16)), int(os.environ.get("CNN_DEPTH", 6))
NORM = os.environ.get("CNN_NORM", "group")
DTYPE = torch.float64 if os.environ.get("CNN_DTYPE") == "float64" else torch.float32


class Residual(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([norm(outputs), norm(outputs)])
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        """Return the images with what the convolutions found added."""
        inner = functional.silu(self.norms[0](self.first(x)))
        return functional.silu(self.skip(x) + self.norms[1](self.second(inner)))


class Images:
    """Stripes whose direction is their class, under noise; the same for the same index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        made, kind = torch.Generator().manual_seed(index), index % CLASSES
        places = torch.linspace(-3, 3, SIZE)
        angle = torch.tensor(torch.pi * kind / CLASSES)
        stripes = torch.sin(3 * (angle.cos() * places[:, None] + angle.sin() * places[None, :]))
        return (stripes + torch.randn(3, SIZE, SIZE, generator=made)).to(DTYPE), kind


def norm(channels):
    """Return the norm of a feature map."""
    return nn.BatchNorm2d(channels) if NORM == "batch" else nn.GroupNorm(4, channels)


def model():
    """Return the layers, which get narrower in the image and wider in channels halfway."""
    half = DEPTH // 2
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1), nn.SiLU()),
        *[Residual(WIDTH, WIDTH, 1) for _ in range(half)],
        Residual(WIDTH, 2 * WIDTH, 2),
        *[Residual(2 * WIDTH, 2 * WIDTH, 1) for _ in range(DEPTH - half - 1)],
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(2 * WIDTH, CLASSES),
    ).to(DTYPE)


def dataset():
    """Return the images with their classes; the first of the pair is what the first layer takes."""
    return Images()


def loss(output, batch):
    """Return the sum over images, and how many there are."""
    return functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def optimizer(params):
    """Return the optimizer of some of the parameters."""
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)
