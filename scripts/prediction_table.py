"""Predict every model of the catalog under five plans by both engines: python scripts/prediction_table.py.

Prints a line a prediction with its floats in hexadecimal, so that two versions compare bit by bit.
"""

from __future__ import annotations

from typing import Any

import foreshard
from foreshard.catalog.models import models
from foreshard.errors import ForeshardError

PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1x8xh100-sxm", {"zero": 3, "micro_batch": 1, "global_batch": 32, "framework": "torchtitan"}),
    ("4x8xh100-sxm", {"tp": 2, "pp": 2, "micro_batch": 1, "global_batch": 64}),
    ("4x8xa100-sxm-80gb@200Gb/s", {"tp": 4, "pp": 4, "recompute": "full", "global_batch": 64}),
    ("2x8xh100-sxm+2x8xa100-sxm-80gb", {"tp": 8, "pp": 2, "schedule": "gpipe", "global_batch": 32}),
    ("8x8xmi300x", {"tp": 8, "zero": 2, "micro_batch": 2, "global_batch": 64, "seq_len": 1024}),
)


def main() -> None:
    """Print the table."""
    for name in models():
        for number, (cluster, options) in enumerate(PLANS):
            for engine in ("analytical", "graph"):
                print(name, number, engine, answer(name, cluster, engine, options))


def answer(name: str, cluster: str, engine: str, options: dict[str, Any]) -> str:
    """Return the numbers of one prediction, or the error that refuses it."""
    try:
        model, there = foreshard.load_model(name), foreshard.load_cluster(cluster)
        found = foreshard.predict(model, there, engine=engine, **options)
    except ForeshardError as error:
        return f"{type(error).__name__} {error.key}"
    times = [found.step_time_s, *found.step_time_interval_s, *found.time_breakdown_s.values()]
    numbers = [*times, found.memory.peak_bytes, found.energy_j_per_step or 0.0]
    return " ".join(float(number).hex() for number in numbers)


if __name__ == "__main__":
    main()
