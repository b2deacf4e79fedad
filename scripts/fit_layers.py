"""Constants of convolutions in 32 bit and of recurrent layers, on the kernels of DeepBench.

    python scripts/fit_layers.py

Fits `SLOWER` of `cost/convolutions.py` to the least mean absolute log error of all passes in fp32, each
device counting alike, and `WAITING_S` of `validation/kernels/deepbench.py` to recurrent layers of 100 steps
and more on V100. Prints them beside the shipped ones, and median errors of each device by constants fitted
to the others. Three minutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from accuracy_rows import markdown

from foreshard.cost import convolutions
from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.validation.kernels.deepbench import (
    RECURRENT,
    WAITING_S,
    StatedPass,
    device_of,
    passes_alone_s,
    precision_of,
    stated_passes,
)
from foreshard.validation.tables import measured_folder, read_table

GRIDS = {"pointwise_weights": np.arange(1.0, 3.6, 0.1), "spread": np.arange(1.0, 4.1, 0.1)}
WAITS_S = np.arange(0.0, 61e-6, 1e-6)
LEAST_STEPS = 100
TRAINED = ("NV_V100",)
ROUNDS = 3  # over constants, one after the other


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """Passes of a sheet of one device that are priced together."""

    device: Device
    precision: str
    passes: tuple[StatedPass, ...]

    def errors(self, waiting_s: float = WAITING_S) -> np.ndarray:
        """Return log(predicted / measured) of each pass by the constants in place."""
        predicted_s = passes_alone_s(self.passes, self.device, self.precision, waiting_s)
        return np.log(np.array(predicted_s) / [each.measured_s for each in self.passes])


def sheets() -> tuple[list[Sheet], list[Sheet]]:
    """Return the convolutions in fp32 of every device, and the recurrent layers that are fitted."""
    rows = read_table(measured_folder() / "kernel_deepbench.csv.gz").rows
    groups: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for row in rows:
        groups[row["device"], row["section"], row["sheet_precision"]].append(row)
    images, steps = [], []
    for (name, section, sheet), found in groups.items():
        recurrent = section.startswith(RECURRENT) and name in TRAINED
        if not (section == "W" or recurrent):
            continue
        try:
            device, precision = device_of(name), precision_of(sheet, section)
        except SpecError:
            continue
        passes = stated_passes(section, precision, found)
        if recurrent:
            passes = [each for each in passes if each.name in ("forward", "inputs") and is_long(each)]
            steps += [Sheet(device, precision, tuple(passes))] if passes else []
        elif precision == "fp32":
            images.append(Sheet(device, precision, tuple(passes)))
    return images, steps


def is_long(each: StatedPass) -> bool:
    """Return whether a pass of a recurrent layer has as many steps as are fitted."""
    return each.operations[0].sizes[-1].fixed >= LEAST_STEPS


@cache
def score(sheet: Sheet, constants: Any) -> float:
    """Return the mean absolute log error of a sheet by constants, which are in place."""
    return float(np.mean(np.abs(sheet.errors())))


def fitted(images: Sequence[Sheet]) -> Any:
    """Return the constants of convolutions with the least error, each device counting alike."""
    for _ in range(ROUNDS):
        for name, grid in GRIDS.items():
            scores = []
            for value in grid:
                convolutions.SLOWER = replace(convolutions.SLOWER, **{name: float(value)})
                scores.append(np.mean([score(sheet, convolutions.SLOWER) for sheet in images]))
            best = round(float(grid[int(np.argmin(scores))]), 2)
            convolutions.SLOWER = replace(convolutions.SLOWER, **{name: best})
    return convolutions.SLOWER


def waiting(steps: Sequence[Sheet]) -> float:
    """Return the seconds that a step waits, with the least error."""
    scores = []
    for value in WAITS_S:
        scores.append(np.mean([np.mean(np.abs(sheet.errors(float(value)))) for sheet in steps]))
    return float(WAITS_S[int(np.argmin(scores))])


def medians(sheet: Sheet) -> list[str]:
    """Return the median errors of forward, images and weights, in percent."""
    errors = np.abs(np.expm1(sheet.errors()))
    names = np.array([each.name for each in sheet.passes])
    return [f"{100 * np.median(errors[names == name]):.1f}" for name in ("forward", "inputs", "weights")]


def main() -> None:
    """Fit, and print."""
    images, steps = sheets()
    shipped = convolutions.SLOWER
    print(f"shipped: {shipped}, a step waits {WAITING_S:.3g} s")
    print(f"fitted: {fitted(images)}, a step waits {waiting(steps):.3g} s")
    for sheet in steps:
        error = np.median(np.abs(np.expm1(sheet.errors())))
        print(f"recurrent layers on {sheet.device.name} in {sheet.precision}: {error:.1%}")
    lines = []
    for sheet in images:
        convolutions.SLOWER = shipped
        mine = medians(sheet)
        constants = fitted([other for other in images if other is not sheet])
        left = medians(sheet)
        values = (constants.pointwise_weights, constants.spread)
        lines.append((sheet.device.name, *mine, *left, *(f"{value:.1f}" for value in values)))
    passes = ("forward", "inputs", "weights")
    header = ("device", *passes, *(f"{name}, left out" for name in passes), *GRIDS)
    print("\n".join(markdown(header, lines)))


if __name__ == "__main__":
    main()
