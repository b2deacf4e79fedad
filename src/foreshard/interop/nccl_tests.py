"""What nccl-tests print, as rows: size, time, bandwidths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mode

import numpy as np

from foreshard.catalog.devices import resolve_device
from foreshard.comm.nccl.constants import ALGORITHMS, PROTOCOLS
from foreshard.cost.tables import COLLECTIVES, KernelTables, size_table
from foreshard.errors import SpecError

_TAG = re.compile(r"^\s*(?:\[[^\]\s]*\](?:<\w+>)?:?|\d+:)\s*")  # mpirun --tag-output, srun --label
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+?)\s*$")
_NAMED = re.compile(r"\b(all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|sendrecv)_perf\b")
_NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "sendrecv": "send",
}
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_LIBRARY = re.compile(r"nccl-library=(\d{5})\b")
_PICK = re.compile(r"\b(\d{1,15}) Bytes -> Algo ([A-Za-z_]+|[0-6]) proto ([A-Za-z0-9]+)")
_MICRO, _GIGA = 1e-6, 1e9
_MOST = 1e15  # us (30 years) or GB/s
_REFIT = "foreshard comm import FILE CLUSTER --fit OUT.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestRow:
    """One size of one test, out of place."""

    size_bytes: int
    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestRun:
    """The output of one test: what ran where, as far as it is printed, and its rows."""

    collective: str | None
    num_ranks: int | None
    num_hosts: int | None
    device: str | None
    rows: tuple[NcclTestRow, ...]
    num_skipped: int  # lines that begin as a row and have other columns
    release: str = ""  # of NCCL, where a log of its own or the header says
    # algorithm and protocol that NCCL logged (NCCL_DEBUG_SUBSYS=TUNING), by the bytes that it states
    picks: Mapping[int, tuple[str, str]] = field(default_factory=dict)


def tables_of(run: NcclTestRun, device: str, path: str, collective: str | None = None) -> KernelTables:
    """Return the rows of a run as a cost source: a table of the device that it names, else of `device`.

    `device` may be one of a cluster file: the run names it by the same words. `collective` is what ran where
    the run does not say; a reduce-scatter is held as the all-gather of as many bytes.

    Raises
    ------
    SpecError
        For what no table holds: several hosts, unknown ranks, a broadcast or messages, an unknown device.
    """
    ran = run.collective or collective or ""
    op = {"reduce-scatter": "all-gather"}.get(ran, ran).replace("-", "_")
    rows = [row for row in run.rows if row.size_bytes > 0 and row.time_s > 0.0]
    faults = (
        (
            op not in COLLECTIVES,
            "the collective",
            ran or None,
            "A table is one of " + ", ".join(COLLECTIVES),
        ),
        (run.num_ranks is None, "the ranks", None, "The header of nccl-tests says on which ranks it ran"),
        ((run.num_hosts or 1) > 1, "several hosts", run.num_hosts, "A table is of devices of one node"),
        (not rows, "no size above 0", None, "A table has sizes and times"),
    )
    for is_wrong, what, value, rule in faults:
        if is_wrong:
            fix = f"Refit the cluster instead: {_REFIT}"
            raise SpecError(f"{what} of the run", file=path, key="--costs", value=value, rule=rule, fix=fix)
    named = run.device or device
    if named != device:
        try:
            named = resolve_device(named).name
        except SpecError as error:
            fix = f"Give a device of a cluster file this name, or refit the cluster: {_REFIT}"
            raise SpecError(
                error.what, file=path, key="--costs", value=named, rule=error.rule, fix=fix
            ) from None
    sizes = np.array([(run.num_ranks, row.size_bytes) for row in rows], dtype=float)
    table = size_table(sizes, np.array([row.time_s for row in rows]), rises=[1])
    return KernelTables(path=path, devices={(named, "16bit"): {op: table}})


def read_nccl_tests(text: str, file: str | None = None) -> NcclTestRun:
    """Return the rows of the standard output of a program of nccl-tests.

    Columns are found by the header that names them, so that old releases (without root, with `error`) and new
    ones are read alike; labels that mpirun and srun put before lines are dropped, logs of NCCL between lines
    are passed over. Times are printed in microseconds, bandwidths in GB/s.

    Raises
    ------
    SpecError
        There is no header, or no row under it.
    """
    lines = [_TAG.sub("", line) for line in text.splitlines()]
    columns: list[str] = []
    rows: list[NcclTestRow] = []
    skipped = 0
    for line in lines:
        words = line.split()
        if words[:2] == ["#", "size"]:
            columns = words[1:]
        elif columns and words and words[0].isdecimal():
            row = _row(columns, words)
            skipped += row is None
            rows += [row] if row is not None else []
    if not rows:
        raise SpecError(
            "no row of nccl-tests" if columns else "no header of nccl-tests",
            file=file,
            rule="Rows stand under a line that begins with '# size count type'",
            fix="Give the standard output of all_reduce_perf or another program of nccl-tests",
        )
    ranks = {found[1]: found for line in lines if (found := _RANK.search(line))}
    named = _NAMED.search(text)
    return NcclTestRun(
        collective=_NAMES[named[1].replace("_", "")] if named else None,
        num_ranks=len(ranks) or None,
        num_hosts=len({found[2] for found in ranks.values()}) or None,
        device=mode(found[3] for found in ranks.values()) if ranks else None,
        rows=tuple(rows),
        num_skipped=skipped,
        release=_release(text),
        picks=dict(pick for line in lines if (pick := _pick(line)) is not None),
    )


def _release(text: str) -> str:
    """Return the release of NCCL that a log states, empty where it states none.

    Examples
    --------
    >>> _release("NCCL version 2.27.7+cuda12.9"), _release("# nccl-library=22803"), _release("")
    ('2.27.7', '2.28.3', '')
    """
    if found := _VERSION.search(text):
        return found[1]
    if found := _LIBRARY.search(text):
        number = int(found[1])
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return ""


def _pick(line: str) -> tuple[int, tuple[str, str]] | None:
    """Return bytes, algorithm and protocol of a line of NCCL's log of its choices.

    Examples
    --------
    >>> _pick("NCCL INFO AllReduce: 65536 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}")
    (65536, ('ring', 'LL'))
    >>> _pick("NCCL INFO 1048576 Bytes -> Algo 5 proto 2 time 61.2")
    (1048576, ('nvls-tree', 'Simple'))
    """
    found = _PICK.search(line)
    if found is None:
        return None
    algorithm, protocol = found[2].upper().replace("_", ""), found[3].upper()
    names = {name.upper(): own for own, name in ALGORITHMS.items()}
    own = list(ALGORITHMS)[int(algorithm)] if algorithm.isdecimal() else names.get(algorithm)
    if protocol.isdecimal():
        protocol = PROTOCOLS[int(protocol)].upper()
    kept = next((name for name in PROTOCOLS if name.upper() == protocol), None)
    return None if own is None or kept is None else (int(found[1]), (own, kept))


def _row(columns: list[str], words: list[str]) -> NcclTestRow | None:
    """Return the row of a line, None where its columns are not those of the header or no numbers."""
    if len(words) != len(columns) or "time" not in columns:
        return None
    place = columns.index("time")
    try:
        time, algbw, busbw = (_finite(word) for word in words[place : place + 3])
        return NcclTestRow(
            size_bytes=int(words[0]),
            time_s=time * _MICRO,
            algbw_bytes_per_s=algbw * _GIGA,
            busbw_bytes_per_s=busbw * _GIGA,
        )
    except ValueError:
        return None


def _finite(word: str) -> float:
    """Return a number of at least 0, below what no test measures: damaged ones overflow in other units."""
    value = float(word)
    if not 0.0 <= value < _MOST:
        raise ValueError(word)
    return value
