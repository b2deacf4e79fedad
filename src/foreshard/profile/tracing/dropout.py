"""Dropout as one kernel that keeps a mask of a byte an element, as accelerators run it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FusedDropout(TorchFunctionMode):
    """Runs dropout as devices do; on the meta device torch draws, divides and multiplies apart.

    Source
    ------
    PyTorch, aten/src/ATen/native/Dropout.cpp is_fused_kernel_acceptable.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace dropout, pass everything else on."""
        if getattr(func, "__name__", "") == "dropout" and len(args) == 3 and not kwargs:
            values, share, training = args
            if training and 0.0 < share < 1.0:
                return torch.native_dropout(values, share, training)[0]
        return func(*args, **(kwargs or {}))
