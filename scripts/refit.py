"""Comparison of shipped constants with a refit."""

from __future__ import annotations

from typing import Any


def differences(shipped: Any, refit: Any, relative: float, path: str = "") -> list[str]:
    """Return the paths at which two fits differ by more than a part of the refitted value."""
    if isinstance(shipped, dict) and isinstance(refit, dict):
        return [
            line
            for key in sorted(shipped.keys() | refit.keys())
            for line in differences(shipped.get(key, {}), refit.get(key, {}), relative, f"{path}.{key}")
        ]
    if isinstance(shipped, int | float) and isinstance(refit, int | float):
        # A constant of zero is compared with numbers below any that a fit gives.
        alike = abs(shipped - refit) <= relative * max(abs(refit), 1e-30)
    else:
        alike = shipped == refit
    return [] if alike else [f"{path}: shipped {shipped}, refit {refit}"]
