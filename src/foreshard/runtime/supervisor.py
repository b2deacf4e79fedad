"""Who is there: a process apart from all ranks that hosts the rendezvous and decides on generations.

A generation is a set of ranks and a plan. Ranks ask for the next one when they start, when a peer is gone and when
they are told that somebody waits at the door; it is made when every rank that is alive has asked. A rank whose
heart stops is taken out after a bound. What was decided is on disk before anybody hears it, so that a supervisor
that is killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreshard.errors import InfeasibleError
from foreshard.runtime.repair import repaired
from foreshard.runtime.store import StoreServer
from foreshard.spec.plan import Plan, parse_plan


@dataclass(slots=True)
class Known:
    """What the supervisor knows of a rank."""

    beat_s: float
    pid: int = 0
    host: str = ""
    waits: bool = False
    beats: bool = False
    done: bool = False


@dataclass(slots=True)
class Decided:
    """What survives the supervisor."""

    plan: dict[str, Any]
    expected: list[int]
    number: int = -1
    ranks: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class Supervisor:
    """Decides on generations; everything it is told comes through `answer`.

    Parameters
    ----------
    folder : Path
        Of the run.
    plan : Plan
    expected : sequence of int
        Ranks that the first generation waits for.
    detect_s : float
        Silence after which a rank is taken for dead.
    now : callable
        Seconds; another clock in tests.
    kill : callable of (rank, pid, host)
        Makes sure that a rank taken for dead is.
    """

    def __init__(
        self, folder: Path, plan: Plan, expected: list[int], *, detect_s: float = 10.0,
        now: Callable[[], float] = time.monotonic, kill: Callable[[int, int, str], None] | None = None,
    ):  # fmt: skip
        self._folder, self._detect_s, self._now = folder, detect_s, now
        self._kill = kill or _kill_here
        self._known: dict[int, Known] = {}
        self._changed = threading.Condition()
        self.server: StoreServer | None = None
        self.decided = self._recalled() or Decided(plan=plan.to_dict(), expected=sorted(expected))
        for rank in self.decided.ranks:
            self._known[rank] = Known(beat_s=self._now())

    # -- questions ------------------------------------------------------------------------------------------

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a rank or an agent."""
        ask = message.get("ask")
        if ask == "beat":
            return self._beat(int(message["rank"]), int(message["pid"]), str(message["host"]))
        if ask == "join":
            return self._join(int(message["rank"]), int(message["after"]), float(message["timeout_s"]), message)
        if ask == "died":
            return self._died(int(message["rank"]), str(message.get("reason", "")))
        if ask == "finished":
            return self._finished(int(message["rank"]))
        if ask == "plan":
            return self._planned(message["plan"])
        if ask == "report":
            self.log(str(message["kind"]), **message.get("facts", {}))
            return {}
        if ask == "state":
            d = self.decided
            return {"number": d.number, "ranks": d.ranks, "alive": sorted(self._known), "finished": d.finished}
        return {"error": f"unknown question {ask!r}"}

    def _beat(self, rank: int, pid: int, host: str) -> dict[str, Any]:
        with self._changed:
            known = self._known.get(rank)
            if known is None:
                return {"wanted": False, "number": self.decided.number, "out": True}
            known.beat_s, known.pid, known.host, known.beats = self._now(), pid, host, True
            door = any(k.waits for r, k in self._known.items() if r not in self.decided.ranks)
            return {"wanted": door, "number": self.decided.number, "out": False}

    def _join(self, rank: int, after: int, timeout_s: float, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a rank asks for the next generation; answer when there is one with it, or nothing in time."""
        with self._changed:
            known = self._known.setdefault(rank, Known(beat_s=self._now()))
            known.beat_s, known.pid, known.host = self._now(), int(message["pid"]), str(message["host"])
            known.waits = not self._covers(rank, after)
            if known.waits:
                self._decide()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._covers(rank, after), timeout_s)
            if not self._covers(rank, after):
                return {"generation": None}
            d = self.decided
            return {"generation": {"number": d.number, "ranks": d.ranks, "plan": self._plan_now().to_dict()}}

    def _covers(self, rank: int, after: int) -> bool:
        return self.decided.number > after and rank in self.decided.ranks

    def _died(self, rank: int, reason: str) -> dict[str, Any]:
        with self._changed:
            if self._known.pop(rank, None) is not None:
                self.log("rank lost", rank=rank, reason=reason)
                self._decide()
                self._changed.notify_all()
        return {}

    def _finished(self, rank: int) -> dict[str, Any]:
        """Let a rank go when all are done; send it back while another has to finish its last step with it."""
        with self._changed:
            if rank in self._known:
                self._known[rank].done = True
            self._changed.notify_all()
            self._changed.wait_for(self._over, 5.0)
            if self._all_done():
                self.decided.finished = sorted({*self.decided.finished, rank})
                self._remember()
                return {"end": True}
            back = any(k.waits for r, k in self._known.items() if r in self.decided.ranks)
            if back and rank in self._known:
                self._known[rank].done = False
            return {"end": False, "back": back}

    def _over(self) -> bool:
        return self._all_done() or any(k.waits for r, k in self._known.items() if r in self.decided.ranks)

    def _all_done(self) -> bool:
        """Return whether every rank of the generation that is alive has done its steps."""
        return all(k.done for r, k in self._known.items() if r in self.decided.ranks)

    def _planned(self, plan: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self.decided.plan = parse_plan(plan).to_dict()
            self._remember()
        return {}

    # -- decisions ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Take out ranks that have been silent for too long; call it every fraction of the bound."""
        with self._changed:
            late = [
                rank for rank, known in self._known.items()
                if known.beats and not known.waits and self._now() - known.beat_s > self._detect_s
            ]
            for rank in late:
                known = self._known.pop(rank)
                self._kill(rank, known.pid, known.host)
                self.log("rank silent", rank=rank, for_s=round(self._now() - known.beat_s, 3))
            if late:
                self._decide()

    def _decide(self) -> None:
        """Make the next generation if everybody who is alive has asked for it."""
        waiting = {rank for rank, known in self._known.items() if known.waits}
        first = self.decided.number < 0
        if not waiting or waiting != set(self._known) or (first and not waiting.issuperset(self.decided.expected)):
            return
        try:
            self._plan_for(waiting)
        except InfeasibleError as error:
            self.log("waiting", text=str(error), ranks=sorted(waiting))
            return
        self.decided.number += 1
        self.decided.ranks = sorted(waiting)
        self._remember()
        if self.server is not None:
            self.server.forget(f"g{self.decided.number - 2}/")
        for rank in waiting:
            self._known[rank].waits = False
            self._known[rank].beat_s = self._now()
        self.log("generation", number=self.decided.number, ranks=self.decided.ranks)
        self._changed.notify_all()

    def _plan_for(self, ranks: set[int]) -> Plan:
        return repaired(parse_plan(self.decided.plan), ranks)

    def _plan_now(self) -> Plan:
        return self._plan_for(set(self.decided.ranks))

    # -- memory ---------------------------------------------------------------------------------------------

    def log(self, kind: str, **facts: Any) -> None:
        """Write a line of the operator's log."""
        line = json.dumps({"time": time.time(), "who": "supervisor", "kind": kind, **facts})
        with (self._folder / "supervisor.jsonl").open("a") as file:
            file.write(line + "\n")

    def _remember(self) -> None:
        d = self.decided
        told = {"plan": d.plan, "expected": d.expected, "number": d.number, "ranks": d.ranks, "finished": d.finished}
        new = self._folder / "supervisor.json.new"
        with new.open("w") as file:
            json.dump(told, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._folder / "supervisor.json")

    def _recalled(self) -> Decided | None:
        path = self._folder / "supervisor.json"
        return Decided(**json.loads(path.read_text())) if path.exists() else None


def _kill_here(rank: int, pid: int, host: str) -> None:
    """Kill a silent rank of this host, so that it cannot wake up into a run that went on without it."""
    if pid and host == os.uname().nodename:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def main(argv: list[str]) -> int:
    """Run a supervisor: FOLDER ADDRESS PORT SECRET_FILE DETECT_S; the plan is FOLDER/plan.json."""
    folder, address, port, secret_file, detect_s = argv
    path = Path(folder)
    plan = parse_plan(json.loads((path / "plan.json").read_text()))
    expected = json.loads((path / "ranks.json").read_text())
    supervisor = Supervisor(path, plan, expected, detect_s=float(detect_s))
    secret = Path(secret_file).read_bytes().strip()
    supervisor.server = StoreServer(address, int(port), secret, supervisor.answer)
    (path / "supervisor.port").write_text(str(supervisor.server.port))
    supervisor.log("supervisor", address=address, port=supervisor.server.port, pid=os.getpid())
    while True:
        time.sleep(min(0.2, float(detect_s) / 5))
        supervisor.watch()


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
