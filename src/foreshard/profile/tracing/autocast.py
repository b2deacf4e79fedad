"""Automatic mixed precision of CUDA: values in 32 bit, products in 16, and which operations stay wide.

Torch's autocast knows no meta device, so that its lists are applied here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_PRODUCTS = ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "einsum")
_SUMMED = ("addmm", "addmv", "addbmm", "baddbmm", "prelu", "scaled_dot_product_attention")
_CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_NARROW = frozenset((*_PRODUCTS, *_SUMMED, *_CONVOLUTIONS))
_NORMS = ("layer_norm", "group_norm", "softmax", "log_softmax", "softmin", "norm", "cosine_similarity")
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div")
_SUMS = ("sum", "prod", "cumsum", "cumprod", "dist", "cdist", "binary_cross_entropy_with_logits")
_POINTWISE = ("exp", "expm1", "log", "log2", "log10", "log1p", "pow", "__pow__", "reciprocal", "rsqrt")
_WIDE = frozenset((*_NORMS, *_LOSSES, *_SUMS, *_POINTWISE, "softplus"))


class Autocast(TorchFunctionMode):
    """Casts what operations read, each weight once.

    Source
    ------
    PyTorch, "Automatic Mixed Precision package", CUDA op-specific behavior (aten/src/ATen/autocast_mode.h).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._weights: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the floating tensors that an operation of either list reads."""
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _NARROW:
            args, kwargs = tree_map(self._narrow, (args, kwargs))
        elif name in _WIDE:
            args, kwargs = tree_map(self._wide, (args, kwargs))
        return func(*args, **kwargs)

    def _narrow(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        if not isinstance(value, torch.nn.Parameter):
            return value.to(self._dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value.to(self._dtype)
        return self._weights[id(value)]

    def _wide(self, value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype is self._dtype
        return value.to(torch.float32) if narrow else value
