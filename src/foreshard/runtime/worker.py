"""One rank of `foreshard run`: a process that trains until all steps are done, through losses of peers.

A killed peer is noticed here as a `PeerLost` of the communication in the middle of a step (`_peer_error`):
the rank then leaves its generation and waits for the next one. Any other error ends the run with its name.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from foreshard.errors import ForeshardError, SpecError
from foreshard.profile.heap import keep_heap, map_large_blocks
from foreshard.runtime.adaptive.idle_probe import PROBE_EVERY
from foreshard.runtime.adaptive.straggler_detector import StragglerDetector, slow_in
from foreshard.runtime.committed_step import StepDone
from foreshard.runtime.hardware import Hardware
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import load_job
from foreshard.runtime.job.readers import ReaderLost, Readers
from foreshard.runtime.membership.leader_failover import rendezvous_address
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.membership.operator_requests import Requests
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.runtime.membership.processor_wait import ProcessorWait
from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.membership.wire import PeerLost
from foreshard.runtime.records.durable_jsonl import flush_all, whole_lines
from foreshard.runtime.records.ledger import Ledger, LedgerBackup
from foreshard.runtime.records.metrics import Metrics
from foreshard.runtime.records.trace_recorder import TraceRecorder, wall_epoch_s
from foreshard.runtime.run_settings import (
    FINISHED,
    JOB_FAULT,
    OPTIMIZERS_LOAD,
    READER_LOST,
    REPORT_FD,
    RunSettings,
)
from foreshard.runtime.trainer import Trainer
from foreshard.spec.online import Command
from foreshard.spec.plan_file import load_plan

if TYPE_CHECKING:
    from foreshard.runtime.adaptive.steering import Steering

_LAST_LINES_S = 60.0
"""How long a finished run waits until the disk accepts its last lines."""
_REPORT_BYTES = 60_000  # a pipe holds 64 KiB without a reader


class RankWorker:
    """Trains as one rank, and writes metrics, events, the ledger and the trace."""

    def __init__(
        self, work: RunSettings, rank: int, store: tuple[str, int], secret: bytes, hardware: Hardware
    ):
        self.work, self.rank, self.out = work, rank, Path(work.out)
        processor_wait = ProcessorWait()
        self.progress = Progress(work.progress_s, waited_s=processor_wait)
        self.progress.arm()
        torch.set_num_threads(work.threads)
        self.metrics = Metrics(self.out, rank, trackers=work.trackers)
        self._log_warnings()
        if not processor_wait.is_known:
            text = "hanging is judged by all time: the system does not count waits for a processor"
            self.metrics.event("wall time", text)
        hardware.use_device(
            work.device, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        self.hardware, self.clock, self.device = hardware, hardware.clock, hardware.device
        job = load_job(work.job, seed=work.seed)
        self.job = job.in_double() if work.double else job
        if work.eval_every and job.evaluate is None:
            raise SpecError(
                "no evaluate(model, step)",
                file=work.job,
                key="--eval-every",
                value=work.eval_every,
                rule="A job that is evaluated says how",
                fix="Define it, or leave out --eval-every; see docs/runtime_jobs.md",
            )
        # before there are threads and connections: they are forked
        self.readers = None
        if work.readers:
            self.readers = Readers(self.job.dataset, work.readers, seed=work.seed, path=self.job.path)
        with self.progress.waiting():
            hardware.await_turn(self.out / "metrics.jsonl", work.steps)
        self._stragglers, self._stragglers_of = StragglerDetector(), -1
        epoch_s = 0.0 if self.clock.virtual else wall_epoch_s()
        self.trace = TraceRecorder(rank, clock=self.clock.name, epoch_s=epoch_s) if work.trace else None
        importlib.import_module(OPTIMIZERS_LOAD)  # not while peers wait
        self.membership = Membership(
            store,
            rank,
            secret,
            progress=self.progress,
            job=work.job,
            interface=os.environ.get("FORESHARD_INTERFACE", work.interface),
            device=self.device if hardware.owns_device else None,
            resume=work.resume,
            locate=lambda: rendezvous_address(self.out),
        )
        self._saved_last = False
        self._requests = Requests(self.out)
        self.ledger = self._make_ledger()
        self.trainer = self._make_trainer()
        self.steering = self._make_steering()

    def _make_steering(self) -> Steering | None:
        work = self.work
        if work.policy is None:
            return None
        # loaded here, since planner and controller take memory that other runs need not hold
        from foreshard.runtime.adaptive.controller_config import config_of
        from foreshard.runtime.adaptive.steering import Steering

        parameters = self.trainer.parameters
        config = config_of(
            work.policy,
            load_plan(str(self.out / "plan.json")),
            self.hardware.cluster,
            steps=work.steps,
            out=self.out,
            parameter_bytes=[
                (8.0 if work.double else 4.0) * sum(parameters.of([layer]).values())
                for layer in range(self.job.num_layers)  # tied ones count in all their layers
            ],
            # flags would win over what the plan says of sums
            steers_sums=not (self.clock.virtual or work.collectives or work.bucket_bytes or work.compress),
        )
        return Steering(config, self.trainer.propose, self.metrics.event)

    def _make_ledger(self) -> Ledger:
        samples = Feed(
            self.job.dataset,
            self.job.collate,
            global_batch=self.membership.generation.plan.global_batch,
            seed=self.work.seed,
            prefetch=0,
            path=self.job.path,
        )
        return Ledger(
            self.out / "ledger" / f"rank-{self.rank}.jsonl",
            self.rank,
            samples.index,
            size=samples.size,
            on_event=self.metrics.event,
            backup=LedgerBackup(self.membership.client, self.rank),
            kept_bytes=self.work.kept_bytes,
        )

    def _make_trainer(self) -> Trainer:
        work = self.work
        return Trainer(
            self.job,
            membership=self.membership,
            clock=self.clock,
            device=self.device,
            options=replace(
                work,
                save_at=work.steps if work.save_last else None,
                track_norm=True,
                probe_every=PROBE_EVERY if work.policy else 0,
            ),
            checkpoints=self.out / "ckpt",
            phase=self._phases(),
            on_event=self.metrics.event,
            on_action=self.trace.add if self.trace is not None else None,
            ledger=self.ledger,
            memory_bytes=self.hardware.memory_bytes(),
            within_memory=self.hardware.within_memory,
            readers=self.readers,
            before_step=self._before_step,
            on_step=self._report_step,
            on_evaluation=self.metrics.evaluation,
        )

    # -- training -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the steps are done, by all ranks."""
        while True:
            self._train()
            if self.trace is not None:
                self._write_trace(self.trace)
            flush_all([self.ledger.file], _LAST_LINES_S)
            self.metrics.flush()
            if self.steering is not None:
                self.steering.flush()
            if self.membership.finish():
                self.metrics.close()
                return
            self._rebuild("a peer has to finish its step")

    def _train(self) -> None:
        while not self._saved_last or (self.trainer.step < self.work.steps and not self.trainer.is_stopped):
            reason = _peer_error(self._train_once)
            if reason is not None:
                self.metrics.event("peer gone", reason, step=self.trainer.step)
                self._rebuild(reason)

    def _train_once(self) -> None:
        """Train a step, or make sure that the last checkpoint is written."""
        if self.trainer.step < self.work.steps and not self.trainer.is_stopped:
            self._saved_last = False
            self.trainer.train_step()
            keep_heap()  # from here on: the first step has made the optimizer's states
        else:
            self.trainer.save_last()
            self._saved_last = True

    def _rebuild(self, reason: str) -> None:
        """Leave the generation and join the next one; repeat while further peers die."""
        error: str | None = reason
        while error is not None:
            self.trainer.release()
            generation = self.membership.next_generation(error)
            error = _peer_error(lambda: self.trainer.adopt(generation))  # noqa: B023 - called at once

    def _before_step(self, step: int) -> None:
        self.metrics.flush()
        if self.steering is not None:
            self.steering.flush()
        self.progress.begin_step(step)
        with self.progress.waiting():  # an emulated rank may have to wait for its turn
            come = self.hardware.before_step(step, self.membership)
        if not come:
            self.metrics.event("late", "a rank that is due has not come", step=step)
        if self.rank == min(self.membership.generation.ranks):
            self._serve_request(step)
        if self.trace is not None:
            self.trace.begin_step(step, self.trainer.plan, self.clock.now())

    def _serve_request(self, step: int) -> None:
        """Propose the plan that the operator asks for, and say when all ranks have adopted it."""
        found = self._requests.open()
        if found is None:
            return
        number, plan = found
        try:
            running = repaired(plan, self.membership.generation.ranks)
            if self.trainer.plan != running:  # not proposed yet, or the proposal went with its generation
                command = Command(kind="regroup", plan=running, reason="asked for by the operator")
                self.trainer.propose(command)
                return
            self.membership.plan_adopted(plan.to_dict())
            kind, text = "adopted by request", "the plan that was asked for is adopted"
        except ForeshardError as error:
            kind, text = "request refused", str(error)
        self.metrics.event(kind, text, step=step, request=number)
        self._requests.answered(number)

    def _phases(self) -> Callable[[str], None]:
        """Return what is called at each phase: progress, the trace, and the fault that a test asks for."""
        fault, trace, now = phase_hook(self.rank), self.trace, self.clock.now

        def phase(name: str) -> None:
            self.progress.turn_to(name)
            if trace is not None:
                trace.phase(name, now())
            fault(name)

        return phase

    # -- reports --------------------------------------------------------------------------------------------

    def _report_step(self, done: StepDone) -> None:
        plan, generation = self.trainer.plan, self.membership.generation
        more: dict[str, Any] = {"clock_s": self.clock.now()}
        if done.time_s is not None:
            self._report_stragglers(done)
        if self.steering is not None and done.time_s is not None:  # else reported late, by any rank
            from foreshard.runtime.adaptive.steering import SteppedRun

            self.steering.stepped(
                SteppedRun(
                    step=done.step,
                    time_s=done.time_s,
                    running=plan,
                    ranks=generation.ranks,
                    generation=generation.number,
                    stage_s=done.vote.sample_s,
                    link_s=done.vote.links,
                    idle_s=done.vote.idle_s,
                    clock_s=self.clock.now(),
                )
            )
            more |= self.steering.metrics(plan)
        line = self.metrics.step(
            step=done.step,
            loss=done.loss,
            count=done.count,
            gradient_norm=done.gradient_norm,
            time_s=done.time_s,
            clock=self.clock.name,
            devices=len(plan.ranks),
            samples=plan.global_batch,
            generation=generation.number,
            work_s_by_rank={str(r): w for r, w in done.vote.work_s.items()},
            **more,
        )
        if self.job.on_step is not None:
            self.job.on_step(done.step, line)

    def _report_stragglers(self, done: StepDone) -> None:
        """Log which ranks have become slow, and which have recovered."""
        generation = self.membership.generation
        if generation.number != self._stragglers_of:
            self._stragglers_of = generation.number
            slow = slow_in(whole_lines(self.metrics.events_path), generation.pids)
            self._stragglers = StragglerDetector(slow)
        plan, vote = json.dumps(self.trainer.plan.to_dict()), done.vote
        for change in self._stragglers.stepped(done.step, plan, vote.work_s, vote.samples):
            self.metrics.event(
                "rank_slow" if change.slow else "rank_recovered",
                change.text,
                step=done.step,
                who=change.rank,
                pid=generation.pids.get(change.rank),
                factor=round(change.factor, 3),
                since_step=change.since_step,
            )

    def _log_warnings(self) -> None:
        """Copy each user warning to the operator's log, once: the output of ranks is rarely read."""
        show, logged = warnings.showwarning, set[str]()

        def log(message: Any, category: type[Warning], *where: Any) -> None:
            membership = vars(self).get("membership")  # none yet while the job is loaded
            leads = self.rank == (0 if membership is None else membership.generation.ranks[0])
            if issubclass(category, UserWarning) and leads and str(message) not in logged:
                logged.add(str(message))
                self.metrics.event("warning", str(message))
            show(message, category, *where)

        warnings.showwarning = log  # type: ignore[assignment]

    def _write_trace(self, trace: TraceRecorder) -> None:
        trace.close(self.clock.now())
        try:
            trace.write(self.out / "trace" / f"rank-{self.rank}.json.gz")
        except OSError as error:
            reason = error.strerror or str(error)
            self.metrics.event("trace given up", reason, step=self.trainer.step)


def _peer_error(body: Callable[[], Any]) -> str | None:
    """Run the body, and return the error of the communication when a peer is gone.

    The exception is dropped: its frames hold process groups, and peers only learn that a rank has left when
    its groups are closed.
    """
    try:
        body()
    except PeerLost as error:
        return str(error)
    return None


def phase_hook(rank: int) -> Callable[[str], None]:
    """Return a function of the phase that does nothing, unless a test asks for a fault (FORESHARD_FAULT).

    FORESHARD_FAULT is ``FILE``: a JSON object {rank: {phase, nth}}; the rank kills itself when it reaches the
    phase for the nth time. Chaos tests use it to hit every phase.
    """
    path = os.environ.get("FORESHARD_FAULT")
    if not path:
        return lambda name: None
    fault, times = json.loads(Path(path).read_text()).get(str(rank)), itertools.count(1)

    def hook(name: str) -> None:
        if fault is not None and name == fault["phase"] and next(times) == fault["nth"]:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main(hardware_of: Callable[[RunSettings, int], Hardware] = lambda work, rank: Hardware()) -> int:
    """Run the rank that the environment describes, on this machine or on the hardware of a test bed."""
    rank = int(os.environ["FORESHARD_RANK"])
    host, _, port = os.environ["FORESHARD_STORE"].rpartition(":")
    secret = Path(os.environ["FORESHARD_SECRET_FILE"]).read_bytes().strip()
    work = RunSettings(**json.loads(os.environ["FORESHARD_JOB"]))
    map_large_blocks()
    try:
        RankWorker(work, rank, (host, int(port)), secret, hardware_of(work, rank)).run()
    except SystemExit:
        return FINISHED  # the others have done all steps without this rank
    except ReaderLost as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            Metrics(Path(work.out), rank).event("reader lost", f"rank {rank}: {error.what}")
        return READER_LOST
    except ForeshardError as error:
        _report_fault(error)
        return JOB_FAULT
    except Exception as error:
        _report_fault(_by_name(error, rank, work))
        return JOB_FAULT
    return FINISHED


def _by_name(error: Exception, rank: int, work: RunSettings) -> ForeshardError:
    """Return an error of this machine or of foreshard, which a restart would meet again."""
    lines = str(error).splitlines()
    return ForeshardError(
        f"rank {rank}: {type(error).__name__}: {lines[0] if lines else 'no message'}",
        file=str(Path(work.out) / "logs" / f"rank-{rank}.log"),
        rule="An error that is not the loss of a peer ends the run",
        fix="The end of the file has its traceback; correct the cause and add --resume",
    )


def _report_fault(error: ForeshardError) -> None:
    """Send an error to the agent, and write it to the log if the disk accepts it."""
    report = json.dumps({**error.to_dict(), "what": error.what[: _REPORT_BYTES // 4]}).encode()
    if REPORT_FD in os.environ and len(report) <= _REPORT_BYTES:
        os.write(int(os.environ[REPORT_FD]), report)
    with contextlib.suppress(OSError):
        traceback.print_exc()


def exit_with(code: int) -> NoReturn:
    """End the process at once: threads of torch may still wait for peers that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def start() -> NoReturn:
    """Be the rank that the environment describes, to the end of the process."""
    exit_with(main())


if __name__ == "__main__":
    start()
