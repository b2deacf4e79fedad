"""Classic networks against published training speeds; only RegNet's are in a fit (scripts/fit_grouped.py).

    python scripts/accuracy_networks.py [--data FOLDER] [--residuals]

Prints a table for each source and device, and with --residuals writes `data/network_residuals.json`: one log
residual, the median, for each source, network, device, precision and layout. Intervals of traced modules
come from it. Rows without a batch size, of networks or devices without an entry, are counted and left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.api import load_cluster, predict_traced
from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import NETWORKS, network, network_name
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.traced_module import TracedModule

ROOT = Path(__file__).resolve().parents[1]
RESIDUALS = ROOT / "src/foreshard/catalog/data/network_residuals.json"
DLE_BATCH = {"mixed": 256, "tf32": 128, "fp32": 128}  # of the README's commands; tables leave it out
DLE_DEVICE = {"A100": "a100-sxm-80gb", "V100 16GB": "v100-sxm-16gb", "V100 32GB": "v100-sxm-32gb"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published speed."""

    source: str
    network: str
    device: str
    precision: str
    layout: str
    num_devices: int
    batch: int  # of a device
    side: int
    samples_per_s: float

    @property
    def case(self) -> tuple[str, ...]:
        """What repeated measurements share."""
        return self.source, self.network, self.device, self.precision, self.layout


def timm(row: dict[str, str]) -> Measured | None:
    """Return a row of timm's training benchmark."""
    return Measured(
        source="timm",
        network=network_name(row["model"]) or row["model"],
        device=resolve_device(row["gpu"]).name,
        precision="fp16",
        layout=row["layout"],
        num_devices=1,
        batch=int(row["batch_size"]),
        side=int(float(row["img_size"])),
        samples_per_s=float(row["samples_per_sec"]),
    )


def examples(row: dict[str, str]) -> Measured | None:
    """Return a row of NVIDIA's DeepLearningExamples, which put channels last in 16 bit."""
    if row["framework"] != "PyTorch" or row["unit"] not in ("img/s", "images/sec"):
        return None
    return Measured(
        source="DeepLearningExamples",
        network=network_name(row["model"]) or row["model"].lower(),
        device=DLE_DEVICE[row["gpu_model"]],
        precision={"mixed": "fp16"}.get(row["precision"], row["precision"]),
        layout="nhwc" if row["precision"] == "mixed" else "nchw",
        num_devices=int(row["num_gpus"]),
        batch=DLE_BATCH[row["precision"]],
        side=224,
        samples_per_s=float(row["throughput"]),
    )


def lambda_bench(row: dict[str, str]) -> Measured | None:
    """Return a row of Lambda's benchmark, which leaves the layout at channels first."""
    if row["model"] != "resnet50" or not row["global_batch"]:
        return None
    device, count = resolve_device(row["gpu"]), int(row["num_gpus"])
    wide = "tf32" if device.supports("tf32") else "fp32"
    return Measured(
        source="Lambda",
        network="resnet50",
        device=device.name,
        precision="fp16" if row["precision"].startswith("amp") else wide,
        layout="nchw",
        num_devices=count,
        batch=int(float(row["global_batch"])) // count,
        side=224,
        samples_per_s=float(row["throughput"]),
    )


TABLES = {
    "cnn_timm_train.csv": timm,
    "cnn_nvidia_dle.csv": examples,
    "cnn_lambda_bench.csv": lambda_bench,
}


@cache
def traced(name: str, side: int, precision: str, layout: str) -> TracedModule:
    """Return a network as it was measured."""
    import torch

    module, image = network(name, side=side)
    if layout == "nhwc":
        module = module.to(memory_format=torch.channels_last)
    return trace_module(module, image, precision=precision, autocast=True, name=name)


@cache
def predicted(case: tuple[str, ...], num_devices: int, batch: int, side: int) -> float:
    """Return predicted samples per second."""
    _, name, device, precision, layout = case
    module = traced(name, side, precision, layout)
    cluster = load_cluster(f"1x{num_devices}x{device}")
    plan = plan_from_degrees(
        len(module.layers) - 2,
        num_devices,
        micro_batch=batch,
        seq_len=1,
        precision=precision,
        optimizer="sgd",
        zero=0,
        framework="ddp",
    )
    return predict_traced(module, cluster, plan).samples_per_s


def rows(folder: Path, skipped: Counter[str]) -> Iterator[Measured]:
    """Yield the rows that can be predicted; count the others by reason."""
    for name, read in TABLES.items():
        with open(folder / name, encoding="utf-8") as file:
            for row in csv.DictReader(file):
                try:
                    made = read(row)
                except (SpecError, KeyError, ValueError) as error:
                    skipped[f"{name}: {type(error).__name__}"] += 1
                    continue
                if made is None or made.network not in NETWORKS:
                    skipped[f"{name}: not modelled"] += 1
                else:
                    yield made


def residuals(folder: Path, skipped: Counter[str]) -> dict[tuple[Any, ...], list[float]]:
    """Return the log residuals of every case and number of devices."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows(folder, skipped):
        try:
            speed = predicted(row.case, row.num_devices, row.batch, row.side)
        except SpecError as error:
            skipped[f"{row.source}: {error.what}"] += 1
            continue
        found[(*row.case, row.num_devices)].append(math.log(speed / row.samples_per_s))
    return found


def table(found: dict[tuple[Any, ...], list[float]]) -> str:
    """Return the errors of each source, device, precision and layout as Markdown."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for (source, _, device, precision, layout, _), values in found.items():
        groups[source, device, precision, layout] += [math.expm1(value) for value in values]
    lines = [
        "| source | device | precision | layout | rows | median | p90 | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
        values = f"{median(sizes):.1%} | {p90:.1%} | {median(errors):+.1%}"
        lines.append(f"| {' | '.join(key)} | {len(errors)} | {values} |")
    return "\n".join(lines)


def scaling(found: dict[tuple[Any, ...], list[float]]) -> str:
    """Return the errors of scaling efficiency, speed on N devices over N times that on one, as Markdown."""
    errors: dict[str, list[float]] = defaultdict(list)
    for (*case, num_devices), values in found.items():
        alone = found.get((*case, 1))
        if num_devices > 1 and alone:
            errors[case[0]].append(math.expm1(median(values) - median(alone)))
    lines = ["| source | cases of several devices | median | bias |", "|---|---|---|---|"]
    errors["all"] = [error for values in errors.values() for error in values]
    for source, values in sorted(errors.items()):
        sizes = f"{median(map(abs, values)):.1%} | {median(values):+.1%}"
        lines.append(f"| {source} | {len(values)} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; write the residuals where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--residuals", action="store_true")
    asked = parser.parse_args()
    skipped: Counter[str] = Counter()
    found = residuals(asked.data, skipped)
    print(table(found))
    print("\nScaling efficiency:\n")
    print(scaling(found))
    print("\nLeft out:", "; ".join(f"{reason}: {count}" for reason, count in sorted(skipped.items())))
    if asked.residuals:
        cases = [
            {"case": list(key[:-1]), "devices": key[-1], "residual": round(median(values), 6)}
            for key, values in sorted(found.items())
        ]
        source = "scripts/accuracy_networks.py --residuals; log(predicted / measured samples per second)"
        RESIDUALS.write_text(
            json.dumps({"source": source, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
