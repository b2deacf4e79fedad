"""What a rank's training is given once and keeps to the end: the job, its options, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from foreshard.runtime.committed_step import StepDone
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.executor import OnAction
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.readers import Readers
from foreshard.runtime.membership.fixed_membership import GroupMembership
from foreshard.runtime.records.durable_jsonl import OnEvent
from foreshard.runtime.records.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is done, apart from the plan.

    Attributes
    ----------
    seed : int
        Of initial values, order of samples and dropout.
    clip_norm : float or None
        Largest norm of the mean gradient.
    checkpoint_every : int
        Steps between checkpoints; 0 for none.
    save_at : int or None
        The step before which training ends: a checkpoint is made there, and where it is stopped.
    save_async : bool
        Whether training goes on while a checkpoint is written, from a copy in host memory.
    keep : int
        Checkpoints that are kept.
    stop_on_nan : bool
        Whether a gradient that is not finite ends the run.
    track_norm : bool
        Whether to report the gradient's norm without clipping.
    eval_every : int
        Steps between evaluations; 0 for none.
    probe_every : int
        Steps between measurements of idle ranks and links; 0 for none.
    """

    seed: int = 0
    clip_norm: float | None = None
    checkpoint_every: int = 0
    save_at: int | None = None
    save_async: bool = False
    keep: int = 2
    stop_on_nan: bool = False
    track_norm: bool = False
    eval_every: int = 0
    probe_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """The surroundings of a rank's training; `Trainer` documents each."""

    job: Job
    membership: GroupMembership
    options: Options
    clock: Clock
    device: torch.device
    checkpoints: Path | None
    phase: Callable[[str], None]
    on_action: OnAction | None
    on_event: OnEvent
    ledger: Ledger | None
    memory_bytes: float | None
    before_step: Callable[[int], None]
    readers: Readers | None
    on_step: Callable[[StepDone], None]
    on_evaluation: Callable[[int, Mapping[str, float]], None]
