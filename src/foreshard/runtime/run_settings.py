"""What the ranks of a run receive, apart from the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreshard.runtime.records.ledger import KEPT_BYTES

FINISHED = 10
"""Exit code of a rank that has done its part: a job that ends its process with 0 has not."""
JOB_FAULT = 2
"""Exit code of a rank that has reported an error of the job to its agent: a restart would not help."""
HANGS = 3
"""Exit code of a rank that has made no progress: a restart may help."""
READER_LOST = 4
"""Exit code of a rank of which a process that reads samples has died."""
REPORT_FD = "FORESHARD_REPORT_FD"
"""Variable with the pipe on which it reports: the disk may be the problem."""
PARENT = "FORESHARD_PARENT"
"""Variable with the process without which it has to end."""
OPTIMIZERS_LOAD = "torch._dynamo"
"""A module that takes seconds: loaded before there are ranks that others wait for."""


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
    collectives : str or None
        How gradients are summed, as `schedule_selection` reads it; None for what the plan says, which may
        change while the run goes on.
    compress : str or None
        What of gradients goes over the network, as `compression_method` reads it; None for all.
    compress_after : int
        Steps at the start whose gradients are summed whole; Adam's second moments are those of these steps.
    bucket_bytes : int or None
        From which on a bucket of gradients is full; None for what the plan says, else `BUCKET_BYTES`.
    bucket_order : str or None
        Which bucket is summed next where several wait, as `bucket_urgency` reads it; None for the first.
    stage_messages : str or None
        How stages send, as `schedule_selection` reads a broadcast; None for the backend's own messages.
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
    collectives: str | None = None
    compress: str | None = None
    compress_after: int = 0
    bucket_bytes: int | None = None
    bucket_order: str | None = None
    stage_messages: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Options):
    """What a worker receives, as JSON in FORESHARD_JOB.

    `policy` holds what `config_of` takes; `emulated` is what the worker of a test bed reads.
    """

    job: str
    out: str
    steps: int
    save_last: bool = True
    stop_on_nan: bool = True
    resume: bool = False
    emulated: str | None = None
    detect_s: float = 30.0
    progress_s: float = 60.0
    interface: str | None = None
    trackers: tuple[str, ...] = ()
    readers: int = 0
    threads: int = 1
    device: str = "auto"
    trace: bool = False
    policy: Mapping[str, Any] | None = None
    double: bool = False
    kept_bytes: int = KEPT_BYTES

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))
