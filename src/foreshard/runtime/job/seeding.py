"""The process's generators of torch, random and numpy, seeded by what the numbers are drawn for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from foreshard.runtime.engine.counter_rng import key_of


def seed_generators(seed: int, position: int, use: int) -> None:
    """Seed the process's generators by the position.

    `use` is 0 for a sample, 1 for a collation, 2 for an evaluation.
    """
    value = key_of(seed, position, use)
    torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # datasets may use numpy's global generator


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the process's generators after the body."""
    kept = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
