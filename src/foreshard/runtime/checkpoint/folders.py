"""The folders of checkpoints: which steps are there, without reading a tensor.

It does not import torch: asking from where a run would continue must not wait for torch to load.
"""

from __future__ import annotations

import re
import shutil
from itertools import chain
from pathlib import Path

META = "meta.json"
PARTIAL, OLD = ".part", ".old"
"""Endings of the folder of an attempt, and of a checkpoint that is replaced by one of the same step."""
_NAMED = re.compile(r"step-(\d{10})")


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:010d}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, newest first."""
    return sorted((step for step, place in _named(folder) if (place / META).exists()), reverse=True)


def latest(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    return next(iter(steps_in(folder)), None)


def prune(folder: Path, keep: int = 2) -> None:
    """Remove all but the newest checkpoints, and the remains of attempts up to them."""
    named = _named(folder)
    newest = named[-1][0] if named else -1
    remains = [
        place
        for place in chain(folder.glob(f"step-*{PARTIAL}"), folder.glob(f"step-*{OLD}"))
        if (match := _NAMED.fullmatch(place.stem)) and int(match[1]) <= newest
    ]
    for place in [*(place for _, place in named[: max(0, len(named) - keep)]), *remains]:
        shutil.rmtree(place, ignore_errors=True)


def _named(folder: Path) -> list[tuple[int, Path]]:
    found = [(_NAMED.fullmatch(place.name), place) for place in folder.glob("step-*")]
    return sorted((int(match[1]), place) for match, place in found if match)
