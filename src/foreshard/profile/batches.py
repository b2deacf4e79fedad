"""Batches and what layers pass on, whatever they are made of: as a tuple, on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return what a layer takes or gives as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value
