"""What a rank's training is given once and keeps to the end: the job, how it is done, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foreshard.runtime.committed_step import StepDone
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is done, apart from the plan.

    Attributes
    ----------
    seed : int
        Of initial values, order of samples and dropout.
    clip_norm : float or None
        Largest norm of the mean gradient.
    sync : str
        Name of the gradient synchronisation.
    checkpoint_every : int
        Steps between checkpoints; 0 for none but the first values, which need no file.
    track_norm : bool
        Whether to report the gradient's norm without clipping.
    probe_every : int
        Steps between measurements of idle ranks and links; 0 for none.
    """

    seed: int = 0
    clip_norm: float | None = None
    sync: str = "all-reduce"
    checkpoint_every: int = 0
    track_norm: bool = False
    probe_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """The surroundings of a rank's training; `Trainer` says what each is."""

    job: Job
    membership: Any
    options: Options
    clock: Clock
    device: torch.device
    checkpoints: Path | None
    phase: Callable[[str], None]
    on_action: Callable[..., None] | None
    on_event: Callable[..., None]
    ledger: Any
    room_bytes: float | None
    before_step: Callable[[int], None]
    on_step: Callable[[StepDone], None]
