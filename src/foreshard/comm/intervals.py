"""Intervals around the time of a collective: quantiles of residuals of systems left out of the fit.

A residual is |log(measured / predicted)| of a row by constants that have not seen its system. Rows of a
system err together, so every system counts alike, whatever the number of its rows. Residuals are grouped by
what the constants rest on (`EVIDENCE`) and by size: latency, the pipeline in between, and bandwidth err
differently.
``catalog/data/collective_residuals.json`` is written by ``scripts/fit_comm_intervals.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from foreshard.catalog.fabrics import link_generation
from foreshard.catalog.shipped import shipped

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster, NodeGroup

LEVELS = (0.5, 0.8, 0.9, 0.95)
EVIDENCE = ("fitted", "unseen", "network")
"""Links of a generation of which systems were measured; links of a generation of which none was; several
domains, whose network is known by its datasheet."""
BANDS = (("small", 2.0**20), ("middle", 2.0**24), ("large", float("inf")))
"""Names of sizes, and where each ends: bytes."""
_POOLED = ("nvlink", "pcie", "pcie4", "mesh", "single-die")
"""Rows of links that stand for generations without a measured system."""


def band_of(num_bytes: float) -> str:
    """Return the name of a size.

    Examples
    --------
    >>> band_of(1024), band_of(2**20), band_of(2**30)
    ('small', 'middle', 'large')
    """
    return next(name for name, end in BANDS if num_bytes < end)


def collective_evidence(cluster: Cluster, num_ranks: int, domain: float) -> str:
    """Return what the time of a collective over the first ranks rests on, the weakest of `EVIDENCE`."""
    if num_ranks > domain:
        return "network"
    groups = dict.fromkeys(cluster.node_group_of(rank) for rank in range(num_ranks))
    return "unseen" if any(_is_unseen(group) for group in groups) else "fitted"


def _is_unseen(group: NodeGroup) -> bool:
    """Return whether no system with the links of a node was measured."""
    device, over_pcie = group.device, group.nvlink_domain <= 1
    if over_pcie and group.pcie != "shared":
        return True  # a stated path through a switch or the host, by a row of other devices
    return link_generation(device.arch, "" if over_pcie else device.link, name=device.name) in _POOLED


def left_out_evidence(system: str) -> str | None:
    """Return what a system of the residuals rests on when it is left out, None for any other."""
    classes = shipped("collective_residuals.json")["classes"]
    return next((evidence for evidence in EVIDENCE if system in classes[evidence]), None)


def collective_intervals(
    time_s: float, num_bytes: float, evidence: str, *, exclude: str = ""
) -> dict[float, tuple[float, float]]:
    """Return (low, high) of a time by level, each inside the next.

    Weaker evidence is never given a narrower interval than `fitted`. `exclude` is a system whose residuals
    are not looked at.
    """
    found: dict[float, tuple[float, float]] = {}
    for level in LEVELS:
        half = _half_width(band_of(num_bytes), evidence, level, exclude)
        if evidence != "fitted":
            half = max(half, _half_width(band_of(num_bytes), "fitted", level, exclude))
        found[level] = time_s * float(np.exp(-half)), time_s * float(np.exp(half))
    return found


@cache
def _half_width(band: str, evidence: str, level: float, exclude: str) -> float:
    classes: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    classes = shipped("collective_residuals.json")["classes"]
    systems = classes[evidence]
    others = [bands for system, bands in systems.items() if system != exclude]
    own = [bands[band] for bands in others if band in bands]
    if not own:  # no system has such sizes: those of all sizes
        own = [values for bands in others for values in bands.values()]
    return float(np.quantile(np.concatenate(own), level))
