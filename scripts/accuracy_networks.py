"""Classic networks against published training speeds; only RegNet's are in a fit (scripts/fit_grouped.py).

Networks of words and tables (`network_runs` says how each was trained) are in none, nor in the residuals.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from network_runs import LAMBDA, WORDS, Run, dle_batch, dle_device, dle_run, suspects

from foreshard.api import load_cluster, predict_traced
from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import CLASSIFIERS, NETWORKS, is_mixed, network, network_name
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.traced_module import TracedModule

ROOT = Path(__file__).resolve().parents[1]
RESIDUALS = ROOT / "src/foreshard/catalog/data/network_residuals.json"
DLE_BATCH = {"mixed": 256, "tf32": 128, "fp32": 128}  # of the README's commands; tables leave it out
DLE_DEVICE = {"A100": "a100-sxm-80gb", "V100 16GB": "v100-sxm-16gb", "V100 32GB": "v100-sxm-32gb"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published speed.

    Attributes
    ----------
    layout : str
        Of images; for other networks the samples that a device takes at once.
    batch, accumulated : int
        Samples that a device takes at once, and how often before it updates.
    side : int
        Of images, pixels.
    changed : tuple of (str, object)
        Arguments of the network in place of its own.
    """

    source: str
    network: str
    device: str
    precision: str
    layout: str
    num_devices: int
    batch: int
    samples_per_s: float
    side: int = 0
    accumulated: int = 1
    optimizer: str = "sgd"
    changed: tuple[tuple[str, Any], ...] = ()

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


def of_words(source: str, run: Run, num_devices: int, batch: int, speed: float, **given: Any) -> Measured:
    """Return a speed of a network of words or tables, which a source may count in tokens."""
    return Measured(
        source=source,
        network=run.network,
        layout=f"{batch} at once",
        num_devices=num_devices,
        batch=batch,
        samples_per_s=speed / run.counted,
        optimizer=run.optimizer,
        changed=tuple(sorted(run.changed.items())),
        **given,
    )


def examples(row: dict[str, str]) -> Measured | None:
    """Return a row of NVIDIA's DeepLearningExamples, which put channels last in 16 bit."""
    run = dle_run(row)
    if run is not None:
        batch, accumulated = dle_batch(row)
        precision = {"mixed": "fp16"}.get(row["precision"], row["precision"])
        known = {"device": dle_device(row), "precision": precision, "accumulated": accumulated}
        num_devices, taken = int(row["num_gpus"]), round(batch * run.samples)
        return of_words("DeepLearningExamples", run, num_devices, taken, float(row["throughput"]), **known)
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
    if row["model"] not in ("resnet50", *LAMBDA) or not row["global_batch"]:
        return None
    device, count = resolve_device(row["gpu"]), int(row["num_gpus"])
    wide = "tf32" if device.supports("tf32") else "fp32"
    precision, batch = "fp16" if row["precision"].startswith("amp") else wide, int(float(row["global_batch"]))
    if row["model"] in LAMBDA:
        known = {"device": device.name, "precision": precision}
        speed = float(row["throughput"])
        return of_words("Lambda", LAMBDA[row["model"]], count, batch // count, speed, **known)
    return Measured(
        source="Lambda",
        network="resnet50",
        device=device.name,
        precision=precision,
        layout="nchw",
        num_devices=count,
        batch=batch // count,
        side=224,
        samples_per_s=float(row["throughput"]),
    )


TABLES = {
    "cnn_timm_train.csv": timm,
    "cnn_nvidia_dle.csv": examples,
    "cnn_lambda_bench.csv": lambda_bench,
}


@cache
def traced(
    name: str, side: int, precision: str, channels_last: bool, changed: tuple[tuple[str, Any], ...]
) -> TracedModule:
    """Return a network as it was measured."""
    import torch

    module, inputs = network(name, side=side, **dict(changed))
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    return trace_module(module, inputs, precision=precision, autocast=is_mixed(name), name=name)


def traced_of(row: Measured) -> TracedModule:
    """Return the network of a row as it was measured."""
    return traced(row.network, row.side, row.precision, row.layout == "nhwc", row.changed)


@cache
def predicted(row: Measured) -> float:
    """Return predicted samples per second of a run, whatever it was measured at."""
    module = traced_of(row)
    cluster = load_cluster(f"1x{row.num_devices}x{row.device}")
    plan = plan_from_degrees(
        max(1, len(module.layers) - 2),
        row.num_devices,
        micro_batch=row.batch,
        global_batch=row.batch * row.accumulated * row.num_devices,
        seq_len=1,
        precision=row.precision,
        optimizer=row.optimizer,
        zero=0,
        framework="ddp",
    )
    return predict_traced(module, cluster, plan).samples_per_s


def beyond_peak(row: Measured) -> bool:
    """Return whether a network of words would compute more at a row's speed than the devices' peak.

    Then it does not compute what its stated length says: sentences are shorter, and not filled up.
    """
    each = row.samples_per_s / row.num_devices
    return traced_of(row).flops(1) * each > resolve_device(row.device).peak(row.precision)


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
    every = list(rows(folder, skipped))
    odd = suspects((row.case, row.num_devices, row.batch, row.samples_per_s) for row in every)
    textual = [row for row in every if row.network in WORDS]
    faster = {row for row in textual if (row.case, row.num_devices, row.batch, row.samples_per_s) in odd}
    shorter = {(row.source, row.network) for row in textual if row not in faster and beyond_peak(row)}
    for row in every:
        if row in faster:
            skipped[f"{row.source}, {row.network}: faster by devices than devices are more"] += 1
            continue
        if (row.source, row.network) in shorter:
            skipped[f"{row.source}, {row.network}: beyond the peak of a device at the stated length"] += 1
            continue
        try:
            speed = predicted(replace(row, samples_per_s=0.0))
        except SpecError as error:
            skipped[f"{row.source}: {error.what}"] += 1
            continue
        found[(*row.case, row.num_devices)].append(math.log(speed / row.samples_per_s))
    return found


def table(found: dict[tuple[Any, ...], list[float]], columns: Mapping[str, int]) -> str:
    """Return the errors by some parts of a case, name to place, as Markdown."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, values in found.items():
        groups[tuple(key[place] for place in columns.values())] += [math.expm1(value) for value in values]
    lines = [
        f"| {' | '.join(columns)} | rows | median | p90 | bias |",
        f"{'|---' * (len(columns) + 4)}|",
    ]
    for key, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
        values = f"{median(sizes):.1%} | {p90:.1%} | {median(errors):+.1%}"
        lines.append(f"| {' | '.join(key)} | {len(errors)} | {values} |")
    return "\n".join(lines)


def scaling(found: dict[tuple[Any, ...], list[float]], by: int = 0) -> str:
    """Return the errors of scaling efficiency, speed on N devices over N times that on one, as Markdown.

    `by` is the part of a case that errors are grouped by.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for (*case, num_devices), values in found.items():
        alone = found.get((*case, 1))
        if num_devices > 1 and alone:
            errors[case[by]].append(math.expm1(median(values) - median(alone)))
    lines = [
        f"| {('source', 'network')[by]} | cases of several devices | median | bias |",
        "|---|---|---|---|",
    ]
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
    every = residuals(asked.data, skipped)
    found = {key: values for key, values in every.items() if key[1] in CLASSIFIERS}
    words = {key: values for key, values in every.items() if key[1] in WORDS}
    print(table(found, {"source": 0, "device": 2, "precision": 3, "layout": 4}))
    print("\nScaling efficiency:\n")
    print(scaling(found))
    print("\nNetworks of words and tables, on one device:\n")
    alone = {key: values for key, values in words.items() if key[-1] == 1}
    print(table(alone, {"source": 0, "network": 1, "precision": 3}))
    print()
    print(table(alone, {"device": 2, "precision": 3}))
    print("\nScaling efficiency:\n")
    print(scaling(words, by=1))
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
