"""The formats that a topology file may have, and which of them a file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.astra_sim import astra_sim_topology
from foreshard.comm.topology.importers.nccl_xml import nccl_topology
from foreshard.comm.topology.importers.plain_graph import plain_topology
from foreshard.comm.topology.importers.teccl import teccl_topology
from foreshard.errors import SpecError, unknown
from foreshard.spec import codec

FORMATS: Mapping[str, Callable[..., Topology]] = {
    "nccl": nccl_topology,
    "astra-sim": astra_sim_topology,
    "teccl": teccl_topology,
    "plain": plain_topology,
}
"""Readers by format; each takes the text and the name of its file."""

_BY_SUFFIX = {".xml": "nccl", ".yml": "astra-sim", ".yaml": "astra-sim", ".toml": "plain", ".json": "plain"}
# Keys of the JSON files of TE-CCL and TACCL that no plain graph has.
_TECCL_KEYS = ('"capacity"', '"gpus_per_node"', '"TopologyParams"')
_MAX_BYTES = 32 * 2**20


def read_topology(path: str | Path, *, format: str | None = None) -> Topology:
    """Return the topology of a file, in the format that its name and first keys tell unless one is given.

    Raises
    ------
    SpecError
        If the file cannot be read, or is none of that format.
    """
    text, file = codec.read_text(path, max_bytes=_MAX_BYTES), str(path)
    found = format or _format_of(Path(path), text)
    if found not in FORMATS:
        raise unknown("format", found, FORMATS, key="format", file=file)
    return FORMATS[found](text, file=file)


def _format_of(path: Path, text: str) -> str:
    suffix = path.suffix.lower()
    if suffix not in _BY_SUFFIX:
        rule = f"A topology file ends in {', '.join(sorted(_BY_SUFFIX))}"
        fix = f"Name the format: {', '.join(FORMATS)}"
        raise SpecError(f"unknown suffix '{suffix}'", file=str(path), value=suffix, rule=rule, fix=fix)
    if suffix == ".json" and any(key in text for key in _TECCL_KEYS):
        return "teccl"
    return _BY_SUFFIX[suffix]
