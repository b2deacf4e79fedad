"""Trains a job for real: executes plans on torch.distributed, and changes them while they run.

Decides nothing about which plan is best (but after a loss, `membership.plan_repair`); it makes sure that any
plan gives the gradients of a single process, that every sample counts once, and that ranks may die, stall,
leave and join. In go a job file, a plan and, for adaptive runs, a policy; out come a checkpoint, metrics,
events and a ledger of samples in the run's folder. `launch` starts ranks, `worker` is one rank's process,
`trainer` its loop: read `trainer` first. A step is in `engine`, its times are measured by `engine/clock`,
what a rank holds is in `state`, the user's code in `job`. A killed rank is noticed in `membership`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreshard.runtime.gradient_check import gradient_error as gradient_error
    from foreshard.runtime.job.job import Job as Job
    from foreshard.runtime.trainer import Trainer as Trainer

_PUBLIC = {
    "Job": "foreshard.runtime.job.job",
    "Trainer": "foreshard.runtime.trainer",
    "gradient_error": "foreshard.runtime.gradient_check",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: torch is heavy."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
