"""Whether a budget is longer than scipy and numba take to load."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_LOADING_S = 1.0
"""Seconds in which scipy and numba load, with a little to search in."""

HASTE = (
    "The budget is shorter than the search takes to load: plans are those of published planners, the bound "
    "is that of computation alone; --budget-s 2 leaves time to search"
)


def is_hasty(budget_s: float) -> bool:
    """Return whether a budget would be spent on loading; what is loaded already takes no time."""
    names = [name for name in ("scipy", "numba") if find_spec(name) is not None]
    used = {"scipy": "scipy.optimize", "numba": "numba.core.dispatcher"}
    return budget_s < _LOADING_S and any(used[name] not in sys.modules for name in names)
