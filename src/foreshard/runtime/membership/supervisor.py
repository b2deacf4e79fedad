"""Decides who trains: a process apart from all ranks that hosts the rendezvous and forms generations.

A generation is a set of ranks and a plan. Ranks ask for the next one when they start, when a peer is gone,
and at the end of a step when another rank waits to join; it is formed when every living rank has asked. A
rank without a heartbeat for `detect_s` counts as dead (`watch`), unless its agent sees it run (`_agent`). A
rank that hangs ends itself and says so (`_hangs`); if all ranks wait for each other, a link is lost
(`_is_stuck`); after each generation without a step that takes twice as long. A run that fails again and again
without a step ends with the reason (`fault`). Decisions are on disk before any rank learns of them, so that a
supervisor that is killed continues where it was.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshard.errors import InfeasibleError
from foreshard.runtime.membership.leader_failover import current_term
from foreshard.runtime.membership.link_blame import LinkBlame
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.runtime.membership.progress import WALL_FACTOR
from foreshard.runtime.membership.store import StoreServer
from foreshard.runtime.membership.supervisor_state import SupervisorState, load_state, save_state
from foreshard.runtime.records.durable_jsonl import DurableJsonl
from foreshard.runtime.run_settings import REPORT_FD
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

START_S = 600.0
"""How long the first generation waits for all ranks: torch may take minutes to load on a busy host."""
_ASK_S = 5.0
"""Longest time that a question waits for its answer; the asker repeats it."""
_STUCK_S = 5.0
"""Least time after which ranks that all wait are stuck: on a busy machine none may run for a while."""
_STUCK_REPORTS = 5
"""Heartbeats in which a rank says that it waits for the same, by which it counts as stuck: one that has no
processor, or holds its interpreter, sends none and may have got on."""
_STUCK_GROWTH = 8
"""Most times as long that ranks may wait after generations without a step: a loaded machine needs it."""
_HANGS_IN_A_ROW = 3
"""Generations that end because a rank hangs, without a step between them, after which the run ends."""
_FAILURES_IN_A_ROW = 8
"""Generations of the same processes without a step between them after which the run ends."""
_ATTEMPTS = 16
"""The same of generations of any ranks: those that ranks die in, or are excluded from."""


@dataclass(slots=True)
class LiveRank:
    """A rank that is alive: last heard or seen to run at `beat_s`, in `step`.

    It `waits` for the next generation, or is `done` with all steps. `count` is that of its activities, see
    `Progress`; it waits for the peers `waits_for` since `began_s`, and has said so `reports` times more, the
    last time at `said_s`. `waited_s` is how long it has waited for a processor in all; what it has since then
    puts `still_s` later.
    """

    pid: int
    beat_s: float
    waits: bool = False
    done: bool = False
    count: int = -1
    waits_for: list[int] | None = None
    began_s: float = 0.0
    still_s: float = 0.0
    said_s: float = 0.0
    reports: int = 0
    step: int | None = None
    waited_s: float = 0.0


class Supervisor:
    """Forms generations; everything it learns comes through `answer`.

    The first generation waits for the `expected` ranks. A rank counts as dead after a silence of `detect_s`.
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
        self._to_kill: dict[int, int] = {}
        self._died: set[tuple[int, int]] = set()  # ranks and their processes, as agents said
        self._changed = threading.Condition()
        self._began_s = now()
        self._link_blame = LinkBlame(detect_s)
        self._lines = DurableJsonl(folder / "supervisor.jsonl")
        self._last_logged: tuple[str, dict[str, Any]] = ("", {})
        self._longest_s: dict[str, float] = {}
        self._step = -1
        self._hung_in: set[int] = set()
        self._stuck_in = -1
        self._failures, self._attempts = 0, 0
        self._watched_s = now()
        self._stop = False
        self._begun: dict[int, int] = {}
        self._left: list[str] = []
        self._news: list[str] = []
        self.server: StoreServer | None = None
        self.state = load_state(folder) or SupervisorState(plan=plan.to_dict(), expected=sorted(expected))
        self._live = {rank: LiveRank(pid=pid, beat_s=now()) for rank, pid in self.state.pids.items()}

    # -- questions ------------------------------------------------------------------------------------------

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a rank or an agent."""
        ask = message.get("ask")
        answers = {
            "beat": self._beat,
            "hangs": self._hangs,
            "join": self._join,
            "finished": self._finished,
            "agent": self._agent,
            "plan": self._set_plan,
            "state": self._state,
        }
        if ask not in answers:
            return {"error": f"unknown question {ask!r}"}
        with self._changed:
            return answers[ask](message)

    def _state(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**self.state.to_dict(), "alive": sorted(self._live)}

    def _beat(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note a heartbeat; answer whether a rank waits to join, and whether the generation is of any use."""
        live = self._heard(int(message["rank"]), int(message["pid"]), int(message.get("number", -1)))
        if live is not None:
            self._note_progress(live, message)
        joins = any(
            other.waits and r not in self.state.ranks and not self._is_excluded(r)
            for r, other in self._live.items()
        )
        return {
            "wanted": live is not None and joins,
            "broken": live is not None and self._is_broken(),
            "stuck": live is not None and self._is_stuck(),
            "number": self.state.number,
            "longest_s": dict(self._longest_s),
            "stop": self._stop,
        }

    def _heard(self, rank: int, pid: int, number: int) -> LiveRank | None:
        """Note that a rank lives; None if it has been replaced by another process."""
        if rank not in self._live:
            self._take_back(rank, pid, number)
        live = self._live.get(rank)
        if live is None or live.pid not in (0, pid):
            return None
        live.beat_s, live.pid = self._now(), pid
        return live

    def _note_progress(self, live: LiveRank, message: dict[str, Any]) -> None:
        count, waits_for = int(message.get("count", -1)), message.get("waits_for")
        live.said_s, live.reports = self._now(), live.reports + 1
        before_s, live.waited_s = live.waited_s, float(message.get("waited_s", 0.0))
        live.still_s = min(self._now(), live.still_s + max(0.0, live.waited_s - before_s))
        if count != live.count or waits_for is None:
            live.began_s, live.still_s, live.reports = self._now(), self._now(), 0
        most_s = (1 - 1 / WALL_FACTOR) * (self._now() - live.began_s)
        live.still_s = min(live.still_s, live.began_s + most_s)
        live.count, live.waits_for = count, waits_for
        for key, seconds in message.get("longest_s", {}).items():
            self._longest_s[str(key)] = max(float(seconds), self._longest_s.get(key, 0.0))
        step, before = int(message.get("step", -1)), live.step
        if step < 0:
            return  # it has not begun one: that the next is a later one shows no progress
        self._step, live.step = step, step
        if before is not None and step > before:  # trained, be it again after a loss of all copies
            self._failures, self._attempts = 0, 0
            self._hung_in.clear()

    def _is_stuck(self) -> bool:
        """Return whether every rank of the generation waits for others, and none has got on for a while.

        All of them have said so throughout that while: what one said before it fell silent proves nothing. Of
        those that wait for each other in a circle one has a lost link.
        """
        if self._stuck_in == self.state.number:
            return True
        members = self.state.ranks
        living = {rank: self._live[rank] for rank in members if rank in self._live}
        at_work = [live for live in living.values() if not (live.waits or live.done)]
        if not at_work or any(live.waits_for is None or live.reports < _STUCK_REPORTS for live in at_work):
            return False
        if min(live.said_s for live in at_work) - max(live.still_s for live in at_work) < self._stuck_s:
            return False
        waits = {rank: set(live.waits_for or ()) & living.keys() for rank, live in living.items()}
        if not any(waits.values()) and len(living) == len(members):
            return False  # all ask for the next generation
        self._stuck_in = self.state.number
        self._link_blame.stuck(self.state.number, _in_circles(waits))
        self.log("stuck", number=self.state.number, waits={r: sorted(w) for r, w in waits.items()})
        return True

    @property
    def _stuck_s(self) -> float:
        """How long all ranks may wait for each other in this generation."""
        growth = min(2 ** max(0, self._attempts - 1), _STUCK_GROWTH)
        return max(self._detect_s, _STUCK_S) * growth

    def _hangs(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a rank ends itself because it hangs; the run ends if that does not help."""
        rank, pid, where = int(message["rank"]), int(message["pid"]), str(message["where"])[:300]
        live = self._live.get(rank)
        if live is not None and live.pid == pid:
            self._lose(rank)
        self.log("rank hangs", rank=rank, pid=pid, step=self._step, where=where)
        self._news.append(f"rank {rank} hangs in {where}, its stack is in logs/rank-{rank}.log")
        self._hung_in.add(self.state.number)
        if len(self._hung_in) >= _HANGS_IN_A_ROW:
            rule = f"A run ends when ranks hang {_HANGS_IN_A_ROW} times without a step between"
            fix = "Correct what the stack shows, or give --progress-s if it only takes long"
            self._end(f"rank {rank} hangs in {where}", rule, fix, f"logs/rank-{rank}.log")
        self._decide()
        return {}

    def _end(self, what: str, rule: str, fix: str, file: str) -> None:
        """End the run by name: agents learn of it at their next question."""
        fault = {"code": 1, "what": what, "rule": rule, "fix": fix, "file": str(self._folder / file)}
        self.state.fault = self.state.fault or fault
        self.log("ended", text=what)

    def _is_broken(self) -> bool:
        """Return whether a rank of the generation has died or left: its peers need not wait for it."""
        return any(r not in self._live or self._live[r].waits for r in self.state.ranks)

    def _take_back(self, rank: int, pid: int, number: int) -> None:
        """Revive a rank that is still in the generation: its link was silent, or the state was lost.

        What a dead process sent is read after its agent has said so at times: it revives no rank.
        """
        if (rank, pid) in self._died:
            return
        if number > self.state.number:
            self.state.number, self.state.ranks, self.state.pids = number, [], {}
            self.log("memory lost", number=number)
        if number < 0 or number != self.state.number or self.state.pids.get(rank, pid) != pid:
            return
        self._live[rank] = LiveRank(pid=pid, beat_s=self._now())
        self.state.ranks = sorted({*self.state.ranks, rank})
        self.state.pids[rank] = pid
        self.log("rank heard again", rank=rank)

    def _join(self, message: dict[str, Any]) -> dict[str, Any]:
        """Add a rank to those that wait for a generation after `after`; return it if it forms in time."""
        rank, pid, after = (int(message[key]) for key in ("rank", "pid", "after"))
        timeout_s = min(float(message["timeout_s"]), _ASK_S)
        if self.state.over:
            return {"generation": None, "over": True}
        self.state.number = max(self.state.number, after)
        if not self._covers(rank, pid, after):
            if message.get("unconnected"):
                self._link_blame.stuck(after, [rank])
            self._add_waiting(rank, pid, after, str(message.get("reason", ""))[:300])
            self._decide()
            self._changed.wait_for(lambda: self._covers(rank, pid, after) or self.state.over, timeout_s)
        if not self._covers(rank, pid, after):
            return {"generation": None, "over": self.state.over}
        s = self.state
        generation = {"number": s.number, "ranks": s.ranks, "plan": s.running, "pids": dict(s.pids)}
        return {"generation": generation, "over": False}

    def _add_waiting(self, rank: int, pid: int, after: int, reason: str) -> None:
        live = self._live.get(rank)
        self._died.discard((rank, pid))
        if live is None or live.pid != pid:  # a new process of a rank replaces the one before
            live = self._live[rank] = LiveRank(pid=pid, beat_s=self._now())
        live.beat_s, live.done = self._now(), False
        if not live.waits:
            live.waits = True
            if after >= 0:
                self.log("left generation", rank=rank, number=after, reason=reason)
                self._left.append(f"rank {rank}: {reason}")
            else:
                self.log("at the door", rank=rank)

    @property
    def _when(self) -> str:
        return f"at step {self._step}" if self._step >= 0 else "before any step was heard of"

    def _covers(self, rank: int, pid: int, after: int) -> bool:
        """Return whether the present generation is later than `after` and has this process of a rank."""
        s = self.state
        return s.number > after and rank in s.ranks and s.pids.get(rank) == pid and rank in self._live

    def _agent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note ranks of an agent that died or will not be started again; answer which it has to kill."""
        for rank, pid, reason in message.get("died", []):
            live = self._live.get(int(rank))
            if live is not None and live.pid in (0, int(pid)):
                self._lose(int(rank))
                self._died.add((int(rank), int(pid)))
                self.log("rank lost", rank=rank, pid=pid, reason=reason)
                self._news.append(f"rank {rank} died ({reason}) {self._when}")
        for rank, pid in message.get("running", []):
            live = self._live.get(int(rank))
            if live is not None and live.pid == int(pid):
                live.beat_s = self._now()  # alive, though its interpreter may be too busy to say so
        self.state.fault = self.state.fault or message.get("fault")
        if message.get("stop") and not self._stop:
            self._stop = True
            text = "the run ends after the present step, with a checkpoint; asked again, it ends at once"
            self.log("stopping", text=text)
        self._expect_no_more(int(rank) for rank in message.get("gone", []))
        self._decide()
        mine = {int(rank) for rank in message.get("ranks", [])}
        kill = {rank: self._to_kill.pop(rank) for rank in mine & self._to_kill.keys()}
        s = self.state
        return {"kill": kill, "finished": s.finished, "over": s.over, "fault": s.fault, "stop": self._stop}

    def _lose(self, rank: int) -> None:
        del self._live[rank]
        if self.state.pids.pop(rank, None) is not None:
            self._save()

    def _expect_no_more(self, ranks: Iterable[int]) -> None:
        gone = set(ranks) & set(self.state.expected)
        if gone:
            self.state.expected = sorted(set(self.state.expected) - gone)
            self._save()
            self.log("not expected any more", ranks=sorted(gone))

    def _finished(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let a rank end when all are done; send it back while another needs it to finish its last step."""
        rank, pid = int(message["rank"]), int(message["pid"])
        self._heard(rank, pid, self.state.number)
        if rank in self._live:
            self._live[rank].done = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._all_done() or self._is_needed(), _ASK_S)
        if self._all_done():
            self.state.finished = sorted({*self.state.finished, rank})
            self.state.over = True
            self._save()
            self._changed.notify_all()
            return {"end": True, "back": False}
        back = self._is_needed()
        if back and rank in self._live:
            self._live[rank].done = False
        return {"end": False, "back": back}

    def _is_needed(self) -> bool:
        """Return whether a rank of the generation asks for the next one: it has steps to do."""
        return any(live.waits for rank, live in self._live.items() if rank in self.state.ranks)

    def _all_done(self) -> bool:
        """Return whether every living rank of the generation has done its steps."""
        members = [live for rank, live in self._live.items() if rank in self.state.ranks]
        return self.state.over or (bool(members) and all(live.done for live in members))

    def _set_plan(self, message: dict[str, Any]) -> dict[str, Any]:
        self.state.plan = parse_plan(message["plan"]).to_dict()
        self._save()
        return {}

    # -- decisions ------------------------------------------------------------------------------------------

    def watch(self, every_s: float = math.inf) -> None:
        """Declare ranks dead that have been silent for `detect_s`; called a few times per `detect_s`.

        If it is called later than `every_s`, this process had no processor and could not hear ranks.
        """
        with self._changed:
            if self.state.over:
                return
            deaf_s, self._watched_s = self._now() - self._watched_s - every_s, self._now()
            if deaf_s > every_s:
                for live in self._live.values():
                    live.beat_s = min(live.beat_s + deaf_s, self._now())
            for rank, live in list(self._live.items()):
                silent_s = self._now() - live.beat_s
                if silent_s > self._detect_s:
                    self._lose(rank)
                    self._to_kill[rank] = live.pid
                    self.log("rank silent", rank=rank, pid=live.pid, for_s=round(silent_s, 3))
                    self._news.append(f"rank {rank} is silent for {silent_s:.1f} s {self._when}")
            self._decide()

    def _is_excluded(self, rank: int) -> bool:
        return self._link_blame.excludes(rank, self._now())

    def _decide(self) -> None:
        """Form the next generation if every living rank has asked for it."""
        alive = {rank for rank in self._live if not self._is_excluded(rank)}
        waiting = {rank for rank in alive if self._live[rank].waits}
        if self.state.over or not waiting or waiting != alive or not self._may_begin(waiting):
            return
        out = self._link_blame.rank_to_exclude(self.state.number, waiting, self._now())
        if out is not None and self._plan_on(waiting - {out}) is not None:
            self._link_blame.exclude(out, self._now())
            self.log("link suspected", rank=out)
            self._news.append(f"rank {out} cannot be reached by others and stays out for a while")
            waiting.discard(out)
        plan = self._plan_on(waiting)
        if plan is None:
            self._log_once("waiting", text="no rank of the plan is left", ranks=sorted(waiting))
            return
        self._count_failures(waiting)
        self._begin(waiting, plan)

    def _plan_on(self, ranks: set[int]) -> Plan | None:
        """Return the run's plan on the ranks that are there; None while those are awaited that it needs.

        Idle ranks that are too few for its seats take some of them once nobody else is expected.
        """
        try:
            return repaired(parse_plan(self.state.plan), ranks, few=ranks.issuperset(self.state.expected))
        except InfeasibleError:
            return None

    def _count_failures(self, ranks: set[int]) -> None:
        """End the run if ranks leave generation after generation without a step."""
        before, self._begun = self._begun, {rank: self._live[rank].pid for rank in sorted(ranks)}
        self._failures = self._failures + 1 if before == self._begun else 0
        if self._failures >= _FAILURES_IN_A_ROW:
            rule = f"A run ends after {_FAILURES_IN_A_ROW} generations of the same ranks without a step"
            what = f"ranks cannot train together: {'; '.join(self._left[-len(ranks) :])}"
            self._end(what, rule, "See the logs of these ranks", "logs")
        elif self._attempts >= _ATTEMPTS:
            rule = f"A run ends after {_ATTEMPTS} generations without a step between them"
            what = f"ranks do not get as far as a step; last, {(self._left or ['one was lost'])[-1]}"
            fix = "See why ranks left; on a loaded machine or network give a larger --detect-s; add --resume"
            self._end(what, rule, fix, "supervisor.jsonl")

    def _may_begin(self, waiting: set[int]) -> bool:
        """Return whether all expected ranks are there; only the first generation waits for them."""
        began = bool(self.state.ranks) or self._now() - self._began_s > START_S
        return began or waiting.issuperset(self.state.expected)

    def _begin(self, ranks: set[int], plan: Plan) -> None:
        s = self.state
        self._attempts += 1
        back = sorted(ranks - set(s.ranks)) if s.ranks else []
        news, self._news = [*self._news, *(f"rank {rank} is back" for rank in back)], []
        s.number, s.ranks, s.running = s.number + 1, sorted(ranks), plan.to_dict()
        s.pids = {rank: self._live[rank].pid for rank in s.ranks}
        self._save()
        if self.server is not None:
            self.server.forget(f"g{s.number - 2}/")
        for rank in ranks:
            self._live[rank].waits = False
            self._live[rank].beat_s = self._now()
        self._link_blame.began(s.number, s.ranks, self._now())
        left = f"rank{'s' * (len(s.ranks) > 1)} {', '.join(map(str, s.ranks))}"
        text = "; ".join([*news, f"continuing with {left}"]) if news else None
        self.log("generation", number=s.number, ranks=s.ranks, text=text)
        self._changed.notify_all()

    # -- files ----------------------------------------------------------------------------------------------

    def log(self, kind: str, **facts: Any) -> None:
        """Write a line of the operator's log; while the disk is full, lines wait."""
        self._lines.add({"time": time.time(), "who": "supervisor", "kind": kind, **facts})
        self._last_logged = (kind, facts)

    def _log_once(self, kind: str, **facts: Any) -> None:
        if self._last_logged != (kind, facts):
            self.log(kind, **facts)

    def _save(self) -> None:
        try:
            save_state(self._folder, self.state)
        except OSError as error:  # ranks know the generation's number too, so that it never falls
            self._log_once("memory not written", text=str(error))


def _in_circles(waits: Mapping[int, set[int]]) -> list[int]:
    """Return the ranks that wait, over others or directly, for themselves.

    Examples
    --------
    >>> _in_circles({0: {1}, 1: {2}, 2: {1}})
    [1, 2]
    """
    reached = {rank: set(first) for rank, first in waits.items()}
    for _ in waits:
        for rank in waits:
            reached[rank].update(*(reached[other] for other in list(reached[rank])))
    return [rank for rank, found in reached.items() if rank in found]


def main(argv: Sequence[str]) -> int:
    """Run a supervisor: FOLDER ADDRESS PORT SECRET_FILE DETECT_S TERM; the plan is FOLDER/plan.json."""
    folder, address, port, secret_file, detect_s, term = argv
    path, parent = Path(folder), os.getppid()
    plan = parse_plan(json.loads((path / "plan.json").read_text()))
    expected = json.loads((path / "ranks.json").read_text())
    supervisor = Supervisor(path, plan, expected, detect_s=float(detect_s))
    secret = Path(secret_file).read_bytes().strip()
    supervisor.server = StoreServer(address, int(port), secret, supervisor.answer)
    if REPORT_FD in os.environ:
        os.write(int(os.environ[REPORT_FD]), str(supervisor.server.port).encode())
    supervisor.log("supervisor", address=address, port=supervisor.server.port, pid=os.getpid())
    every_s = min(0.2, float(detect_s) / 5)
    while os.getppid() == parent:  # without its agent, the run on this host is over
        time.sleep(every_s)
        supervisor.watch(every_s)
        if current_term(path) > int(term):
            supervisor.log("superseded", term=current_term(path))  # another host has the rendezvous now
            return 0
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
