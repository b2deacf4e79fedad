"""Automatic mixed precision of CUDA: values in 32 bit, products in 16, and which operations stay wide.

Torch's autocast casts tensors of its device alone, and is off where CUDA is not built in, so that its lists
are applied here to tensors of the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

_PRODUCTS = ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "einsum")
_SUMMED = ("addmm", "addmv", "addbmm", "baddbmm", "prelu", "scaled_dot_product_attention")
_CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_RECURRENT = (
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
)
_NARROW = frozenset((*_PRODUCTS, *_SUMMED, *_CONVOLUTIONS, *_RECURRENT))
_NORMS = ("layer_norm", "group_norm", "softmax", "log_softmax", "softmin", "norm", "cosine_similarity")
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div")
_SUMS = ("sum", "prod", "cumsum", "cumprod", "dist", "cdist", "binary_cross_entropy_with_logits")
_POINTWISE = ("exp", "expm1", "log", "log2", "log10", "log1p", "pow", "__pow__", "reciprocal", "rsqrt")
_WIDE = frozenset((*_NORMS, *_LOSSES, *_SUMS, *_POINTWISE, "softplus"))
_DEVICE = "cuda"  # whose regions count: a trace is priced on accelerators


class Autocast(TorchFunctionMode):
    """Casts what operations read inside of regions of autocast, each weight once.

    Parameters
    ----------
    dtypes : set of torch.dtype
        Takes those that regions cast to.

    Source
    ------
    PyTorch, "Automatic Mixed Precision package", CUDA op-specific behavior (aten/src/ATen/autocast_mode.h).
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes
        self._weights: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the floating tensors that an operation of either list reads."""
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if (name in _NARROW or name in _WIDE) and torch.is_autocast_enabled(_DEVICE):
            self._dtypes.add(torch.get_autocast_dtype(_DEVICE))
            args, kwargs = tree_map(self._narrow if name in _NARROW else _wide, (args, kwargs))
        return func(*args, **kwargs)

    def _narrow(self, value: Any) -> Any:
        dtype = torch.get_autocast_dtype(_DEVICE)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is dtype:
            return value
        if not isinstance(value, torch.nn.Parameter) or not torch.is_grad_enabled():
            return value.to(dtype)
        key = (id(value), dtype)
        if key not in self._weights:
            self._weights[key] = value.to(dtype)
        return self._weights[key]


def _wide(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if narrow else value


@contextmanager
def regions_of_cuda(modes: Sequence[TorchFunctionMode] = ()) -> Iterator[None]:
    """Let ``torch.autocast`` enter regions of CUDA where there is no CUDA; the meta device's are CUDA's.

    A block that is recomputed enters the region of its forward again, but the backward runs without the
    modes that the forward ran in: those of `modes` that are off are on inside of any region.
    """
    kind = torch.autocast
    made, enter, leave, device_of = (
        kind.__init__,
        kind.__enter__,
        kind.__exit__,
        checkpoint._infer_device_type,
    )
    entered: list[ExitStack] = []

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type not in (_DEVICE, "meta"):
            made(self, device_type, dtype, enabled, cache_enabled)
            return
        made(self, _DEVICE, dtype, False, cache_enabled)  # an enabled one asks the device
        self._enabled = enabled

    def enter_with_modes(self: Any) -> Any:
        entered.append(ExitStack())
        for mode in modes:
            if mode not in _get_current_function_mode_stack():
                entered[-1].enter_context(mode)
        return enter(self)

    def leave_with_modes(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        entered.pop().close()
        return result

    kind.__init__, kind.__enter__, kind.__exit__ = init, enter_with_modes, leave_with_modes  # type: ignore[method-assign]
    checkpoint._infer_device_type = lambda *_: _DEVICE
    try:
        yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = made, enter, leave  # type: ignore[method-assign]
        checkpoint._infer_device_type = device_of
