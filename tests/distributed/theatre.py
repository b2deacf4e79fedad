"""Ranks as threads under a real supervisor, killed wherever a test says, and started again."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rehearsal import stop_reading

from foreshard.runtime.job.job import Job
from foreshard.runtime.membership import member as membership_module
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.membership.store import StoreServer
from foreshard.runtime.membership.supervisor import Supervisor
from foreshard.runtime.membership.wire import PeerLost
from foreshard.runtime.records.ledger import Audit, Ledger, audit
from foreshard.runtime.trainer import Options, Trainer
from foreshard.spec.plan import Plan

SECRET = b"of this test only"
DETECT_S = 30.0


class Killed(BaseException):
    """What SIGKILL is to a process."""


class Theatre:
    """A run of ranks that live and die.

    Parameters
    ----------
    folder : Path
    job : Job
    plan : Plan
    steps : int
    faults : mapping of (rank, life) to (phase, nth)
        In its life-th life (from 0) a rank is killed when it comes to the phase for the nth time.
    ranks : sequence of int
    stays_away : sequence of int
        Ranks that are not started again.
    every : int
        Steps between checkpoints.
    hook : callable of (rank, life), optional
        Called in a rank's thread when it begins a life; may raise Killed later from where it likes.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        plan: Plan,
        *,
        steps: int,
        faults: Mapping[tuple[int, int], tuple[str, int]],
        ranks: Sequence[int] = range(4),
        stays_away: Sequence[int] = (),
        every: int = 3,
        hook: Callable[[int, int], None] = lambda rank, life: None,
    ):
        self.folder, self.job, self.plan, self.steps = folder, job, plan, steps
        self.faults, self.ranks, self.away = faults, list(ranks), stays_away
        self.every, self.hook = every, hook
        self.supervisor = Supervisor(folder, plan, self.ranks, detect_s=DETECT_S)
        self.server = StoreServer("127.0.0.1", 0, SECRET, self.supervisor.answer)
        self.supervisor.server = self.server
        self.found: dict[int, Any] = {}
        self.losses: dict[int, float] = {}
        self.crashes: list[str] = []
        self.deaths: Counter[int] = Counter()
        self.spent: set[tuple[int, int]] = set()
        self._pids = threading.local()
        self._next_pid = 1000
        self._lock = threading.Lock()

    def play(self, after: Callable[[Trainer], Any], *, within_s: float = 120.0) -> Audit:
        """Run to the end; what `after` gives of each rank is in `found`."""
        before, real = torch.get_num_threads(), membership_module.os
        torch.set_num_threads(1)
        membership_module.os = SimpleNamespace(getpid=lambda: self._pids.now, environ={}, getppid=lambda: 0)
        try:
            threads = {
                rank: threading.Thread(target=self._lives, args=(rank, after), daemon=True)
                for rank in self.ranks
            }
            for thread in threads.values():
                thread.start()
            until = time.monotonic() + within_s
            for thread in threads.values():
                thread.join(max(until - time.monotonic(), 0.01))
            stuck = [rank for rank, thread in threads.items() if thread.is_alive()]
        finally:
            membership_module.os = real
            torch.set_num_threads(before)
            self.server.close()
        if stuck:
            raise AssertionError(f"ranks {stuck} are not done after {within_s} s; crashes: {self.crashes}")
        return audit(
            sorted(self.folder.glob("rank-*.jsonl")), global_batch=self.plan.global_batch, steps=self.steps
        )

    def _lives(self, rank: int, after: Callable[[Trainer], Any]) -> None:
        for life in range(20):
            with self._lock:
                self._next_pid += 1
                pid = self._pids.now = self._next_pid
            if self._life(rank, life, after):
                return
            self.deaths[rank] += 1
            gone = [rank] if rank in self.away else []
            died = [[rank, pid, "killed"]]
            self.supervisor.answer({"ask": "agent", "ranks": [rank], "died": died, "gone": gone})
            if gone:
                return

    def _life(self, rank: int, life: int, after: Callable[[Trainer], Any]) -> bool:
        """Live once; return whether the run is over for this rank."""
        seen: Counter[str] = Counter()

        def phase(name: str) -> None:
            seen[name] += 1
            if self.faults.get((rank, life)) == (name, seen[name]):
                self.spent.add((rank, life))
                raise Killed

        stage = _Stage()
        try:
            self.hook(rank, life)
            stage.membership = Membership(
                ("127.0.0.1", self.server.port),
                rank,
                SECRET,
                interface="127.0.0.1",
                beat_s=0.1,
            )
            stage.trainer = self._trainer(rank, stage.membership, phase)
            self._train(stage)
            self.found[rank] = after(stage.trainer)
            return True
        except SystemExit:
            return True
        except Killed:
            return False
        except BaseException:
            self.crashes.append(f"rank {rank}, life {life}: {traceback.format_exc()}")
            return False
        finally:
            stage.close()

    def _trainer(self, rank: int, membership: Membership, phase: Callable[[str], None]) -> Trainer:
        return Trainer(
            self.job,
            membership=membership,
            options=Options(checkpoint_every=self.every),
            phase=phase,
            checkpoints=self.folder / "ckpt",
            ledger=Ledger(self.folder / f"rank-{rank}.jsonl", rank),
            on_step=lambda done: self.losses.__setitem__(done.step, done.loss),
        )

    def _train(self, stage: _Stage) -> None:
        """What a worker does."""
        trainer = stage.trainer
        while True:
            while trainer.step < self.steps:
                self._step(stage)
            if stage.membership.finish():
                return
            self._rebuild(stage, "a peer has to finish its step")

    def _step(self, stage: _Stage) -> None:
        try:
            stage.trainer.train_step()
            return
        except PeerLost as error:
            reason = str(error)[:200]
        self._rebuild(stage, reason)

    def _rebuild(self, stage: _Stage, reason: str | None) -> None:
        while reason is not None:
            stage.trainer.release()
            generation = stage.membership.next_generation(reason)
            reason = None
            try:
                stage.trainer.adopt(generation)
            except PeerLost as error:
                reason = str(error)[:200]


def wait_for_connections() -> None:
    """Wait for threads that are inside of gloo: the interpreter must not end in the middle of one."""
    for thread in threading.enumerate():
        if thread.name in ("closing", "connecting"):
            thread.join(60.0)


class _Stage:
    """What a rank has in a life; closed as the kernel closes what a killed process had."""

    membership: Any = None
    trainer: Any = None

    def close(self) -> None:
        if self.trainer is not None:
            with suppress(RuntimeError):
                self.trainer.release()
            stop_reading(self.trainer)
            self.trainer = None
        if self.membership is not None:
            self.membership._done.set()
            self.membership._drop_groups()
            self.membership.client.close()
