"""Keeps the ranks of a host going: starts them, starts them again, and keeps the supervisor alive.

Ranks are children of the agent, not of torchrun or the supervisor: when one dies the others live, and when
the supervisor dies nobody does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from foreshard.errors import ForeshardError, SpecError
from foreshard.profile.address import own_address
from foreshard.runtime.membership.leader_failover import Place, announce, claim, place_of, term_of
from foreshard.runtime.membership.store import Client
from foreshard.runtime.run_settings import JOB_FAULT, TELL_FD, RunSettings
from foreshard.spec.plan import Plan

WORKER = "foreshard.runtime.worker"
_GRACE_S = 5.0
_TEND_S = 0.2
_STALLED_S = 10.0
_LATE_S = 20.0
_NEVER_S = 300.0
_SUPERVISOR_STARTS = 5
_SUPERVISOR_S = 60.0


@dataclass(slots=True)
class Started:
    """A rank's process; `told` is where it says what is wrong."""

    process: subprocess.Popen[bytes]
    told: int
    starts: int = 1
    due_s: float | None = None
    done: bool = False
    lost: bool = False
    stopped_s: float | None = None


@dataclass(slots=True)
class Agent:
    """Runs ranks of one host to the end.

    Attributes
    ----------
    out : Path
    plan : Plan
    work : RunSettings
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
    own : str, optional
        Address of this host, where it would host the rendezvous if its host is lost; found out if not given.
    rehost_s : float
        Silence of the rendezvous after which another host takes it over.
    secret_file : Path
    max_starts : int
        Of one rank; beyond it the rank stays away.
    restart_s : float
        Before a dead rank is started again; negative for never.
    command : callable of rank, optional
        Words put before a rank's command line, such as a network namespace.
    worker : str
        Module that ranks are started from.
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
    rehost_s: float = 60.0
    max_starts: int = 4
    restart_s: float = 1.0
    command: Callable[[int], list[str]] = lambda rank: []
    worker: str = WORKER
    _ranks: dict[int, Started] = field(default_factory=dict)
    _supervisor: subprocess.Popen[bytes] | None = None
    _client: Client | None = None
    _died: list[tuple[int, int, str]] = field(default_factory=list)
    _heard_s: float = 0.0
    _tended_s: float = 0.0
    _over_s: float | None = None
    _was_heard: bool = False
    _term: int = 0
    _claimed: int = 0
    _finished: frozenset[int] = frozenset()

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Run until every rank is done; return how often a rank was started again.

        Raises
        ------
        ForeshardError
            With what a rank says is wrong with the job.
        """
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        with _ending_on_sigterm():
            try:
                self._term = self._claimed = term_of(self.out)
                if self.supervises:
                    if not _is_free(self.address, self.port):
                        raise _taken(self.address, self.port)
                    self._term += 1
                    self._start_supervisor()
                self._heard_s = time.monotonic()
                for rank in self.ranks:
                    self._ranks[rank] = Started(*self._spawn(rank))
                while not all(started.done for started in self._ranks.values()):
                    self._look()
                    watch()
                    time.sleep(0.05)
                self._see_off()
                return sum(started.starts - 1 for started in self._ranks.values())
            except BaseException:
                if self.supervises:  # ended on purpose: no other host is to go on
                    with contextlib.suppress(OSError):
                        announce(self.out, Place(address=self.address, port=0, term=self._term + 1))
                raise
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
        for started in self._ranks.values():
            os.close(started.told)
        self._ranks.clear()
        if self._client is not None:
            self._client.close()

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
        if self._supervisor is not None and self._supervisor.poll() is not None:
            place = place_of(self.out)
            if place is not None and place.term > self._term:
                self._follow(place)  # this host was out of reach for a while, and is not missed
            else:
                self._start_supervisor()
        for rank, started in self._ranks.items():
            if started.done:
                continue
            code = started.process.poll()
            if code is not None and started.due_s is None:
                self._ended(rank, started, code)
            if started.due_s is not None and time.monotonic() >= started.due_s:
                os.close(started.told)
                (started.process, started.told), started.due_s = self._spawn(rank), None
                started.starts += 1
        if time.monotonic() - self._tended_s > _TEND_S or self._died:
            self._tend()

    def _ended(self, rank: int, started: Started, code: int) -> None:
        if code == 0:
            started.done = True
            return
        if code == JOB_FAULT:
            raise self._told_fault(rank, started)
        self._died.append((rank, started.process.pid, f"exit code {code}"))
        if self.restart_s < 0 or started.starts >= self.max_starts:
            started.done = started.lost = True
            if all(s.lost for s in self._ranks.values()):
                raise ForeshardError(
                    f"rank {rank} ended with exit code {code}",
                    file=str(self._log(rank)),
                    rule="A rank is started again a few times",
                    fix="The end of the file says why",
                )
            return
        started.due_s = time.monotonic() + self.restart_s

    def _tend(self) -> None:
        """Tell the supervisor who died, and do what it asks; see that it lives."""
        self._tended_s = time.monotonic()
        self._end_stopped()
        gone = [rank for rank, started in self._ranks.items() if started.lost]
        if self._client is None:
            self._client = Client((self.address, self.port), self.secret_file.read_bytes().strip())
        try:
            told = self._client.ask(
                {"ask": "agent", "ranks": list(self._ranks), "died": self._died, "gone": gone}, patience_s=0.0
            )
        except RuntimeError:
            self._unheard()
            return
        self._was_heard = True
        self._heard_s, self._died, self._finished = time.monotonic(), [], frozenset(told["finished"])
        if told["over"] and self._over_s is None:
            self._over_s = time.monotonic()
        for rank, pid in told["doomed"].items():
            process = self._ranks[int(rank)].process
            if process.poll() is None and (process.pid == pid or self.command(int(rank))):
                process.kill()

    def _end_stopped(self) -> None:
        """Kill ranks that stand still before the supervisor knows them, and those left after the end."""
        now = time.monotonic()
        late = self._over_s is not None and now - self._over_s > _LATE_S
        for started in self._ranks.values():
            if not _is_stopped(started.process.pid):
                started.stopped_s = None
            elif started.stopped_s is None:
                started.stopped_s = now
            long = started.stopped_s is not None and now - started.stopped_s > self.work.detect_s
            if started.process.poll() is None and (long or late):
                started.process.kill()
            started.done = started.done or late

    def _unheard(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        if self._supervisor is not None and silent_s > max(self.work.detect_s, _STALLED_S):
            self._supervisor.kill()  # alive, but it does not answer
            self._heard_s = time.monotonic()
        if self._supervisor is not None:
            return
        place = place_of(self.out)
        if place is not None and (place.term > self._term or self._is_led_astray(place)):
            self._follow(place)
        elif not self._was_heard and silent_s > _NEVER_S:
            raise ForeshardError(
                f"no supervisor has answered for {silent_s:.0f} s",
                value=f"{self.address}:{self.port}",
                rule="Rank 0 hosts the rendezvous at first",
                fix="See what rank 0 says; start the run again",
            )
        elif self._was_heard and silent_s > self.rehost_s:
            self._heard_s, self._claimed = time.monotonic(), max(self._claimed, self._term) + 1
            if claim(self.out, self._claimed):
                self._take_over(self._claimed)

    def _is_led_astray(self, place: Place) -> bool:
        """Return whether this agent came back to a run whose rendezvous has moved while it was away."""
        return (
            not self._was_heard
            and bool(place.port)
            and (place.address, place.port) != (self.address, self.port)
        )

    def _follow(self, place: Place) -> None:
        """Go where the rendezvous is now."""
        if not place.port:
            raise ForeshardError(
                "the run was ended",
                value=place.address,
                file=str(self.out),
                rule="Who hosts the rendezvous ends it for all",
                fix="See what that host said; start the run again with --resume",
            )
        self.address, self.port, self._term = place.address, place.port, place.term
        self.supervises, self._supervisor, self._client = False, None, None
        self._heard_s = time.monotonic()

    def _take_over(self, term: int) -> None:
        """Host the rendezvous: who did before does not answer."""
        address = self.own or own_address(self.address)
        self.port = self.port if _is_free(address, self.port) else 0
        self.address, self._term, self.supervises, self._client = address, term, True, None
        self._start_supervisor()

    def _see_off(self) -> None:
        """Stay until ranks of other hosts have heard that the run is over."""
        others = set(self.expected) - set(self.ranks)
        until = time.monotonic() + _GRACE_S
        while self.supervises and not others <= self._finished and time.monotonic() < until:
            self._look()
            time.sleep(0.05)

    def _told_fault(self, rank: int, started: Started) -> ForeshardError:
        try:
            told = json.loads(os.read(started.told, 1 << 16))
        except (OSError, ValueError):
            return ForeshardError(
                f"rank {rank} gave up", file=str(self._log(rank)), fix="The end of the file says why"
            )
        kind = SpecError if told.pop("code") == SpecError.exit_code else ForeshardError
        return kind(told.pop("what"), **told)

    def _log(self, rank: int) -> Path:
        return self.out / "logs" / f"rank-{rank}.log"

    def _opened(self, name: str) -> IO[bytes]:
        try:
            return (self.out / "logs" / name).open("ab")
        except FileNotFoundError:
            raise ForeshardError(
                "the folder of the run is gone",
                file=str(self.out),
                rule="A run keeps its folder to the end",
                fix="Put it back and add --resume, or start again in a folder that nothing removes",
            ) from None

    def _spawn(self, rank: int) -> tuple[subprocess.Popen[bytes], int]:
        """Return the process of a rank, and the end of the pipe on which it says what is wrong."""
        words = [*self.command(rank), sys.executable, "-m", self.worker]
        with self._opened(f"rank-{rank}.log") as log, _pipe() as (told, tell):
            env = {
                **os.environ,
                "FORESHARD_RANK": str(rank),
                "FORESHARD_STORE": f"{self.address}:{self.port}",
                "FORESHARD_SECRET_FILE": str(self.secret_file),
                "FORESHARD_JOB": self.work.to_json(),
                "OMP_NUM_THREADS": str(self.work.threads),
                "FORESHARD_AGENT": str(os.getpid()),
                TELL_FD: str(tell),
            }
            os.set_blocking(told, False)
            return subprocess.Popen(
                words,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[tell],
            ), told

    def _start_supervisor(self) -> None:
        """Start the supervisor, at the port it had; it finds what it decided in the run's folder."""
        if self._supervisor is None:  # written once: a disk that has filled up since must not take them away
            (self.out / "plan.json").write_text(json.dumps(self.plan.to_dict()))
            (self.out / "ranks.json").write_text(json.dumps(list(self.expected)))
        for _ in range(_SUPERVISOR_STARTS):
            self._supervisor, port = self._spawn_supervisor()
            if port is not None:
                self.port, self._heard_s = port, time.monotonic()
                if term_of(self.out) < self._term:
                    announce(self.out, Place(address=self.address, port=port, term=self._term))
                return
            self._supervisor.kill()
            self._supervisor.wait(_GRACE_S)
        raise ForeshardError(
            "the supervisor did not start",
            file=str(self.out / "logs" / "supervisor.log"),
            fix="The end of the file says why",
        )

    def _spawn_supervisor(self) -> tuple[subprocess.Popen[bytes], int | None]:
        """Return its process, and the port it listens on once it does."""
        told_it = [self.out, self.address, self.port, self.secret_file, self.work.detect_s, self._term]
        words = [sys.executable, "-m", "foreshard.runtime.membership.supervisor", *map(str, told_it)]
        with self._opened("supervisor.log") as log, _pipe() as (told, tell):
            process = subprocess.Popen(
                words,
                env={**os.environ, TELL_FD: str(tell)},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[tell],
            )
        with open(told, "rb", buffering=0) as pipe:  # nothing comes from one that ends at once
            said = pipe.read(8) if select.select([pipe], [], [], _SUPERVISOR_S)[0] else b""
        return process, int(said) if said else None


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Give both ends of a pipe; the one written to is the child's, the other stays if there is a child."""
    told, tell = os.pipe()
    try:
        yield told, tell
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, where the system tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _is_free(address: str, port: int) -> bool:
    """Return whether the supervisor could listen there."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


def _taken(address: str, port: int) -> SpecError:
    return SpecError(
        f"cannot listen on {address}:{port}",
        key="--interface",
        value=address,
        rule="Ranks meet on an address of this host, at a free port",
        fix="Change --interface or --port",
    )


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the run as an interrupt does, so that no rank is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
