"""Plans to judge: those Sailor's planner chose, and random ones its simulator can judge."""

from __future__ import annotations

import json
from pathlib import Path

import judge
import numpy as np
from judge import NUM_LAYERS, Group, Stage

GLOBAL_BATCH = 1024


def their_plans() -> dict[str, tuple[float, Group]]:
    """Return what Sailor's planner chose for each cluster and its simulator's iterations a second."""
    table = json.loads(Path(__file__).with_name("their_plans.json").read_text())["plans"]
    return {name: (row["iterations_per_s"], _group(row)) for name, row in table.items()}


def _group(row: dict) -> Group:
    stages, start = [], 0
    for stage in row["stages"]:
        stop = start + stage["layers"]
        stages.append(
            [Stage(gpu, tp, start, stop) for gpu, tp, number in stage["replicas"] for _ in range(number)]
        )
        start = stop
    return even(tuple(zip(*stages, strict=True)), row["micro_batch"])


def even(replicas: tuple, micro_batch: int) -> Group:
    """Return a group that takes the whole batch, micro-batches shared out evenly as Sailor does."""
    return Group(replicas, micro_batch, -(-GLOBAL_BATCH // (micro_batch * len(replicas))))


def random_group(rng: np.random.Generator, micro_batch: int, cuts: tuple[int, ...]) -> Group:
    """Return replicas with random devices on every stage."""
    options = [(gpu, tp) for gpu, tp, size in judge.times() if size == micro_batch]
    edges = [0, *cuts, NUM_LAYERS]
    replicas = []
    for _ in range(int(rng.integers(1, 40))):
        chosen = rng.integers(len(options), size=len(edges) - 1)
        replicas.append(
            tuple(Stage(*options[k], i, j) for k, i, j in zip(chosen, edges[:-1], edges[1:], strict=True))
        )
    return even(tuple(replicas), micro_batch)


def random_cuts(rng: np.random.Generator) -> tuple[int, ...]:
    """Return places to cut the layers, at most eleven."""
    return tuple(
        sorted(rng.choice(np.arange(1, NUM_LAYERS), size=int(rng.integers(0, 12)), replace=False).tolist())
    )


def random_uneven(rng: np.random.Generator) -> tuple[Group, ...]:
    """Return groups of one set of cuts whose micro-batches differ in size and number."""
    cuts = random_cuts(rng)
    groups = []
    for _ in range(int(rng.integers(2, 4))):
        group = random_group(rng, int(rng.choice([1, 2, 4, 8])), cuts)
        groups.append(Group(group.replicas, group.micro_batch, int(rng.integers(1, 60))))
    return tuple(groups)


def random_even(rng: np.random.Generator) -> Group:
    """Return a plan as Sailor's planner makes them."""
    return random_group(rng, int(rng.choice([1, 2, 4, 8])), random_cuts(rng))
