"""Time of a state-space scan (Mamba-2): chunks of a sequence as small products, states between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.elementwise import stream_s

CHUNK = 128
"""Tokens of a chunk: `chunk_size` of Megatron-Core's mixer and of the released configurations."""
_LAUNCHES = 6  # convolution, chunk states, passing, scores, scan, norm
_KERNEL_SHARE = 0.25  # of flash attention's share of the peak: generated kernels, products of 64 channels
_STATE_BYTES = 16.0  # of a state in fp32: written by a chunk, read and written on passing, read by the scan
_CHANNEL_BYTES = 16.0  # of a channel in 16 bit: convolution 4, chunk states 2, scan 4 and 2, norm 4
_BACKWARD = 3.5  # convolution and states again, as the fused kernel keeps neither, then 2.5 times the work


def scan_s(
    tokens: Any, channels: Any, state: Any, groups: Any, kernels: KernelModel
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one scan with its convolution and gated norm, forward and backward; no channels give 0.

    The kernels run one after another: what they compute and what they move add up.

    Source
    ------
    Products and states of the blocked algorithm: Dao and Gu 2024 (arXiv 2405.21060), section 6; the backward
    builds them again in Megatron-Core's mixer (`use_mem_eff_path`). Its rates are assumed, no scan was
    measured alone.
    """
    inside = CHUNK * (groups * state + np.asarray(channels, dtype=np.float64))  # causal half of 2 QN, 2 QP
    across = 4.0 * channels * state
    rate = kernels.bf16_peak_flops_per_s * kernels.attn_fwd_eff * _KERNEL_SHARE
    states = _STATE_BYTES * channels * state / CHUNK
    moved = tokens * (_CHANNEL_BYTES * channels + 8.0 * 2.0 * groups * state + states)
    forward = tokens * (inside + across) / rate + stream_s(moved, kernels)
    forward = np.where(np.asarray(channels) > 0, forward + (_LAUNCHES - 1) * kernels.stream_launch_s, 0.0)
    return forward, _BACKWARD * forward
