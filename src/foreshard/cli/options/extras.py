"""What verbs need beside the core."""

from __future__ import annotations

from importlib.util import find_spec

from foreshard.errors import ExtraMissingError


def needs_torch(verb: str, what: str) -> None:
    """Raise where torch is not installed, which `what` (Training, Profiling) needs."""
    if find_spec("torch") is None:
        raise ExtraMissingError(
            "torch is not installed",
            key=verb,
            rule=f"{what} needs the extra 'run'",
            fix="pip install 'foreshard[run]'",
        )
