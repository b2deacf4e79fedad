"""Instructions of kernels that do not stream at the bandwidth: narrow norms, permuting copies, column sums.

Such a kernel costs the processors so many instructions of a thread for each element or row. A device with
slow memory hides them behind its bytes; one with fast memory does not.

Source
------
Seconds of kernels of torch 2.11 on an H200 and an H100 (33.5e12 instructions of threads a second), in
profiles of networks (docs/device_steps.md). Each figure is one that both networks, or several kernels of
them, agree on; of a range the lower end is taken, rounded.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""How images, and weights of convolutions, of so many dimensions lie with their channels last."""
_NORMS = {aten.native_layer_norm.default: 1, aten.native_layer_norm_backward.default: 2}  # place of the shape
_ROW = 28_000.0
"""A row of a layer norm, which is a block of four warps however few columns it has. The H200 took 56,000
(1.67 and 1.70 ns in the two networks; backward, both kernels, 1.58 and 1.76), by which ConvNeXt and Swin on
RTX 3090 (timm, torch 1.10 to 1.12) come out 3 points too slow: half is taken."""
_BATCH_NORMS = {aten.native_batch_norm.default: 155.0, aten.native_batch_norm_backward.default: 125.0}
"""An element of a batch norm that cuDNN does not take, in bf16 with channels last:
156 to 190 and 127 to 167 in ResNet-50 with 256 and 32 images and MobileNetV2."""
_STRIDED = 90.0
"""An element whose place every operand computes by divisions: 94 to 116 in copies, sums and products, up to
150 where they also cast."""
_SUMMED = 45.0  # an element of a sum over rows: 58 and 67; less, for the reason of `_ROW`
_SINGLE = 50.0  # an element of a product that is loaded by itself, as rows do not begin at 4 bytes
_TILE = 128.0  # rows or columns that a block of a product makes: it loads what they share once
_DEPTHWISE = {"forward": 6.0, "input": 12.0, "weight": 4.5}
"""A multiply-add of a convolution of single channels, channels last: 5.9 with filters of 7 x 7 (ConvNeXt) and
7.9 with 3 x 3 (MobileNetV2), 12 and 20 for the gradient of its input, 4.6 and 11 for that of its weights."""
_DIRECT = {"forward": (205.0, 16.0), "input": (470.0, 10.5), "weight": (0.0, 56.0)}
"""An element that torch's own kernels of such convolutions make with channels first, and a tap of its filter
(for the gradient of weights: a multiply-add): MobileNetV3 and EfficientNet-B0 in fp16 on an H100, filters of
3 x 3 and 5 x 5, agree within 5 %, but for weights of 16 channels, which take 2.7 times as long."""
_LAYOUT = 75.0
"""An element of a tensor whose channels come last for a convolution: 60 (VGG-16) and 89 (ResNet-50)."""
_POOLS = {
    aten.max_pool2d_with_indices.default: (300.0, 27.0),
    aten.max_pool2d_with_indices_backward.default: (280.0, 10.0),
    aten.avg_pool2d.default: (390.0, 0.0),
    aten.avg_pool2d_backward.default: (620.0, 0.0),
}
"""An element that pooling makes, and a position of its window: 403 (2 x 2) and 542 (3 x 3) forward, 320 and
372 backward in VGG-16 and ResNet-50, in either layout; means over 2 x 2 in DenseNet-121."""
_COPIES = {aten.clone.default, aten._to_copy.default, aten.copy_.default}
_SUMS = {aten.sum.dim_IntList}


def issued_by(func: Any, args: tuple[Any, ...], out: Any, *, channels_last: bool) -> float:
    """Return the instructions of an operation that may take longer than its bytes; 0 where none do."""
    if func in _NORMS:
        return _ROW * args[0].numel() / max(1, prod(args[_NORMS[func]]))
    if func in _BATCH_NORMS:
        backward = "backward" in func.name()
        image, weight = args[int(backward)], args[1 + int(backward)]
        by_elements = (channels_last or _order(image)[-1:] == [1]) and not by_cudnn(image, weight)
        return _BATCH_NORMS[func] * image.numel() * by_elements
    out = out[0] if func is aten.max_pool2d_with_indices.default else out
    if not isinstance(out, torch.Tensor):
        return 0.0
    if func in _POOLS:
        element, place = _POOLS[func]
        window = args[2] if "backward" in func.name() else args[1]
        places = window[0] ** 2 if len(window) == 1 else prod(window)
        return (element + place * places) * out.numel()
    if func in _SUMS:
        summed, order = {dim % args[0].dim() for dim in args[1] or ()}, _order(args[0])
        return _SUMMED * args[0].numel() * (bool(summed) and bool(order) and order[-1] not in summed)
    if func is aten.roll.default:
        return _STRIDED * out.numel()
    if func in _COPIES or torch.Tag.pointwise in func.tags:
        operands = [value for value in args if isinstance(value, torch.Tensor) and value.numel() > 1]
        if any(_differs(operand, out, channels_last) for operand in operands):
            return _STRIDED * out.numel()
    return 0.0


def by_cudnn(image: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return whether cuDNN takes a batch norm: not in bf16, nor with weights that are none or in 16 bit.

    Source: torch 2.11, aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend.
    """
    return image.dtype is not torch.bfloat16 and weight is not None and weight.dtype is torch.float32


def issued_by_product(
    sizes: tuple[float, ...], matrices: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> float:
    """Return the instructions that loads and stores of single elements take in products of odd sizes.

    Of many products these are small, each a tile. Of one product no side is looked at, as it may be that of
    the samples, but how far rows lie apart: a matrix of odd rows is loaded for every tile of the other side.
    """
    m, n, k, count = sizes
    if out.element_size() != 2:
        return 0.0
    if count == 1:
        left, right = matrices
        loaded = (n * left.numel() * _has_odd_rows(left) + m * right.numel() * _has_odd_rows(right)) / _TILE
        return _SINGLE * (loaded + out.numel() * _has_odd_rows(out))
    return 0.0 if n % 2 == 0 and k % 2 == 0 else _SINGLE * count * (m * k + k * n + m * n)


def _has_odd_rows(matrix: torch.Tensor) -> bool:
    """Return whether every other row or column of a matrix in 16 bit does not begin at 4 bytes."""
    return matrix.dim() == 2 and min(matrix.shape) > 1 and max(matrix.stride()) % 2 == 1


def issued_by_depthwise(flops: float, gives: str, *, channels_last: bool) -> float:
    """Return the instructions of a convolution of single channels that gives its output or a gradient.

    `gives` is forward, input or weight.
    """
    return _DEPTHWISE[gives] * flops / 2.0 * channels_last


def issued_by_direct_depthwise(out: torch.Tensor, flops: float, gives: str) -> float:
    """Return the instructions of torch's own convolution of single channels, channels first."""
    element, tap = _DIRECT[gives]
    return element * out.numel() + tap * flops / 2.0


def issued_by_layout(touched: tuple[torch.Tensor, ...]) -> float:
    """Return the instructions that a change of layout takes."""
    return _LAYOUT * sum(tensor.numel() for tensor in touched)


def issued_by_bias(out: torch.Tensor) -> float:
    """Return the instructions of the sum of a bias of a convolution, a kernel of its own."""
    return _STRIDED * out.numel()


def issued_by_bias_sum(gradient: torch.Tensor) -> float:
    """Return the instructions of the gradient of such a bias."""
    return _SUMMED * gradient.numel()


def _differs(operand: torch.Tensor, out: torch.Tensor, channels_last: bool) -> bool:
    """Return whether an operand lies otherwise in memory than the result, or is repeated along it."""
    if operand.shape != out.shape:
        return True
    # images: convolutions on the meta device forget that channels are last
    if channels_last and out.dim() in CHANNELS_LAST:
        return False
    return _order(operand) != _order(out)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by their strides, longest first; those of one element have none."""
    return sorted(
        (dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1), key=tensor.stride, reverse=True
    )
