"""What a supervisor has decided, on disk: its successor goes on from it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreshard.spec.plan import Plan

_FILE = "supervisor.json"


@dataclass(slots=True)
class SupervisorState:
    """The state of a run's membership.

    Attributes
    ----------
    plan : dict
        That generations are made from, as its file stores it.
    expected : list of int
        Ranks that the first generation waits for.
    number : int
        Of the generation; it never falls.
    ranks : list of int
        Of the generation.
    pids : dict of rank
        Which process of a rank is in the generation.
    running : dict
        The plan of the generation: `plan` on those who are there.
    finished : list of int
        Ranks that have been let go.
    over : bool
        Whether all steps are done.
    """

    plan: dict[str, Any]
    expected: list[int]
    number: int = -1
    ranks: list[int] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    running: dict[str, Any] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    over: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as its file stores it."""
        return asdict(self)


def remember(folder: Path, decided: SupervisorState) -> None:
    """Write the state; a reader finds the old or the new, never a part."""
    new = folder / f"{_FILE}.new"
    with new.open("w") as file:
        json.dump(decided.to_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _FILE)


def recalled(folder: Path) -> SupervisorState | None:
    """Return the state on disk; None if there is none that can be read."""
    try:
        told = json.loads((folder / _FILE).read_text())
        told["pids"] = {int(rank): pid for rank, pid in told.get("pids", {}).items()}
        return SupervisorState(**told)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def holds_run(folder: Path) -> bool:
    """Return whether a folder has a run in it."""
    return (folder / _FILE).exists()


def reopen(folder: Path, plan: Plan, expected: list[int]) -> None:
    """Prepare a folder for a run that goes on: numbers rise from where they were, as ledgers need it."""
    before = recalled(folder)
    number = before.number if before is not None else -1
    remember(folder, SupervisorState(plan=plan.to_dict(), expected=sorted(expected), number=number))
