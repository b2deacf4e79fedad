"""Attention as one fused kernel, whatever torch would run on the meta device, where it has none."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from foreshard.profile.tracing.operations import Call, bytes_of

ATTENTION = "fused attention"
Note = Callable[[str, Call, tuple[Any, ...], Any], None]
"""Takes the name of an operation, its kernel, what it reads and what it makes."""
_PRODUCTS = {"attention": 2, "attention_backward": 5}


class _Fused(torch.autograd.Function):
    """Flash attention without arithmetic: keeps queries, keys, values, output and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, note: Note) -> Any:
        out = _made_for(query, value.shape[-1])
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        read = (query, key, value)
        note(ATTENTION, _call("attention", query, key, causal, (read, out)), read, out)
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.causal, ctx.note = causal, note
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        query, key, value, out, _ = ctx.saved_tensors
        made = tuple(_made_for(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        read = (query, key, value, out, gradient)
        ctx.note(ATTENTION, _call("attention_backward", query, key, ctx.causal, (read, made)), read, made)
        return (*made, None, None)


def _made_for(like: Any, width: int) -> Any:
    """Make a tensor as kernels lay it out: as what they read, with heads of a position side by side."""
    if like.dim() < 4:
        return like.new_empty((*like.shape[:-1], width))
    inside = like.transpose(-3, -2)
    made = (
        torch.empty_like(inside) if width == like.shape[-1] else inside.new_empty((*inside.shape[:-1], width))
    )
    return made.transpose(-3, -2)


def _call(name: str, query: Any, key: Any, causal: bool, touched: Any) -> Call:
    heads = query.shape[-3] if query.dim() > 2 else 1
    sequences, queries, width, keys = prod(query.shape[:-3]), query.shape[-2], query.shape[-1], key.shape[-2]
    sizes = (sequences, heads, queries, keys, width, float(causal))
    pairs = 2.0 * sequences * heads * queries * keys * width
    return Call(name, "attention", tuple(map(float, sizes)), bytes_of(touched), _PRODUCTS[name] * pairs)


class FusedAttention(TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` as one kernel, as accelerators do."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace attention, pass everything else on."""
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
        return _Fused.apply(query, key, value, causal, self._note)
