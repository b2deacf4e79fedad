"""One rank of `foreshard run`: a process that trains until the steps are done, whatever else happens."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from foreshard.errors import ForeshardError
from foreshard.profile.heap import keep_heap
from foreshard.runtime.adaptive.controller_config import PolicyOptions
from foreshard.runtime.adaptive.steering import PROBE_EVERY, Steering, SteppedRun
from foreshard.runtime.adaptive.straggler_detector import StragglerDetector, slow_in
from foreshard.runtime.committed_step import StepDone
from foreshard.runtime.hardware import Hardware
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import load_job
from foreshard.runtime.membership.leader_failover import located
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.records.durable_jsonl import settle, whole_lines
from foreshard.runtime.records.ledger import Ledger
from foreshard.runtime.records.ledger_backup import LedgerBackup
from foreshard.runtime.records.metrics import Metrics
from foreshard.runtime.records.trace_recorder import TraceRecorder, wall_epoch_s
from foreshard.runtime.run_settings import JOB_FAULT, TELL_FD, RunSettings
from foreshard.runtime.trainer import Trainer
from foreshard.runtime.trainer_context import Options
from foreshard.spec.plan_file import load_plan

_LAST_LINES_S = 60.0
"""How long a run that is done waits for its disk."""
_TOLD_BYTES = 60_000  # a pipe holds 64 KiB without a reader


class RankWorker:
    """A rank at work.

    Parameters
    ----------
    work : RunSettings
    rank : int
    store : (host, port)
    secret : bytes
    hardware : Hardware
    """

    def __init__(
        self, work: RunSettings, rank: int, store: tuple[str, int], secret: bytes, hardware: Hardware
    ):
        self.work, self.rank, self.out = work, rank, Path(work.out)
        torch.set_num_threads(work.threads)
        self.metrics = Metrics(self.out, rank, tensorboard=work.tensorboard)
        self.hardware, self.clock = hardware, hardware.clock
        job = load_job(work.job, seed=work.seed)
        self.job = job.in_double() if work.double else job
        hardware.await_turn(self.out / "metrics.jsonl", work.steps)
        self._pace, self._paced_in = StragglerDetector(), -1
        self.timeline = (
            TraceRecorder(rank, clock=self.clock.name, epoch_s=0.0 if self.clock.virtual else wall_epoch_s())
            if work.trace
            else None
        )
        cuda = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        )
        importlib.import_module("torch._dynamo")  # optimizers load it, for seconds: better before peers wait
        self.membership = Membership(
            store,
            rank,
            secret,
            timeout_s=work.detect_s,
            interface=os.environ.get("FORESHARD_INTERFACE", work.interface),
            backend="nccl" if cuda else "gloo",
            resume=work.resume,
            locate=lambda: located(self.out),
        )
        self._tell_warnings()
        self.trainer = self._make_trainer()
        self.steering = self._make_steering()

    def _make_steering(self) -> Steering | None:
        work = self.work
        if work.policy is None:
            return None
        config = PolicyOptions(**{**work.policy, "budgets": tuple(work.policy["budgets"])}).config(
            load_plan(str(self.out / "plan.json")),
            self.hardware.cluster,
            steps=work.steps,
            out=self.out,
            parameter_bytes=self._parameter_bytes(),
        )
        return Steering(config, self.trainer.propose, self._event)

    def _parameter_bytes(self) -> list[float]:
        """Return the bytes of each layer's trained parameters; tied ones count in all their layers."""
        width = 8.0 if self.work.double else 4.0
        parameters = self.trainer.parameters
        return [width * sum(parameters.of([i]).values()) for i in range(self.job.num_layers)]

    def _make_trainer(self) -> Trainer:
        work, plan = self.work, self.membership.generation.plan
        index = Feed(
            self.job.dataset,
            self.job.collate,
            global_batch=plan.global_batch,
            seed=work.seed,
            prefetch=0,
            path=self.job.path,
        )
        return Trainer(
            self.job,
            membership=self.membership,
            clock=self.clock,
            device=self.device,
            options=Options(
                seed=work.seed,
                clip_norm=work.clip_norm,
                checkpoint_every=work.checkpoint_every,
                track_norm=True,
                probe_every=PROBE_EVERY if work.policy else 0,
            ),
            checkpoints=self.out / "ckpt",
            phase=self._phases(),
            on_event=self._event,
            on_action=self.timeline.add if self.timeline is not None else None,
            ledger=Ledger(
                self.out / "ledger" / f"rank-{self.rank}.jsonl",
                self.rank,
                index.index,
                size=index.size,
                tell=self._event,
                copies=LedgerBackup(self.membership.client, self.rank),
                kept_bytes=work.kept_bytes,
            ),
            room_bytes=self.hardware.memory_bytes(self.device),
            before_step=self._before,
            on_step=self._tell,
        )

    def run(self) -> None:
        """Train until the steps are done."""
        while True:
            self._train()
            self._write_trace()
            settle([self.trainer.setting.ledger.lines], _LAST_LINES_S)
            self.metrics.flush()
            if self.steering is not None:
                self.steering.flush()
            if self.membership.finish():
                return
            self._rebuild("a peer has to finish its step")

    def _write_trace(self) -> None:
        if self.timeline is None:
            return
        self.timeline.close(self.clock.now())
        try:
            self.timeline.write(self.out / "trace" / f"rank-{self.rank}.json.gz")
        except OSError as error:
            self._event("trace given up", error.strerror or str(error), step=self.trainer.step)

    def _train(self) -> None:
        while self.trainer.step < self.work.steps:
            reason = _trouble(self.trainer.train_step)
            if reason is not None:
                self._event("peer gone", reason, step=self.trainer.step)
                self._rebuild(reason)

    def _rebuild(self, reason: str) -> None:
        """Leave the generation and take a place in the next; again while peers go on dying."""
        trouble: str | None = reason
        while trouble is not None:
            self.trainer.release()
            generation = self.membership.next_generation(trouble)
            trouble = _trouble(lambda: self.trainer.adopt(generation))  # noqa: B023 - called at once

    def _before(self, step: int) -> None:
        self.metrics.flush()
        if self.steering is not None:
            self.steering.flush()
        if not self.hardware.before_step(step, self.membership):
            self._event("late", "a rank that is due has not come", step=step)
        if self.timeline is not None:
            self.timeline.begin_step(step, self.trainer.plan, self.clock.now())

    def _phases(self) -> Callable[[str], None]:
        """Return what receives each phase: the fault that a test asked for, and the trace."""
        hook, timeline, now = phase_hook(self.rank), self.timeline, self.clock.now
        if timeline is None:
            return hook

        def entered(name: str) -> None:
            timeline.phase(name, now())
            hook(name)

        return entered

    def _tell(self, done: StepDone) -> None:
        plan = self.trainer.plan
        if done.time_s is not None:
            self._tell_pace(done)
        more: dict[str, Any] = {"clock_s": self.clock.now()}
        if self.steering is not None and done.time_s is not None:  # else reported late, by any rank
            self.steering.stepped(
                SteppedRun(
                    step=done.step,
                    time_s=done.time_s,
                    running=plan,
                    ranks=self.membership.generation.ranks,
                    generation=self.membership.generation.number,
                    stage_s=done.vote.sample_s,
                    link_s=done.vote.links,
                    idle_s=done.vote.idle_s,
                    clock_s=self.clock.now(),
                )
            )
            more |= self.steering.metrics(plan)
        self.metrics.step(
            step=done.step,
            loss=done.loss,
            count=done.count,
            gradient_norm=done.gradient_norm,
            time_s=done.time_s,
            clock=self.clock.name,
            devices=len(plan.ranks),
            samples=plan.global_batch,
            generation=self.membership.generation.number,
            work_s_by_rank={str(r): w for r, w in done.vote.work_s.items()},
            **more,
        )

    def _tell_pace(self, done: StepDone) -> None:
        """Tell the log which ranks have become slow, and which have recovered."""
        generation = self.membership.generation
        if generation.number != self._paced_in:
            self._paced_in = generation.number
            self._pace = StragglerDetector(slow_in(whole_lines(self.metrics.events_path), generation.pids))
        under, vote = self.trainer.plan.to_dict(), done.vote
        for change in self._pace.stepped(done.step, json.dumps(under), vote.work_s, vote.samples):
            self._event(
                "rank_slow" if change.slow else "rank_recovered",
                change.text,
                step=done.step,
                who=change.rank,
                pid=generation.pids.get(change.rank),
                factor=round(change.factor, 3),
                since_step=change.since_step,
            )

    def _tell_warnings(self) -> None:
        """Tell the operator's log too what is warned of, once: logs of ranks are read by nobody."""
        show, shown = warnings.showwarning, set[str]()

        def showing(message: Any, category: type[Warning], *where: Any) -> None:
            leads = self.rank == self.membership.generation.ranks[0]
            if issubclass(category, UserWarning) and leads and str(message) not in shown:
                shown.add(str(message))
                self._event("warning", str(message))
            show(message, category, *where)

        warnings.showwarning = showing  # type: ignore[assignment]

    def _event(self, kind: str, text: str, **facts: Any) -> None:
        self.metrics.event(kind, text, **facts)


def _trouble(body: Callable[[], Any]) -> str | None:
    """Run the body; return what torch.distributed says when a peer is gone.

    The exception ends here: its frames hold process groups, and peers only learn of a rank that has left
    when its groups are gone.
    """
    try:
        body()
    except ForeshardError:
        raise
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


def phase_hook(rank: int) -> Callable[[str], None]:
    """Return what the trainer tells its phase to: nothing, unless a fault is asked for (FORESHARD_FAULT).

    FORESHARD_FAULT is ``FILE``: a JSON object {rank: {phase, nth}}; the rank kills itself when it comes to
    the phase for the nth time. Chaos tests use it to hit a phase for sure.
    """
    path = os.environ.get("FORESHARD_FAULT")
    if not path:
        return lambda name: None
    wanted = json.loads(Path(path).read_text()).get(str(rank))
    seen = {"count": 0}

    def hook(name: str) -> None:
        if wanted is not None and name == wanted["phase"]:
            seen["count"] += 1
            if seen["count"] == wanted["nth"]:
                os.kill(os.getpid(), 9)

    return hook


def main(hardware_of: Callable[[RunSettings, int], Hardware] = lambda work, rank: Hardware()) -> int:
    """Run a rank as the environment says, on this machine or what a test bed makes of it."""
    rank = int(os.environ["FORESHARD_RANK"])
    host, _, port = os.environ["FORESHARD_STORE"].rpartition(":")
    secret = Path(os.environ["FORESHARD_SECRET_FILE"]).read_bytes().strip()
    work = RunSettings(**json.loads(os.environ["FORESHARD_JOB"]))
    keep_heap()
    try:
        RankWorker(work, rank, (host, int(port)), secret, hardware_of(work, rank)).run()
    except ForeshardError as error:
        _tell(error)
        return JOB_FAULT
    return 0


def _tell(error: ForeshardError) -> None:
    """Tell the agent what is wrong, and the log if its disk takes it."""
    text = json.dumps({**error.to_dict(), "what": error.what[: _TOLD_BYTES // 4]}).encode()
    if TELL_FD in os.environ and len(text) <= _TOLD_BYTES:
        os.write(int(os.environ[TELL_FD]), text)
    with contextlib.suppress(OSError):
        traceback.print_exc()


def exit_with(code: int) -> NoReturn:
    """End the process; threads of torch may still wait for peers that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with(main())
