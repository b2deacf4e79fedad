"""`foreshard comm predict COLLECTIVE SIZE CLUSTER`: the time of a collective, and what NCCL or RCCL picks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import MEASURED_HELP, measured_collectives
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Count, Word
from foreshard.comm.nccl.constants import GIGA, releases, tuning
from foreshard.comm.nccl.constants_file import read_constants
from foreshard.comm.nccl.rccl import rccl_tuning
from foreshard.comm.prediction import NAMES, TABLE, predict_collective
from foreshard.errors import SpecError
from foreshard.report.screen import Box, Screen, Table, table
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.cli.comm.inputs import MeasuredCollectives
    from foreshard.comm.nccl.channels import Channels
    from foreshard.comm.nccl.choice import NcclChoice
    from foreshard.comm.nccl.communicator import Communicator
    from foreshard.comm.nccl.constants_file import RefittedConstants
    from foreshard.comm.nccl.estimates import Estimate
    from foreshard.comm.prediction import CollectivePrediction

_OLD = (2, 10)  # the last release whose latencies are those of the era `old`
_EARLY = (2, 19)  # and of `2.1x`
INTERVAL = 0.9
_RESTS_ON = {
    "fitted": "systems left out of the fit, on links of which others were measured",
    "unseen": "systems left out of the fit, on links of which no other was measured",
    "network": "three systems of several nodes, which no fit has seen",
}
_CLOSE = 0.1  # a margin within the error of NCCL's own estimates


@verb_command("predict")
@click.argument("collective", type=Word(*NAMES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.argument("cluster", metavar="CLUSTER")
@click.option("--ranks", type=Count(2), help="Take the first N devices (default: all).")
@click.option(
    "--library",
    default="nccl",
    metavar="nccl[@VERSION]|FILE",
    help="Library and release (2.10 and before are slower), or refitted constants of comm import --fit-nccl.",
)
@click.option("--costs", metavar="FILE", help=MEASURED_HELP)
def command(
    collective: str, size: float, cluster: str, ranks: int | None, library: str, costs: str | None
) -> None:
    """Predict one collective of SIZE bytes on CLUSTER, and explain what NCCL (on MI300X: RCCL) picks for it.

    COLLECTIVE is all-reduce, all-gather, reduce-scatter, broadcast, all-to-all or send. SIZE is what
    nccl-tests print: the whole buffer, of an all-gather the gathered output. A send goes from the first rank
    to the last.

    \b
    foreshard comm predict all-reduce 1GiB 8x8xh100-sxm
    foreshard comm predict all-gather 64KiB 8x8xh100-sxm --ranks 16 --json
    foreshard comm predict all-reduce 3MiB 8xh100-sxm --costs all_reduce.log
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    own = read_constants(library) if library.lower().endswith(".toml") else None
    release = _release(
        f"nccl@{own.measured_with}" if own and own.measured_with else "nccl" if own else library
    )
    era = "2.2x" if release is None or release > _EARLY else "2.1x" if release > _OLD else "old"
    rules = ".".join(map(str, release)) if release else ""
    where = api.load_cluster(cluster)
    rules = rules if rules in releases() else ""
    measured = None if costs is None else measured_collectives(costs, where, collective)
    tables = measured.tables if measured else None
    found = predict_collective(
        collective,
        size,
        where,
        ranks,
        era=era,
        release=rules,
        constants=own.constants if own else None,
        tables=tables,
    )
    if library.lower() == "rccl" and found.library == "NCCL":
        rule, fix = "RCCL is the library of AMD's devices", "Leave it out"
        raise SpecError("RCCL on these devices", key="--library", value=library, rule=rule, fix=fix)
    if own is not None:
        _check_chosen(found, own)
    notes = _notes(found, release, measured, own)
    give(_object(found, notes, own), lambda: _screen(found, notes))


def _check_chosen(found: CollectivePrediction, own: RefittedConstants) -> None:
    """Refuse refitted constants where NCCL chooses between no algorithms."""
    if found.library != "NCCL" or found.choice is None or found.choice.best is None:
        by = f"{found.library or 'no library'} on these devices" if found.library != "NCCL" else "NCCL"
        what = f"constants of NCCL for {found.collective} by {by}"
        rule = "They are of its choice between algorithms, which devices and collective must have"
        fix = "Leave it out"
        raise SpecError(what, key="--library", value=own.path, rule=rule, fix=fix)


def _release(library: str) -> tuple[int, int] | None:
    """Return the release that a label names, None where it names none."""
    name, _, version = library.strip().lower().partition("@")
    found = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})([.\-].*)?", version)
    if name == "rccl" and not version:
        return None
    if name != "nccl" or (version and not found):
        what = f"unknown library {library[:40]!r}"
        rule = "The library is nccl with @ and a release or without, or rccl on AMD's devices"
        fix = f"Give nccl or nccl@{tuning()['release']}"
        raise SpecError(what, key="--library", value=library[:40], rule=rule, fix=fix)
    return (int(found[1]), int(found[2])) if found else None


def _object(found: CollectivePrediction, notes: list[str], own: RefittedConstants | None) -> dict[str, Any]:
    """Return the contract's object, with its inputs and NCCL's estimates."""
    choice = found.choice
    second = choice.runner_up if choice else None
    return {
        "schema_version": 1,
        "collective": found.collective,
        "size_bytes": int(found.num_bytes),
        "num_ranks": found.num_ranks,
        "time_s": found.time_s,
        "time_interval_s": list(found.time_intervals_s[INTERVAL]) if found.time_intervals_s else None,
        "time_intervals_s": {str(level): list(ends) for level, ends in found.time_intervals_s.items()},
        "evidence": found.evidence,
        "algbw_bytes_per_s": found.algbw_bytes_per_s,
        "busbw_bytes_per_s": found.busbw_bytes_per_s,
        "algorithm": choice.algorithm if choice else None,
        "protocol": choice.protocol if choice else None,
        "runner_up": second.name if second else None,
        "margin": choice.margin if choice else None,
        "candidates": [_candidate(estimate) for estimate in choice.estimates] if choice else [],
        "nccl": f"{tuning()['release']}, refitted" if own else tuning()["release"],
        "library": found.library or None,
        "notes": notes,
    }


def _candidate(estimate: Estimate) -> dict[str, Any]:
    return {
        "name": estimate.name,
        "estimate_s": estimate.time_s if estimate.runs else None,
        "latency_s": estimate.latency_s if estimate.runs else None,
        "bytes_per_s": estimate.bytes_per_s if estimate.runs else None,
        "reason": estimate.reason or None,
    }


def _notes(
    found: CollectivePrediction,
    release: tuple[int, int] | None,
    measured: MeasuredCollectives | None,
    own: RefittedConstants | None,
) -> list[str]:
    """Return what the answer rests on, in sentences."""
    notes = _notes_of_time(found, measured)
    if found.choice is None:
        return [
            *notes,
            "What a library picks is modelled for devices of NVIDIA from Pascal on (NCCL) and for whole "
            "nodes of eight MI300X or MI325X (RCCL).",
        ]
    if found.library == "RCCL":
        return [*notes, *_notes_of_rccl(found.choice)]
    shipped = str(tuning()["release"])
    choice = found.choice
    if choice.best is None:
        return [*notes, "NCCL sends messages between pairs here: there is no choice of algorithm."]
    notes.append(
        f"Algorithm and protocol are the pick of NCCL {shipped} by its own estimates, which rank candidates "
        "and are no measured times."
    )
    asked = ".".join(map(str, release)) if release else ""
    if own is not None:
        of = f" with NCCL {own.measured_with}" if own.measured_with else ""
        notes[-1] = (
            f"Algorithm and protocol are those of the shortest estimate with the constants of {own.path}: "
            f"{number_of(len(own.constants), 'constant')} refitted to times of {own.measured_on}{of}, all "
            f"others those of NCCL {own.based_on}, also for algorithms that were not measured. NCCL itself "
            "picks so only if a tuner gives it these constants."
        )
    elif found.communicator is not None and found.communicator.release:
        notes[-1] = notes[-1].replace(f"NCCL {shipped}", f"NCCL {asked}")
    elif release is not None and release != tuple(map(int, shipped.split(".")[:2])):
        notes.append(
            f"The constants of NCCL {asked} are not shipped: its pick may differ from that of {shipped}."
        )
    if choice.margin is not None and choice.margin < _CLOSE and choice.runner_up is not None:
        notes.append(
            f"The choice is close: {choice.runner_up.name} is {100 * choice.margin:.1f} % slower by NCCL's "
            "estimate; measure both (NCCL_ALGO, NCCL_PROTO)."
        )
    return notes


def _notes_of_time(found: CollectivePrediction, measured: MeasuredCollectives | None) -> list[str]:
    """Return what the time rests on: which measured rows, or which fit."""
    if measured is None or found.evidence != TABLE:
        form = (
            "The time is that of the closed form fitted to measured rows (docs/derivations/collectives.md); "
            f"its interval is of {_RESTS_ON[found.evidence]}."
        )
        if measured is None:
            return [form]
        covers = "a table is of devices, collectives and ranks of one domain, and of its sizes"
        return [f"{measured.path} does not cover it: {covers}.", form]
    notes = [f"The time is interpolated between measured sizes of {measured.path}, which state no interval."]
    if measured.collective != found.collective:
        notes.append(
            f"What was measured is {measured.collective}, which moves as many bytes between the same ranks."
        )
    if not measured.is_named:
        notes.append(f"{measured.path} does not say which collective ran: it is taken to be this one.")
    return notes


def _notes_of_rccl(choice: NcclChoice) -> list[str]:
    """Return what RCCL's choice rests on: what its source states, and what nobody has logged."""
    if choice.best is None:
        return ["RCCL sends messages between pairs here: there is no choice of algorithm."]
    table = rccl_tuning()
    return [
        f"Algorithm and protocol are the pick of RCCL {table['release']} by its own estimates. Its constants "
        f"are stated in its source ({str(table['commit'])[:8]}), none is fitted, and no log of its picks was "
        "at hand; MSCCL schedules, which it runs instead for some sizes, are not modelled."
    ]


def _screen(found: CollectivePrediction, notes: list[str]) -> Screen:
    header = f"{found.collective} of {_size(found.num_bytes)} over {found.num_ranks} ranks"
    boxes = [
        Box(title="time", value=quantity.seconds(found.time_s), note=_interval(found)),
        Box(title="algorithm bandwidth", value=f"{quantity.digits(found.algbw_bytes_per_s / GIGA)} GB/s"),
        Box(title="bus bandwidth", value=f"{quantity.digits(found.busbw_bytes_per_s / GIGA)} GB/s"),
    ]
    choice, comm = found.choice, found.communicator
    if choice is None:
        return Screen(header=(header,), boxes=tuple(boxes), notes=tuple(notes))
    value = f"{choice.algorithm}/{choice.protocol}"
    boxes.append(Box(title=f"{found.library} picks", value=value, note=_why(choice)))
    tables = (_candidates(choice, found.library),) if choice.estimates else ()
    headers = (header,) if comm is None else (header, _seen(comm))
    return Screen(header=headers, boxes=tuple(boxes), tables=tables, notes=tuple(notes))


def _interval(found: CollectivePrediction) -> str:
    if not found.time_intervals_s:
        return "measured"
    low, high = (quantity.seconds(end) for end in found.time_intervals_s[INTERVAL])
    return f"{100 * INTERVAL:.0f} % within {low} to {high}"


def _size(num_bytes: float) -> str:
    """Return bytes in the largest binary unit that divides them."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes % 2**power == 0:
            return f"{num_bytes / 2**power:,.0f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _why(choice: NcclChoice) -> str:
    best, second = choice.best, choice.runner_up
    if best is None or second is None or choice.margin is None:
        return "the only way" if best is not None else "by messages"
    latency = second.latency_s - best.latency_s
    by = "latency" if 2.0 * latency > second.time_s - best.time_s else "bandwidth"
    return f"{100 * choice.margin:.1f} % ahead of {second.name}, by {by}"


def _seen(comm: Communicator) -> str:
    """Return what NCCL's search finds, in words."""
    links, nodes = "NVLink" if comm.nvlink else "PCIe", "node" if comm.num_nodes == 1 else "nodes"
    text = f"NCCL sees {comm.num_nodes} {nodes} of {comm.ranks_per_node:g} ranks over {links}: "
    text += f"{_speeds(comm.ring)} rings"
    return text + (f", {_speeds(comm.switch)} channels through the switch" if comm.switch is not None else "")


def _speeds(channels: Channels) -> str:
    intra, inter = channels.intra_bytes_per_s / GIGA, channels.inter_bytes_per_s / GIGA
    return f"{channels.count} x {intra:g} GB/s" + (f" ({inter:g} between nodes)" if intra != inter else "")


def _candidates(choice: NcclChoice, library: str) -> Table:
    rows = [
        (
            estimate.name,
            quantity.seconds(estimate.time_s),
            quantity.seconds(estimate.latency_s),
            quantity.digits(estimate.bytes_per_s / GIGA),
            "picked" if rank == 0 else "",
        )
        if estimate.runs
        else (estimate.name, None, None, None, estimate.reason)
        for rank, estimate in enumerate(choice.estimates)
    ]
    title = f"{library}'s estimates: latency + bytes / bandwidth"
    return table(
        title, ("candidate", ">estimate", ">latency", ">GB/s", ""), rows, spare=(">GB/s", ">latency")
    )
