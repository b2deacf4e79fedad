"""Gradients summed by named algorithms and files are those of one process, whatever the number of owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from command import events, replicas, run
from rehearsal import gradients, plan_of, rehearse, values, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule_file import save_schedule
from foreshard.comm.schedules.selection import all_reduce_selection
from foreshard.errors import SpecError
from foreshard.runtime.gradient_sums import GradientSums, check_sums
from foreshard.runtime.trainer import Options
from foreshard.spec.plan import Plan

ALGORITHMS = ("ring:channels=2", "bidirectional-ring", "double-tree:parts=3", "halving-doubling", "direct")
DIES = {
    "loss": "def loss(output, batch):\n"
    "    started = Path('run/metrics.jsonl').exists() and not Path('died').exists()\n"
    "    if started and os.environ['FORESHARD_RANK'] == '3':\n"
    "        Path('died').touch(); os._exit(9)\n"
    "    return output.square().sum(), len(output)"
}
"""Rank 3 dies once, after the first step."""

DIES_IN_BACKWARD = {
    "model": "class Mortal(nn.Tanh):\n"
    "    def forward(self, x):\n"
    "        out = super().forward(x)\n"
    "        out.register_hook(die)\n"
    "        return out\n"
    "def die(grad):\n"
    "    started = Path('run/metrics.jsonl').exists() and not Path('died').exists()\n"
    "    if started and os.environ['FORESHARD_RANK'] == '1':\n"
    "        Path('died').touch(); os._exit(9)\n"
    "def model(): return [nn.Linear(4, 4), Mortal(), nn.Linear(4, 4), nn.Linear(4, 1)]"
}
"""Rank 1 dies once, when the sums of the last layers have begun."""


def uneven(count: int) -> Plan:
    """Replicas of one rank each, of which the first takes what is left over."""
    shares = [12 // count + (12 % count) * (rank == 0) for rank in range(count)]
    return plan_of(
        [{"share": s, "micro_batch": 2, "stages": [([r], [[0, 8]])]} for r, s in enumerate(shares)],
        global_batch=12,
    )


def error_of(plan: Plan, count: int, options: Options) -> float:
    """Largest error of a gradient of the first step, each of which is summed by itself."""
    found = rehearse(
        JOBS["gpt"](torch.float64), plan, steps=1, after=gradients, ranks=range(count), options=options
    )
    reference = rehearse(JOBS["gpt"](torch.float64), ALONE, steps=1, after=gradients)[0][1]
    return worst_error(found, reference)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("plan", ["uneven replicas", "two uneven pipelines", "three stages, zb-h1"])
def test_gradients_are_those_of_one_process(algorithm: str, plan: str) -> None:
    options = Options(collectives=algorithm, bucket_bytes=1)
    assert error_of(PLANS[plan], 4, options) <= 1e-14


@pytest.mark.parametrize(
    ("count", "algorithm"),
    [(2, "ring"), (3, "halving-doubling"), (5, "double-tree"), (6, "hierarchical:per_node=3"), (7, "direct")],
)
def test_odd_numbers_of_ranks_and_nodes(count: int, algorithm: str) -> None:
    assert error_of(uneven(count), count, Options(collectives=algorithm, bucket_bytes=4096)) <= 1e-14


def test_optimizer_sharding_keeps_its_sums(tmp_path: Path) -> None:
    """ZeRO 1 sums over all ranks; a schedule's file takes the place of a name."""
    file = str(tmp_path / "sum.json")
    save_schedule(schedule_of("all-reduce", "halving-doubling", 4), file)
    plan = PLANS["four ranks in a stage, zero 1"]
    assert error_of(plan, 4, Options(collectives=file)) <= 1e-14


def test_replicas_stay_equal_to_the_last_bit() -> None:
    options = Options(collectives="double-tree:parts=2")
    found = rehearse(
        JOBS["gpt"](torch.float32), uneven(3), steps=3, after=values, ranks=range(3), options=options
    )
    for key, first in found[0][1].items():
        assert all(torch.equal(first, tensors[key]) for _, tensors in found.values())


def refused(plan: Plan, collectives: Any, *, virtual: bool = False) -> str:
    with pytest.raises(SpecError) as caught:
        check_sums(plan, GradientSums(collectives=collectives), virtual=virtual)
    return str(caught.value)


def test_what_no_schedule_sums_is_refused() -> None:
    plan = uneven(3)
    assert "rong" in refused(plan, "rong") and "ring" in refused(plan, "rong")
    assert "channels=0" in refused(plan, "ring:channels=0")
    assert "nodes=2" in refused(plan, "hierarchical:nodes=2")
    assert "virtual time" in refused(plan, "ring", virtual=True)
    assert "zero 0 or 1" in refused(PLANS["uneven data in both stages, zero 2"], "ring")
    selection = all_reduce_selection("hierarchical:per_node=3")
    assert selection is not None
    with pytest.raises(SpecError, match="4 ranks in nodes of 3"):
        selection.schedule_for(4)


@pytest.mark.slow
def test_the_command_sums_by_a_name_and_goes_on_when_a_rank_is_lost(tmp_path: Path) -> None:
    """Two nodes of two ranks; the three that are left are no equal nodes, and the run says who sums then."""
    flags = ("--collectives", "hierarchical:per_node=2", "--buckets", "32", "--steps", "6")
    found = run(tmp_path, DIES, replicas(4), *flags, "--max-starts", "1", local=4)
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", {}, replicas(1), "--steps", "6", local=1)
    assert found.code == plain.code == 0, found.stderr
    assert found.losses.keys() == plain.losses.keys()
    assert all(abs(found.losses[step] / plain.losses[step] - 1.0) < 1e-5 for step in plain.losses)
    said = [line["text"] for line in events(found, ["collective"])]
    assert any("ranks [0, 1, 2] sum by the backend" in text for text in said)
    assert "sum by the backend" in found.stderr


@pytest.mark.slow
def test_a_rank_that_dies_between_its_sums_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The threads of the others wait for it in the middle of a schedule; the step is repeated."""
    sums = ("--collectives", "double-tree", "--buckets", "16", "--bucket-order", "forward")
    flags = (*sums, "--steps", "6", "--max-starts", "1")
    found = run(tmp_path, DIES_IN_BACKWARD, replicas(3, batch=6), *flags, local=3)
    assert found.code == 0, found.stderr
    assert (tmp_path / "died").exists()
    assert sorted(found.losses) == list(range(6))


@pytest.mark.slow
def test_the_command_refuses_owners_that_an_algorithm_cannot_sum(tmp_path: Path) -> None:
    found = run(tmp_path, {}, replicas(2), "--collectives", "hierarchical", "--json", local=2)
    assert found.code == 2 and "per_node" in found.stderr + found.stdout
