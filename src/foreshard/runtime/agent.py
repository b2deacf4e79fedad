"""Keeps the ranks of a host going: starts them, starts them again, and keeps the supervisor alive.

Ranks are children of the agent, not of torchrun or the supervisor: when one dies the others live, and when the
supervisor dies nobody does.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.store import Client
from foreshard.runtime.work import JOB_FAULT, Work
from foreshard.spec.plan import Plan

_GRACE_S = 5.0


@dataclass(slots=True)
class Started:
    """A rank's process."""

    process: subprocess.Popen[bytes]
    starts: int = 1
    due_s: float | None = None
    done: bool = False


@dataclass(slots=True)
class Agent:
    """Runs ranks of one host to the end.

    Attributes
    ----------
    out : Path
    plan : Plan
    work : Work
    ranks : sequence of int
        Of this host.
    expected : sequence of int
        Of all hosts.
    address : str
        Of the rendezvous.
    port : int
        0 for any free one; the same after a restart of the supervisor.
    supervises : bool
        Whether the supervisor is this agent's.
    secret_file : Path
    max_starts : int
        Of one rank; beyond it the rank stays away.
    restart_s : float
        Before a dead rank is started again; negative for never.
    command : callable of rank, optional
        Words put before a rank's command line, such as a network namespace.
    """

    out: Path
    plan: Plan
    work: Work
    ranks: Sequence[int]
    expected: Sequence[int]
    secret_file: Path
    address: str = "127.0.0.1"
    port: int = 0
    supervises: bool = True
    max_starts: int = 4
    restart_s: float = 1.0
    command: Callable[[int], list[str]] = lambda rank: []
    _ranks: dict[int, Started] = field(default_factory=dict)
    _supervisor: subprocess.Popen[bytes] | None = None
    _client: Client | None = None

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Run until every rank is done; return how often a rank was started again.

        Raises
        ------
        ForeshardError
            With what a rank says is wrong with the job.
        """
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        try:
            self._start_supervisor()
            for rank in self.ranks:
                self._ranks[rank] = Started(self._spawn(rank))
            while not all(started.done for started in self._ranks.values()):
                self._look()
                watch()
                time.sleep(0.05)
            return sum(started.starts - 1 for started in self._ranks.values())
        finally:
            self.stop()

    def stop(self) -> None:
        """End everything this agent started."""
        processes = [started.process for started in self._ranks.values()]
        processes += [self._supervisor] if self._supervisor is not None else []
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait(_GRACE_S)

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank."""
        return self._ranks[rank].process.pid

    def supervisor_pid(self) -> int:
        """Return the process of the supervisor."""
        if self._supervisor is None:
            raise SpecError("the supervisor is another host's", key="supervisor")
        return self._supervisor.pid

    def _look(self) -> None:
        """See who has ended, and start again who should go on."""
        if self.supervises and self._supervisor is not None and self._supervisor.poll() is not None:
            self._start_supervisor()
        for rank, started in self._ranks.items():
            if started.done:
                continue
            code = started.process.poll()
            if code is not None and started.due_s is None:
                self._ended(rank, started, code)
            if started.due_s is not None and time.monotonic() >= started.due_s:
                started.process, started.due_s = self._spawn(rank), None
                started.starts += 1

    def _ended(self, rank: int, started: Started, code: int) -> None:
        if code == 0:
            started.done = True
            return
        if code == JOB_FAULT:
            raise self._told_fault(rank)
        self._ask({"ask": "died", "rank": rank, "reason": f"exit code {code}"})
        if self.restart_s < 0 or started.starts >= self.max_starts:
            started.done = True
            if all(s.done for s in self._ranks.values()):
                raise ForeshardError(
                    f"rank {rank} ended with exit code {code}", file=str(self._log(rank)),
                    rule="a rank is started again a few times", fix="The end of the file says why",
                )  # fmt: skip
            return
        started.due_s = time.monotonic() + self.restart_s

    def _told_fault(self, rank: int) -> ForeshardError:
        told = json.loads((self.out / "errors" / f"rank-{rank}.json").read_text())
        told.pop("code", None)
        return SpecError(told.pop("what"), **told)

    def _log(self, rank: int) -> Path:
        return self.out / "logs" / f"rank-{rank}.log"

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        env = {
            **os.environ, "FORESHARD_RANK": str(rank), "FORESHARD_STORE": f"{self.address}:{self.port}",
            "FORESHARD_SECRET_FILE": str(self.secret_file), "FORESHARD_JOB": self.work.to_json(),
            "OMP_NUM_THREADS": str(self.work.threads),
        }  # fmt: skip
        words = [*self.command(rank), sys.executable, "-m", "foreshard.runtime.worker"]
        with self._log(rank).open("ab") as log:
            return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _start_supervisor(self) -> None:
        if not self.supervises:
            return
        (self.out / "plan.json").write_text(json.dumps(self.plan.to_dict()))
        (self.out / "ranks.json").write_text(json.dumps(list(self.expected)))
        told = self.out / "supervisor.port"
        told.unlink(missing_ok=True)
        words = [sys.executable, "-m", "foreshard.runtime.supervisor", str(self.out), self.address, str(self.port),
                 str(self.secret_file), str(self.work.detect_s)]  # fmt: skip
        with (self.out / "logs" / "supervisor.log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + 60
        while not told.exists() or not told.read_text():
            if self._supervisor.poll() is not None or time.monotonic() > until:
                raise ForeshardError("the supervisor did not start", file=str(self.out / "logs" / "supervisor.log"))
            time.sleep(0.02)
        self.port = int(told.read_text())

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            self._client = Client((self.address, self.port), self.secret_file.read_bytes().strip())
        return self._client.ask(message)


def make_secret(path: Path) -> Path:
    """Write a fresh secret that only this user can read, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    return path
