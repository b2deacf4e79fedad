"""Networks of timm's training benchmark that timm still makes, traced from its own code: none is in a fit.

    pip install timm==0.6.13 pillow
    python scripts/accuracy_timm.py [--data FOLDER] [--layout nchw] [--every N]

Prints for each network the error of samples per second, then the median, the 90th percentile and the bias. A
network is taken at the largest batch that was measured, the median over versions of PyTorch. timm imports
torchvision to read data, which is not needed here and may be missing.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from accuracy_networks import ROOT

from foreshard.api import load_cluster, predict_traced
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import network_name
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees


def timm() -> ModuleType:
    """Return timm, without what reads data."""
    parts = ("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc", ".utils")
    parts += (".transforms", ".transforms.functional")
    try:
        import torchvision  # noqa: F401
    except ImportError:
        for part in parts:
            sys.modules[f"torchvision{part}"] = MagicMock(__path__=[], __spec__=None)
    import timm

    return timm


def measured(folder: Path, layout: str) -> dict[str, tuple[int, int, float]]:
    """Return batch, side of the image and samples per second by network."""
    found: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    with open(folder / "cnn_timm_train.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["layout"] == layout and not network_name(row["model"]):
                key = int(row["batch_size"]), int(float(row["img_size"]))
                found[row["model"]][key].append(float(row["samples_per_sec"]))
    return {name: (*max(rows), median(rows[max(rows)])) for name, rows in found.items()}


def samples_per_s(make: Any, name: str, batch: int, side: int, layout: str) -> float:
    """Return what is predicted of a network of timm on one RTX 3090 under mixed precision."""
    try:
        module = make(name, img_size=side)
    except TypeError:  # convolutions take any size
        module = make(name)
    module = module.train().to("meta")
    if layout == "nhwc":
        module = module.to(memory_format=torch.channels_last)
    image = torch.empty(1, 3, side, side, device="meta")
    traced = trace_module(module, image, precision="fp16", autocast=True, name=name)
    plan = plan_from_degrees(
        len(traced.layers) - 2,
        1,
        micro_batch=batch,
        seq_len=1,
        precision="fp16",
        optimizer="sgd",
        zero=0,
        framework="ddp",
    )
    return float(predict_traced(traced, load_cluster("1x1xrtx-3090"), plan).samples_per_s)


def errors(asked: argparse.Namespace, skipped: Counter[str]) -> Iterator[tuple[str, float]]:
    """Yield networks with the error of their samples per second; count those left out by reason."""
    make = timm().create_model
    for name, (batch, side, speed) in sorted(measured(asked.data, asked.layout).items())[:: asked.every]:
        try:
            yield name, samples_per_s(make, name, batch, side, asked.layout) / speed - 1.0
        except (RuntimeError, SpecError) as error:  # timm raises RuntimeError of names that it lost
            skipped[str(getattr(error, "what", error)).split(":")[0]] += 1


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--layout", choices=("nchw", "nhwc"), default="nchw")
    parser.add_argument("--every", type=int, default=1, help="only each so many")
    asked = parser.parse_args()
    skipped: Counter[str] = Counter()
    found = []
    for name, error in errors(asked, skipped):
        found.append(error)
        print(f"{name:40} {error:+.1%}", flush=True)
    sizes = sorted(map(abs, found))
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    print(f"{len(sizes)} networks: median {median(sizes):.1%}, p90 {p90:.1%}, bias {median(found):+.1%}")
    print("Left out:", "; ".join(f"{reason}: {count}" for reason, count in skipped.most_common()))


if __name__ == "__main__":
    main()
