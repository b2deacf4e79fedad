"""A run does what its plan states of sums, buckets, overlap and adapters, or refuses it by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from command import HEAD, JOB, events, replicas, run
from rehearsal import gradients, rehearse, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.errors import SpecError
from foreshard.runtime.engine.bucket_sums import BucketSum, BucketSums
from foreshard.runtime.engine.gradient_sync import GradientSync
from foreshard.runtime.job.job import Job, load_job
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.state.buckets import Bucket
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan import Plan

COUNTS = {
    "model": "from foreshard.runtime.engine import bucket_sums, gradient_sync\n"
    "def noted(text):\n"
    "    with open('noted.txt', 'a') as file: file.write(text + '\\n')\n"
    "make = bucket_sums.ScheduledAllReduce\n"
    "def made(schedule, *more):\n"
    "    noted(schedule.algorithm)\n"
    "    return make(schedule, *more)\n"
    "bucket_sums.ScheduledAllReduce = made\n"
    "start = gradient_sync.GradientSync._start\n"
    "def started(self, number):\n"
    "    noted(f'bucket {number} of {len(self._buckets)}')\n"
    "    start(self, number)\n"
    "gradient_sync.GradientSync._start = started\n"
    "def model(): return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]"
}
"""Writes down the schedules that ranks execute and the buckets whose sums they start."""
FROZEN = {
    "model": "lora = '2:q+v'\n"
    "def model():\n"
    "    base = nn.Linear(4, 4).requires_grad_(False)\n"
    "    return [base, nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 1)]"
}


def loaded(folder: Path, parts: Mapping[str, str]) -> Job:
    path = folder / "job.py"
    path.write_text(HEAD + "\n".join({**JOB, **parts}.values()) + "\n")
    return load_job(str(path))


def noted(folder: Path) -> list[str]:
    return (folder / "noted.txt").read_text().splitlines()


def trained(folder: Path, plan: Plan, *flags: str) -> dict[int, float]:
    """Losses of a run of the command, each step's after the updates before it."""
    folder.mkdir()
    found = run(folder, COUNTS, plan, "--steps", "2", "--dtype", "fp64", *flags)
    assert found.code == 0, found.stderr
    return found.losses


@pytest.mark.slow
def test_the_command_sums_as_the_plan_states_unless_flags_say_otherwise(tmp_path: Path) -> None:
    stated = replace(replicas(2), collectives="tree", buckets=64)
    by_plan = trained(tmp_path / "plan", stated)
    by_flags = trained(tmp_path / "flags", stated, "--collectives", "ring", "--buckets", "1MiB")
    job = loaded(tmp_path, {}).in_double()
    alone = rehearse(job, replicas(1), steps=2)[0][0]
    for step, loss in enumerate(alone):
        assert by_plan[step] == pytest.approx(loss, rel=1e-12)
        assert by_flags[step] == pytest.approx(loss, rel=1e-12)
    assert "double-tree" in noted(tmp_path / "plan") and "ring" not in noted(tmp_path / "plan")
    assert "bucket 2 of 3" in noted(tmp_path / "plan"), "160, 160 and 40 bytes each fill a bucket of 64"
    assert "ring" in noted(tmp_path / "flags") and "bucket 0 of 1" in noted(tmp_path / "flags")


@pytest.mark.parametrize("zero", [0, 1])
def test_a_running_job_takes_other_buckets_and_another_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """Losses and gradients are those of one process, whatever the sums are changed to and back."""
    seen: list[tuple[str, int]] = []
    connect = BucketSums.connect

    def connected(sums: BucketSums, group: PeerGroup, buckets: Sequence[Bucket]) -> BucketSum:
        made = connect(sums, group, buckets)
        name = "backend" if sums._selection is None else sums._selection.name
        if group.place == 0:
            seen.append((name, len(buckets)))
        return made

    monkeypatch.setattr(BucketSums, "connect", connected)
    job = loaded(tmp_path, {}).in_double()
    (first, *others) = replicas(3, batch=6).groups
    wide = replace(
        first, share=6, micro_batch=6, stages=(replace(first.stages[0], ranks=(0, 1, 2), zero=zero),)
    )
    plan = replace(replicas(3, batch=6), groups=(wide,) if zero else (first, *others))
    changes = {
        2: replace(plan, buckets=64),
        4: replace(plan, buckets=64, collectives="ring"),
        6: replace(plan, collectives="tree"),
        8: plan,
    }
    found = rehearse(job, plan, steps=10, changes=changes, after=gradients)
    alone = rehearse(job, replicas(1, batch=6), steps=10, after=gradients)[0]
    assert found[0][0] == pytest.approx(alone[0], rel=1e-12)
    assert worst_error(found, alone[1]) <= 1e-12
    assert seen == [("backend", 1), ("backend", 3), ("ring", 3), ("double-tree", 1), ("backend", 1)]


PAUSING = {
    "loss": "def loss(output, batch):\n"
    "    time.sleep(0.06 * len(output))\n"
    "    return output.square().sum(), len(output)"
}
"""So slow that two ranks are worth their sums."""
CLUSTER = """
name = "two far hosts"
[[devices]]
name = "box"
base = "rtx-3090"
[[nodes]]
count = 2
device = "box"
per_node = 1
nic = "10 Gb/s"
nic_latency = "4 ms"
"""


@pytest.mark.slow
def test_the_controller_changes_the_buckets_of_a_running_job(tmp_path: Path) -> None:
    """Links that start slowly: three buckets are one from the first order on; losses are those without."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    plan = replace(replicas(2), buckets=64, comm={"grad_overlap": False})
    flags = ["--steps", "12", "--dtype", "fp64"]
    steered = ["--policy", "lyapunov", "--cluster", str(tmp_path / "cluster.toml")]
    found = run(tmp_path, COUNTS | PAUSING, plan, *flags, *steered)
    assert found.code == 0, found.stderr
    said = [line["text"] for line in events(found, ["plan"])]
    assert any(text.startswith("re-bucket: ") for text in said), said
    alone = rehearse(loaded(tmp_path, {}).in_double(), replicas(1), steps=12)[0][0]
    assert list(found.losses.values()) == pytest.approx(alone, rel=1e-12)
    buckets = [line for line in noted(tmp_path) if line.startswith("bucket")]
    assert "bucket 2 of 3" in buckets and buckets[-1] == "bucket 0 of 1"


@pytest.mark.parametrize("plan", ["uneven replicas", "three stages, zb-h1", "two uneven pipelines"])
def test_without_overlap_no_sum_starts_in_the_backward(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are those of one process, and every sum starts when all backwards are done."""
    early: list[int] = []
    finish, start = GradientSync.finish, GradientSync._start
    finishing: set[int] = set()

    def finished(sync: GradientSync) -> None:
        finishing.add(id(sync))
        finish(sync)

    def started(sync: GradientSync, number: int) -> None:
        if id(sync) not in finishing:
            early.append(number)
        start(sync, number)

    monkeypatch.setattr(GradientSync, "finish", finished)
    monkeypatch.setattr(GradientSync, "_start", started)
    reference = rehearse(JOBS["gpt"](torch.float64), ALONE, steps=1, after=gradients)[0][1]
    for comm in ({"grad_overlap": False}, {}):
        early.clear()
        finishing.clear()
        stated = replace(PLANS[plan], comm=comm)
        found = rehearse(JOBS["gpt"](torch.float64), stated, steps=1, after=gradients, ranks=range(4))
        assert worst_error(found, reference) <= 1e-14
        assert bool(early) == (not comm)


def test_adapters_of_a_plan_are_the_job_s(tmp_path: Path) -> None:
    """A run adds none: a job without them, with others, or that freezes nothing, is refused by name."""
    plan = replace(replicas(1), lora="2:q+v")
    for parts, lora, said in (
        ({}, "2:q+v", "no adapters"),
        (FROZEN, "4", "adapters 2:q+v"),
        ({"lora": "lora = '2:q+v'"}, "2:q+v", "all weights"),
    ):
        with pytest.raises(SpecError, match=re.escape(said)) as caught:
            Trainer(loaded(tmp_path, parts), replace(plan, lora=lora)).train_step()
        assert caught.value.key == "lora" and caught.value.value == lora and caught.value.fix
    assert Trainer(loaded(tmp_path, FROZEN), plan).train_step().loss > 0


WIDE = "def model(): return [nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 1)]"
FADING = {
    "model": COUNTS["model"].rpartition("def model")[0] + WIDE,
    "optimizer": JOB["optimizer"] + "\n"
    "from foreshard.runtime.adaptive import steering\n"
    "measured = steering.StepMeasured\n"
    "def faded(**facts):\n"
    "    if facts['step'] > 1:\n"
    "        rates = {(a, b): 1e9 for a in range(3) for b in range(3) if a != b}\n"
    "        rates |= {(1, 2): 2e7, (2, 1): 2e7}\n"
    "        facts['link_s'] = {pair: (1e6, 1e6 / rate) for pair, rate in rates.items()}\n"
    "    return measured(**facts)\n"
    "steering.StepMeasured = faded",
}
"""From step 2 on the controller is told how messages fare, as where links are timed: one link is slow."""


def test_the_controller_changes_the_algorithm_of_a_running_job_when_a_link_fades(tmp_path: Path) -> None:
    """A double tree sends less over the link than the ring does; losses are those of one process.

    The 8 ms between them are more than noise and less than a rank is worth: all ranks stay.
    """
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("count = 2", "count = 3").replace("4 ms", "10 us"))
    plan = replace(replicas(3, batch=3), collectives="ring", comm={"grad_overlap": False})
    flags = ["--steps", "9", "--dtype", "fp64", "--policy", "lyapunov"]
    flags += ["--cluster", str(tmp_path / "cluster.toml")]
    found = run(tmp_path, COUNTS | PAUSING | FADING, plan, *flags, local=3)
    assert found.code == 0, found.stderr
    orders = [line["text"] for line in events(found, ["plan"])]
    assert any(text.startswith("re-route: ") for text in orders), orders
    alone = rehearse(loaded(tmp_path, {"model": WIDE}).in_double(), replicas(1, batch=3), steps=9)[0][0]
    assert list(found.losses.values()) == pytest.approx(alone, rel=1e-12)
    sums = [line for line in noted(tmp_path) if not line.startswith("bucket")]
    assert sums[0] == "ring" and "double-tree" in sums
