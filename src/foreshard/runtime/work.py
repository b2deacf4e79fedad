"""What the ranks of a run are told, apart from the plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

JOB_FAULT = 2
"""Exit code of a rank whose job is at fault: starting it again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker is told, as JSON in FORESHARD_JOB."""

    job: str
    out: str
    steps: int
    seed: int = 0
    clip_norm: float | None = None
    checkpoint_every: int = 0
    resume: bool = False
    lab: str | None = None
    detect_s: float = 30.0
    interface: str | None = None
    tensorboard: bool = False
    threads: int = 1
    trace: bool = False
    steering: str | None = None

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))
