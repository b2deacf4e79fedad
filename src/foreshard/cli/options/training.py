"""What verbs that train share: they need torch, and say how an interrupted run is resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from foreshard.cli.options.answer import say
from foreshard.errors import ExtraMissingError


def needs_torch(verb: str, what: str) -> None:
    """Raise where torch is not installed, which `what` (Training, Profiling) needs."""
    if find_spec("torch") is None:
        rule = f"{what} needs the extra 'run'"
        fix = "pip install 'foreshard[run]'"
        raise ExtraMissingError("torch is not installed", key=verb, rule=rule, fix=fix)


@contextmanager
def resumable(out: str) -> Iterator[None]:
    """Say, when the body is interrupted, what --resume would go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            say(how_to_resume(out))
        raise


def how_to_resume(out: str) -> str:
    """Return what --resume goes on from."""
    from foreshard.runtime.checkpoint.folders import latest

    step = latest(Path(out) / "ckpt")
    if step is None:
        return (
            f"no checkpoint in {out}/: the same command with --resume starts at the first step; "
            "--checkpoint-every N makes some"
        )
    return f"the same command with --resume goes on from the checkpoint of step {step} in {out}/"
