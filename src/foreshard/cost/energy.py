"""Energy of a step: devices at their power limit while they compute, less while they wait."""

from __future__ import annotations

from collections.abc import Mapping

WAITING_POWER = 0.4
"""Share of the power limit that a device draws while it waits; an assumption, no measurement shipped."""

BUSY_PARTS = ("compute", "recompute", "optimizer")


def energy_j(watts: float, time_breakdown_s: Mapping[str, float]) -> float:
    """Return the joules of all devices in one step; hosts, switches and cooling are not counted.

    `watts` are the power limits of all devices together.
    """
    busy = sum(time_breakdown_s[part] for part in BUSY_PARTS)
    waiting = sum(time_breakdown_s.values()) - busy
    return watts * (busy + WAITING_POWER * waiting)
