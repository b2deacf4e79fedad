"""The loop over sends that finds their rounds; plain Python that numba compiles."""

from __future__ import annotations

from typing import Any


def count_rounds(indptr: Any, indices: Any, found: Any) -> bool:
    """Put each send one round behind the last of those it waits for; `found` comes in as 0.

    Return whether every send is listed after those.
    """
    for send in range(len(found)):
        for i in range(indptr[send], indptr[send + 1]):
            if indices[i] >= send:
                return False
            found[send] = max(found[send], found[indices[i]] + 1)
    return True
