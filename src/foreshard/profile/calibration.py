"""From a profile to costs: lines of seconds over samples, fitted in relative error, with how far passes spread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.errors import SpecError

_COLUMN = {"cpu": 0, "wall": 1}
_PHASES = ("forward", "backward", "backward_input")


def load_profile(path: str) -> dict[str, Any]:
    """Return a profile that is complete.

    Raises
    ------
    SpecError
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise SpecError(f"cannot read: {error.strerror}", file=path, key="--profile",
                        fix="Make it with foreshard profile") from None  # fmt: skip
    except ValueError as error:
        raise SpecError(f"not JSON: {error}", file=path, key="--profile") from None
    if not isinstance(data, dict) or data.get("kind") != "profile":
        raise SpecError("is not a profile", file=path, key="--profile", rule="foreshard profile writes profiles")
    if not data.get("complete"):
        raise SpecError("is not complete", file=path, key="--profile", fix="Run foreshard profile again: it goes on")
    return data


def calibrate(
    profile: Mapping[str, Any], *, clock: str = "cpu", slow: Mapping[str, float] | None = None,
    links: Mapping[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the object of a costs file.

    Parameters
    ----------
    profile : mapping
    clock : {'cpu', 'wall'}
        Whose seconds.
    slow : mapping of device name to factor, optional
        Devices that are this one, slower; the measured device alone, as 'here', if not given.
    links : mapping, optional
        Measured `bytes_per_s` and `latency_s`; the cluster's are used if not given.
    """
    column, sizes = _COLUMN[clock], sorted(int(n) for n in profile["passes"])
    layers = []
    for layer, held in enumerate(profile["bytes"]):
        lines = {f"{phase}_s": _line(profile, phase, layer, sizes, column) for phase in _PHASES}
        largest = profile["passes"][str(sizes[-1])]
        told = profile["optimizer"][layer]
        layers.append({
            **{name: list(line) for name, line in lines.items()}, **held,
            "optimizer_s": float(np.median([row[column] for row in told["seconds"]])),
            "state_bytes": told["state_bytes"],
            "saved_bytes_per_sample": largest["saved_bytes"][layer] / sizes[-1],
            "boundary_bytes_per_sample": largest["boundary_bytes"][layer] / sizes[-1],
            "relative_error": _relative_error(profile, layer, sizes, column, lines),
        })  # fmt: skip
    return {
        "schema_version": 1, "kind": "measured costs", "date": profile["date"], "clock": clock,
        "model": profile["fingerprint"]["job"], "machine": profile["fingerprint"]["processor"],
        "fingerprint": profile["fingerprint"], "tokens_per_sample": profile["tokens_per_sample"], "layers": layers,
        "devices": dict(slow or {"here": 1.0}), "spread": list(_spread(profile, sizes, column)), "links": links,
        "samples": sizes,
    }  # fmt: skip


def _seconds(profile: Mapping[str, Any], phase: str, layer: int, size: int, column: int) -> np.ndarray:
    return np.array([one[layer][column] for one in profile["passes"][str(size)][phase]])


def _line(profile: Mapping[str, Any], phase: str, layer: int, sizes: Sequence[int], column: int) -> tuple[float, float]:
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
    profile: Mapping[str, Any], layer: int, sizes: Sequence[int], column: int, lines: Mapping[str, tuple[float, float]]
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


def _spread(profile: Mapping[str, Any], sizes: Sequence[int], column: int) -> tuple[float, float]:
    """Return the 5th and 95th percentile of whole passes over their median, all sizes together."""
    ratios: list[float] = []
    for size in sizes:
        told = profile["passes"][str(size)]
        whole = [
            sum(row[column] for phase in ("forward", "backward") for row in told[phase][n])
            for n in range(len(told["forward"]))
        ]
        ratios += [value / float(np.median(whole)) for value in whole]
    return float(np.quantile(ratios, 0.05)), float(np.quantile(ratios, 0.95))
