"""Constants of collectives by link generation, read from ``data/comm_constants.json``.

One row per generation of scale-up link (``hopper-nvlink``, ``ada-pcie``, ...), fitted by
``scripts/fit_comm.py``; what each constant means and which data it rests on is in
``docs/derivations/collectives.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources

from foreshard.errors import SpecError


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
    scaling
        Exponent of (ranks / 2) in the bandwidth: 0 behind a switch, positive in a mesh (more peers,
        more links), negative where ranks share one bus.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """How a collective library uses the NICs: fractions of the datasheet rate, software time per hop."""

    ring_eff: float
    tree_eff: float
    exchange_eff: float
    overhead_s: float


@lru_cache(maxsize=1)
def comm_constants() -> dict[str, dict[str, dict[str, float]]]:
    """Return the table as parsed: sections ``links``, ``eras``, ``network``."""
    text = resources.files("foreshard.catalog").joinpath("data/comm_constants.json").read_text("utf-8")
    return json.loads(text)


def link_generation(arch: str, link: str | None) -> str:
    """Return the row of ``links`` that describes a device: architecture and kind of link.

    Parameters
    ----------
    arch
        Device architecture as the catalog spells it (``Hopper``, ``Ampere``, ``CDNA3``).
    link
        Scale-up link (``NVLink4``, ``xGMI``); None or a PCIe name for devices without one.
    """
    kind = "pcie" if link is None or "pci" in link.lower() or not link.strip() else "nvlink"
    if kind == "nvlink" and "nvl" not in link.lower():
        kind = "fabric"
    family = arch.lower().split()[0].split("-")[0] if arch else "unknown"
    table = comm_constants()["links"]
    for name in (f"{family}-{kind}", kind):
        if name in table:
            return name
    return "nvlink"


def link_constants(generation: str, *, nccl: str = "2.2x") -> LinkConstants:
    """Return the constants of one generation, with the latencies of a library era.

    Raises
    ------
    SpecError
        The generation or the era is not in the table.
    """
    table = comm_constants()
    if generation not in table["links"]:
        known = ", ".join(sorted(table["links"]))
        raise SpecError("no such link generation", key="generation", value=generation, fix=f"known: {known}")
    if nccl not in table["eras"]:
        known = ", ".join(sorted(table["eras"]))
        raise SpecError("no such NCCL era", key="nccl", value=nccl, fix=f"known: {known}")
    names = {field.name for field in fields(LinkConstants)}
    row = {key: value for key, value in table["links"][generation].items() if key in names}
    era = table["eras"][nccl]
    return LinkConstants(**{key: value * era.get(key, 1.0) for key, value in row.items()})


def network_constants() -> NetworkConstants:
    """Return the constants of the scale-out network."""
    names = {field.name for field in fields(NetworkConstants)}
    return NetworkConstants(**{k: v for k, v in comm_constants()["network"].items() if k in names})
