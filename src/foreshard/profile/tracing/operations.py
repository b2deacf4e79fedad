"""Sizes of one operation as torch calls it: which product it is, what it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any

import torch

from foreshard.profile.tracing.issued import (
    CHANNELS_LAST,
    by_cudnn,
    issued_by,
    issued_by_bias,
    issued_by_bias_sum,
    issued_by_depthwise,
    issued_by_direct_depthwise,
    issued_by_layout,
    issued_by_product,
)

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
_TILE_SIDE, _TILE_TAPS = 4, 3  # of a tile of an image, and of a filter, in Winograd's algorithm
_PASSES = {  # passes over the largest tensor beyond reading and writing each once: statistics come first
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,
    aten.cudnn_batch_norm.default: 1,
    aten.native_batch_norm_backward.default: 2,
    aten.native_group_norm.default: 1,
    aten.native_group_norm_backward.default: 2,
    aten.native_layer_norm_backward.default: 2,  # gradients of weight and bias are a kernel of their own
    aten._softmax_backward_data.default: 3,  # gradients times probabilities are a kernel of their own
}


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """Where a batch norm has its image, its weight and whether it trains."""

    image: int
    weight: int
    training: int
    backward: bool


_BATCH_NORMS = {
    aten.native_batch_norm.default: _BatchNorm(0, 1, 5, False),
    aten._native_batch_norm_legit.default: _BatchNorm(0, 1, 5, False),
    aten.native_batch_norm_backward.default: _BatchNorm(1, 2, 7, True),
}
_SOFTMAX = {  # where the dimension is, and passes beyond reading and writing each tensor once
    aten._softmax.default: (1, 2),
    aten._log_softmax.default: (1, 2),
    aten._softmax_backward_data.default: (2, 1),
    aten._log_softmax_backward_data.default: (2, 1),
}
_CACHED_ROW_BYTES = 2**18
"""A row that a block reads again from the device's cache: longer rows of two blocks on each of 108 to 132
processors exceed the 40 to 50 MB of an A100 or H100.

Source: torch 2.11, aten/src/ATen/native/cuda/SoftMax.cu: softmax_forward reads a row for its maximum, its sum
and its result; softmax_backward a row of gradients for their sum and for the result.
"""
_PICKED = {  # what is read of the first tensor is as much as is made, or as this argument's
    aten.embedding.default: None,
    aten.gather.default: None,
    aten.index_select.default: None,
    aten.index.Tensor: None,
    aten.nll_loss_forward.default: 1,
}
_PLACED = (aten.scatter_add.default, aten.scatter_add_.default)
"""Add to places of a tensor, of which they touch no others: autograd's gather_backward adds in place."""
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
        last = channels_last or is_channels_last(args[:1])
        filters = _Filters(args[1], args[0], args[3], args[5], args[6], args[8], last)
        yield _convolution(name, args[0], out, filters, transposed=filters.transposed)
        yield from filters.layout((args[0], args[1], out))
        if args[2] is not None and not filters.is_direct:
            yield Call("bias", "stream", (), 2.0 * nbytes(out), 0.0, issued=issued_by_bias(out))
    elif func is aten.convolution_backward.default:
        last = channels_last or is_channels_last(args[1:2])
        filters = _Filters(args[2], args[1], args[4], args[6], args[7], args[9], last)
        yield from _convolution_backward(name, args[0], filters, args[10])
    elif _by_channels(func, args, channels_last):
        norm = _BATCH_NORMS[func]
        image, weight = args[norm.image], args[norm.weight]
        channels, own = image.shape[1], not by_cudnn(image, weight)
        sizes = (channels, image.numel() / channels, image.element_size(), norm.backward, own)
        yield Call(name, "batch_norm", tuple(map(float, sizes)), _moved(func, args, out), 0.0)
    else:
        moved = _moved(func, args, out)
        kernels = len(args[2]) if func is aten.roll.default and len(args) > 2 else 1  # one for each dimension
        issued = kernels * issued_by(func, args, out, channels_last=channels_last)
        yield Call(name, "stream", (), kernels * moved, 0.0, issued=issued)


def _moved(func: Any, args: tuple[Any, ...], out: Any) -> float:
    """Return the bytes that an operation reads and writes."""
    if func in _PLACED:
        return nbytes(args[2]) + 3.0 * args[2].numel() * args[0].element_size()
    if func is aten.nll_loss_backward.default:  # takes the probabilities for their shape alone
        return nbytes(args[2]) + bytes_of(out)
    moved = bytes_of(args) + bytes_of(out)
    if func in _PICKED:
        index = _PICKED[func]
        moved -= max(0.0, nbytes(args[0]) - nbytes(out if index is None else args[index]))
    if func in _SOFTMAX:
        place, passes = _SOFTMAX[func]
        row_bytes = args[0].shape[args[place]] * args[0].element_size() if args[0].dim() else 0
        moved += passes * nbytes(args[0]) * (row_bytes > _CACHED_ROW_BYTES)
    if func in _PASSES and not _is_settled(func, args):
        moved += _PASSES[func] * nbytes(args[0])
    return moved + (bytes_of(out) if func in _FILLED else 0.0)


def _is_settled(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a forward batch norm by statistics that are known: one pass."""
    norm = _BATCH_NORMS.get(func)
    return norm is not None and not norm.backward and not args[norm.training]


def _by_channels(func: Any, args: tuple[Any, ...], channels_last: bool) -> bool:
    """Return whether an operation is a batch norm in training, of images with channels first.

    A block of threads then takes a channel.
    """
    norm = _BATCH_NORMS.get(func)
    if norm is None or channels_last or not args[norm.training]:
        return False
    image = args[norm.image]
    return image.dim() > 2 and not is_channels_last([image])


def is_channels_last(tensors: Iterable[Any]) -> bool:
    """Return whether any of images, or of weights of convolutions, has its channels last."""
    return any(
        tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()]) and not tensor.is_contiguous()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.dim() in CHANNELS_LAST
    )


def channels_last(made: Any) -> Any:
    """Return a tensor with its channels last if it is an image, else as it is."""
    if not isinstance(made, torch.Tensor) or made.dim() not in CHANNELS_LAST:
        return made
    return torch.empty_like(made, memory_format=CHANNELS_LAST[made.dim()])


def laid_out(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return what an operation makes as it lies on a device: the meta device forgets channels last.

    Source: torch 2.11, aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    if func is aten.convolution.default and is_channels_last(args[:2]):
        return channels_last(out)
    if func is aten.convolution_backward.default and is_channels_last(args[1:3]):
        return (channels_last(out[0]), *out[1:])
    return out


def nbytes(tensor: Any) -> float:
    """Return the bytes that an operation touches of a tensor: an expanded one is read once."""
    if tensor.layout is torch.sparse_coo:
        return nbytes(tensor._indices()) + nbytes(tensor._values())
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def storage_of(tensor: Any) -> int:
    """Return a number that tensors of the same memory share."""
    return int(tensor.untyped_storage()._cdata)


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


def _matrices(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a product multiplies: the last two tensors of up to three, of which the first is added."""
    left, right = [value for value in args[:3] if isinstance(value, torch.Tensor)][-2:]
    return left, right


def _product(name: str, sizes: tuple[float, ...], args: Any, out: Any) -> Call:
    return Call(
        name,
        "experts" if name == "_grouped_mm" else "product",
        tuple(map(float, sizes)),
        bytes_of((args, out)),
        2.0 * prod(sizes),
        wide=out.dtype is torch.float32,
        issued=issued_by_product(sizes, _matrices(args), out),
    )


@dataclass(frozen=True, slots=True)
class _Filters:
    """The weight of a convolution and how it passes over an image."""

    weight: torch.Tensor
    image: torch.Tensor  # what the convolution reads
    stride: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    channels_last: bool

    @property
    def width(self) -> int:
        """Channels of a group, the fewer of those read and made."""
        return int(min(self.weight.shape[0] // self.groups, self.weight.shape[1]))

    @property
    def taps(self) -> int:
        """Positions of a filter."""
        return prod(self.weight.shape[2:])

    def winograd_tiles(self, made: torch.Tensor) -> float:
        """Return the tiles of an image for Winograd's algorithm, 0 where libraries do not have it.

        Source: NVIDIA, cuDNN 7 Developer Guide, CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD and _NONFUSED.
        """
        plain = set(self.stride) == {1} and set(self.dilation) == {1} and self.groups == 1
        if not plain or self.transposed or self.weight.shape[2:] != (_TILE_TAPS, _TILE_TAPS):
            return 0.0
        return float(made.shape[0] * prod(ceil(side / _TILE_SIDE) for side in made.shape[2:]))

    @property
    def is_direct(self) -> bool:
        """Whether it runs in torch's own kernels for single channels: cuDNN takes few with channels first.

        Source: torch 2.11, aten/src/ATen/native/Convolution.cpp, use_cudnn_depthwise.
        """
        if self.transposed or self.channels_last or not 1 < self.groups == self.image.shape[1]:
            return False
        channels, side, filter_side = self.image.shape[1], self.image.shape[-1], self.weight.shape[-1]
        taken = self.image.dtype is torch.float16 and channels >= 32 and set(self.dilation) == {1}
        if self.image.dim() == 3:  # one row of pixels
            return not (taken and set(self.stride) == {1})
        taken &= side >= 7 and filter_side in (1, 3, 5) and self.weight.shape[2] == filter_side
        many = filter_side > 1 and (channels >= 512 or (channels >= 256 and side >= 28))
        return not (taken and (set(self.stride) == {1} or (set(self.stride) == {2} and many)))

    def layout(self, touched: tuple[Any, ...]) -> Iterator[Call]:
        """Yield the change of layout that matrix units ask for: channels last, for tensors that are not.

        Kernels for few channels to a group take either. The size is the positions of an image whose channels
        a filter of one position multiplies as they lie, if these are enough; else 0. Source: NVIDIA Deep
        Learning Performance, Convolutional Layers User's Guide, "Tensor layouts in memory".
        """
        grouped = self.width >= _MATRIX_CHANNELS and _on_matrix_units(self.width, self.groups)
        pointwise = self.groups == 1 and self.taps == 1 and set(self.stride) == {1}
        sizes = (float(pointwise * prod(self.image.shape[2:])), float(self.image.element_size()))
        if not self.channels_last and (self.groups == 1 or grouped):
            issued = issued_by_layout(touched)
            yield Call("layout", "layout", sizes, 2.0 * bytes_of(touched), 0.0, issued=issued)


def _convolution(
    name: str, data: torch.Tensor, out: torch.Tensor, filters: _Filters, *, transposed: bool
) -> Call:
    """Return the matrix product of a convolution, or of the gradient of its input.

    Every output position multiplies a patch of the input with the weights of its group. A transposed one is
    the gradient of a convolution from its output to its input, and takes the positions of its own input.
    """
    groups, taps = filters.groups, filters.taps
    positions = out.shape[0] * prod(out.shape[2:]) if not transposed else data.shape[0] * prod(data.shape[2:])
    inside, outside = data.shape[1] // groups, out.shape[1] // groups
    product = (positions, outside, inside * taps, groups)
    if transposed:
        product = (positions, outside * taps, inside, groups)
    spread = prod(filters.stride) if name != "convolution" and transposed else 1
    tiles = filters.winograd_tiles(out)
    sizes = (*product, taps, spread, tiles, *((outside, inside) if tiles else (0, 0)))
    moved = bytes_of((data, filters.weight, out))
    gives = "forward" if name == "convolution" else "input"
    return _of_groups(name, tuple(map(float, sizes)), moved, filters, out, gives)


def _of_groups(
    name: str, sizes: tuple[float, ...], moved: float, filters: _Filters, out: torch.Tensor, gives: str
) -> Call:
    """Return a convolution by the kernels that run its groups; it gives `forward`, or a gradient."""
    width, groups = filters.width, filters.groups
    kind, flops, issued = "convolution", 2.0 * prod(sizes[:4]), 0.0
    if groups > 1 and width == 1:
        kind, sizes = "depthwise", (float(prod(filters.weight.shape[2:-1])),)
        issued = issued_by_depthwise(flops, gives, channels_last=filters.channels_last)
        if filters.is_direct:
            sizes, issued = (1.0,), issued_by_direct_depthwise(out, flops, gives)
    elif not _on_matrix_units(width, groups):
        kind, sizes = "grouped", (float(width), float(filters.channels_last))
    wide = filters.weight.dtype is torch.float32
    return Call(name, kind, sizes, moved, flops, wide=wide, issued=issued)


def _on_matrix_units(width: int, groups: int) -> bool:
    """Return whether libraries have a kernel on matrix units for groups of so many channels.

    Those of cuDNN 8 take blocks of whole groups: networks whose channels are no multiple of the block
    (RegNet) run 2 to 20 times as long for a FLOP as those whose channels are (ResNeXt).
    """
    return groups == 1 or (width <= _GROUP_CHANNELS and width * groups % _BLOCK_CHANNELS == 0)


def _convolution_backward(
    name: str, gradient: torch.Tensor, filters: _Filters, mask: Sequence[bool]
) -> Iterator[Call]:
    data, weight, groups, transposed = filters.image, filters.weight, filters.groups, filters.transposed
    touched = (gradient, data, weight)
    if mask[0]:
        yield _convolution(name, gradient, data, filters, transposed=not transposed)
        yield from filters.layout(touched)
    if mask[1]:
        wide, narrow = (data, gradient) if transposed else (gradient, data)
        positions = wide.shape[0] * prod(wide.shape[2:])
        made, read = wide.shape[1] // groups, narrow.shape[1] // groups
        tiles = filters.winograd_tiles(data)
        product = (made, read * filters.taps, positions, groups)
        shape = (*product, filters.taps, 1, *((made, read) if tiles else (0, 0)), tiles)
        yield _of_groups(name, tuple(map(float, shape)), bytes_of(touched), filters, weight, "weight")
        yield from filters.layout(touched)
    if mask[2]:
        yield Call(name, "stream", (), nbytes(gradient), 0.0, issued=issued_by_bias_sum(gradient))
