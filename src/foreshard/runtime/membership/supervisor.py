"""Who is there: a process apart from all ranks that hosts the rendezvous and decides on generations.

A generation is a set of ranks and a plan. Ranks ask for the next one when they start, when a peer is gone
and when they are told that somebody waits at the door; it is made when every rank that is alive has asked.
A rank whose heart stops is taken out after a bound. What was decided is on disk before anybody hears it, so
that a supervisor that is killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshard.errors import InfeasibleError
from foreshard.runtime.membership.leader_failover import term_of
from foreshard.runtime.membership.link_blame import LinkBlame
from foreshard.runtime.membership.plan_repair import repaired, taken_over
from foreshard.runtime.membership.store import StoreServer
from foreshard.runtime.membership.supervisor_state import SupervisorState, recalled, remember
from foreshard.runtime.run_settings import TELL_FD
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

START_S = 600.0
"""How long the first generation waits for ranks that have not come."""
_ASK_S = 5.0


@dataclass(slots=True)
class Known:
    """What the supervisor knows of a rank that is alive."""

    pid: int
    beat_s: float
    waits: bool = False
    done: bool = False


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
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        expected: Sequence[int],
        *,
        detect_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._detect_s, self._now = folder, detect_s, now
        self._known: dict[int, Known] = {}
        self._doomed: dict[int, int] = {}
        self._changed = threading.Condition()
        self._began_s = now()
        self._suspicion = LinkBlame(detect_s)
        self.server: StoreServer | None = None
        self.decided = recalled(folder) or SupervisorState(plan=plan.to_dict(), expected=sorted(expected))
        for rank, pid in self.decided.pids.items():
            self._known[rank] = Known(pid=pid, beat_s=now())

    # -- questions ------------------------------------------------------------------------------------------

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a rank or an agent."""
        ask = message.get("ask")
        if ask == "beat":
            return self._beat(int(message["rank"]), int(message["pid"]), int(message.get("number", -1)))
        if ask == "join":
            return self._join(
                int(message["rank"]),
                int(message["pid"]),
                int(message["after"]),
                reason=str(message.get("reason", ""))[:300],
                timeout_s=min(float(message["timeout_s"]), _ASK_S),
            )
        if ask == "finished":
            return self._finished(int(message["rank"]), int(message["pid"]))
        if ask == "agent":
            return self._agent(message)
        if ask == "plan":
            return self._planned(message["plan"])
        if ask == "report":
            self.log(str(message["kind"]), **message.get("facts", {}))
            return {}
        if ask == "state":
            with self._changed:
                return {**self.decided.to_dict(), "alive": sorted(self._known)}
        return {"error": f"unknown question {ask!r}"}

    def _beat(self, rank: int, pid: int, number: int) -> dict[str, Any]:
        with self._changed:
            if rank not in self._known:
                self._take_back(rank, pid, number)
            known = self._known.get(rank)
            if known is None or known.pid not in (0, pid):
                return {"wanted": False, "broken": False, "number": self.decided.number}
            known.beat_s, known.pid = self._now(), pid
            door = any(
                k.waits and r not in self.decided.ranks and not self._held_out(r)
                for r, k in self._known.items()
            )
            return {"wanted": door, "broken": self._broken(), "number": self.decided.number}

    def _broken(self) -> bool:
        """Return whether a rank of the generation has died or left it: nobody has to wait for it."""
        return any(r not in self._known or self._known[r].waits for r in self.decided.ranks)

    def _take_back(self, rank: int, pid: int, number: int) -> None:
        """Know a rank again that is still in the generation: its link was silent, or memory was lost."""
        if number > self.decided.number:
            self.decided.number, self.decided.ranks, self.decided.pids = number, [], {}
            self.log("memory lost", number=number)
        if number < 0 or number != self.decided.number or self.decided.pids.get(rank, pid) != pid:
            return
        self._known[rank] = Known(pid=pid, beat_s=self._now())
        self.decided.ranks = sorted({*self.decided.ranks, rank})
        self.decided.pids[rank] = pid
        self.log("rank heard again", rank=rank)

    def _join(self, rank: int, pid: int, after: int, *, reason: str, timeout_s: float) -> dict[str, Any]:
        """Note that a rank asks for the next generation; answer when it is there, or nothing in time."""
        with self._changed:
            if self.decided.over:
                return {"generation": None, "over": True}
            self.decided.number = max(self.decided.number, after)
            if not self._covers(rank, pid, after):
                self._wait_in_line(rank, pid, after, reason)
                self._decide()
                self._changed.wait_for(lambda: self._covers(rank, pid, after) or self.decided.over, timeout_s)
            if not self._covers(rank, pid, after):
                return {"generation": None, "over": self.decided.over}
            d = self.decided
            told = {"number": d.number, "ranks": d.ranks, "plan": d.running, "pids": dict(d.pids)}
            return {"generation": told, "over": False}

    def _wait_in_line(self, rank: int, pid: int, after: int, reason: str) -> None:
        known = self._known.get(rank)
        if known is None or known.pid != pid:  # a new process of a rank takes the place of the one before
            known = self._known[rank] = Known(pid=pid, beat_s=self._now())
        known.beat_s, known.done = self._now(), False
        if not known.waits:
            known.waits = True
            if after >= 0:
                self.log("left generation", rank=rank, number=after, reason=reason)
                self._suspicion.left(rank, after, reason)
            else:
                self.log("at the door", rank=rank)

    def _covers(self, rank: int, pid: int, after: int) -> bool:
        d = self.decided
        return d.number > after and rank in d.ranks and d.pids.get(rank) == pid and rank in self._known

    def _agent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Hear an agent about its ranks that died or will not be started again; tell it which to kill."""
        with self._changed:
            for rank, pid, reason in message.get("died", []):
                known = self._known.get(int(rank))
                if known is not None and known.pid in (0, int(pid)):
                    self._lose(int(rank))
                    self.log("rank lost", rank=rank, pid=pid, reason=reason)
            self._absent(int(rank) for rank in message.get("gone", []))
            self._decide()
            mine = {int(rank) for rank in message.get("ranks", [])}
            doomed = {rank: pid for rank, pid in self._doomed.items() if rank in mine}
            for rank in doomed:
                del self._doomed[rank]
            return {"doomed": doomed, "finished": self.decided.finished, "over": self.decided.over}

    def _lose(self, rank: int) -> None:
        del self._known[rank]
        if self.decided.pids.pop(rank, None) is not None:
            self._remember()

    def _absent(self, ranks: Any) -> None:
        gone = set(ranks) & set(self.decided.expected)
        if gone:
            self.decided.expected = sorted(set(self.decided.expected) - gone)
            self._remember()
            self.log("not expected any more", ranks=sorted(gone))

    def _finished(self, rank: int, pid: int) -> dict[str, Any]:
        """Let a rank go when all are done; send it back while another has to finish its last step with it."""
        with self._changed:
            self._beat(rank, pid, self.decided.number)
            if rank in self._known:
                self._known[rank].done = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._all_done() or self._missed(), _ASK_S)
            if self._all_done():
                self.decided.finished = sorted({*self.decided.finished, rank})
                self.decided.over = True
                self._remember()
                self._changed.notify_all()
                return {"end": True, "back": False}
            back = self._missed()
            if back and rank in self._known:
                self._known[rank].done = False
            return {"end": False, "back": back}

    def _missed(self) -> bool:
        """Return whether a rank of the generation asks for the next: it has steps to do."""
        return any(known.waits for rank, known in self._known.items() if rank in self.decided.ranks)

    def _all_done(self) -> bool:
        """Return whether every rank of the generation that is alive has done its steps."""
        members = [known for rank, known in self._known.items() if rank in self.decided.ranks]
        return self.decided.over or (bool(members) and all(known.done for known in members))

    def _planned(self, plan: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            self.decided.plan = parse_plan(plan).to_dict()
            self._remember()
        return {}

    # -- decisions ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Take out ranks that have been silent for too long; call it every fraction of the bound."""
        with self._changed:
            if self.decided.over:
                return
            for rank, known in list(self._known.items()):
                if self._now() - known.beat_s > self._detect_s:
                    self._lose(rank)
                    self._doomed[rank] = known.pid
                    self.log(
                        "rank silent", rank=rank, pid=known.pid, for_s=round(self._now() - known.beat_s, 3)
                    )
            self._decide()

    def _held_out(self, rank: int) -> bool:
        return self._suspicion.holds_out(rank, self._now())

    def _decide(self) -> None:
        """Make the next generation if everybody who is alive has asked for it."""
        waiting = {rank for rank, known in self._known.items() if known.waits and not self._held_out(rank)}
        alive = {rank for rank in self._known if not self._held_out(rank)}
        if self.decided.over or not waiting or waiting != alive or not self._may_begin(waiting):
            return
        out = self._suspicion.judged(self.decided.number, waiting, self._now())
        if out is not None:
            self.log("link suspected", rank=out, text="ranks cannot reach it; it stays out for a while")
            waiting.discard(out)
        try:
            plan = repaired(taken_over(parse_plan(self.decided.plan), waiting), waiting)
        except InfeasibleError as error:
            self._say_once("waiting", text=str(error), ranks=sorted(waiting))
            return
        self._begin(waiting, plan)

    def _may_begin(self, waiting: set[int]) -> bool:
        """Return whether all who should come are there; only the first generation waits for them."""
        began = bool(self.decided.ranks) or self._now() - self._began_s > START_S
        return began or waiting.issuperset(self.decided.expected)

    def _begin(self, ranks: set[int], plan: Plan) -> None:
        d = self.decided
        d.number, d.ranks, d.running = d.number + 1, sorted(ranks), plan.to_dict()
        d.pids = {rank: self._known[rank].pid for rank in d.ranks}
        self._remember()
        if self.server is not None:
            self.server.forget(f"g{d.number - 2}/")
        for rank in ranks:
            self._known[rank].waits = False
            self._known[rank].beat_s = self._now()
        self._suspicion.began(d.number, d.ranks, self._now())
        self.log("generation", number=d.number, ranks=d.ranks)
        self._changed.notify_all()

    # -- memory ---------------------------------------------------------------------------------------------

    def log(self, kind: str, **facts: Any) -> None:
        """Write a line of the operator's log; a full disk loses the line, not the run."""
        line = json.dumps({"time": time.time(), "who": "supervisor", "kind": kind, **facts})
        with contextlib.suppress(OSError), (self._folder / "supervisor.jsonl").open("a") as file:
            file.write(line + "\n")
        self._said = (kind, facts)

    _said: tuple[str, dict[str, Any]] = ("", {})

    def _say_once(self, kind: str, **facts: Any) -> None:
        if self._said != (kind, facts):
            self.log(kind, **facts)

    def _remember(self) -> None:
        try:
            remember(self._folder, self.decided)
        except OSError as error:  # ranks know the number too, so that it never falls
            self._say_once("memory not written", text=str(error))


def main(argv: Sequence[str]) -> int:
    """Run a supervisor: FOLDER ADDRESS PORT SECRET_FILE DETECT_S TERM; the plan is FOLDER/plan.json."""
    folder, address, port, secret_file, detect_s, term = argv
    path, parent = Path(folder), os.getppid()
    plan = parse_plan(json.loads((path / "plan.json").read_text()))
    expected = json.loads((path / "ranks.json").read_text())
    supervisor = Supervisor(path, plan, expected, detect_s=float(detect_s))
    secret = Path(secret_file).read_bytes().strip()
    supervisor.server = StoreServer(address, int(port), secret, supervisor.answer)
    if TELL_FD in os.environ:
        os.write(int(os.environ[TELL_FD]), str(supervisor.server.port).encode())
    supervisor.log("supervisor", address=address, port=supervisor.server.port, pid=os.getpid())
    while os.getppid() == parent:  # its agent is gone: so is the run on this host
        time.sleep(min(0.2, float(detect_s) / 5))
        supervisor.watch()
        if term_of(path) > int(term):
            supervisor.log("superseded", term=term_of(path))  # another host has the rendezvous now
            return 0
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
