"""Rates of direct kernels for grouped convolutions, on networks whose groups no matrix unit takes.

    python scripts/fit_grouped.py [--data FOLDER]

    python scripts/fit_grouped.py --kernels

Fits `_FIRST` and `_LAST` of `cost/operations.py` to the least sum of absolute log errors on timm's rows of
those networks, one layout at a time, and prints them, then the median error of each family in the fit and
with the family left out of it. What is no grouped convolution is priced as shipped. With `--kernels` those of
groups apart are fitted, on the kernels of an H100 in `bench/device_groups.csv`; widths that one kernel takes
(64, and those of `_on_matrix_units`) are left out.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from accuracy_networks import ROOT, rows
from scipy.optimize import minimize

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost import operations
from foreshard.validation.networks.predicted import predicted, traced_of


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step: its seconds, those of everything but grouped convolutions, and these."""

    network: str
    layout: str
    measured_s: float
    rest_s: float
    vector_s: np.ndarray
    least_s: np.ndarray
    widths: np.ndarray

    @property
    def family(self) -> str:
        """Networks of one design."""
        return self.network[:8]

    def error(self, values: np.ndarray) -> float:
        """Return log(predicted / measured speed) by a share and the channels of a tap."""
        share, channels = np.exp(values)
        direct_s = np.maximum(self.vector_s * (1.0 + channels / self.widths) / share, self.least_s)
        return float(np.log(self.measured_s / (self.rest_s + direct_s.sum())))


def read(folder: Path) -> list[Row]:
    """Return the rows of networks with such groups, of timm."""
    found = []
    for row in rows(folder, Counter(), ["cnn_timm_train.csv"]):
        module = traced_of(row)
        work = [
            o for layer in module.layers for o in (*layer.forward, *layer.backward) if o.kind == "grouped"
        ]
        if not work:
            continue
        device = resolve_device(row.device)
        kernels, vector = kernel_model(device, row.precision, fidelity="zero-shot"), device.peak("fp32")
        flops = np.array([o.flops.at(row.batch) for o in work])
        streamed_s = operations.stream_s(np.array([o.bytes.at(row.batch) for o in work]), kernels)
        own_s = operations.operations_s(work, row.batch, kernels, vector).sum()
        step_s = predicted(row).step_time_s
        found.append(
            Row(
                network=row.network,
                layout=row.layout,
                measured_s=row.batch / row.samples_per_s,
                rest_s=step_s - own_s,
                vector_s=flops / vector,
                least_s=streamed_s,
                widths=np.array([o.sizes[0].at(row.batch) for o in work]),
            )
        )
    return found


def kernels_apart() -> list[Row]:
    """Return kernels of an H100 as rows of nothing else."""
    device = resolve_device("h100-sxm")
    kernels, vector = kernel_model(device, "bf16", fidelity="zero-shot"), device.peak("fp32")
    found = []
    with (ROOT / "bench" / "device_groups.csv").open() as file:
        for line in csv.DictReader(file):
            samples, width, groups, side = (
                int(line[key]) for key in ("samples", "channels", "groups", "side")
            )
            if width == 64 or (width <= 32 and width * groups % 128 == 0):
                continue  # one kernel takes them all
            elements = float(samples * side**2 * width * groups)
            least_s = operations.stream_s(np.array([4.0 * elements]), kernels)
            found += [
                Row(
                    network=f"{width} channels",
                    layout=line["layout"],
                    measured_s=float(line[key]) / 1e6,
                    rest_s=0.0,
                    vector_s=np.array([18.0 * elements * width / vector]),
                    least_s=least_s,
                    widths=np.array([float(width)]),
                )
                for key in ("forward_us", "input_us", "weight_us")
            ]
    return found


def fitted(data: list[Row]) -> np.ndarray:
    """Return the logs of share and channels: the best of three searches, since some end elsewhere."""

    def total(x: np.ndarray) -> float:
        return sum(abs(row.error(x)) for row in data)

    ends = [minimize(total, np.log([share, 150.0]), method="Nelder-Mead") for share in (0.2, 1.0, 5.0)]
    return min(ends, key=lambda end: end.fun).x


def main() -> None:
    """Print the constants and the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--kernels", action="store_true", help="groups apart, on the kernels of an H100")
    asked = parser.parse_args()
    data = kernels_apart() if asked.kernels else read(asked.data)
    for layout in sorted({row.layout for row in data}):
        of_layout = [row for row in data if row.layout == layout]
        values = fitted(of_layout)
        print(f"{layout}: share {np.exp(values[0]):.3g}, channels {np.exp(values[1]):.3g}")
        for family in sorted({row.family for row in of_layout}):
            inside = [row for row in of_layout if row.family == family]
            others = fitted([row for row in of_layout if row.family != family])
            errors = [median(abs(np.expm1(row.error(x))) for row in inside) for x in (values, others)]
            print(f"  {family}: {len(inside)} rows, in the fit {errors[0]:.1%}, left out {errors[1]:.1%}")


if __name__ == "__main__":
    main()
