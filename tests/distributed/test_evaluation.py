"""Evaluation on the layers where they lie: the numbers are those of the whole model on one process."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from command import RANK, Run, pipeline, replicas, run
from rehearsal import Options, rehearse
from small_jobs import gpt
from small_plans import ALONE, PLANS

from foreshard.errors import ExtraMissingError, SpecError
from foreshard.runtime.job.job import Job
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.metrics import Metrics


def evaluated(plan: Any, **more: Any) -> tuple[dict[int, dict[str, float]], dict[int, Any]]:
    """Train four steps, evaluate after the second and the fourth; return numbers, and losses by rank."""
    job = gpt(torch.float64)
    found: dict[int, dict[str, float]] = {}

    def evaluate(model: Any, step: int) -> dict[str, float]:
        batch = torch.stack([job.dataset[i] for i in range(step, step + 6)])
        output = model(job.inputs(batch))
        total, count = job.loss(output, batch)
        assert not output.requires_grad
        return {"loss": total / count, "seen": float(step), "first": output[0, 0, 0]}

    job.evaluate = lambda model, step: {k: float(v) for k, v in evaluate(model, step).items()}
    both = rehearse(
        job,
        plan,
        steps=4,
        options=Options(eval_every=2),
        on_evaluation=lambda: lambda step, values: found.setdefault(step, dict(values)),
        **more,
    )
    return found, both


REFERENCE = evaluated(ALONE)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_evaluates_what_one_process_evaluates_and_trains_on_as_without(name: str) -> None:
    """Dropout is off in it, and on again after it."""
    plan = replace(PLANS[name], precision="fp32")
    found, trained = evaluated(plan, ranks=range(4))
    assert sorted(found) == [2, 4] and found[2]["seen"] == 2.0
    for step, values in found.items():
        assert values == pytest.approx(REFERENCE[0][step], rel=1e-9)
    plain = rehearse(gpt(torch.float64), plan, steps=4, ranks=range(4))
    for rank, (losses, _) in trained.items():
        assert losses == pytest.approx(plain[rank][0], rel=1e-12)


EVALUATE = """
def evaluate(model, step):
    batch = torch.rand(3, 4)
    if {broken}: os.kill(os.getpid(), 9)
    total, count = loss(model(inputs(batch)), batch)
    return {{"loss": total / count}}
def on_step(step, metrics):
    with open("steps.txt", "a") as file: print(step, metrics["loss_metrics/global_avg_loss"], file=file)
"""


def numbers(found: Run) -> dict[int, float]:
    return {line["step"]: line["eval/loss"] for line in found.lines("evaluations.jsonl")}


FAKE_WANDB = """
import json
def write(what): print(json.dumps(what), file=open("wandb.txt", "a"))
def init(**given):
    write(given)
    return Run()
class Run:
    def define_metric(self, name, step_metric): assert (name, step_metric) == ("*", "step")
    def log(self, values): write(values)
    def finish(self): write({"finished": True})
"""


@pytest.mark.slow
def test_hooks_of_a_job_are_called_and_a_rank_may_die_in_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    flags = ["--steps", "9", "--eval-every", "3"]
    parts = {"evaluate": EVALUATE.format(broken="False")}
    calm = run(tmp_path, parts, pipeline(), *flags, "--wandb", environment=environment)
    assert calm.code == 0, calm.stderr
    assert sorted(numbers(calm)) == [3, 6, 9] and len(set(numbers(calm).values())) == 3
    seen = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    assert [int(step) for step, _ in seen] == list(range(9))
    assert [float(loss) for _, loss in seen] == list(calm.losses.values())
    begun, *logged, ended = whole_lines(tmp_path / "wandb.txt")
    assert (begun["mode"], begun["dir"]) == ("offline", str(calm.out)) and ended == {"finished": True}
    assert {line["step"]: line["eval/loss"] for line in logged if "eval/loss" in line} == numbers(calm)
    assert len(logged) == 9 + 3
    once = f"{RANK} == 1 and step == 6 and not (Path('died').exists() or Path('died').touch())"
    more = [*flags, "--stage-messages", "ring:parts=2"]
    hurt = run(tmp_path, {"evaluate": EVALUATE.format(broken=once)}, pipeline(), *more, out="hurt")
    assert hurt.code == 0, hurt.stderr
    assert numbers(hurt) == pytest.approx(numbers(calm), rel=1e-6)
    assert hurt.losses == pytest.approx(calm.losses, rel=1e-6)


def test_what_is_wrong_with_hooks_is_said_by_name(tmp_path: Path) -> None:
    job = gpt()
    given = {"layers": job.builders, "dataset": job.dataset, "loss": job.loss, "optimizer": job.optimizer}
    bad = Job.of(**given, evaluate=lambda model, step: 3, on_step=lambda step, metrics: 1 / 0)
    with pytest.raises(SpecError, match="evaluate gave int"):
        bad.evaluate(None, 1)
    with pytest.raises(SpecError, match="ZeroDivisionError in"):
        bad.on_step(1, {})
    if find_spec("wandb") is None:
        with pytest.raises(ExtraMissingError, match="pip install wandb"):
            Metrics(tmp_path, 0, trackers=["wandb"])
    found = run(tmp_path, {}, replicas(1), "--steps", "2", "--eval-every", "1", local=1)
    assert found.code == 2 and "no evaluate(model, step)" in found.stderr, found.stderr
