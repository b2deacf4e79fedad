"""Time of attention: fused (flash) kernels, and the unfused chain of products and softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.learned import attention_features, corrected_s
from foreshard.cost.tables import tabled_s

BACKWARD_FLOPS = 2.5
"""Of a flash backward over its forward."""
_QUERY_TILE = 128  # query rows of one flash attention tile

# Score traffic of the unfused chain, bytes per score in 16 bit: read and write, mask of one byte.
_SOFTMAX_BYTES, _DROPOUT_BYTES = (4.0, 6.0), 5.0
# Operation by operation in model code of transformers: scale 4, mask 4, softmax in 32 bit 6, narrow 6;
# backward widen 6, softmax 10, scale 4. Under autocast scores are widened apart: 8 more each way.
_PLAIN_SOFTMAX_BYTES, _AUTOCAST_SOFTMAX_BYTES = (20.0, 20.0), (28.0, 28.0)
# In 32 bit, of a score: scale 8, mask 8, softmax 8; backward softmax 12, mask 8, scale 8. Scores in 16 bit
# are widened before and narrowed after, 6 each.
_WIDE_SOFTMAX_BYTES, _CASTS_BYTES = (24.0, 28.0), 12.0


def attended_pairs(q_len: Any, kv_len: Any, *, causal: Any, window: Any = 0) -> np.ndarray:
    """Query-key pairs of one head that are not masked, the queries being the last of the keys.

    A causal query sees keys up to its own position, `window` of them on each masked side (0 or None: all). A
    causal square counts half its area, as FLOP conventions do.

    Source
    ------
    Area under the mask; derived in docs/derivations/kernels.md.
    """
    q_len, kv_len = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
    reach = np.asarray(0.0 if window is None else window, dtype=np.float64)
    reach = np.where(reach > 0, reach, np.inf)
    unseen = np.maximum(kv_len - q_len, 0.0)
    triangle = _seen_up_to(kv_len, reach) - _seen_up_to(unseen, reach)
    band = q_len * np.minimum(kv_len, 2.0 * reach)
    return np.where(causal, triangle, band)


def _seen_up_to(position: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Return the integral of min(position, reach)."""
    seen = np.minimum(position, reach)
    return seen * (position - 0.5 * seen)


def seen_keys(q_len: Any, kv_len: Any, *, causal: Any, window: Any = 0) -> np.ndarray:
    """Return twice the keys that a query sees in the mean: the length of a causal sequence."""
    return 2.0 * attended_pairs(q_len, kv_len, causal=causal, window=window) / np.maximum(q_len, 1.0)


def flash_attention_forward_s(
    batch: Any,
    num_heads: Any,
    num_kv_heads: Any,
    q_len: Any,
    kv_len: Any,
    head_dim: Any,
    value_head_dim: Any,
    kernels: KernelModel,
    *,
    causal: Any,
    window: Any = 0,
) -> np.ndarray:
    """Seconds of one fused attention forward: two products over the pairs that are not masked.

    Each query row costs its pairs plus half of `attn_s0`; the exponential of a score costs `attn_d0` head
    dimensions; the last `attn_tail` query tiles of full length find the other processors idle. Never less
    than moving q, k, v and the output. Sizes are those on this rank; any zero gives 0 seconds. A measured
    table (`cost.tables`) gives the time of the sizes that it covers.

    Source
    ------
    Derived in docs/derivations/kernels.md; fitted on aiconfigurator prefill attention.
    """
    batch, q_len, kv_len = (np.asarray(size, dtype=np.float64) for size in (batch, q_len, kv_len))
    pairs = attended_pairs(q_len, kv_len, causal=causal, window=window)
    rows = batch * num_heads
    dims = np.asarray(head_dim, dtype=np.float64) + value_head_dim
    seen = seen_keys(q_len, kv_len, causal=causal, window=window)
    longest = np.minimum(q_len, _QUERY_TILE) * np.minimum(kv_len, seen)
    work = rows * (pairs + 0.5 * kernels.attn_s0 * q_len) + kernels.attn_tail * kernels.num_sms * longest
    # Normalised so that a head dimension of 128 costs its own products.
    flops = work * (dims + 2.0 * kernels.attn_d0) * (256.0 / (128.0 + kernels.attn_d0))
    compute_s = flops / (kernels.bf16_peak_flops_per_s * kernels.attn_fwd_eff)
    moved = 2.0 * dims * (rows * q_len + batch * num_kv_heads * kv_len)
    memory_s = moved / (kernels.stream_eff * kernels.memory_bytes_per_s)
    busy_s = np.maximum(compute_s, memory_s) + kernels.attn_launch_s
    if np.count_nonzero(kernels.attn_learned):
        with np.errstate(divide="ignore"):
            features = attention_features(
                rows, batch * num_kv_heads, q_len, kv_len, 0.5 * dims, kernels.num_sms
            )
        serving = np.asarray(kernels.attn_learned) > 1
        busy_s = corrected_s("attention", busy_s, [*features, serving], kernels.attn_learned)
    if np.count_nonzero(kernels.attn_table):
        form = whole_causal(q_len, kv_len, head_dim, value_head_dim, causal=causal, window=window)
        sizes = (batch, num_heads, num_kv_heads, np.where(form, q_len, 0.0), head_dim)
        busy_s = tabled_s(busy_s, kernels.attn_table, sizes)
    return np.where(rows * pairs * dims > 0, busy_s, 0.0)


def whole_causal(
    q_len: Any, kv_len: Any, head_dim: Any, value_head_dim: Any, *, causal: Any, window: Any = 0
) -> Any:
    """Return whether attention is of the kind that measured tables hold: causal, of a whole sequence."""
    reach = np.asarray(0.0 if window is None else window, dtype=np.float64)
    unmasked = (reach <= 0) | (reach >= kv_len)
    same = (np.asarray(q_len) == kv_len) & (np.asarray(head_dim) == value_head_dim)
    return np.asarray(causal, dtype=bool) & same & unmasked


def backward_of_forward_s(forward_s: np.ndarray, kernels: KernelModel, seen: Any = math.inf) -> np.ndarray:
    """Return the backward of a fused attention whose forward takes `forward_s`: 2.5 times its work.

    Parameters
    ----------
    forward_s : ndarray
    kernels : KernelModel
    seen : array_like
        Twice the keys that a query sees in the mean, which is the length of a causal sequence: a query row
        costs `attn_bwd_fixed` times what it does in the forward beside them.

    Source
    ------
    Five products against two: Dao et al. 2022, algorithm 4; ratio in docs/derivations/kernels.md.
    """
    busy_s = (forward_s - kernels.attn_launch_s) * (BACKWARD_FLOPS / kernels.attn_bwd_ratio)
    more = kernels.attn_s0 * (kernels.attn_bwd_fixed - 1.0)
    busy_s = busy_s * (1.0 + more / np.maximum(seen + kernels.attn_s0, 1.0))
    return np.where(forward_s > 0, busy_s + kernels.attn_launch_s, 0.0)


def flash_attention_backward_s(
    forward_s: np.ndarray, sizes: tuple[Any, ...], kernels: KernelModel, *, causal: Any, window: Any = 0
) -> np.ndarray:
    """Return seconds of the backward of a fused attention: by a measured table, else of its forward's.

    Parameters
    ----------
    forward_s : ndarray
        Of the forward alone.
    sizes : tuple
        Batch to dimension of a value, as `flash_attention_forward_s` takes them.
    kernels : KernelModel
    causal, window : array_like
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    seen = seen_keys(q_len, kv_len, causal=causal, window=window)
    backward_s = backward_of_forward_s(forward_s, kernels, seen)
    if not np.count_nonzero(kernels.attn_back_table):
        return backward_s
    form = whole_causal(q_len, kv_len, head_dim, value_dim, causal=causal, window=window)
    asked = (batch, heads, kv_heads, np.where(form, q_len, 0.0), head_dim)
    return np.where(backward_s > 0, tabled_s(backward_s, kernels.attn_back_table, asked), 0.0)


def unfused_attention_s(
    batch: Any,
    num_heads: Any,
    q_len: Any,
    kv_len: Any,
    head_dim: Any,
    kernels: KernelModel,
    *,
    dropout: Any,
    bytes_per_element: Any = 2.0,
    plain_code: Any = 0.0,
    autocasts: Any = 0.0,
    wide_softmax: Any = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of attention as separate kernels, forward and backward: products, one softmax kernel, dropout.

    The scores, of `bytes_per_element`, are computed in full, mask or not. Backward does four products,
    forward two. Sizes are those on this rank; any zero gives 0 seconds. `plain_code` is 1 where softmax, its
    scale and mask run as torch operations of their own, `autocasts` where autocast also widens the scores,
    `wide_softmax` where they run so in 32 bit.

    Source
    ------
    Score traffic: read and write of 16-bit scores (4 bytes forward, 6 backward), dropout 5 bytes more; by
    operations, transformers 5.17 modeling_llama.py eager_attention_forward; in 32 bit, FusedScaleMaskSoftmax
    of Megatron-LM v1.1.5 without its fused kernel, which takes 16 bit only (megatron/model/fused_softmax.py).
    """
    q_len, kv_len = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
    count = np.asarray(batch, dtype=np.float64) * num_heads
    products_s = _score_products_s(q_len, kv_len, head_dim, kernels, count)
    pairs = count * q_len * kv_len
    scores = pairs * (np.asarray(bytes_per_element) / 2.0)
    dropped_s: Any = 0.0
    if np.count_nonzero(dropout):
        dropped_s = np.where(dropout, stream_s(scores * _DROPOUT_BYTES, kernels), 0.0)
    ways = zip(_SOFTMAX_BYTES, _PLAIN_SOFTMAX_BYTES, _AUTOCAST_SOFTMAX_BYTES, strict=True)
    forward_bytes, backward_bytes = (
        scores * (fused + np.asarray(plain_code) * (plain + np.asarray(autocasts) * (cast - plain) - fused))
        for fused, plain, cast in ways
    )
    casts = _CASTS_BYTES * (np.asarray(bytes_per_element) < 4.0)
    forward_bytes, backward_bytes = (
        np.where(np.asarray(wide_softmax) > 0, pairs * (wide + casts), moved)
        for wide, moved in zip(_WIDE_SOFTMAX_BYTES, (forward_bytes, backward_bytes), strict=True)
    )
    forward_s = products_s + (stream_s(forward_bytes, kernels) + dropped_s)
    backward_s = 2.0 * products_s + (stream_s(backward_bytes, kernels) + dropped_s)
    runs = scores * np.asarray(head_dim) > 0
    return np.where(runs, forward_s, 0.0), np.where(runs, backward_s, 0.0)


def _score_products_s(q_len: Any, kv_len: Any, head_dim: Any, kernels: KernelModel, count: Any) -> np.ndarray:
    """Return seconds of the products with the keys and with the values, priced in one call."""
    shape = np.broadcast_shapes(*{np.shape(size) for size in (q_len, kv_len, head_dim, count)})
    n, k = np.empty((2, *shape)), np.empty((2, *shape))
    n[0] = k[1] = kv_len
    n[1] = k[0] = head_dim
    return np.asarray(gemm_s(q_len, n, k, kernels, sixteen_bit=True, batch=count).sum(0))
