"""Who updates what: in proportion to memory where it is known, evenly where it is not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.runtime.job.job import Job
from foreshard.runtime.state.layout import layout_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import parameters_of
from foreshard.spec.plan_file import parse_plan

GIB = 2.0**30
LAYERS = [nn.Linear(8, 8, bias=False) for _ in range(60)]


def sharding_of(
    memory_bytes: dict | None, ranks: tuple[int, ...] = (0, 1, 2), tp: int = 1
) -> OptimizerSharding:
    stage = {"ranks": list(ranks), "layers": [[0, 60]], "tp": tp}
    group = {"share": 6, "micro_batch": 3, "zero": 1, "stages": [stage]}
    plan = parse_plan({"global_batch": 6, "seq_len": 8, "precision": "fp32", "groups": [group]})
    job = Job.of(LAYERS, [0], lambda out, batch: (out, 1), lambda params: None)
    return OptimizerSharding(layout_of(plan), parameters_of(job), memory_bytes)


def counts(sharding: OptimizerSharding) -> list[int]:
    return [len(sharding.updated(rank)) for rank in sorted(sharding.layout.seats)]


def test_shards_follow_the_memory_of_the_ranks() -> None:
    assert counts(sharding_of({0: 80 * GIB, 1: 16 * GIB, 2: 24 * GIB})) == [40, 8, 12]


@pytest.mark.parametrize(
    "memory_bytes", [None, {}, {0: 80 * GIB, 1: None, 2: 24 * GIB}, {0: 80 * GIB, 2: 24 * GIB}]
)
def test_shards_are_even_where_memory_is_not_known_of_all(memory_bytes: dict | None) -> None:
    assert counts(sharding_of(memory_bytes)) == [20, 20, 20]


def test_a_row_of_ranks_has_the_room_of_its_least() -> None:
    sharding = sharding_of({0: 80 * GIB, 1: 40 * GIB, 2: 80 * GIB, 3: 20 * GIB}, ranks=(0, 1, 2, 3), tp=2)
    assert counts(sharding) == [40, 40, 20, 20]


def test_every_parameter_has_one_updater() -> None:
    sharding = sharding_of({0: 1.0, 1: 1e12, 2: 3e9})
    found = [key for rank in range(3) for key in sharding.updated(rank)]
    assert len(found) == len(set(found)) == 60
