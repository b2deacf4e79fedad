"""A small GPT on made-up text: what `foreshard run` needs of a job, in plain PyTorch."""

import os
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, SEQUENCE = 256, 64
WIDTH, BLOCKS, HEADS = int(os.environ.get("GPT_WIDTH", 128)), int(os.environ.get("GPT_BLOCKS", 6)), 4
DTYPE = torch.float64 if os.environ.get("GPT_DTYPE") == "float64" else torch.float32
SAMPLES = 4096


class Embedding(nn.Module):
    """Words and places to vectors."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, ids):
        """Return a vector of each word."""
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """Attention and a feed-forward part; what several ranks may share out, and so have fewer heads of."""

    tensor_plan: ClassVar = {"qkv": "column:3", "out": "row", "up": "column", "down": "row"}

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        """Return vectors that have seen the ones before them."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """Vectors to scores of words."""

    def __init__(self):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        """Return the scores of every word."""
        return self.scores(self.norm(x))


class Text:
    """Words that mostly follow from the one before, the same for the same index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        first, noise = torch.randint(0, VOCABULARY, (2,), generator=made).tolist()
        steps = torch.arange(SEQUENCE + 1) * (1 + noise % 7)
        jumps = torch.randint(0, 2, (SEQUENCE + 1,), generator=made)
        return (first + steps + jumps) % VOCABULARY


def model():
    """Return the layers: built one by one, each by the ranks that hold it."""
    return [lambda: Embedding().to(DTYPE), *[lambda: Block().to(DTYPE)] * BLOCKS, lambda: Head().to(DTYPE)]


def dataset():
    """Return anything with __len__ and __getitem__, or an iterable."""
    return Text()


def inputs(batch):
    """Return what the first layer takes of a batch."""
    return batch[:, :-1]


def loss(output, batch):
    """Return the sum over words, and how many there are."""
    target = batch[:, 1:]
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def optimizer(params):
    """Return the optimizer of some of the parameters."""
    return torch.optim.AdamW(params, lr=3e-4)
