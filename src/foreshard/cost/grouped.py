"""Time of the expert products of a mixture-of-experts layer: many products of one shape but few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.gemm import gemm_s
from foreshard.cost.learned import corrected_s, grouped_features
from foreshard.cost.tables import tabled_s


def grouped_gemm_s(
    tokens: Any,
    num_groups: Any,
    n: Any,
    k: Any,
    kernels: KernelModel,
    *,
    bytes_per_element: Any = 2,
    imbalance: Any = 1.0,
    looped: bool = False,
) -> np.ndarray:
    """Seconds of `num_groups` products (tokens / num_groups, k) with (k, n), one per local expert.

    `tokens` are those routed to this rank over all its experts, times `imbalance` on the busiest one; experts
    beyond the tokens get none and cost nothing. `looped` is one launch per expert instead of one grouped
    kernel: no expert fills the idle processors of another. A measured table gives the time of one launch.

    Source
    ------
    Derived in docs/derivations/kernels.md; fitted on the fused MoE kernels of aiconfigurator.
    """
    tokens = np.asarray(tokens, dtype=np.float64) * imbalance
    active = np.minimum(np.asarray(num_groups, dtype=np.float64), np.ceil(tokens))
    rows = tokens / np.maximum(active, 1.0)
    table, slower = kernels.grouped_table, kernels.gemm_slower
    if np.count_nonzero(kernels.gemm_table):  # of products alone, not of those of experts
        kernels = replace(kernels, gemm_table=0.0)
    if looped:
        return gemm_s(rows, n, k, kernels, bytes_per_element=bytes_per_element) * active
    learned = kernels.grouped_learned
    own = kernels
    if np.count_nonzero(learned):
        own = replace(kernels, gemm_learned=np.where(np.asarray(learned) > 0, 0.0, kernels.gemm_learned))
    grouped_s = gemm_s(rows, n, k, own, bytes_per_element=bytes_per_element, batch=active)
    grouped_s = grouped_s / kernels.grouped_eff
    if np.count_nonzero(learned):
        with np.errstate(divide="ignore", invalid="ignore"):
            features = grouped_features(tokens, active, np.asarray(n), np.asarray(k), kernels.num_sms)
        # Tokens are those of this rank, evenly routed: exponent 0, log of 1 rank.
        grouped_s = corrected_s("grouped", grouped_s, [*features, 0.0, 0.0], learned)
    if np.count_nonzero(table):
        grouped_s = tabled_s(grouped_s, table, (active, rows, n, k), slower)
    return grouped_s
