"""Intervals around the times of kernels: quantiles of the errors of the same kernels on other devices.

A residual is |log(measured / predicted)| of a row by constants fitted to kernels of its device. What a table
of a device errs by is taken from the other devices, each of which counts alike. A device of which no kernel
was fitted has no interval. ``catalog/data/kernel_residuals.json`` is written by
``scripts/fit_kernel_intervals.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from foreshard.catalog.learned import fitted_devices
from foreshard.catalog.shipped import shipped
from foreshard.comm.intervals import LEVELS


def kernel_group(layout: str, cells: Mapping[str, str]) -> str:
    """Return the name of the rows of a layout that share all cells but the device.

    Examples
    --------
    >>> kernel_group("attention", {"device": "NVIDIA L40S", "framework": "trtllm"})
    'attention trtllm'
    """
    others = [value.strip().lower() for key, value in cells.items() if key != "device"]
    return " ".join([layout, *others]).strip()


@cache
def kernel_half_widths(group: str, device: str) -> Mapping[float, float]:
    """Return half the logarithm of an interval by level, empty where there is nothing to tell it by.

    Parameters
    ----------
    group : str
        As `kernel_group` names it.
    device : str
        Of the catalog; its own residuals are not looked at.
    """
    if device not in fitted_devices():
        return {}
    devices: Mapping[str, list[float]] = shipped("kernel_residuals.json")["groups"].get(group, {})
    others = [values for name, values in devices.items() if name != device]
    if not others:
        return {}
    pooled = np.concatenate(others)
    return {level: float(np.quantile(pooled, level)) for level in LEVELS}
