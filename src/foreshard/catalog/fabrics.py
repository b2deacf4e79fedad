"""Constants of collectives by link generation, read from ``data/comm_constants.json``.

One row per generation of scale-up link (``hopper-nvlink``, ``l40s-pcie``, ...), fitted by
``scripts/fit_comm.py``; what each constant means and which data it rests on is in
``docs/derivations/collectives.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.errors import unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """How a collective library uses one generation of scale-up link.

    Parameters
    ----------
    launch_s
        Time of the smallest collective before its first hop.
    hop_s
        One more rank on the ring, smallest message.
    exchange_launch_s, exchange_hop_s
        The same for send/receive patterns (all-to-all, point to point).
    switch_launch_s
        Smallest all-reduce through in-switch reduction.
    ring_eff, gather_eff, exchange_eff, switch_eff
        Fraction of the datasheet bandwidth that ring all-reduce, ring all-gather or reduce-scatter,
        all-to-all and in-switch reduction reach on large messages.
    ramp, exchange_ramp, switch_ramp
        Multiplier of the pipeline term 2 sqrt(latency * transfer): 1 is ideal chunking.
    copy, exchange_copy
        Extra wire-equivalent bytes of a rank's own block, as a fraction of the block.
    scaling, exchange_scaling
        For rings and for all-to-all, the exponent of (ranks / reference) in the bandwidth: 0 behind a
        switch, positive in a mesh (more peers, more links), negative where ranks share one bus.
    reference
        Ranks at which ``scaling`` counts 1; 0 means the whole domain.
    """

    launch_s: float
    hop_s: float
    exchange_launch_s: float
    exchange_hop_s: float
    switch_launch_s: float
    ring_eff: float
    gather_eff: float
    exchange_eff: float
    switch_eff: float
    ramp: float
    exchange_ramp: float
    switch_ramp: float
    copy: float
    exchange_copy: float
    scaling: float
    exchange_scaling: float
    reference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """How a collective library uses the NICs.

    Parameters
    ----------
    ring_eff, tree_eff, exchange_eff
        Fraction of the datasheet NIC rate that rings, trees and direct sends reach.
    launch_s
        Software time of a collective that leaves the domain, once (proxy thread, GPU to NIC handshake).
    """

    ring_eff: float
    tree_eff: float
    exchange_eff: float
    launch_s: float


def comm_constants() -> dict[str, Any]:
    """Return the table as parsed: sections ``links``, ``eras``, ``network``, ``nccl``."""
    table: dict[str, Any] = shipped("comm_constants.json")
    return table


def link_generation(arch: str, link: str | None, *, name: str = "") -> str:
    """Return the row of ``links`` that describes a device: architecture and kind of link.

    Parameters
    ----------
    arch
        Device architecture as the catalog spells it (``Hopper``, ``Ampere``, ``CDNA3``).
    link
        Scale-up link (``NVLink4``, ``xGMI``); None or a PCIe name for devices without one.
    name
        Device name: what PCIe gives depends on the server, so a row measured on one device serves only
        that device; others get the pooled row.
    """
    family, link = (arch.lower().split() or [""])[0], (link or "").lower()
    if not link or "pci" in link:
        candidates = (f"{name}-pcie", f"{family}-pcie", "pcie")
        return next(row for row in candidates if row in comm_constants()["links"])
    if "c2c" in link:
        return "hopper-c2c"
    if "infinity" in link or "xgmi" in link or "roce" in link:
        return "mesh"
    row = f"{family}-nvlink"
    return row if "nvlink" in link and row in comm_constants()["links"] else "nvlink"


def link_constants(generation: str, *, nccl: str = "2.2x", exclude: str = "") -> LinkConstants:
    """Return the constants of one generation, with the latencies of a library era.

    Parameters
    ----------
    generation, nccl
        Row and era.
    exclude
        Family of measured rows that the constants must not have seen (the ``system`` column, or ``gpu`` of
        the Sailor profiles). A family that no constant rests on changes nothing.

    Raises
    ------
    SpecError
        The generation or the era is not in the table.
    """
    table = comm_constants()
    if generation not in table["links"]:
        raise unknown("link generation", generation, sorted(table["links"]), key="generation")
    if nccl not in table["eras"]:
        raise unknown("NCCL era", nccl, sorted(table["eras"]), key="nccl")
    names = {field.name for field in fields(LinkConstants)}
    changed = table["left_out"].get(exclude, {"links": {}, "eras": {}})
    fitted = changed["links"].get(generation, table["links"][generation])
    row = {key: value for key, value in fitted.items() if key in names}
    era = changed["eras"].get(nccl, table["eras"][nccl])
    return LinkConstants(**{key: value * era.get(key, 1.0) for key, value in row.items()})


def network_constants() -> NetworkConstants:
    """Return the constants of the scale-out network."""
    names = {field.name for field in fields(NetworkConstants)}
    return NetworkConstants(**{k: v for k, v in comm_constants()["network"].items() if k in names})
