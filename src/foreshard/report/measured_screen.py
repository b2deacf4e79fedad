"""The measured times of a job's layers and links, and the costs fitted to them, as screens."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from foreshard.quantity import memory, percent, rate, seconds, size
from foreshard.report.screen import Screen, Table, table
from foreshard.units import number_of

_LAYER = (">layer", ">forward", ">backward", ">optimizer", ">parameters", ">kept a sample")


def profile_screen(profile: Mapping[str, Any], path: str) -> Screen:
    """Return the screen of a profile: the largest micro-batch, layer by layer."""
    machine, most = profile["fingerprint"], max(profile["passes"], key=int)
    passes, kept = profile["passes"][most], profile["passes"][most]["saved_bytes"]
    rows = []
    for layer, held in enumerate(profile["bytes"]):
        times = [median(row[layer][1] for row in passes[phase]) for phase in ("forward", "backward")]
        update = median(row[1] for row in profile["optimizer"][layer]["seconds"])
        sizes = (memory(held["parameter_bytes"]), memory(kept[layer] / int(most)))
        rows.append((layer, *map(seconds, times), seconds(update), *sizes))
    title = f"layers, {number_of(int(most), 'sample')}, wall time"
    tables = [table(title, _LAYER, rows, spare=(">optimizer",))]
    if profile.get("links"):
        tables.append(_links_table(profile["links"]))
    threads = number_of(machine["threads"], "thread")
    return Screen(
        header=(f"{machine['job']} on {machine['accelerator'] or machine['processor']}, {threads}",),
        tables=tuple(tables),
        notes=(f"Written to {path}; foreshard calibrate makes costs of it.",),
    )


def _links_table(links: Mapping[str, Any]) -> Table:
    sizes = sorted({timed["bytes"] for timed in links["messages"]})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for kind in ("messages", "sums"):
        for timed in links[kind]:
            key = (kind[:-1], " ".join(map(str, timed["ranks"])))
            rows.setdefault(key, {})[timed["bytes"]] = seconds(median(timed["seconds"]))
    columns = ("what", "ranks", *(f">{size(num_bytes)}" for num_bytes in sizes))
    title = f"links, {links['backend']}; a launch takes {seconds(links['launch_s'])}"
    return table(title, columns, [(*key, *map(row.get, sizes)) for key, row in rows.items()])


def costs_screen(costs: Mapping[str, Any], path: str | None) -> Screen:
    """Return the screen of calibrated costs."""
    rows = []
    for layer, cost in enumerate(costs["layers"]):
        fixed, each = (cost["forward_s"][i] + cost["backward_s"][i] for i in (0, 1))
        times = (seconds(fixed), seconds(each), seconds(cost["optimizer_s"]))
        rows.append((layer, *times, percent(cost["relative_error"])))
    low, high = costs["spread"]
    devices = ", ".join(_device(*device) for device in costs["devices"].items())
    written = f"Written to {path}." if path else "Not written: give -o FILE."
    notes = [
        "A layer takes what was timed at a size; the error is that of a fixed time plus a time per sample.",
        f"Interval of a step: {low:.3f} to {high:.3f} of the prediction, by how rounds and passes differ.",
        written,
    ]
    for name, link in (costs["links"] or {}).items():
        if link is not None:
            notes.insert(
                0,
                (
                    f"Links {name} a host: messages {seconds(link['floor_s'])} "
                    f"or {rate(link['bytes_per_s'])}, "
                    f"sums {seconds(link['hop_s'])} a hop or {rate(link['ring_bytes_per_s'])}, "
                    f"{percent(link['relative_error'])} off (median)."
                ),
            )
    columns = (">layer", ">fixed", ">a sample", ">optimizer", ">largest error")
    return Screen(
        header=(f"{costs['model']} on {costs['machine']}, {costs['clock']} clock; devices: {devices}",),
        tables=(table("layers: forward and backward", columns, rows),),
        notes=tuple(notes),
    )


def calibration_screen(made: Mapping[str, Any], path: str | None) -> Screen:
    """Return the screen of a file of calibrated constants."""
    written = f"Written to {path}." if path else "Not written: give -o FILE."
    notes = [
        "A factor moves the constants of a term together; brackets hold it with 90 %. Identified: the steps "
        "halve the error bar that the term has without them.",
        "Steps left out: each predicted by constants fitted to the others.",
        written,
    ]
    return Screen(
        header=(
            f"{made['steps']} steps on {', '.join(made['devices'])} by {', '.join(made['frameworks'])}; "
            f"{percent(made['noise'])} of a step are explained by no constant",
        ),
        tables=(error_table(made), term_table(made), *curve_tables(made)),
        notes=tuple(notes),
    )


def error_table(made: Mapping[str, Any]) -> Any:
    """Return errors before and after, and of steps left out."""
    names = {"before": "shipped constants", "after": "calibrated", "left_out": "calibrated, steps left out"}
    rows = [
        (names[key], percent(error["median_ape"]), percent(error["p90_ape"]))
        for key, error in made["error"].items()
        if error is not None
    ]
    return table("Error of a step", ("constants", ">median", ">90 % of steps below"), rows)


def term_table(made: Mapping[str, Any]) -> Any:
    """Return the factor of each term, what identifies it, and what it is tied to."""
    rows = []
    for term in made["terms"]:
        low, high = term["interval"]
        by = ", ".join(f"{one['step']} ({percent(one['share_of_step'], 0)})" for one in term["by"])
        tied = f"; tied to {', '.join(term['tied_to'])}" if term["tied_to"] else ""
        rows.append(
            (
                term["name"],
                f"{term['factor']:.3f}",
                f"{low:.3f} to {high:.3f}",
                ("yes" if term["identified"] else "no") + tied,
                by or "no step: it takes no time in any",
            )
        )
    columns = ("term", ">factor", ">90 %", "identified", "by steps in which it takes the most")
    return table("Terms", columns, rows)


def curve_tables(made: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the error against the number of measured steps, nothing where there are too few."""
    rows = [
        (
            str(shot["steps"]),
            percent(shot["median_ape"]),
            f"{percent(shot['low'])} to {percent(shot['high'])}",
        )
        for shot in made["curve"]
    ]
    columns = (">steps measured", ">median error of others", ">in 8 of 10 orders")
    return (table("Error against measured steps", columns, rows),) if rows else ()


def _device(name: str, factor: float) -> str:
    return name if factor == 1 else f"{name} ({factor:g} times as slow)"
