"""The supervisor's decisions on disk: a restarted supervisor, or one on another host, continues from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreshard.file_replacement import replace_file
from foreshard.spec.plan import Plan

_FILE = "supervisor.json"
REQUEST = "replan.json"
"""The newest plan that the operator has asked for."""


@dataclass(slots=True)
class SupervisorState:
    """The state of a run's membership.

    `plan` is that of the run, as its file stores it, `running` that of the generation: `plan` on the ranks
    that are there. The generation's `number` never falls; `ranks` and their `pids` are in it, and the first
    one waits for the `expected` ranks. `finished` ranks have ended after all steps; the run is `over` when
    all steps are done. `fault` is why it has to end, as `ForeshardError.to_dict` gives it.
    """

    plan: dict[str, Any]
    expected: list[int]
    number: int = -1
    ranks: list[int] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    running: dict[str, Any] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    over: bool = False
    fault: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as its file stores it."""
        return asdict(self)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file; a reader finds the old content or the new one, never a part."""
    replace_file(path, json.dumps(content), durable=True)


def save_state(folder: Path, state: SupervisorState) -> None:
    """Write the state of a run."""
    write_json(folder / _FILE, state.to_dict())


def load_state(folder: Path) -> SupervisorState | None:
    """Return the state on disk; None if there is none that can be read."""
    try:
        data = json.loads((folder / _FILE).read_text())
        data["pids"] = {int(rank): pid for rank, pid in data.get("pids", {}).items()}
        return SupervisorState(**data)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def has_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return (folder / _FILE).exists()


def reopen(folder: Path, plan: Plan, expected: list[int]) -> None:
    """Prepare a folder for a run that is resumed: generations count on, so that ledgers stay unambiguous."""
    before = load_state(folder)
    number = before.number if before is not None else -1
    (folder / REQUEST).unlink(missing_ok=True)  # whoever asked was told that the run had ended
    save_state(folder, SupervisorState(plan=plan.to_dict(), expected=sorted(expected), number=number))
