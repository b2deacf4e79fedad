"""Energy of a step: devices at their power limit while they compute, less while they wait."""

from __future__ import annotations

from collections.abc import Mapping

WAITING_POWER = 0.4
"""Share of the power limit that a device draws while it waits; an assumption, no measurement shipped."""

_BUSY_PARTS = ("compute", "recompute", "optimizer")


def energy_j(tdp_w: float, num_devices: int, time_breakdown_s: Mapping[str, float]) -> float:
    """Return the joules of all devices in one step; hosts, switches and cooling are not counted.

    Parameters
    ----------
    tdp_w : float, watts
        Mean power limit of the devices.
    num_devices : int
    time_breakdown_s : mapping of part to seconds

    Returns
    -------
    float, joules
    """
    busy = sum(time_breakdown_s[part] for part in _BUSY_PARTS)
    waiting = sum(time_breakdown_s.values()) - busy
    return tdp_w * num_devices * (busy + WAITING_POWER * waiting)
