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
    """How a collective library uses one generation of scale-up link; fields are floats, or arrays of rows."""

    launch_s: Any  # time of the smallest collective before its first hop
    hop_s: Any  # one more rank on the ring, smallest message
    # the same for send/receive patterns (all-to-all, point to point)
    exchange_launch_s: Any
    exchange_hop_s: Any
    switch_launch_s: Any  # smallest all-reduce through in-switch reduction
    # fraction of the datasheet bandwidth that ring all-reduce, ring all-gather or reduce-scatter, all-to-all
    # and in-switch reduction reach on large messages
    ring_eff: Any
    gather_eff: Any
    exchange_eff: Any
    switch_eff: Any
    # multiplier of the pipeline term 2 sqrt(latency * transfer): 1 is ideal chunking
    ramp: Any
    exchange_ramp: Any
    switch_ramp: Any
    # extra wire-equivalent bytes of a rank's own block, as a fraction of the block
    copy: Any
    exchange_copy: Any
    # for rings and for all-to-all, the exponent of (ranks / reference) in the bandwidth: 0 behind a switch,
    # positive in a mesh (more peers, more links), negative where ranks share one bus
    scaling: Any
    exchange_scaling: Any
    reference: Any  # ranks at which ``scaling`` counts 1; 0 means the whole domain


_PCIE4 = ("ampere", "ada")
"""Cards of PCIe 4, of which two servers were measured: no peer-to-peer switch, one bus shared by all."""
_LATENCIES = ("launch_s", "hop_s", "exchange_launch_s", "exchange_hop_s")


def comm_constants() -> dict[str, Any]:
    """Return the table as parsed: sections ``links``, ``eras``, ``harness``, ``network``, ``nccl``."""
    table: dict[str, Any] = shipped("comm_constants.json")
    return table


def link_generation(arch: str, link: str | None, *, name: str = "") -> str:
    """Return the row of ``links`` that describes a device: architecture and kind of link.

    Architectures are spelled as in the catalog (``Hopper``, ``CDNA3``). The link (``NVLink4``, ``xGMI``) is
    None or a PCIe name for devices without one. What PCIe gives depends on the server, so a row measured on
    one device serves only the device of that `name`; others get the pooled row of their kind.
    """
    family, link = (arch.lower().split() or [""])[0], (link or "").lower()
    if not link or "pci" in link:
        pooled = "pcie4" if family in _PCIE4 else "pcie"
        return next(
            row
            for row in (f"{name}-pcie", f"{family}-pcie", pooled, "pcie")
            if row in comm_constants()["links"]
        )
    if "c2c" in link:
        return "hopper-c2c"
    if "infinity" in link or "xgmi" in link or "roce" in link:
        return "mesh"
    row = f"{family}-nvlink"
    return row if "nvlink" in link and row in comm_constants()["links"] else "nvlink"


def link_constants(
    generation: str, *, nccl: str = "2.2x", exclude: str = "", clock_hz: float = 0.0
) -> LinkConstants:
    """Return the constants of one generation, with the latencies of a library era.

    `exclude` is a family of measured rows that the constants must not have seen: the ``system`` column, or
    ``gpu`` of the Sailor profiles. A family that no constant rests on changes nothing. `clock_hz` is that of
    the device (0: unknown), for rows that many devices share and whose latencies are so many cycles.
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
    if clock_hz and "clock_hz" in fitted:
        row |= {name: row[name] * fitted["clock_hz"] / clock_hz for name in _LATENCIES}
    era = changed["eras"].get(nccl, table["eras"][nccl])
    return LinkConstants(**{key: value * era.get(key, 1.0) for key, value in row.items()})


def harness_s(name: str, *, exclude: str = "") -> float:
    """Return the host work that a measuring loop adds to every call, s; 0 for a loop that adds none.

    `exclude` as in `link_constants`. The loop ``torch`` calls torch.distributed once a turn.
    """
    table = comm_constants()
    changed = table["left_out"].get(exclude, {}).get("harness", {})
    return float(changed.get(name, table["harness"].get(name, 0.0)))
