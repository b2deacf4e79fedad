"""A job whose gradients and states weigh much beside its activations: feed-forward blocks on short lines."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, BLOCKS, LINE, SAMPLES = 32, 8, 2, 4096


class Block(nn.Module):
    """A feed-forward part with its norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the input with something added."""
        return x + self.down(functional.relu(self.up(self.norm(x))))


class Lines:
    """Lines of noise, to be turned round."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.randn(LINE, WIDTH, generator=torch.Generator().manual_seed(index))


def model():
    """Return the layers: built one by one, each by the ranks that hold it."""
    return [Block] * BLOCKS


def dataset():
    """Return the lines."""
    return Lines()


def inputs(batch):
    """Return what the first layer takes of a batch."""
    return batch


def loss(output, batch):
    """Return the sum over numbers, and how many there are."""
    return functional.mse_loss(output, batch.flip(1), reduction="sum"), batch.numel()


def optimizer(params):
    """Return the optimizer of some of the parameters."""
    return torch.optim.AdamW(params, lr=3e-4)
