"""Sizes of one operation as torch calls it: which product it is, what it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from foreshard.profile.tracing.issued import issued_by, issued_by_depthwise, issued_by_product

aten = torch.ops.aten

_FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
}
_MATRIX_CHANNELS = 8  # of a group, that a matrix unit multiplies at once
_GROUP_CHANNELS = 32  # of a group, that kernels on matrix units for groups take at most
_BLOCK_CHANNELS = 128  # that these kernels take at once
_PASSES = {  # passes over the largest tensor beyond reading and writing each once: statistics come first
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,
    aten.cudnn_batch_norm.default: 1,
    aten.native_batch_norm_backward.default: 2,
    aten.native_group_norm.default: 1,
    aten.native_group_norm_backward.default: 2,
    aten.native_layer_norm_backward.default: 2,  # gradients of weight and bias are a kernel of their own
}
_FILLED = {aten.slice_backward.default, aten.select_backward.default}  # zeros first, then the part


@dataclass(frozen=True, slots=True)
class Call:
    """One operation at the traced number of samples."""

    name: str
    kind: str
    sizes: tuple[float, ...]
    bytes: float
    flops: float
    wide: bool = False  # whether a product is in 32 bit
    issued: float = 0.0  # instructions of threads, where these may bind


def calls_of(func: Any, args: tuple[Any, ...], out: Any, *, channels_last: bool = False) -> Iterator[Call]:
    """Yield the kernels of an operation: none for a view, two for the backward of a convolution.

    `channels_last` is the layout of the module's images: convolutions on the meta device forget it.
    """
    if func in _FREE or _is_view(func):
        return
    name = str(func.overloadpacket).removeprefix("aten.")
    if func in _PRODUCTS:
        yield _product(name, _PRODUCTS[func](args), args, out)
    elif func is aten.convolution.default:
        yield _convolution(
            name, args[0], args[1], out, groups=args[8], transposed=args[6], channels_last=channels_last
        )
        if not channels_last:
            yield from _layout(args[1], (args[0], args[1], out), args[8])
    elif func is aten.convolution_backward.default:
        yield from _convolution_backward(name, args, channels_last)
    else:
        moved = bytes_of(args) + bytes_of(out)
        moved += _PASSES[func] * nbytes(args[0]) if func in _PASSES else 0.0
        moved += bytes_of(out) if func in _FILLED else 0.0
        kernels = len(args[2]) if func is aten.roll.default and len(args) > 2 else 1  # one for each dimension
        issued = kernels * issued_by(func, args, out, channels_last=channels_last)
        yield Call(name, "stream", (), kernels * moved, 0.0, issued=issued)


def is_channels_last(tensors: Iterable[Any]) -> bool:
    """Return whether weights of convolutions say that images have their channels last."""
    return any(
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
        for tensor in tensors
    )


def nbytes(tensor: Any) -> float:
    """Return the bytes that an operation touches of a tensor: an expanded one is read once."""
    if tensor.layout is torch.sparse_coo:
        return nbytes(tensor._indices()) + nbytes(tensor._values())
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation: in tuples and lists, or alone."""
    if isinstance(values, torch.Tensor):
        return [values]
    if not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def bytes_of(values: Any) -> float:
    """Return the bytes of all tensors among values, each once."""
    found = {id(tensor): tensor for tensor in tensors_of(values)}
    return sum(map(nbytes, found.values()))


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operation only makes another view of its input."""
    results = func._schema.returns
    return bool(results) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in results
    )


def _mm(args: tuple[Any, ...]) -> tuple[float, ...]:
    (m, k), n = args[0].shape, args[1].shape[1]
    return m, n, k, 1.0


def _bmm(args: tuple[Any, ...]) -> tuple[float, ...]:
    (count, m, k), n = args[0].shape, args[1].shape[2]
    return m, n, k, count


def _grouped_mm(args: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the sizes of the products of the mean group: of its rows, or of its weights' gradient."""
    (m, k), n = args[0].shape[-2:], args[1].shape[-1]
    if args[1].dim() == 3:
        count = args[1].shape[0]
        return (m / count if args[0].dim() == 2 else m), n, k, count
    count = args[2].shape[0]
    return m, n, k / count, count


_PRODUCTS = {
    aten._grouped_mm.default: _grouped_mm,
    aten.mm.default: _mm,
    aten.addmm.default: lambda args: _mm(args[1:]),
    aten.bmm.default: _bmm,
    aten.baddbmm.default: lambda args: _bmm(args[1:]),
}


def _product(name: str, sizes: tuple[float, ...], args: Any, out: Any) -> Call:
    return Call(
        name,
        "experts" if name == "_grouped_mm" else "product",
        tuple(map(float, sizes)),
        bytes_of((args, out)),
        2.0 * prod(sizes),
        wide=out.dtype is torch.float32,
        issued=issued_by_product(sizes, out),
    )


def _convolution(
    name: str, data: Any, weight: Any, out: Any, *, groups: int, transposed: bool, channels_last: bool
) -> Call:
    """Return the matrix product of a convolution, or of the gradient of its input.

    Every output position multiplies a patch of the input with the weights of its group. A transposed one is
    the gradient of a convolution from its output to its input, and takes the positions of its own input.
    """
    positions = out.shape[0] * prod(out.shape[2:]) if not transposed else data.shape[0] * prod(data.shape[2:])
    kernel = prod(weight.shape[2:])
    inside, outside = data.shape[1] // groups, out.shape[1] // groups
    sizes = (positions, outside, inside * kernel, groups)
    if transposed:
        sizes = (positions, outside * kernel, inside, groups)
    moved = bytes_of((data, weight, out))
    gives = "forward" if name == "convolution" else "input"
    return _of_groups(name, tuple(map(float, sizes)), moved, weight, groups, channels_last, gives)


def _of_groups(
    name: str,
    sizes: tuple[float, ...],
    moved: float,
    weight: Any,
    groups: int,
    channels_last: bool,
    gives: str,
) -> Call:
    """Return a convolution by the kernels that run its groups; it gives `forward`, or a gradient."""
    width = _group_width(weight, groups)
    kind, flops, issued = "convolution", 2.0 * prod(sizes), 0.0
    if groups > 1 and width == 1:
        kind, sizes = "depthwise", (float(prod(weight.shape[2:-1])),)
        issued = issued_by_depthwise(flops, gives, channels_last=channels_last)
    elif not _on_matrix_units(width, groups):
        kind, sizes = "grouped", (float(width), float(channels_last))
    return Call(name, kind, sizes, moved, flops, wide=weight.dtype is torch.float32, issued=issued)


def _group_width(weight: Any, groups: int) -> int:
    """Return the channels of a group, the fewer of those read and made."""
    return int(min(weight.shape[0] // groups, weight.shape[1]))


def _layout(weight: Any, touched: tuple[Any, ...], groups: int) -> Iterator[Call]:
    """Yield the change of layout that matrix units ask for: channels last, for tensors that are not.

    Kernels for few channels to a group take either. Source: NVIDIA Deep Learning Performance, Convolutional
    Layers User's Guide, "Tensor layouts in memory".
    """
    width = _group_width(weight, groups)
    if groups == 1 or (width >= _MATRIX_CHANNELS and _on_matrix_units(width, groups)):
        yield Call("layout", "layout", (), 2.0 * bytes_of(touched), 0.0)


def _on_matrix_units(width: int, groups: int) -> bool:
    """Return whether libraries have a kernel on matrix units for groups of so many channels.

    Those of cuDNN 8 take blocks of whole groups: networks whose channels are no multiple of the block
    (RegNet) run 2 to 20 times as long for a FLOP as those whose channels are (ResNeXt).
    """
    return groups == 1 or (width <= _GROUP_CHANNELS and width * groups % _BLOCK_CHANNELS == 0)


def _convolution_backward(name: str, args: tuple[Any, ...], channels_last: bool) -> Iterator[Call]:
    gradient, data, weight, transposed, groups, mask = (
        args[0],
        args[1],
        args[2],
        args[7],
        args[9],
        args[10],
    )
    touched = (gradient, data, weight)
    if mask[0]:
        yield _convolution(
            name,
            gradient,
            weight,
            data,
            groups=groups,
            transposed=not transposed,
            channels_last=channels_last,
        )
        if not channels_last:
            yield from _layout(weight, touched, groups)
    if mask[1]:
        wide, narrow = (data, gradient) if transposed else (gradient, data)
        positions = wide.shape[0] * prod(wide.shape[2:])
        shape = (
            wide.shape[1] // groups,
            narrow.shape[1] // groups * prod(weight.shape[2:]),
            positions,
            groups,
        )
        sizes = tuple(map(float, shape))
        yield _of_groups(name, sizes, bytes_of(touched), weight, groups, channels_last, "weight")
        if not channels_last:
            yield from _layout(weight, touched, groups)
    if mask[2]:
        yield Call(name, "stream", (), nbytes(gradient), 0.0)
