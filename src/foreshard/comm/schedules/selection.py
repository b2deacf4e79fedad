"""The all-reduce that a user names: an algorithm with options, or a schedule's file."""

from __future__ import annotations

from dataclasses import dataclass
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
_KEY = "--collectives"
_FORM = "NAME, NAME:per_node=2,channels=2,parts=4, or a schedule's file that ends in .json"


@dataclass(frozen=True, kw_only=True, eq=False)
class AllReduceSelection:
    """How ranks sum, for any number of them or for that of a file.

    Attributes
    ----------
    name : str
        Of the algorithm, or the path of the file.
    options : tuple of (str, int)
        Of `schedule_of`.
    schedule : Schedule, optional
        What the file holds.
    """

    name: str
    options: tuple[tuple[str, int], ...] = ()
    schedule: Schedule | None = None

    def schedule_for(self, num_ranks: int) -> Schedule:
        """Return the schedule of so many ranks.

        Raises
        ------
        SpecError
            Where the algorithm, with these options, or the file is not one for so many ranks, or hosts cannot
            execute it, or ranks would end with sums that differ in their last bits.
        """
        if self.schedule is None:
            made = schedule_of("all-reduce", self.name, num_ranks, **dict(self.options))  # type: ignore[arg-type]
        else:
            made = self.schedule
        _check_executable(made, num_ranks, self.name)
        return made


def all_reduce_selection(text: str) -> AllReduceSelection | None:
    """Return the selection that a text means; None for the communication library's own all-reduce.

    Parameters
    ----------
    text : str
        ``NAME``, ``NAME:OPTION=N,...`` with the options per_node, channels and parts, or a path.

    Raises
    ------
    SpecError
        For a name, an option or a file that means none.

    Examples
    --------
    >>> all_reduce_selection("hierarchical:per_node=2").schedule_for(4).collective
    'all-reduce'
    >>> all_reduce_selection("backend") is None
    True
    """
    if text == BACKEND:
        return None
    if Path(text).suffix.lower() == ".json":
        return _selection_of_file(text)
    name, colon, rest = text.partition(":")
    names = algorithms_of("all-reduce")
    name = spelled(name, names)
    if name not in names:
        raise unknown("algorithm", name, (BACKEND, *names), key=_KEY, rule="All-reduces are")
    options = {}
    for part in rest.split(",") if colon else ():
        option, _, value = part.partition("=")
        if option not in _OPTIONS or not value.isdecimal() or not 0 < int(value) < 2**20:
            raise SpecError(f"{part!r} of {text}", key=_KEY, value=text, rule=f"It is {_FORM}")
        options[option] = int(value)
    return AllReduceSelection(name=name, options=tuple(options.items()))


def _selection_of_file(path: str) -> AllReduceSelection:
    """Return the schedule of a file, which the reader proves right."""
    made = load_schedule(path)
    if made.collective != "all-reduce":
        rule = "Gradients are summed by an all-reduce"
        raise SpecError(
            f"the schedule is one of {made.collective}", file=path, key="collective", value=_KEY, rule=rule
        )
    return AllReduceSelection(name=path, schedule=made)


def _check_executable(schedule: Schedule, num_ranks: int, name: str) -> None:
    """Refuse what hosts cannot execute on so many ranks, or would not execute alike."""
    every = tuple(range(num_ranks))
    total = sum(chunk.weight for chunk in schedule.chunks)
    if schedule.num_ranks != num_ranks:
        what, rule = f"a schedule of {schedule.num_ranks} ranks", f"{num_ranks} ranks sum these gradients"
    elif schedule.switches:
        what, rule = f"{schedule.algorithm} reduces in switches", "Hosts execute sends between ranks"
    elif any(tuple(sorted(ranks)) != every for c in schedule.chunks for ranks in (c.sources, c.targets)):
        what, rule = "some ranks take no part in a chunk", "Every rank adds to every chunk and gets its sum"
    elif not np.isclose(total, 1.0, rtol=0.0, atol=1e-9):
        what, rule = f"chunks of together {total:g} of the data", "Together they are the whole"
    elif not sums_round_alike(schedule):
        what = "ranks add in different orders"
        rule = "Replicas stay equal only if every rank ends with the same bits"
    else:
        return
    fix = f"Take {BACKEND}, ring or another of foreshard comm measure's algorithms"
    raise SpecError(what, key=_KEY, value=name, rule=rule, fix=fix)


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
