"""The host of rank 0 is lost, with the rendezvous: another takes over, and takes it back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rehearsal import plan_of
from small_files import SLOW_JOB

from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.processes import is_stopped
from foreshard.runtime.membership.secret import make_secret
from foreshard.runtime.records.outcome import outcome_of
from foreshard.runtime.run_settings import RunSettings

STEPS, BATCH = 400, 3
GROUPS = [{"share": 1, "micro_batch": 1, "stages": [([rank], [[0, 2]])]} for rank in range(BATCH)]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class FirstHost:
    """The host of rank 0: `foreshard run` as torchrun starts it, the same way every time."""

    def __init__(self, folder: Path, work: RunSettings, secret: Path, port: int):
        self._words = [
            sys.executable,
            "-m",
            "foreshard",
            "run",
            work.job,
            "--plan",
            folder / "plan.json",
            "--out",
            work.out,
            "--steps",
            work.steps,
            "--detect-s",
            work.detect_s,
            "--interface",
            work.interface,
            "--port",
            port,
            "--secret-file",
            secret,
        ]
        self._env = {**os.environ, "RANK": "0", "WORLD_SIZE": str(BATCH), "LOCAL_WORLD_SIZE": "1"}
        self._said = folder / "first.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                list(map(str, self._words)), env=self._env, stdout=said, stderr=said, start_new_session=True
            )

    def lose(self) -> None:
        """Take its agent, its supervisor and its rank away."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ended(self) -> tuple[int, str]:
        assert self._process is not None
        return self._process.wait(30), self._said.read_text()


def told_of(out: Path, kind: str) -> list[dict[str, Any]]:
    log = out / "supervisor.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if line["kind"] == kind]


def children_of(pid: int) -> list[int]:
    place = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in place.read_text().split()] if place.exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="the system kills them, on Linux")
def test_stopped_processes_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    """They are no children of torchrun's, but of its child: that one lived on, and its ranks with it."""
    (tmp_path / "job.py").write_text(SLOW_JOB)
    one = plan_of(GROUPS[:1], global_batch=1)
    (tmp_path / "plan.json").write_text(json.dumps(one.to_dict()))
    port = ["--master-port", str(free_port())]
    words = ["-m", "torch.distributed.run", *port, "--no-python", sys.executable, "-m", "foreshard", "run"]
    torchrun = subprocess.Popen(
        [sys.executable, *words, "--plan", "plan.json", "--steps", str(STEPS), "job.py"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    until, found = time.monotonic() + 90, list[int]()
    try:
        while len(found) < 4:  # the agent, its supervisor, and a fork server with the rank
            assert torchrun.poll() is None and time.monotonic() < until
            time.sleep(0.05)
            found = children_of(torchrun.pid)
            for pid in found:  # also in those that are added
                found += children_of(pid)
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
    finally:
        torchrun.kill()
        torchrun.wait()
    while left := [pid for pid in found if is_stopped(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.slow
def test_another_host_takes_over_the_rendezvous_and_takes_the_lost_one_back(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    (tmp_path / "job.py").write_text(
        SLOW_JOB.replace(
            "time.sleep(0.1)", f"time.sleep(0.0 if __import__('os').path.exists({str(hurry)!r}) else 0.1)"
        )
    )
    out, plan, port = tmp_path / "run", plan_of(GROUPS, global_batch=BATCH), free_port()
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    secret = make_secret(tmp_path / "secret")
    work = RunSettings(
        job=str(tmp_path / "job.py"), out=str(out), steps=STEPS, detect_s=5.0, interface="127.0.0.1"
    )
    agent = Agent(
        out=out,
        plan=plan,
        work=work,
        ranks=[1, 2],
        expected=range(3),
        secret_file=secret,
        port=port,
        supervises=False,
        takeover_s=2.0,
    )
    first, done = FirstHost(tmp_path, work, secret, port), []

    def watch() -> None:
        """Lose the first host in the middle of the run; start it again, as it was, when the others go on."""
        ranks = [line["ranks"] for line in told_of(out, "generation")]
        metrics = out / "metrics.jsonl"
        if not done and metrics.exists() and len(metrics.read_text().splitlines()) >= 5:
            first.lose()
            done.append("lost")
        if done == ["lost"] and ranks[-1] == [1, 2]:
            first.start()
            done.append("back")
        if done == ["lost", "back"] and ranks[-1] == [0, 1, 2]:
            hurry.touch()
            done.append("trains")

    first.start()
    try:
        restarts = agent.run(watch)
        code, said = first.ended()
    finally:
        first.lose()
    assert done == ["lost", "back", "trains"] and agent.supervises and code == 0, said
    found = outcome_of(out, global_batch=BATCH, steps=STEPS, restarts=restarts)
    assert (found.steps, found.lost, found.repeated, found.misread, restarts) == (STEPS, 0, 0, 0, 0)
    generations = told_of(out, "generation")
    assert [g["ranks"] for g in generations if g["ranks"] != [0, 1, 2]] == [[1, 2]]
    numbers = [line["number"] for line in generations]
    assert numbers == sorted(set(numbers))
    assert len(told_of(out, "supervisor")) == 2, "who comes back does not host the rendezvous"
