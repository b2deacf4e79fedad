"""A diagnosis as tables: the critical path in words, and what would help."""

from __future__ import annotations

from collections.abc import Callable

from foreshard import quantity
from foreshard.advise.diagnosis import Diagnosis, Help, PathPlace
from foreshard.report.screen import Table, listing, spans, without_empty
from foreshard.spec.prediction import TIME_LABELS

_SHOWN = 10  # places of the path
_KINDS = {
    "forward": "forward of stage {stage}",
    "passes": "forward and backward of stage {stage}",
    "backward": "backward of stage {stage}",
    "backward_input": "input gradients of stage {stage}",
    "backward_weight": "weight gradients of stage {stage}",
    "send_forward": "activations leave stage {stage}",
    "send_backward": "gradients of activations leave stage {stage}",
    "parameter_gather": "weights of stage {stage} are gathered",
    "gradient_reduce": "gradients of stage {stage} are summed",
    "optimizer": "optimizer of stage {stage}",
    "wait": "stage {stage} waits",
}


def diagnosis_tables(found: Diagnosis, counted: str) -> tuple[Table, ...]:
    """Return the two tables; `counted` is what throughput counts."""
    return path_table(found), helps_table(found.helps, counted)


def path_table(found: Diagnosis) -> Table:
    """Return the critical path by place, the longest first."""
    several = any(place.group for place in found.path)
    columns: dict[str, Callable[[PathPlace], object]] = {
        "the step waits for": lambda place: place_words(place, several),
        "ranks": lambda place: spans(place.ranks)[:40],
        ">times": lambda place: place.times,
        ">seconds": lambda place: quantity.seconds(place.seconds),
        ">share": lambda place: quantity.percent(place.seconds / found.makespan_s),
        "of which": _largest,
    }
    shown = found.path[:_SHOWN]
    title = "The critical path: what the step waits for, one after another"
    if found.cut:
        title += f" (of a step cut to {found.cut} micro-batches)"
    if len(found.path) > _SHOWN:
        title += f", its {_SHOWN} longest of {len(found.path)} places"
    return without_empty(listing(title, shown, columns, spare=("ranks", ">times")))


def place_words(place: PathPlace, several: bool = False) -> str:
    """Return what runs where, in words.

    Examples
    --------
    >>> place_words(PathPlace(kind="optimizer", group=0, stage=1, ranks=(8,), times=1, parts_s={}))
    'optimizer of stage 1'
    """
    if place.stage < 0:
        return "all ranks meet"
    words = _KINDS[place.kind].format(stage=place.stage)
    return f"{words} of group {place.group}" if several else words


def _largest(place: PathPlace) -> str:
    """Return the largest parts of a place that are not its only one."""
    if len(place.parts_s) < 2:
        return ""
    ranked = sorted(place.parts_s.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(
        f"{TIME_LABELS[name].removesuffix(', exposed')} {quantity.percent(seconds / place.seconds, 0)}"
        for name, seconds in ranked
        if seconds >= 0.005 * place.seconds
    )


def helps_table(helps: tuple[Help, ...], counted: str) -> Table:
    """Return what would help, the most first."""
    columns: dict[str, Callable[[Help], object]] = {
        "what would help": lambda one: one.what,
        f">{counted}/s": lambda one: quantity.gain(one.gain),
        ">step": lambda one: quantity.seconds(one.step_time_s),
        ">if free": lambda one: "" if one.most is None else quantity.gain(one.most),
        "--change": lambda one: "" if one.change == one.what else one.change,
    }
    return without_empty(listing("What would help, the most first", helps, columns))
