"""The folders of checkpoints by their names: which steps are there, without reading a tensor.

Torch is not needed here: who only asks where a run would go on does not wait for it to load.
"""

from __future__ import annotations

import re
import shutil
from itertools import chain
from pathlib import Path

META = "meta.json"
TORN, OLD = ".part", ".old"
"""Endings of the folder of an attempt, and of a checkpoint that makes room for one of its step."""
_NAMED = re.compile(r"step-(\d{10})")


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:010d}"


def latest(folder: Path) -> int | None:
    """Return the step of the newest whole checkpoint."""
    return max((step for step, place in _named(folder) if (place / META).exists()), default=None)


def prune(folder: Path, keep: int = 2) -> None:
    """Remove all but the newest checkpoints, and what attempts up to them have left."""
    named = _named(folder)
    newest = named[-1][0] if named else -1
    torn = [
        place
        for place in chain(folder.glob(f"step-*{TORN}"), folder.glob(f"step-*{OLD}"))
        if (match := _NAMED.fullmatch(place.stem)) and int(match[1]) <= newest
    ]
    for place in [*(place for _, place in named[: max(0, len(named) - keep)]), *torn]:
        shutil.rmtree(place, ignore_errors=True)


def _named(folder: Path) -> list[tuple[int, Path]]:
    found = [(_NAMED.fullmatch(place.name), place) for place in folder.glob("step-*")]
    return sorted((int(match[1]), place) for match, place in found if match)
