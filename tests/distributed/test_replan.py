"""A running job adopts the plan that it is given, and trains on as if it had always had it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command import Command, events, pipeline, replicas, run
from test_kept import SLOW, wait_for_steps


def test_a_running_job_takes_another_plan_and_refuses_one_of_another_batch(tmp_path: Path) -> None:
    command = Command(tmp_path, {"loss": SLOW}, replicas(2), "--steps", "30")
    wait_for_steps(command, 4)
    said = {}
    for name, plan in (("cut", pipeline()), ("batch", replicas(2, batch=8))):
        (tmp_path / f"{name}.json").write_text(json.dumps(plan.to_dict()))
        words = [sys.executable, "-m", "foreshard", "replan", "run", f"{name}.json", "--wait-s", "60"]
        said[name] = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = command.end()
    assert said["cut"].returncode == 0 and "adopted after step" in said["cut"].stderr, said["cut"].stderr
    assert said["batch"].returncode == 2 and "global batch 8" in said["batch"].stderr
    assert found.code == 0 and len(events(found, ["adopted by request"])) == 1
    alone = run(tmp_path, {}, replicas(2), "--steps", "30", out="alone")
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
