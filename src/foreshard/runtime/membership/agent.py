"""Keeps the processes of a host alive: starts ranks, restarts dead ones, and restarts the supervisor.

Ranks are started by the agent, not by torchrun or the supervisor: when a rank dies the others live, and when
the supervisor dies no rank does. A rank that is killed is noticed here by its exit code (`_ended`), and
reported to the supervisor. An agent on another host takes over the rendezvous if its host is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreshard.errors import ForeshardError, InfeasibleError, SpecError, Terminated
from foreshard.profile.address import own_address
from foreshard.runtime.fork_server import Forked, ForkServer
from foreshard.runtime.membership.leader_failover import (
    Rendezvous,
    announce,
    claim_term,
    current_term,
    read_rendezvous,
)
from foreshard.runtime.membership.processes import (
    Process,
    is_free,
    is_stopped,
    may_fork,
    open_log,
    report_pipe,
    start,
    start_supervisor,
)
from foreshard.runtime.membership.store import Client
from foreshard.runtime.run_settings import (
    FINISHED,
    JOB_FAULT,
    OPTIMIZERS_LOAD,
    PARENT,
    READER_LOST,
    RunSettings,
)
from foreshard.spec.plan import Plan

WORKER = "foreshard.runtime.worker"
_GRACE_S = 5.0
"""How long killed processes may take to end, and ranks of other hosts to learn that the run is over."""
_CONTACT_S = 0.2  # between questions to the supervisor
_STALLED_S = 10.0
"""Least silence of this host's supervisor after which it is restarted."""
_LATE_S = 20.0
"""How long ranks may take to end after all steps are done."""
_NEVER_S = 300.0
"""How long to wait for the first answer of another host's supervisor."""
_HOUR_S = 3600.0
_STOP_S = 120.0
"""How long the present step and its checkpoint may take after a signal; then the run ends as it is."""
_SUPERVISOR_STARTS = 5
"""Attempts in a row to start a supervisor, after which the run ends with its log."""
_STACK_BYTES = 65536
"""Of the end of a log in which stacks are looked for."""


@dataclass(slots=True)
class RankProcess:
    """The process of a rank; `report_fd` is the pipe on which it reports a fault of the job."""

    process: Process | Forked
    report_fd: int
    starts: int = 1
    started_s: list[float] = field(default_factory=lambda: [time.monotonic()])
    restart_at_s: float | None = None
    done: bool = False
    lost: bool = False
    stopped_s: float | None = None


@dataclass(slots=True)
class Agent:
    """Runs ranks of one host to the end.

    `ranks` are those of this host, `expected` those of all. The rendezvous is at `address` and `port` (0 for
    any free one); its supervisor is this agent's where it `supervises`. After a silence of `takeover_s`
    another host takes the rendezvous over, at its `own` address (found out if not given).

    A rank is started `max_starts` times, and as often as `max_starts_per_hour` within an hour, `restart_s`
    after it died (negative for never); beyond that it stays away. `worker` is the module that ranks are
    started from, `command` gives words that are put before a rank's command line, such as a network
    namespace. Ranks choose devices by `local_rank`, the number of the first of them on the host, and
    `local_ranks`, that of all there.
    """

    out: Path
    plan: Plan
    work: RunSettings
    ranks: Sequence[int]
    expected: Sequence[int]
    secret_file: Path
    address: str = "127.0.0.1"
    port: int = 0
    supervises: bool = True
    own: str | None = None
    takeover_s: float = 60.0
    max_starts: int = 4
    max_starts_per_hour: int | None = None
    restart_s: float = 1.0
    command: Callable[[int], list[str]] = lambda rank: []
    worker: str = WORKER
    local_rank: int = 0
    local_ranks: int = 1
    _ranks: dict[int, RankProcess] = field(default_factory=dict)
    _server: ForkServer | None = None
    _supervisor: Process | None = None
    _client: Client | None = None
    _died: list[tuple[int, int, str]] = field(default_factory=list)
    _heard_s: float = 0.0
    _contacted_s: float = 0.0
    _over_s: float | None = None
    _was_heard: bool = False
    _term: int = 0
    _claimed: int = 0
    _finished: frozenset[int] = frozenset()
    _stop_s: float | None = None
    _stop_signal: int = signal.SIGTERM
    _run_stops: bool = False

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Run until every rank is done; return how often a rank was started again.

        A fault of the job that a rank reports is raised.
        """
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        with self._ending_on_signals():
            try:
                self._term = self._claimed = current_term(self.out)
                if self.supervises:
                    if not is_free(self.address, self.port):
                        raise _port_taken(self.address, self.port)
                    self._term += 1
                    self._start_supervisor()
                self._heard_s = time.monotonic()
                for rank in self.ranks:
                    self._ranks[rank] = RankProcess(*self._spawn(rank))
                while not all(rank.done for rank in self._ranks.values()):
                    self._poll()
                    watch()
                    time.sleep(0.05)
                self._wait_for_other_hosts()
                return sum(rank.starts - 1 for rank in self._ranks.values())
            except BaseException:
                if self.supervises:  # ended on purpose: no other host is to take over
                    ended = Rendezvous(address=self.address, port=0, term=self._term + 1)
                    with contextlib.suppress(OSError):
                        announce(self.out, ended)
                raise
            finally:
                self.stop()

    def stop(self) -> None:
        """End everything this agent started."""
        processes = [rank.process for rank in self._ranks.values()]
        processes += [self._supervisor] if self._supervisor is not None else []
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait(_GRACE_S)
        for rank in self._ranks.values():
            os.close(rank.report_fd)
        self._ranks.clear()
        if self._server is not None:
            self._server.close()
        if self._client is not None:
            self._client.close()

    @property
    def is_stopping(self) -> bool:
        """Whether the run was asked to end after the present step, here or on another host."""
        return self._run_stops or self._stop_s is not None

    @property
    def stopped_by(self) -> int:
        """The signal that asked for it, 0 where none did."""
        return self._stop_signal if self.is_stopping else 0

    @contextlib.contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        """Let SIGTERM or Ctrl-C end the run after the present step with a checkpoint, and twice at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            if self._stop_s is not None or not self.work.save_last:
                raise KeyboardInterrupt if number == signal.SIGINT else Terminated
            self._stop_s, self._stop_signal = time.monotonic(), number

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank."""
        return self._ranks[rank].process.pid

    def supervisor_pid(self) -> int:
        """Return the process of the supervisor."""
        if self._supervisor is None:
            raise SpecError("the supervisor is another host's", key="supervisor")
        return self._supervisor.pid

    # -- ranks ----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Notice processes that have ended, and start again those that should continue."""
        if self._stop_s is not None and time.monotonic() - self._stop_s > _STOP_S:
            raise Terminated
        if self._supervisor is not None and self._supervisor.poll() is not None:
            rendezvous = read_rendezvous(self.out)
            if rendezvous is not None and rendezvous.term > self._term:
                self._follow(rendezvous)  # this host was out of reach for a while, and another took over
            else:
                self._start_supervisor()
        for number, rank in self._ranks.items():
            if rank.done:
                continue
            code = rank.process.poll()
            if code is not None and rank.restart_at_s is None:
                self._ended(number, rank, code)
            if rank.restart_at_s is not None and time.monotonic() >= rank.restart_at_s:
                process, report_fd = self._spawn(number)
                os.close(rank.report_fd)
                rank.process, rank.report_fd, rank.restart_at_s = process, report_fd, None
                rank.starts += 1
                rank.started_s.append(time.monotonic())
        if time.monotonic() - self._contacted_s > _CONTACT_S or self._died:
            self._contact_supervisor()

    def _ended(self, number: int, rank: RankProcess, code: int) -> None:
        if code == FINISHED:
            rank.done = True
            return
        if code == JOB_FAULT:
            fault = self._reported_fault(number, rank)
            if not self.supervises and self._client is not None:  # so that ranks of other hosts end too
                with contextlib.suppress(RuntimeError):
                    self._client.ask({"ask": "agent", "fault": fault.to_dict()}, patience_s=_GRACE_S)
            raise fault
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if code == READER_LOST:
            reason = f"a process that read its samples died; see logs/rank-{number}.log"
        if code == 1 and _ended_by_timer(self._log(f"rank-{number}")):
            reason = f"it hung; its stack is in logs/rank-{number}.log"
        self._died.append((number, rank.process.pid, reason))
        if self.restart_s >= 0 and rank.starts < self.max_starts:
            rank.restart_at_s = max(time.monotonic() + self.restart_s, self._may_start_s(rank))
            return
        rank.done = rank.lost = True
        if all(other.lost for other in self._ranks.values()):
            raise ForeshardError(
                f"rank {number} ended with exit code {code}",
                file=str(self._log(f"rank-{number}")),
                rule="A rank is started again a few times",
                fix="The end of the file says why",
            )

    def _may_start_s(self, rank: RankProcess) -> float:
        """Return when a rank has few enough starts in an hour to be started again."""
        most = self.max_starts_per_hour
        recent = [at_s for at_s in rank.started_s if time.monotonic() - at_s < _HOUR_S]
        return recent[-most] + _HOUR_S if most is not None and len(recent) >= most else 0.0

    def _reported_fault(self, number: int, rank: RankProcess) -> ForeshardError:
        try:
            return _as_error(json.loads(os.read(rank.report_fd, 1 << 16)))
        except (OSError, ValueError):
            log = str(self._log(f"rank-{number}"))
            return ForeshardError(f"rank {number} gave up", file=log, fix="The end of the file says why")

    def _kill_stopped(self) -> None:
        """Kill ranks stopped before the supervisor knows them, and ranks that do not end after the run."""
        if self._server is not None:
            self._server.wake()
        now = time.monotonic()
        late = self._over_s is not None and now - self._over_s > _LATE_S
        for rank in self._ranks.values():
            if not is_stopped(rank.process.pid):
                rank.stopped_s = None
            elif rank.stopped_s is None:
                rank.stopped_s = now
            long = rank.stopped_s is not None and now - rank.stopped_s > self.work.detect_s
            if rank.process.poll() is None and (long or late):
                rank.process.kill()
            rank.done = rank.done or late

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def _spawn(self, rank: int) -> tuple[Process | Forked, int]:
        """Return the process of a rank, and the end of the pipe on which it reports a fault of the job."""
        settings = {
            "FORESHARD_RANK": str(rank),
            "LOCAL_RANK": str(self.local_rank + list(self.ranks).index(rank)),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "FORESHARD_STORE": f"{self.address}:{self.port}",
            "FORESHARD_SECRET_FILE": str(self.secret_file),
            "FORESHARD_JOB": self.work.to_json(),
            "OMP_NUM_THREADS": str(self.work.threads),
            PARENT: str(os.getpid()),
        }
        log = self._log(f"rank-{rank}")
        if self.command(rank) or not may_fork(self.work.device):
            words = [*self.command(rank), sys.executable, "-m", self.worker]
            return start(words, log, settings, blocking=False)
        with open_log(log) as file, report_pipe(blocking=False) as (reading, writing):
            if self._server is None or not self._server.is_running:
                self._server = ForkServer([self.worker, OPTIMIZERS_LOAD], settings, file)
            process = self._server.start(settings, file.fileno(), writing)
        return process, reading

    # -- the supervisor -------------------------------------------------------------------------------------

    def _contact_supervisor(self) -> None:
        """Report ranks that died to the supervisor, and kill those that it has given up."""
        self._contacted_s = time.monotonic()
        self._kill_stopped()
        gone = [number for number, rank in self._ranks.items() if rank.lost]
        if self._client is None:
            self._client = Client((self.address, self.port), self.secret_file.read_bytes().strip())
        running = [
            (number, rank.process.pid)
            for number, rank in self._ranks.items()
            if rank.process.poll() is None and rank.stopped_s is None and not self.command(number)
        ]
        question = {
            "ask": "agent",
            "ranks": list(self._ranks),
            "died": self._died,
            "gone": gone,
            "running": running,
            "stop": self.is_stopping,
        }
        try:
            answer = self._client.ask(question, patience_s=0.0)
        except RuntimeError:
            self._no_answer()
            return
        if answer["fault"] is not None:
            raise _as_error(answer["fault"])
        self._was_heard, self._run_stops = True, bool(answer["stop"])
        self._heard_s, self._died, self._finished = time.monotonic(), [], frozenset(answer["finished"])
        if answer["over"] and self._over_s is None:
            self._over_s = time.monotonic()
        for number, pid in answer["kill"].items():
            process = self._ranks[int(number)].process
            if process.poll() is None and (process.pid == pid or self.command(int(number))):
                process.kill()

    def _no_answer(self) -> None:
        """Restart this host's supervisor, or find the one of another host, or take over from it."""
        silent_s = time.monotonic() - self._heard_s
        if self._supervisor is not None:
            if silent_s > max(self.work.detect_s, _STALLED_S):
                self._supervisor.kill()  # alive, but it does not answer
                self._heard_s = time.monotonic()
            return
        rendezvous = read_rendezvous(self.out)
        if rendezvous is not None and (rendezvous.term > self._term or self._has_moved(rendezvous)):
            self._follow(rendezvous)
        elif not self._was_heard and silent_s > _NEVER_S:
            raise ForeshardError(
                f"no supervisor has answered for {silent_s:.0f} s",
                value=f"{self.address}:{self.port}",
                rule="Rank 0 hosts the rendezvous at first",
                fix="See the output of rank 0; start the run again",
            )
        elif self._was_heard and silent_s > self.takeover_s:
            self._heard_s, self._claimed = time.monotonic(), max(self._claimed, self._term) + 1
            if claim_term(self.out, self._claimed):
                self._take_over(self._claimed)

    def _has_moved(self, rendezvous: Rendezvous) -> bool:
        """Return whether the rendezvous moved while this agent's host was away."""
        is_elsewhere = (rendezvous.address, rendezvous.port) != (self.address, self.port)
        return not self._was_heard and bool(rendezvous.port) and is_elsewhere

    def _follow(self, rendezvous: Rendezvous) -> None:
        """Use the rendezvous of another host from now on."""
        if not rendezvous.port:
            raise ForeshardError(
                "the run was ended",
                value=rendezvous.address,
                file=str(self.out),
                rule="The host of the rendezvous ends the run for all",
                fix="See the output of that host; start the run again with --resume",
            )
        self.address, self.port, self._term = rendezvous.address, rendezvous.port, rendezvous.term
        self.supervises, self._supervisor, self._client = False, None, None
        self._heard_s = time.monotonic()

    def _take_over(self, term: int) -> None:
        """Host the rendezvous: its present host does not answer."""
        address = self.own or own_address(self.address)
        self.port = self.port if is_free(address, self.port) else 0
        self.address, self._term, self.supervises, self._client = address, term, True, None
        self._start_supervisor()

    def _start_supervisor(self) -> None:
        """Start the supervisor, at the port it had; it finds its decisions in the run's folder."""
        if self._supervisor is None:  # once: writing again on a disk that is now full would lose them
            (self.out / "plan.json").write_text(json.dumps(self.plan.to_dict()))
            (self.out / "ranks.json").write_text(json.dumps(list(self.expected)))
        for _ in range(_SUPERVISOR_STARTS):
            self._supervisor, port = self._spawn_supervisor()
            if port is not None:
                self.port, self._heard_s = port, time.monotonic()
                if current_term(self.out) < self._term:
                    announce(self.out, Rendezvous(address=self.address, port=port, term=self._term))
                return
            self._supervisor.kill()
            self._supervisor.wait(_GRACE_S)
        log = str(self._log("supervisor"))
        raise ForeshardError("the supervisor did not start", file=log, fix="The end of the file says why")

    def _spawn_supervisor(self) -> tuple[Process, int | None]:
        """Return the process of a supervisor, and the port on which it listens."""
        arguments = [self.out, self.address, self.port, self.secret_file, self.work.detect_s, self._term]
        return start_supervisor(arguments, self._log("supervisor"))

    def _wait_for_other_hosts(self) -> None:
        """Stay until ranks of other hosts have learned that the run is over."""
        others = set(self.expected) - set(self.ranks)
        until = time.monotonic() + _GRACE_S
        while self.supervises and not others <= self._finished and time.monotonic() < until:
            self._poll()
            time.sleep(0.05)


def _ended_by_timer(log: Path) -> bool:
    """Return whether a log ends with the stacks that `Progress.arm` leaves."""
    with contextlib.suppress(OSError):
        return b"\nTimeout (" in b"\n" + log.read_bytes()[-_STACK_BYTES:]
    return False


def _as_error(fault: dict[str, Any]) -> ForeshardError:
    """Return the error that `ForeshardError.to_dict` describes."""
    kinds = {kind.exit_code: kind for kind in (SpecError, InfeasibleError)}
    return kinds.get(fault["code"], ForeshardError)(
        fault["what"], **{key: fault.get(key) for key in ("file", "key", "value", "rule", "fix")}
    )


def _port_taken(address: str, port: int) -> SpecError:
    return SpecError(
        f"cannot listen on {address}:{port}",
        key="--interface",
        value=address,
        rule="Ranks meet on an address of this host, at a free port",
        fix="Change --interface or --port",
    )
