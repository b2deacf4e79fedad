"""Time of traced operations: products, convolutions, attention, and what streams through memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.attention import backward_of_forward_s, flash_attention_forward_s, seen_keys
from foreshard.cost.convolutions import convolution_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.recurrences import RecurrentKernels, recurrence_s
from foreshard.spec.traced_module import Operation


@dataclass(frozen=True, slots=True)
class _Direct:
    """Kernels of grouped convolutions in one layout.

    Source
    ------
    Fitted by scripts/fit_grouped.py: direct kernels on RegNet's rows of timm (RTX 3090, PyTorch 1.10 to
    1.12); on Hopper, where cuDNN 9 runs one group after the other on matrix units between copies, on the
    kernels of bench/device_groups.csv (H100, PyTorch 2.11).
    """

    share: float  # FLOP/s, of those outside the matrix units
    channels: float  # of a group that finding a tap of the filter costs as much as


@dataclass(frozen=True, slots=True)
class _ChannelNorm:
    """A kernel that norms each channel of a batch by one block of threads, channels first.

    Source
    ------
    Kernels of an H100 (torch 2.11). cuDNN's in fp16 (TF32 has the same): 1.34 to 1.42 elements a nanosecond
    forward and .70 to .73 backward in blocks alone (ResNet-50, VGG-16, MobileNetV3, EfficientNet-B0; 16 to
    128 channels), 1.67 to 1.73 and 1.07 to 1.35 on a processor with several. Torch's own, which run in bf16:
    ResNet-50 and MobileNetV2, within 8 %.
    """

    alone: float  # instructions of threads for an element of a block that has a processor alone
    shared: float  # with other blocks
    once_bytes: float = 0.0  # a channel of so many bytes is read once and kept: such kernels stream
    second: float = 0.0  # instructions for an element of a second kernel, which all processors share


_ALIGNED_BYTES, _ALIGNED_POSITIONS = 16.0, 2.0
"""What a matrix unit loads of an image at once where a convolution is the product of its channels with
channels first: 16 bytes up to cuDNN 8 (NVIDIA, Matrix Multiplication Background, "Requirements to use Tensor
Cores"), two positions from cuDNN 9 on, by kernels of ResNet-50 (cutlass ... align2; 7 x 7 are converted)."""
_CUDNN_NORMS = (
    _ChannelNorm(alone=183.0, shared=149.0, once_bytes=2.0**17),
    _ChannelNorm(alone=357.0, shared=215.0, once_bytes=2.0**15),
)
_TORCH_NORMS = (
    _ChannelNorm(alone=190.0, shared=155.0, second=100.0),
    _ChannelNorm(alone=420.0, shared=355.0),
)
"""Of cuDNN and of torch itself, each forward and backward."""


_STEP_BY_STEP = RecurrentKernels()
_FIRST = _Direct(share=1.55, channels=153.0)
_LAST = _Direct(share=0.245, channels=148.0)
_FIRST_APART = _Direct(share=6.81, channels=214.0)
_LAST_APART = _Direct(share=5.29, channels=198.0)


def operations_s(
    operations: Sequence[Operation],
    samples: float,
    kernels: KernelModel,
    vector_flops_per_s: float,
    *,
    outside: KernelModel | None = None,
    matrix_units: bool = True,
    issued_per_s: float = 0.0,
    processors: int = 0,
    cudnn_9: bool = False,
    recurrent: RecurrentKernels = _STEP_BY_STEP,
) -> np.ndarray:
    """Seconds of each operation for a micro-batch of `samples`; shape (operations,).

    Parameters
    ----------
    operations : sequence of Operation
    samples : float
    kernels : KernelModel
    vector_flops_per_s : float
        Rate outside the matrix units: convolutions with few channels to a group run there where that is
        faster, which libraries choose.
    outside : KernelModel, optional
        Of products in 32 bit outside the matrix units; without one, as `kernels`.
    matrix_units : bool
        Whether 16-bit products run on units of their own, which ask for a layout.
    issued_per_s : float
        Instructions of threads that the device issues a second; 0: not known, they bind nothing.
    processors : int
        Multiprocessors that share these; 0: not known.
    cudnn_9 : bool
        Whether matrix units take groups of any width, one after the other, and channels first where two
        positions lie together.
    recurrent : RecurrentKernels
        How recurrent layers run.

    Source
    ------
    A convolution is the product of its patches and its weights, formed on the fly (implicit GEMM: Chetlur et
    al. 2014, arXiv 1410.0759), so that it moves only its own tensors.
    """
    found = np.zeros(len(operations))
    one_per_s = issued_per_s / processors if processors else 0.0
    prices = _PRICES | {"grouped": partial(_grouped, apart=cudnn_9)}
    prices |= {"convolution": partial(_convolutions, outside=outside or kernels)}
    prices |= {"recurrence": partial(_recurrences, library=recurrent)}
    prices |= {"batch_norm": partial(_batch_norms, processors=processors, one_per_s=one_per_s)}
    for kind, price in prices.items():
        which = [i for i, operation in enumerate(operations) if operation.kind == kind]
        if which:
            found[which] = price([operations[i] for i in which], samples, kernels, vector_flops_per_s)
    if issued_per_s > 0.0:
        issued = np.array([operation.issued.at(samples) for operation in operations])
        found = np.maximum(found, issued / issued_per_s)
    kept = [_keeps_layout(operation, matrix_units, cudnn_9) for operation in operations]
    return np.where(kept, 0.0, found)


def _keeps_layout(operation: Operation, matrix_units: bool, cudnn_9: bool) -> bool:
    """Return whether an operation is a change of layout that does not happen."""
    if operation.kind != "layout":
        return False
    positions, element_bytes = (size.fixed for size in operation.sizes)
    together = _ALIGNED_POSITIONS if cudnn_9 else _ALIGNED_BYTES / element_bytes
    return not matrix_units or (positions > 0.0 and positions % together == 0.0)


def _products(operations: list[Operation], samples: float, kernels: KernelModel, _: float) -> Any:
    rows, columns, inner, count = _sizes(operations, samples)
    moved = _bytes(operations, samples)
    return gemm_s(rows, columns, inner, kernels, batch=count, moved_bytes=moved)


def _experts(operations: list[Operation], samples: float, kernels: KernelModel, _: float) -> Any:
    rows, columns, inner, count = _sizes(operations, samples)
    return grouped_gemm_s(rows * count, count, columns, inner, kernels)


def _convolutions(
    operations: list[Operation], samples: float, kernels: KernelModel, vector: float, *, outside: KernelModel
) -> Any:
    sizes, moved = _sizes(operations, samples), _bytes(operations, samples)
    if kernels is outside:
        of_weights = np.array([operation.sizes[2].each > 0 for operation in operations])
        return convolution_s(sizes, moved, of_weights, kernels)
    rows, columns, inner, count = sizes[:4]
    direct_s = np.maximum(_flops(operations, samples) / (vector * outside.gemm_eff), stream_s(moved, kernels))
    return np.minimum(gemm_s(rows, columns, inner, kernels, batch=count, moved_bytes=moved), direct_s)


def _depthwise(operations: list[Operation], samples: float, kernels: KernelModel, _: float) -> Any:
    """Price convolutions of single channels: each row of the filter streams the image again."""
    (rows,) = _sizes(operations, samples)
    return stream_s(_bytes(operations, samples) * rows, kernels)


def _grouped(
    operations: list[Operation], samples: float, kernels: KernelModel, vector: float, *, apart: bool
) -> Any:
    """Price convolutions in groups that no kernel on matrix units takes at once.

    A direct kernel finds the place of every tap of the filter anew, so that a tap costs as if its group had
    `_Direct.channels` more; copies of every group before and after its products cost alike.
    """
    width, channels_last = _sizes(operations, samples)
    first, last = (_FIRST_APART, _LAST_APART) if apart else (_FIRST, _LAST)
    share = np.where(channels_last > 0, last.share, first.share)
    more = np.where(channels_last > 0, last.channels, first.channels)
    flops = _flops(operations, samples)
    direct_s = flops * (1.0 + more / width) / np.minimum(share * vector, kernels.peak_flops_per_s)
    return np.maximum(direct_s, stream_s(_bytes(operations, samples), kernels))


def _batch_norms(
    operations: list[Operation],
    samples: float,
    kernels: KernelModel,
    vector: float,
    *,
    processors: int,
    one_per_s: float,
) -> Any:
    """Price batch norms with channels first: few channels leave processors idle."""
    streamed_s = _streams(operations, samples, kernels, vector)
    if one_per_s <= 0.0:
        return streamed_s
    channels, elements, element_bytes, backward, own = _sizes(operations, samples)
    run = [(_TORCH_NORMS if o else _CUDNN_NORMS)[int(b)] for o, b in zip(own, backward, strict=True)]
    alone, shared, once_bytes, second = np.array([(k.alone, k.shared, k.once_bytes, k.second) for k in run]).T
    waves = np.ceil(channels / processors)
    blocks_s = elements * np.maximum(alone, waves * shared) / one_per_s
    blocks_s += elements * channels * second / (processors * one_per_s)
    kept = elements * element_bytes <= once_bytes
    return np.where(kept, streamed_s, np.maximum(streamed_s, blocks_s))


def _recurrences(
    operations: list[Operation], samples: float, kernels: KernelModel, _: float, *, library: RecurrentKernels
) -> Any:
    return recurrence_s(
        _sizes(operations, samples),
        _bytes(operations, samples),
        kernels,
        library=library,
        backward=np.array([operation.name.endswith("backward") for operation in operations]),
        kept=library.keeps(operations, samples),
    )


def _attention(operations: list[Operation], samples: float, kernels: KernelModel, _: float) -> Any:
    sequences, heads, queries, keys, width, causal = _sizes(operations, samples)
    forward_s = flash_attention_forward_s(
        sequences, heads, heads, queries, keys, width, width, kernels, causal=causal > 0
    )
    backward = np.array([operation.name.endswith("backward") for operation in operations])
    seen = seen_keys(queries, keys, causal=causal > 0)
    return np.where(backward, backward_of_forward_s(forward_s, kernels, seen), forward_s)


def _streams(operations: list[Operation], samples: float, kernels: KernelModel, _: float) -> Any:
    return stream_s(_bytes(operations, samples), kernels)


_PRICES = {
    "product": _products,
    "experts": _experts,
    "depthwise": _depthwise,
    "attention": _attention,
    "stream": _streams,
    "layout": _streams,
}


def _sizes(operations: list[Operation], samples: float) -> np.ndarray:
    """Return the sizes of operations of one kind, shape (sizes, operations)."""
    return np.array([[size.at(samples) for size in operation.sizes] for operation in operations]).T


def _bytes(operations: list[Operation], samples: float) -> np.ndarray:
    return np.array([operation.bytes.at(samples) for operation in operations])


def _flops(operations: list[Operation], samples: float) -> np.ndarray:
    return np.array([operation.flops.at(samples) for operation in operations])
