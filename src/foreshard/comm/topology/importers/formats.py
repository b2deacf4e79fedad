"""The formats that a topology file may have, and which of them a file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.astra_sim import astra_sim_topology
from foreshard.comm.topology.importers.nccl_xml import nccl_topology
from foreshard.comm.topology.importers.plain_graph import plain_topology
from foreshard.comm.topology.importers.teccl import teccl_topology
from foreshard.spec import codec

READERS: Mapping[str, Callable[..., Topology]] = {
    ".xml": nccl_topology,
    ".yml": astra_sim_topology,
    ".yaml": astra_sim_topology,
    ".json": plain_topology,
}
"""Readers by suffix; each takes the text and the name of its file."""
# Keys of the JSON files of TE-CCL and TACCL that no plain graph has.
_TECCL_KEYS = ('"capacity"', '"gpus_per_node"', '"TopologyParams"')
_MAX_BYTES = 32 * 2**20


def read_topology(path: str | Path) -> Topology:
    """Return the topology of a file whose suffix is one of `READERS`; keys of a JSON file tell its format.

    Raises
    ------
    SpecError
        If the file cannot be read, or is none of that format.
    """
    text, reader = codec.read_text(path, max_bytes=_MAX_BYTES), READERS[Path(path).suffix.lower()]
    if reader is plain_topology and any(key in text for key in _TECCL_KEYS):
        reader = teccl_topology
    return reader(text, file=str(path))
