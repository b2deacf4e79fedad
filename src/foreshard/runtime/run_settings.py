"""What the ranks of a run receive, apart from the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foreshard.runtime.records.ledger import KEPT_BYTES

JOB_FAULT = 2
"""Exit code of a rank that has told its agent what is wrong: starting it again would not help."""
TELL_FD = "FORESHARD_TELL_FD"
"""Where a rank tells it: a pipe, since the disk may be what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a worker receives, as JSON in FORESHARD_JOB.

    `policy` holds `PolicyOptions`; `emulated` is what the worker of a test bed reads.
    """

    job: str
    out: str
    steps: int
    seed: int = 0
    clip_norm: float | None = None
    checkpoint_every: int = 0
    resume: bool = False
    emulated: str | None = None
    detect_s: float = 30.0
    interface: str | None = None
    tensorboard: bool = False
    threads: int = 1
    trace: bool = False
    policy: Mapping[str, Any] | None = None
    double: bool = False
    kept_bytes: int = KEPT_BYTES

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))
