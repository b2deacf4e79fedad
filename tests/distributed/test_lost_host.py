"""The host of rank 0 is lost, with the rendezvous: another host takes it over, no sample is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rehearsal import plan_of
from small_files import SLOW_JOB

from foreshard.runtime.agent import Agent, make_secret
from foreshard.runtime.outcome import outcome_of
from foreshard.runtime.work import Work

STEPS, BATCH = 40, 3
GROUPS = [{"share": 1, "micro_batch": 1, "stages": [([rank], [[0, 2]])]} for rank in range(BATCH)]
FIRST_HOST = """
import json, sys
from pathlib import Path
from foreshard.runtime.agent import Agent
from foreshard.runtime.work import Work
from foreshard.spec.plan import parse_plan
out, port = Path(sys.argv[1]), int(sys.argv[2])
Agent(out=out, plan=parse_plan(json.loads(sys.argv[4])), work=Work(**json.loads(sys.argv[3])), ranks=[0],
      expected=range(3), secret_file=out / "secret", port=port).run()
"""


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_another_host_takes_over_the_rendezvous(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SLOW_JOB)
    out, plan, port = tmp_path / "run", plan_of(GROUPS, global_batch=BATCH), free_port()
    out.mkdir()
    secret = make_secret(out / "secret")
    work = Work(job=str(tmp_path / "job.py"), out=str(out), steps=STEPS, detect_s=5.0, interface="127.0.0.1")
    words = [
        sys.executable,
        "-c",
        FIRST_HOST,
        str(out),
        str(port),
        work.to_json(),
        json.dumps(plan.to_dict()),
    ]
    first = subprocess.Popen(words, start_new_session=True)
    agent = Agent(
        out=out, plan=plan, work=work, ranks=[1, 2], expected=range(3), secret_file=secret, port=port,
        supervises=False, rehost_s=2.0,
    )  # fmt: skip
    lost = []

    def lose() -> None:
        """Take the first host away in the middle of the run: its agent, its supervisor and its rank."""
        metrics = out / "metrics.jsonl"
        if not lost and metrics.exists() and len(metrics.read_text().splitlines()) >= 5:
            os.killpg(first.pid, signal.SIGKILL)
            lost.append(first.wait())

    try:
        restarts = agent.run(lose)
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    assert lost and agent.supervises
    found = outcome_of(out, global_batch=BATCH, steps=STEPS, restarts=restarts)
    assert (found.steps, found.lost, found.repeated, found.misread, restarts) == (STEPS, 0, 0, 0, 0)
    told = [json.loads(line) for line in (out / "supervisor.jsonl").read_text().splitlines()]
    generations = [line["ranks"] for line in told if line["kind"] == "generation"]
    assert generations[0] == [0, 1, 2] and generations[-1] == [1, 2]
    numbers = [line["number"] for line in told if line["kind"] == "generation"]
    assert numbers == sorted(set(numbers))
