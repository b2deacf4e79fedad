"""Training for real: plans executed on torch.distributed, changed while they run."""

from __future__ import annotations

from typing import Any

_PUBLIC = {"Trainer": "foreshard.runtime.trainer", "Job": "foreshard.runtime.job.job"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: torch is heavy."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
