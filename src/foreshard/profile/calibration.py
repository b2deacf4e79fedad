"""From profiles to costs: lines of seconds over samples, how passes spread, and links of a floor and a rate.

All are fitted in relative error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.predict.measured.links import LinkCost

_COLUMN = {"cpu": 0, "wall": 1}
_PHASES = ("forward", "backward", "backward_input")
_STUDENT_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95th percentile of Student's t with 1, 2, ... degrees of freedom."""


def calibrate(
    profile: Mapping[str, Any],
    *,
    clock: str = "wall",
    slow: Mapping[str, float] | None = None,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    links: bool = True,
    table_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the object of a costs file: `profile` and `slow` are as the api's, of the measured device.

    `others` are profiles of the same job on other devices. `links` takes links that were timed. `table_s` has
    seconds that are stated instead of measured, as a lab's table: forward and backward of a sample, optimizer
    of a layer.
    """
    profiles = {"": profile, **(others or {})}
    for name, other in profiles.items():
        _check(profile, other, clock, name)
    for name, other in (
        *((name, profile) for name, factor in (slow or {}).items() if factor == 1.0),
        *(others or {}).items(),
    ):
        _check_device(name, other["fingerprint"])
    layers = {name: _layers(other, _COLUMN[clock]) for name, other in profiles.items()}
    parts = {name: _parts(other, _COLUMN[clock]) for name, other in profiles.items()}
    spreads = [_spread(other, _COLUMN[clock]) for other in profiles.values()]
    if table_s is not None:
        clock, spreads = "table", [(1.0, 1.0)]
        stated = _stated(table_s)
        layers = {name: [layer | stated for layer in rows] for name, rows in layers.items()}
        parts = {
            name: {degree: [layer | stated for layer in rows] for degree, rows in by_degree.items()}
            for name, by_degree in parts.items()
        }
    devices = dict(slow or {}) | dict.fromkeys(others or {}, 1.0)
    found = [other["links"] for other in profiles.values() if other.get("links")]
    timed = found[0] if links and found else None
    print_of = profile["fingerprint"]
    return {
        "schema_version": 1,
        "kind": "measured costs",
        "date": profile["date"],
        "clock": clock,
        "model": print_of["job"],
        "machine": print_of["accelerator"] or print_of["processor"],
        "fingerprint": print_of,
        "tokens_per_sample": profile["tokens_per_sample"],
        "layers": layers.pop(""),
        "tables": layers,
        "tensor": parts,
        "devices": devices or {"here": 1.0},
        "spread": [min(low for low, _ in spreads), max(high for _, high in spreads)],
        "links": fitted_links(timed),
        "launch_s": timed["launch_s"] if timed else None,
        "samples": sorted(int(n) for n in profile["passes"]),
        "tied": profile.get("tied", []),
    }


def _stated(table_s: Mapping[str, float]) -> dict[str, Any]:
    """Return a layer's seconds by a table: half of a backward is for the layer before."""
    return {
        "forward_s": [0.0, table_s["forward"]],
        "backward_s": [0.0, table_s["backward"]],
        "backward_input_s": [0.0, table_s["backward"] / 2],
        "optimizer_s": table_s["optimizer"],
        "relative_error": 0.0,
        "timed_sizes": [],
        **{f"timed_{phase}_s": [] for phase in _PHASES},
    }


def _check(profile: Mapping[str, Any], other: Mapping[str, Any], clock: str, name: str) -> None:
    for key in ("job", "layers", "precision"):
        mine, theirs = (print_of.get(key) for print_of in (profile["fingerprint"], other["fingerprint"]))
        if mine != theirs:
            rule = "Profiles calibrated together are of one job in one precision"
            raise SpecError(f"{name}: {theirs} against {mine}", key="--profile", value=theirs, rule=rule)
    if clock == "cpu" and other["fingerprint"]["device"] != "cpu":
        what = "processor time of a GPU"
        rule = "A GPU's time is the wall's"
        raise SpecError(what, key="--clock", value=clock, rule=rule, fix="Use --clock wall")


def _check_device(name: str, fingerprint: Mapping[str, Any]) -> None:
    """Raise where a profile is said to be of one device of the catalog and was made on another."""
    accelerator = fingerprint.get("accelerator", "")
    try:
        said = resolve_device(name)
        measured = resolve_device(accelerator) if accelerator else None
    except SpecError:  # a lab's device, or a GPU that no catalog has
        return
    if measured is None:
        processor = fingerprint.get("processor") or "a processor"
        rule, fix = f"The profile was made on {processor}", f"Profile the job on {said.name}"
        raise SpecError("a profile of a processor", key="--profile", value=name, rule=rule, fix=fix)
    if said.name != measured.name:
        rule = f"The profile was made on {accelerator}"
        fix = (
            f"Call it {measured.name}, state how much slower {name} is (--device {name}=F), or profile there"
        )
        raise SpecError(f"a profile of {measured.name}", key="--profile", value=name, rule=rule, fix=fix)


def _layers(profile: Mapping[str, Any], column: int) -> list[dict[str, Any]]:
    sizes = sorted(int(n) for n in profile["passes"])
    largest = profile["passes"][str(sizes[-1])]
    timed = {phase: _timed(profile, phase, sizes, column) for phase in _PHASES}
    layers = []
    for layer, held in enumerate(profile["bytes"]):
        lines = {f"{phase}_s": _line(profile, phase, layer, sizes, column) for phase in _PHASES}
        optimizer = profile["optimizer"][layer]
        layers.append(
            {
                **{name: list(line) for name, line in lines.items()},
                **held,
                "timed_sizes": sizes,
                **{f"timed_{phase}_s": timed[phase][:, layer].tolist() for phase in _PHASES},
                "optimizer_s": float(np.median([row[column] for row in optimizer["seconds"]])),
                "state_bytes": optimizer["state_bytes"],
                "saved_bytes_per_sample": largest["saved_bytes"][layer] / sizes[-1],
                "boundary_bytes_per_sample": largest["boundary_bytes"][layer] / sizes[-1],
                "relative_error": _relative_error(profile, layer, sizes, column, lines),
            }
        )
    return layers


def _parts(profile: Mapping[str, Any], column: int) -> dict[str, list[dict[str, Any]]]:
    """Return, by degree of tensor parallelism, the layers as a rank's part was timed, and what is summed."""
    return {
        degree: [
            row | {"sums_forward": forward, "sums_backward": backward}
            for row, forward, backward in zip(
                _layers(part, column), part["sums"]["forward"], part["sums"]["backward"], strict=True
            )
        ]
        for degree, part in profile.get("tensor", {}).items()
    }


def _seconds(profile: Mapping[str, Any], phase: str, layer: int, size: int, column: int) -> np.ndarray:
    return np.array([row[layer][column] for row in profile["passes"][str(size)][phase]])


def _timed(profile: Mapping[str, Any], phase: str, sizes: Sequence[int], column: int) -> np.ndarray:
    """Return the seconds of each layer at each size, shape (sizes, layers).

    They are medians, scaled so that they sum to the median of all layers together: a disturbance that comes
    to each layer rarely comes to one of them in most passes.
    """
    found = []
    for size in sizes:
        each = np.array([[layer[column] for layer in row] for row in profile["passes"][str(size)][phase]])
        medians, whole = np.median(each, axis=0), np.median(each.sum(axis=1))
        found.append(medians * (whole / (medians.sum() or 1.0)))
    return np.array(found)


def _line(
    profile: Mapping[str, Any], phase: str, layer: int, sizes: Sequence[int], column: int
) -> tuple[float, float]:
    """Return (fixed, per sample) >= 0 that fit the medians with the least squares of relative errors."""
    medians = np.array([np.median(_seconds(profile, phase, layer, size, column)) for size in sizes])
    if not medians.any():
        return 0.0, 0.0
    medians = np.maximum(medians, 1e-9)
    terms = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], axis=1) / medians[:, None]
    best, least = (0.0, 0.0), np.inf
    for kept in ((0, 1), (1,), (0,)):
        fitted, *_ = np.linalg.lstsq(terms[:, kept], np.ones(len(sizes)), rcond=None)
        line = np.zeros(2)
        line[list(kept)] = fitted
        error = float(np.square(terms @ line - 1).sum())
        if (line >= 0).all() and error < least - 1e-15:
            best, least = (float(line[0]), float(line[1])), error
    return best


def _relative_error(
    profile: Mapping[str, Any],
    layer: int,
    sizes: Sequence[int],
    column: int,
    lines: Mapping[str, tuple[float, float]],
) -> float:
    """Return the largest error of the fitted forward and backward over the sizes measured."""
    worst = 0.0
    for size in sizes:
        measured = fitted = 0.0
        for phase in ("forward", "backward"):
            measured += float(np.median(_seconds(profile, phase, layer, size, column)))
            fitted += lines[f"{phase}_s"][0] + lines[f"{phase}_s"][1] * size
        if measured > 0:
            worst = max(worst, abs(fitted - measured) / measured)
    return worst


def _spread(profile: Mapping[str, Any], column: int) -> tuple[float, float]:
    """Return between which factors on the prediction a step lies, with 90 %.

    A run is one more round of the profile. Rounds differ by what changes slowly on the machine: logarithms of
    their ratios to the median, over all sizes, are taken as normal, and a further one is predicted by
    Student's t. Within a round passes lie between their 5th and 95th percentile. Both add as independent.

    Source
    ------
    Prediction interval of one further draw of a normal variable (Student 1908).
    """
    passes: dict[int, list[np.ndarray]] = {}
    for timed in profile["passes"].values():
        pass_s = [
            sum(row[column] for phase in ("forward", "backward") for row in timed[phase][n])
            for n in range(len(timed["forward"]))
        ]
        ratios = np.log(np.array(pass_s) / np.median(pass_s))
        ends = np.cumsum(timed.get("rounds") or [len(pass_s)])[:-1]
        for number, of_round in enumerate(np.split(ratios, ends)):
            passes.setdefault(number, []).append(of_round)
    rounds = np.array([np.mean([np.median(of_size) for of_size in sizes]) for sizes in passes.values()])
    rests = [np.concatenate(sizes) - of for sizes, of in zip(passes.values(), rounds, strict=True)]
    low, high = np.quantile(np.concatenate(rests), (0.05, 0.95))
    count, further = len(rounds), 0.0
    if count > 1:
        t = _STUDENT_T_95[min(count - 1, len(_STUDENT_T_95)) - 1]
        further = t * float(rounds.std(ddof=1)) * (1 + 1 / count) ** 0.5
    return float(np.exp(-np.hypot(further, min(low, 0.0)))), float(np.exp(np.hypot(further, max(high, 0.0))))


def fitted_links(links: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the links of a profile as a costs file holds them, None where none were timed."""
    if not links:
        return None
    return {name: _fitted_link(links, apart) for name, apart in (("within", False), ("across", True))}


def _fitted_link(links: Mapping[str, Any], apart: bool) -> dict[str, float] | None:
    messages = [(1.0, row["bytes"], row["seconds"]) for row in links["messages"] if row["apart"] == apart]
    sums = []
    for row in links["sums"]:
        if row["apart"] == apart:
            hops = 2 * (len(row["ranks"]) - 1)
            sums.append((float(hops), hops / len(row["ranks"]) * row["bytes"], row["seconds"]))
    if not messages:
        return None
    floor_s, rate, error = floor_and_rate(messages)
    hop_s, ring_rate, ring_error = floor_and_rate(sums or messages)
    fitted = LinkCost(
        floor_s=floor_s,
        bytes_per_s=rate,
        hop_s=hop_s,
        ring_bytes_per_s=ring_rate,
        relative_error=max(error, ring_error),
    )
    return asdict(fitted)


def floor_and_rate(timed: Sequence[tuple[float, float, Sequence[float]]]) -> tuple[float, float, float]:
    """Return (floor, bytes/s, median relative error) of max(hops * floor, bytes / rate).

    It is fitted to (hops, bytes, seconds of repeats). Every split of the points into those at the floor and
    those at the rate is tried; each side's line goes through the median of its ratios, and the split with the
    least mean of |log(formula / measured)| is kept: half and twice as long are equally wrong.
    """
    points = sorted(timed, key=lambda point: point[1] / point[0])
    hops, size, seconds = (
        np.array([point[0] for point in points]),
        np.array([point[1] for point in points], dtype=float),
        np.maximum([float(np.median(point[2])) for point in points], 1e-9),
    )
    best, least = (0.0, np.inf), np.inf
    for split in range(len(points)):
        floor_s = float(np.median(seconds[:split] / hops[:split])) if split else 0.0
        per_byte_s = float(np.median(seconds[split:] / size[split:]))
        error = float(np.abs(np.log(np.maximum(hops * floor_s, size * per_byte_s) / seconds)).mean())
        if error < least:
            best, least = (floor_s, 1.0 / per_byte_s), error
    floor_s, rate = best
    errors = np.abs(np.maximum(hops * floor_s, size / rate) / seconds - 1)
    return floor_s, rate, float(np.median(errors))
