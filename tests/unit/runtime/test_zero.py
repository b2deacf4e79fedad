"""Who updates what: in proportion to memory where it is known, evenly where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.runtime.job.job import Job
from foreshard.runtime.state.layout import layout_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import parameters_of
from foreshard.runtime.state.zero import ZeroExchange
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


class Stage:
    """A rank of a stage of two, which notes what is sent and waited for; nothing arrives."""

    def __init__(self, modules: list[nn.Linear]):
        self.notes: list[str] = []
        self.names = {m.weight.numel(): f"layer {i}" for i, m in enumerate(modules)}
        parameters = {(i, "weight"): m.weight for i, m in enumerate(modules)}
        group = {"share": 2, "micro_batch": 2, "zero": 3, "stages": [{"ranks": [0, 1], "layers": [[0, 3]]}]}
        plan = parse_plan({"global_batch": 2, "seq_len": 8, "precision": "fp32", "groups": [group]})
        users = {key: (key[0],) for key in parameters}
        stage = plan.groups[0].stages[0]
        self.zero = ZeroExchange(self, stage, [0, 1], 0, dict.fromkeys(parameters, 1), parameters, users)

    def broadcast(self, flat: torch.Tensor, place: int) -> Any:
        name = self.names[flat.numel()]
        self.notes.append(f"begin {name}")
        return SimpleNamespace(wait=lambda: self.notes.append(f"have {name}"))


def test_the_values_of_the_next_layer_come_while_one_computes() -> None:
    stage = Stage([nn.Linear(1, width, bias=False) for width in (1, 2, 3)])
    stage.zero.before(0, backward=False)
    stage.zero.await_layer(0)
    assert stage.notes == ["begin layer 0", "begin layer 1", "have layer 0"]
    stage.zero.await_layer(0)
    stage.zero.await_layer(2)
    assert stage.notes[3:] == ["begin layer 2", "have layer 1", "have layer 2"]
    stage.zero.after(0, summed=False)
    stage.notes.clear()
    stage.zero.before(0, backward=True)
    stage.zero.await_layer(2)
    assert stage.notes == ["begin layer 2", "begin layer 1", "have layer 2"]
    stage.zero.after(0, summed=False)
    assert stage.notes[3:] == ["begin layer 0", "have layer 1", "have layer 0"]
