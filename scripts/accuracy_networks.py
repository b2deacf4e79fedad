"""Classic networks against published training speeds; only RegNet's are in a fit (scripts/fit_grouped.py).

How networks of words and tables were trained is in `network_runs`.

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
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from network_runs import LAMBDA_WORDS, SUPERLINEAR, WORDS, Run, dle_batch, dle_device, dle_run, suspects

from foreshard.advise.traced_request import plan_of
from foreshard.api import load_cluster, predict_traced
from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import CLASSIFIERS, NETWORKS, is_mixed, network, network_name
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
LAMBDA_MEDIA = {  # network, optimizer, units of speed of a sample; padding of Tacotron's is not counted
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
MLPERF = {"resnet": "resnet50", "maskrcnn": "mask_rcnn", "ssd": "retinanet", "unet3d": "unet3d"}
"""Networks by the names of MLPerf's benchmarks; `ssd` is RetinaNet since the second round."""
LAMBDA_WIDE = ("tacotron2", "waveglow")
"""Trained in 32 bit or TF32 whatever the table says: the commands pass `--amp-run`, which train.py does not
know and passes over (its flag is `--amp`); V100s are equally fast with and without."""
SAME_SPEED = 1.05
"""A row in 16 bit that is not so many times as fast as the one beside it is not what it says."""
IMAGES = (*CLASSIFIERS, "ssd300", "mask_rcnn", "retinanet", "unet3d")
TUNED = "MLPerf"
"""Source of runs whose submitters fuse kernels by hand: judged, in no fit and in no interval."""
VOLUMES = ("unet3d",)
NODE = 8  # devices of a node, in both sources


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published speed.

    Attributes
    ----------
    layout : str
        Of images; for other networks the samples that a device takes at once.
    batch, accumulated : int
        Samples that a device takes at once, and how often before it updates.
    side : int, optional
        Of a classifier's images, pixels.
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
    side: int | None = None
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
    if row["model"] not in (*LAMBDA_WORDS, *LAMBDA_MEDIA) or not (row["global_batch"] or b200):
        return None
    device, count = resolve_device(row["gpu"]), int(row["num_gpus"])
    wide, narrow = "tf32" if device.supports("tf32") else "fp32", row["precision"].startswith("amp")
    if row["model"] in LAMBDA_WORDS:
        known = {"device": device.name, "precision": "fp16" if narrow else wide}
        batch, speed = int(float(row["global_batch"])) // count, float(row["throughput"])
        return of_words("Lambda", LAMBDA_WORDS[row["model"]], count, batch, speed, **known)
    name, optimizer, units = LAMBDA_MEDIA[row["model"]]
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


def mlperf(row: dict[str, str]) -> Measured | None:
    """Return a row of MLPerf Training: one run of a submission on one node, in 16 bit with channels last."""
    name, logged = MLPERF.get(row["benchmark"]), row["tracked_throughput_median"]
    if name is None or not logged or row["nodes"] != "1" or (name, row["round"]) == ("retinanet", "v1.0"):
        return None
    count, accelerator = int(row["num_accelerators"]), row["accelerator"].replace("CTS", "")
    return Measured(
        source="MLPerf",
        network=name,
        device=resolve_device(re.sub(r"\(.*", "", accelerator).strip()).name,
        precision="fp16",
        layout="nhwc",
        num_devices=count,
        batch=int(row["global_batch"]) // count,
        side=224 if name in CLASSIFIERS else None,
        # RetinaNet's logs count the images of one device: so many passes over the images end a run
        samples_per_s=float(logged) * (count if name == "retinanet" else 1),
    )


TABLES = {
    "cnn_timm_train.csv": timm,
    "cnn_nvidia_dle.csv": examples,
    "cnn_lambda_bench.csv": lambda_bench,
    "cnn_mlperf_training.csv": mlperf,
}


@cache
def traced(
    name: str, side: int | None, precision: str, channels_last: bool, changed: tuple[tuple[str, Any], ...]
) -> TracedModule:
    """Return a network as it was measured."""
    import torch

    module, inputs = network(name, side=side, **dict(changed))
    if channels_last:
        module = module.to(memory_format=torch.channels_last_3d if name in VOLUMES else torch.channels_last)
    return trace_module(module, inputs, precision=precision, autocast=is_mixed(name), name=name)


def traced_of(row: Measured) -> TracedModule:
    """Return the network of a row as it was measured."""
    return traced(row.network, row.side, row.precision, row.layout == "nhwc", row.changed)


@cache
def predicted(row: Measured) -> float:
    """Return predicted samples per second of a run, whatever it was measured at."""
    module = traced_of(row)
    cluster = load_cluster(f"1x{row.num_devices}x{row.device}")
    whole = row.batch * row.accumulated * row.num_devices
    asked = {"micro_batch": row.batch, "global_batch": whole, "optimizer": row.optimizer}
    plan = plan_of(module, cluster, asked)
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


def plausible_words(measured: list[Measured], skipped: Counter[str]) -> Iterator[Measured]:
    """Yield the rows of words and tables that are as fast as they can be; count the others by reason."""
    odd = suspects((row.case, row.num_devices, row.batch, row.samples_per_s) for row in measured)
    faster = {row for row in measured if (row.case, row.num_devices, row.batch, row.samples_per_s) in odd}
    shorter = {(row.source, row.network) for row in measured if row not in faster and beyond_peak(row)}
    for row in measured:
        if row in faster:
            skipped[f"{row.source}, {row.network}: faster by devices than devices are more"] += 1
        elif (row.source, row.network) in shorter:
            skipped[f"{row.source}, {row.network}: beyond the peak of a device at the stated length"] += 1
        else:
            yield row


def residuals(folder: Path, skipped: Counter[str]) -> dict[tuple[Any, ...], list[float]]:
    """Return the log residuals of every case and number of devices."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    every = list(rows(folder, skipped))
    media = plausible([row for row in every if row.network not in WORDS], skipped)
    for row in (*media, *plausible_words([row for row in every if row.network in WORDS], skipped)):
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
    tuned = {key: every.pop(key) for key in list(every) if key[0] == TUNED}
    found = {key: values for key, values in every.items() if key[0] == "timm" or key[1] == "resnet50"}
    others = {key: values for key, values in every.items() if key not in found}
    print(table(found, {"source": 0, "device": 2, "precision": 3, "layout": 4}))
    print("\nScaling efficiency:\n")
    print(scaling(found))
    print("\nNetworks that no fit and no interval has seen, on one device:\n")
    alone = {key: values for key, values in others.items() if key[-1] == 1}
    print(table(alone, {"source": 0, "network": 1, "precision": 3}))
    print()
    print(table(alone, {"device": 2, "precision": 3}))
    print("\nScaling efficiency:\n")
    print(scaling(others, by=1))
    print("\nSubmissions whose kernels were fused by hand:\n")
    print(table(tuned, {"source": 0, "network": 1, "device": 2}))
    print("\nLeft out:", "; ".join(f"{reason}: {count}" for reason, count in sorted(skipped.items())))
    if asked.residuals:
        cases = [
            {
                "case": list(key[:-1]),
                "devices": key[-1],
                "images": key[1] in IMAGES,
                "residual": round(median(values), 6),
            }
            for key, values in sorted(every.items())
        ]
        source = "scripts/accuracy_networks.py --residuals; log(predicted / measured samples per second)"
        RESIDUALS.write_text(
            json.dumps({"source": source, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
