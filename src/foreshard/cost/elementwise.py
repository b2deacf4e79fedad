"""Bytes that memory-bound operations move, and the time to stream them."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.cost.kernels import KernelModel


def stream_s(num_bytes: Any, kernels: KernelModel, *, num_kernels: Any = 1) -> np.ndarray:
    """Seconds to stream bytes through elementwise kernels: bytes at the achievable bandwidth, plus launch.

    Parameters
    ----------
    num_bytes : array_like, bytes
        Read and written; zero gives 0 seconds.
    kernels : KernelModel
    num_kernels : array_like
        Launches the bytes are spread over.

    Returns
    -------
    ndarray of float64, seconds

    Source
    ------
    Fitted on NeuSight elementwise kernels; docs/derivations/kernels.md.
    """
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    busy_s = num_bytes / (kernels.stream_eff * kernels.memory_bytes_per_s)
    return np.where(num_bytes > 0, busy_s + kernels.stream_launch_s * np.asarray(num_kernels), 0.0)


def norm_bytes(
    num_elements: Any, *, bytes_per_element: Any = 2, backward: bool = False, fused: Any = True
) -> Any:
    """Bytes of a layer norm or RMS norm.

    Fused kernels read and write once; backward reads input and gradient and writes one. The kernels of
    eager torch read the input twice, and the gradient and input twice backward.

    Source: operands; the second read of eager kernels shows in NeuSight rows (docs/derivations/kernels.md),
    its backward is counted, not measured.
    """
    once, twice = (3.0, 5.0) if backward else (2.0, 3.0)
    return num_elements * bytes_per_element * np.where(fused, once, twice)


def residual_bytes(num_elements: Any, *, bytes_per_element: Any = 2) -> Any:
    """Bytes of a residual addition, or of joining its gradients backward: two reads, one write.

    Source: operands of the addition.
    """
    return num_elements * bytes_per_element * 3.0


def activation_bytes(
    num_elements: Any, *, gated: Any = False, bytes_per_element: Any = 2, backward: bool = False
) -> Any:
    """Bytes of an activation with `num_elements` outputs; gated (SwiGLU) reads two inputs per output.

    Source: operands of a fused kernel: forward inputs + output; backward inputs + gradient + input gradients.
    """
    inputs = np.where(gated, 2.0, 1.0)
    return num_elements * bytes_per_element * (2.0 * inputs + 1.0 if backward else inputs + 1.0)


def dropout_bytes(num_elements: Any, *, bytes_per_element: Any = 2) -> Any:
    """Bytes of dropout, forward or backward: read, write and a mask of one byte.

    Source: torch keeps the mask as bool.
    """
    return num_elements * (2.0 * bytes_per_element + 1.0)


def rope_bytes(num_elements: Any, *, bytes_per_element: Any = 2) -> Any:
    """Bytes of rotary embedding of `num_elements` of q and k, forward or backward: read and write.

    Source: fused kernel; the angles are shared by all heads.
    """
    return num_elements * bytes_per_element * 2.0


def softmax_bytes(
    num_elements: Any, *, bytes_per_element: Any = 2, backward: bool = False, fused: Any = True
) -> Any:
    """Bytes of a softmax: read and write; backward reads output and gradient, writes one.

    Eager torch reads its input twice forward.

    Source: operands; the second read shows in NeuSight rows (docs/derivations/kernels.md).
    """
    if backward:
        return num_elements * bytes_per_element * 3.0
    return num_elements * bytes_per_element * np.where(fused, 2.0, 3.0)


def embedding_bytes(num_elements: Any, *, bytes_per_element: Any = 2, backward: bool = False) -> Any:
    """Bytes of looking up tokens (`num_elements` = tokens x hidden): gather; backward adds into the table.

    Source: forward row read + write; backward gradient read + table row read and write.
    """
    return num_elements * bytes_per_element * (3.0 if backward else 2.0)


def cross_entropy_bytes(num_logits: Any, *, fused: Any = False) -> Any:
    """Bytes of the loss, forward and backward together, per logit on this rank.

    Unfused 14: 16-bit logits read (2), fp32 copy written (4) and read for the sum of exponentials (4),
    read once more and 16-bit gradient written (2 + 2). Fused 6: two reads and a write in 16 bit.

    Source: counted in docs/derivations/kernels.md; 14 also fits pipelined training runs.
    """
    return num_logits * np.where(fused, 6.0, 14.0)


def adam_bytes(
    num_parameters: Any, *, gradient_bytes: Any = 4, parameter_bytes: Any = 2, state_bytes: Any = 4
) -> Any:
    """Bytes of an Adam step over the parameters this rank updates.

    Gradient read, master weight and two moments read and written in fp32 (`state_bytes` each), training
    weight written: 30 bytes with 4-byte gradients and 16-bit weights.

    Source: operands of apex FusedAdam with master weights.
    """
    return num_parameters * (gradient_bytes + 6.0 * state_bytes + parameter_bytes)


def main_gradient_bytes(num_parameters: Any) -> Any:
    """Bytes of adding one micro-batch into fp32 main gradients: read and write of 4 bytes.

    Source: operands; fused into the weight-gradient product in Megatron, where it is extra traffic.
    """
    return num_parameters * 8.0


def fp8_cast_bytes(activation_elements: Any, weight_elements: Any) -> Any:
    """Bytes of quantising the operands of one matrix product to 8 bits.

    3 bytes per activation element (read 2, write 1) and 0.9 per weight element, whose cast is kept
    over the micro-batches of a step in part.

    Source: traffic of Transformer Engine casts; weight share from the training rows named in
    docs/derivations/kernels.md.
    """
    return activation_elements * 3.0 + weight_elements * 0.9
