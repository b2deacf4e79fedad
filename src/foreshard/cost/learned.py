"""Learned correction of a kernel's time: regression trees over its shape, on top of a formula's time.

The trees give log(time) less a part of the log of the formula's time. Every feature grows with the size of a
kernel and every tree rises along it, so that a larger kernel is never faster; outside the times that were
trained on, the correction stays as it is at the edge and the formula extrapolates. Trees are fitted by
``scripts/fit_learned.py``, this file only evaluates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TILE = 128
"""Rows and columns of the tile by which features count waves."""
_CHUNK = 4096  # rows evaluated at once, which bounds memory
_MANY = 64  # rows from which equal ones are evaluated once: stages and layers of a plan repeat shapes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """Trees as arrays, shape (trees, nodes); a leaf is its own child.

    `share` is the part of the log formula time outside the trees, `low` and `high` the trained range of that
    log, `base` the sum of all trees that nothing moves.
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    left: NDArray[np.int16]
    right: NDArray[np.int16]
    value: NDArray[np.float32]
    depth: int
    base: float
    share: float
    low: float
    high: float

    def log_time(self, log_formula: Array, features: Array) -> Array:
        """Return the log of the corrected time; shapes (rows,) and (rows, features)."""
        inside = np.clip(log_formula, self.low, self.high)
        rows = np.column_stack([inside, features])
        if len(rows) > _MANY:
            rows, back = np.unique(rows, axis=0, return_inverse=True)
            trees_s = self._sum(rows)[back.ravel()]
        else:
            trees_s = self._sum(rows)
        return (log_formula - inside) + self.share * inside + self.base + trees_s

    def _sum(self, rows: Array) -> Array:
        """Return the sum of the trees at rows of features."""
        trees = np.arange(len(self.feature))[:, None]
        found = []
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            which = np.arange(len(part))[None, :]
            node = np.zeros((len(self.feature), len(part)), dtype=np.int16)
            for _ in range(self.depth):
                low = part[which, self.feature[trees, node]] <= self.threshold[trees, node]
                node = np.where(low, self.left[trees, node], self.right[trees, node])
            found.append(self.value[trees, node].sum(0, dtype=np.float64))
        return np.concatenate(found) if found else np.zeros(0)


@cache
def shipped_trees() -> dict[str, Trees]:
    """Return the shipped trees by kind of kernel."""
    with files("foreshard.catalog").joinpath("data/learned_trees.npz").open("rb") as file:
        arrays = dict(np.load(file))
    kinds = sorted({name.partition("/")[0] for name in arrays})
    return {
        kind: trees_of({n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(f"{kind}/")})
        for kind in kinds
    }


def trees_of(arrays: dict[str, Any]) -> Trees:
    """Return trees from the arrays of a file; `scalars` are depth, base, share, low and high."""
    depth, base, share, low, high = (float(x) for x in arrays["scalars"])
    names = ("feature", "threshold", "left", "right", "value")
    return Trees(
        **{name: arrays[name] for name in names}, depth=int(depth), base=base, share=share, low=low, high=high
    )


def gemm_features(m: Any, n: Any, k: Any, batch: Any, num_sms: Any) -> list[Any]:
    """Return the log sizes, and tiles per processor as a share and as whole waves."""
    tiles = np.ceil(m / TILE) * np.ceil(n / TILE) * batch / num_sms
    return [*(np.log(size) for size in (m, n, k, batch)), np.log(tiles), np.log(np.ceil(tiles))]


def grouped_features(tokens: Any, groups: Any, n: Any, k: Any, num_sms: Any) -> list[Any]:
    """Return logs of tokens, groups and sides of a group's weights, and whole waves of output tiles."""
    tiles = groups * np.ceil(tokens / groups / TILE) * np.ceil(n / TILE) / num_sms
    sides = np.log(np.minimum(n, k)), np.log(np.maximum(n, k))
    return [np.log(tokens), np.log(groups), *sides, np.log(np.ceil(tiles))]


def attention_features(
    rows: Any, kv_rows: Any, q_len: Any, kv_len: Any, head_dim: Any, num_sms: Any
) -> list[Any]:
    """Return logs of query and key lengths, heads per processor, key heads, and the head dimension."""
    return [np.log(q_len), np.log(kv_len), np.log(rows / num_sms), np.log(kv_rows), head_dim]


def corrected_s(kind: str, formula_s: Any, features: list[Any], learned: Any) -> Array:
    """Return the seconds of kernels, corrected where `learned` is not 0 and the formula gives time.

    Sizes of 0 may give features that are not finite: their rows stay as they are.
    """
    shape = np.broadcast_shapes(np.shape(formula_s), np.shape(learned), *(np.shape(x) for x in features))
    time_s = np.array(np.broadcast_to(np.asarray(formula_s, dtype=np.float64), shape))
    columns = np.stack([np.broadcast_to(x, shape) for x in features], axis=-1)
    which = (np.broadcast_to(learned, shape) != 0) & (time_s > 0) & np.isfinite(columns).all(-1)
    if which.any():
        time_s[which] = np.exp(shipped_trees()[kind].log_time(np.log(time_s[which]), columns[which]))
    return time_s
