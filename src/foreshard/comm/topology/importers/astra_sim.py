"""ASTRA-sim's network file for its analytical backend: one entry for each dimension.

Source: astra-sim/astra-network-analytical, network YAML of version 2: ``topology`` (Ring, FullyConnected,
Switch), ``npus_count``, ``bandwidth`` of each link and ``latency`` in ns. Its code takes GB/s as 2**30 B/s.
"""

from __future__ import annotations

import math
import re
from typing import get_args

from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.connected import connected
from foreshard.comm.topology.regular import Dimension, Shape, grid
from foreshard.errors import SpecError, unknown

_SHAPES: dict[str, Shape] = {"ring": "ring", "fullyconnected": "full", "switch": "switch", "line": "line"}
_KEYS = ("topology", "npus_count", "bandwidth", "latency")
_BYTES_PER_S, _S = 2.0**30, 1e-9
_MAX_LINES = 10_000
assert set(_SHAPES.values()) == set(get_args(Shape))


def astra_sim_topology(text: str, *, file: str | None = None) -> Topology:
    """Return the topology of an ASTRA-sim network file; NPU numbers count its first dimension fastest.

    Raises
    ------
    SpecError
        For a missing key, lists of different lengths, or an entry that is no shape or number.
    """
    entries = _entries(text, file)
    for key in _KEYS:
        if key not in entries:
            raise SpecError(f"no {key}", file=file, key=key, rule=f"The file has {', '.join(_KEYS)}")
    lengths = {key: len(entries[key]) for key in _KEYS}
    if len(set(lengths.values())) > 1 or not lengths["topology"]:
        told = ", ".join(f"{key} {length}" for key, length in lengths.items())
        rule = "Every key has one entry for each dimension"
        raise SpecError(f"entries: {told}", file=file, key="topology", value=told, rule=rule)
    dimensions = [
        Dimension(
            shape=_shape(entries["topology"][i], file),
            size=round(_number(entries, "npus_count", i, file, whole=True)),
            bytes_per_s=_number(entries, "bandwidth", i, file) * _BYTES_PER_S,
            latency_s=_number(entries, "latency", i, file, may_be_zero=True) * _S,
        )
        for i in range(lengths["topology"])
    ]
    # Ranks of a grid count the last dimension fastest.
    return connected(grid(dimensions[::-1], name=file or "ASTRA-sim network"), file=file)


def _entries(text: str, file: str | None) -> dict[str, list[str]]:
    """Return the lists of a YAML mapping of lists, in brackets or one entry a line."""
    lines = text.splitlines()
    if len(lines) > _MAX_LINES:
        raise SpecError(f"{len(lines):,} lines", file=file, rule=f"At most {_MAX_LINES:,} lines")
    found: dict[str, list[str]] = {}
    key = ""
    for number, line in enumerate(lines, start=1):
        line = line.split("#")[0].rstrip()
        pair = re.fullmatch(r"([A-Za-z_]\w*)\s*:\s*(?:\[(.*)\]|([^\[\]]*))", line)
        if pair:
            key = pair[1]
            if key in found:
                raise SpecError(
                    f"line {number} repeats {key}", file=file, key=key, rule="Keys are given once"
                )
            inside = pair[2] if pair[2] is not None else pair[3]
            found[key] = [part.strip().strip("'\"") for part in inside.split(",") if part.strip()]
        elif key and re.fullmatch(r"\s*-\s+\S+", line):
            found[key].append(line.split("-", 1)[1].strip().strip("'\""))
        elif line.strip() not in ("", "---"):
            rule = "Each line is 'key: [ entry, entry ]' or '- entry'"
            raise SpecError(f"cannot read line {number}", file=file, value=line.strip()[:80], rule=rule)
    return found


def _shape(text: str, file: str | None) -> Shape:
    known = _SHAPES.get(text.lower())
    if known is None:
        raise unknown("shape", text, ("Ring", "FullyConnected", "Switch"), key="topology", file=file)
    return known


def _number(
    entries: dict[str, list[str]],
    key: str,
    index: int,
    file: str | None,
    *,
    whole: bool = False,
    may_be_zero: bool = False,
) -> float:
    text = entries[key][index]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0.0 < value < 1e15 or (may_be_zero and value == 0.0)) or (whole and value % 1):
        rule = "It is a whole number above 0" if whole else "It is a number above 0"
        rule = "It is a number of at least 0" if may_be_zero else rule
        raise SpecError(f"'{text:.40}'", file=file, key=f"{key}[{index}]", value=text[:40], rule=rule)
    return value
