"""The loop over sends that finds their rounds; plain Python that numba compiles."""

from __future__ import annotations

from typing import Any


def count_rounds(indptr: Any, indices: Any, found: Any) -> None:
    """Put each send, listed after those it waits for, one round behind the last of these; `found` is 0."""
    for send in range(len(found)):
        for i in range(indptr[send], indptr[send + 1]):
            found[send] = max(found[send], found[indices[i]] + 1)
