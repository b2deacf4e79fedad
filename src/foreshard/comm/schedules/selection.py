"""The schedule that a user names for a collective of a run: an algorithm with options, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from foreshard.comm.schedules.registry import algorithms_of, schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.schedule_file import load_schedule
from foreshard.errors import SpecError, unknown
from foreshard.words import spelled

BACKEND = "backend"
"""The name of what the communication library does by itself."""
_OPTIONS = ("per_node", "channels", "parts")
KEYS = {"all-reduce": "--collectives", "broadcast": "--stage-messages"}
"""The flag that names the schedule of each collective of a run."""
_PURPOSES = {
    "all-reduce": "Gradients are summed by an all-reduce",
    "broadcast": "A stage message is a broadcast from rank 0, which holds it, to those that need it",
}
_FORM = "NAME, NAME:per_node=2,channels=2,parts=4, or a schedule's file that ends in .json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleSelection:
    """How ranks execute a collective, for any number of them or for that of a file."""

    collective: str = "all-reduce"  # a key of `KEYS`
    name: str  # of the algorithm, or the path of the file
    options: tuple[tuple[str, int], ...] = ()  # of `schedule_of`
    schedule: Schedule | None = None  # what the file holds

    def schedule_for(self, num_ranks: int) -> Schedule:
        """Return the schedule of so many ranks.

        Raises
        ------
        SpecError
            Where the algorithm, with these options, or the file is not one for so many ranks, or hosts cannot
            execute it, or ranks would end with sums that differ in their last bits.
        """
        if self.schedule is None:
            made = schedule_of(self.collective, self.name, num_ranks, **dict(self.options))  # type: ignore[arg-type]
        else:
            made = self.schedule
        _check_executable(made, num_ranks, self)
        return made


def schedule_selection(collective: str, text: str) -> ScheduleSelection | None:
    """Return the selection that a text means; None for what the communication library does by itself.

    Parameters
    ----------
    collective : str
        A key of `KEYS`.
    text : str
        ``NAME``, ``NAME:OPTION=N,...`` with the options per_node, channels and parts, or a path.

    Raises
    ------
    SpecError
        For a name, an option or a file that means none.

    Examples
    --------
    >>> schedule_selection("all-reduce", "hierarchical:per_node=2").schedule_for(4).collective
    'all-reduce'
    >>> schedule_selection("broadcast", "backend") is None
    True
    """
    if text == BACKEND:
        return None
    if Path(text).suffix.lower() == ".json":
        return _selection_of_file(collective, text)
    name, colon, rest = text.partition(":")
    names, key = algorithms_of(collective), KEYS[collective]
    name = spelled(name, names)
    if name not in names:
        rule = "All-reduces are" if collective == "all-reduce" else "Broadcasts are"
        raise unknown("algorithm", name, (BACKEND, *names), key=key, rule=rule)
    options = {}
    for part in rest.split(",") if colon else ():
        option, _, value = part.partition("=")
        if option not in _OPTIONS or not value.isdecimal() or not 0 < int(value) < 2**20:
            raise SpecError(f"{part!r} of {text}", key=key, value=text, rule=f"It is {_FORM}")
        options[option] = int(value)
    return ScheduleSelection(collective=collective, name=name, options=tuple(options.items()))


all_reduce_selection = partial(schedule_selection, "all-reduce")
"""As `schedule_selection`, for `--collectives`."""


def _selection_of_file(collective: str, path: str) -> ScheduleSelection:
    """Return the schedule of a file, which the reader proves right."""
    made = load_schedule(path)
    is_send = collective == "broadcast" and (made.collective, made.num_ranks) == ("send", 2)
    if made.collective != collective and not is_send:
        raise SpecError(
            f"the schedule is one of {made.collective}",
            file=path,
            key="collective",
            value=KEYS[collective],
            rule=_PURPOSES[collective],
        )
    return ScheduleSelection(collective=collective, name=path, schedule=made)


def _check_executable(schedule: Schedule, num_ranks: int, selection: ScheduleSelection) -> None:
    """Refuse what hosts cannot execute on so many ranks, or would not execute alike."""
    every, sums = tuple(range(num_ranks)), selection.collective == "all-reduce"
    total = sum(chunk.weight for chunk in schedule.chunks)
    if schedule.num_ranks != num_ranks:
        what = f"a schedule of {schedule.num_ranks} ranks"
        rule = f"{num_ranks} ranks sum these gradients" if sums else f"{num_ranks} ranks share this message"
    elif schedule.switches:
        what, rule = f"{schedule.algorithm} reduces in switches", "Hosts execute sends between ranks"
    elif sums and any(tuple(sorted(r)) != every for c in schedule.chunks for r in (c.sources, c.targets)):
        what, rule = "some ranks take no part in a chunk", "Every rank adds to every chunk and gets its sum"
    elif not sums and any(c.sources != (0,) or not {*every[1:]} <= {*c.targets} for c in schedule.chunks):
        what, rule = "some chunk does not go from rank 0 to all others", _PURPOSES["broadcast"]
    elif not sums and 0 in schedule.target:
        what, rule = "rank 0 receives", "A stage sends and computes on, without waiting"
    elif not np.isclose(total, 1.0, rtol=0.0, atol=1e-9):
        what, rule = f"chunks of together {total:g} of the data", "Together they are the whole"
    elif sums and not sums_round_alike(schedule):
        what = "ranks add in different orders"
        rule = "Replicas stay equal only if every rank ends with the same bits"
    else:
        return
    fix = f"Take {BACKEND}, ring or another of foreshard comm measure's algorithms"
    raise SpecError(what, key=KEYS[selection.collective], value=selection.name, rule=rule, fix=fix)


def sums_round_alike(schedule: Schedule) -> bool:
    """Return whether all targets of a chunk end with the same floating-point sum, to the last bit.

    Each sum is followed as an expression: a + b and b + a round alike, (a + b) + c and a + (b + c) do not.
    Sends are taken in the order in which ranks execute them.

    Examples
    --------
    >>> sums_round_alike(schedule_of("all-reduce", "ring", 3))
    True
    """
    known: dict[tuple[int, int], int] = {}
    held = {
        (rank, number): -1 - rank for number, chunk in enumerate(schedule.chunks) for rank in chunk.sources
    }
    order = np.lexsort((np.arange(schedule.num_sends), schedule.rounds()))
    columns = (schedule.source, schedule.target, schedule.chunk, schedule.is_reduced)
    for source, target, chunk, is_reduced in zip(*(c[order].tolist() for c in columns), strict=True):
        value = held[source, chunk]
        if is_reduced and (target, chunk) in held:
            own = held[target, chunk]
            value = known.setdefault((min(own, value), max(own, value)), len(known))
        held[target, chunk] = value
    return all(
        len({held[rank, number] for rank in chunk.targets}) == 1
        for number, chunk in enumerate(schedule.chunks)
    )
