"""Time of a state-space scan (Mamba-2): chunks of a sequence as small products, states between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.elementwise import stream_s

CHUNK = 128
"""Tokens of a chunk: `chunk_size` of Megatron-Core's mixer and of the released configurations."""
# FLOP of the kernels of one pass: of scores or their gradients (2 Q G N each), of products with a state
# (2 channels N each), of products inside a chunk (causal half, Q channels each).
_FORWARD_FLOP = (1.0, 2.0, 1.0)  # scores; states in and out; outputs
_BACKWARD_FLOP = (3.0, 5.0, 3.0)  # scores and states again, their gradients; those of x, scores and decay
# Bytes of a channel in 16 bit: convolution 4, chunk states 2, scan with gate 8, norm 4; backward norm 6,
# convolution again 4 and back 6, states again 2, gate 12, gradients of states 2, x 6, B 2, C 2, scores 4,
# decay 4.
# Of a state in fp32: written by a chunk 4, passed on 4 and 2, read by the scan 2; backward written and passed
# on again 12, its gradient written 4, passed back 12, and read with the states by x, B and C 6.
# Of an input or output of the state (2 G N): convolution, kernels of chunks; of the scores of a group, fp32.
_FORWARD_BYTES = (18.0, 12.0, 8.0, 8.0)  # of a channel, a state, an input of the state, a score
_BACKWARD_BYTES = (50.0, 34.0, 29.0, 24.0)
_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES = 7, 17
_KERNEL_SHARE = 0.25  # of flash attention's share of the peak, at most
_PROCESSOR_FLOPS = 0.3e12  # a second, of one processor: some 160 a cycle, whatever its matrix units could
_LARGE_CORES = 8  # a device of no more is made of whole cores, not of many processors


def scan_s(
    tokens: Any, channels: Any, state: Any, groups: Any, kernels: KernelModel
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one scan with its convolution and gated norm, forward and backward; no channels give 0.

    The kernels run one after another: what they compute and what they move add up. Their small products
    get faster with the number of processors, not with matrix units.

    Source
    ------
    Blocked algorithm: Dao and Gu 2024 (arXiv 2405.21060), section 6. Kernels and what each reads and writes:
    state-spaces/mamba e9594ce ssd_combined.py MambaSplitConv1dScanCombinedFn, as Megatron-LM d98e8a6
    core/ssm/mamba_mixer.py calls it. The pace of a processor is that of one dense hybrid on H100
    (docs/derivations/kernels.md); no scan was measured alone.
    """
    channels = np.asarray(channels, dtype=np.float64)
    reached = kernels.bf16_peak_flops_per_s * kernels.attn_fwd_eff * _KERNEL_SHARE
    few = np.asarray(kernels.num_sms) <= _LARGE_CORES
    rate = np.where(few, reached, np.minimum(reached, kernels.num_sms * _PROCESSOR_FLOPS))
    scores, states, inside = 2.0 * CHUNK * groups * state, 2.0 * channels * state, CHUNK * channels

    def one_way(flop: tuple[float, float, float], moved: tuple[float, ...], launches: int) -> np.ndarray:
        work = flop[0] * scores + flop[1] * states + flop[2] * inside
        channel, held, group, score = moved
        per_token = channel * channels + held * channels * state / CHUNK
        per_token = per_token + groups * (2.0 * group * state + score * CHUNK)
        seconds = tokens * work / rate + stream_s(tokens * per_token, kernels)
        return np.where(channels > 0, seconds + (launches - 1) * kernels.stream_launch_s, 0.0)

    forward = one_way(_FORWARD_FLOP, _FORWARD_BYTES, _FORWARD_LAUNCHES)
    return forward, one_way(_BACKWARD_FLOP, _BACKWARD_BYTES, _BACKWARD_LAUNCHES)
