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

from foreshard.advise.traced_request import plan_of
from foreshard.api import load_cluster, predict_traced
from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import CLASSIFIERS, NETWORKS, network, network_name
from foreshard.profile.networks.speech.tacotron2 import MEAN_FRAMES
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.traced_module import TracedModule

ROOT = Path(__file__).resolve().parents[1]
RESIDUALS = ROOT / "src/foreshard/catalog/data/network_residuals.json"
DLE_BATCH = {"mixed": 256, "tf32": 128, "fp32": 128}  # of the README's commands; tables leave it out
DLE_EFFICIENT = {  # of configs.yml: A100, then DGX-1
    "efficientnet_b0": ({"mixed": 256, "tf32": 256}, {"mixed": 128, "fp32": 64}),
    "efficientnet_b4": ({"mixed": 128, "tf32": 64}, {"mixed": 32, "fp32": 16}),
}
DLE_DEVICE = {"A100": "a100-sxm-80gb", "V100 16GB": "v100-sxm-16gb", "V100 32GB": "v100-sxm-32gb"}


LAMBDA = {  # network, optimizer, units of speed that a sample counts as; padding of Tacotron's is not counted
    "resnet50": ("resnet50", "sgd", 1.0),
    "ssd": ("ssd300", "sgd", 1.0),
    "tacotron2": ("tacotron2", "adam", float(MEAN_FRAMES)),
    "waveglow": ("waveglow", "adam", 8000.0),
}
LAMBDA_B200 = {  # batch of a device in 16 bit and else: config_192GB.sh; tables leave it out
    "ssd": (1152, 640),
    "tacotron2": (640, 640),
    "waveglow": (128, 88),
}
LAMBDA_WIDE = ("tacotron2", "waveglow")
"""Trained in 32 bit or TF32 whatever the table says: the commands pass `--amp-run`, which train.py does not
know and passes over (its flag is `--amp`); V100s are equally fast with and without."""
SAME_SPEED, SUPERLINEAR = 1.05, 1.03
"""A row in 16 bit that is not so many times as fast as the one beside it is not what it says, nor are rows of
a case in which N devices are more than so many times N as fast as one."""
NODE = 8  # devices of a node, in both sources


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
    side: int | None
    samples_per_s: float
    optimizer: str = "sgd"

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
    if row["framework"] != "PyTorch" or row["unit"] not in ("img/s", "images/sec", "images per second"):
        return None
    given = row["seq_or_variant"].removeprefix("Model=") or row["model"]
    name, narrow = network_name(given) or given.lower(), row["precision"] == "mixed"
    batch, side, last = DLE_BATCH[row["precision"]], 224, narrow
    if name in DLE_EFFICIENT:
        batch = DLE_EFFICIENT[name][row["gpu_model"] != "A100"][row["precision"]]
        side = 380 if name == "efficientnet_b4" else 224
    elif name == "mask_rcnn":  # channels last but in 32 bit on V100
        batch, side, last = int(row["batch_per_gpu"]), None, row["precision"] != "fp32"
    return Measured(
        source="DeepLearningExamples",
        network=name,
        device=DLE_DEVICE[row["gpu_model"]],
        precision="fp16" if narrow else row["precision"],
        layout="nhwc" if last else "nchw",
        num_devices=int(row["num_gpus"]),
        batch=batch,
        side=side,
        samples_per_s=float(row["throughput"]),
    )


def lambda_bench(row: dict[str, str]) -> Measured | None:
    """Return a row of Lambda's benchmark, which leaves the layout at channels first."""
    b200 = LAMBDA_B200.get(row["model"]) if row["gpu"].startswith("B200") else None
    if row["model"] not in LAMBDA or not (row["global_batch"] or b200):
        return None
    name, optimizer, units = LAMBDA[row["model"]]
    device, count = resolve_device(row["gpu"]), int(row["num_gpus"])
    wide, narrow = "tf32" if device.supports("tf32") else "fp32", row["precision"].startswith("amp")
    return Measured(
        source="Lambda",
        network=name,
        device=device.name,
        precision="fp16" if narrow and row["model"] not in LAMBDA_WIDE else wide,
        layout="nchw",
        num_devices=count,
        batch=b200[not narrow] if b200 else int(float(row["global_batch"])) // count,
        side=224 if name in CLASSIFIERS else None,
        samples_per_s=float(row["throughput"]) / units,
        optimizer=optimizer,
    )


TABLES = {
    "cnn_timm_train.csv": timm,
    "cnn_nvidia_dle.csv": examples,
    "cnn_lambda_bench.csv": lambda_bench,
}


@cache
def traced(name: str, side: int | None, precision: str, layout: str) -> TracedModule:
    """Return a network as it was measured."""
    import torch

    module, image = network(name, side=side)
    if layout == "nhwc":
        module = module.to(memory_format=torch.channels_last)
    return trace_module(module, image, precision=precision, autocast=True, name=name)


@cache
def predicted(
    case: tuple[str, ...], num_devices: int, batch: int, side: int | None, optimizer: str = "sgd"
) -> float:
    """Return predicted samples per second."""
    _, name, device, precision, layout = case
    module = traced(name, side, precision, layout)
    cluster = load_cluster(f"1x{num_devices}x{device}")
    plan = plan_of(module, cluster, {"micro_batch": batch, "optimizer": optimizer})
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


def plausible(measured: list[Measured], skipped: Counter[str]) -> Iterator[Measured]:
    """Yield the rows that those beside them do not contradict; count the others by reason."""
    speeds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in measured:
        speeds[(*row.case, row.num_devices)].append(row.samples_per_s)
    superlinear = {
        tuple(case)
        for (*case, count), found in speeds.items()
        if median(found) > SUPERLINEAR * count * max(speeds.get((*case, 1), [math.inf]))
    }
    for row in measured:
        source, name, device, precision, _ = row.case
        beside = [
            median(found)
            for wide in ("tf32", "fp32")
            for layout in ("nchw", "nhwc")
            if (found := speeds.get((source, name, device, wide, layout, row.num_devices)))
        ]
        if row.num_devices > NODE:
            skipped[f"{source}: several nodes, their network not stated"] += 1
        elif precision == "fp16" and beside and row.samples_per_s < SAME_SPEED * max(beside):
            skipped[f"{source}: {name} on {device} no faster in 16 bit"] += 1
        elif row.case in superlinear:
            skipped[f"{source}: {name} on {device} superlinear"] += 1
        else:
            yield row


def residuals(folder: Path, skipped: Counter[str]) -> dict[tuple[Any, ...], list[float]]:
    """Return the log residuals of every case and number of devices."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in plausible(list(rows(folder, skipped)), skipped):
        try:
            speed = predicted(row.case, row.num_devices, row.batch, row.side, row.optimizer)
        except SpecError as error:
            skipped[f"{row.source}: {error.what}"] += 1
            continue
        found[(*row.case, row.num_devices)].append(math.log(speed / row.samples_per_s))
    return found


def table(found: dict[tuple[Any, ...], list[float]]) -> str:
    """Return the errors of each source, network, device, precision and layout as Markdown."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for (source, name, device, precision, layout, _), values in found.items():
        of_one = "all" if source == "timm" else name
        groups[source, of_one, device, precision, layout] += [math.expm1(value) for value in values]
    lines = [
        "| source | network | device | precision | layout | rows | median | p90 | bias |",
        "|---|---|---|---|---|---|---|---|---|",
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
            of_one = "" if case[1] in CLASSIFIERS else f", {case[1]}"
            errors[case[0] + of_one].append(math.expm1(median(values) - median(alone)))
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
