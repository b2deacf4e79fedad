"""What an export is: files for another tool, and what that tool cannot say of the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from foreshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file by its name and text; `text` ends in a newline."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of one target, and what the user still has to know: what they do not state, in sentences."""

    target: str
    version: str
    files: tuple[File, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``export --json``."""
        return {
            "schema_version": 1,
            "target": self.target,
            "checked_against": self.version,
            "files": [{"name": file.name, "text": file.text} for file in self.files],
            "notes": list(self.notes),
        }


def refuse(target: str, reasons: Iterable[str]) -> None:
    """Raise when there are reasons why the target would not train as the plan says.

    Raises
    ------
    SpecError
        With every reason, so that a plan is mended once.
    """
    found = tuple(dict.fromkeys(reasons))
    if found:
        raise SpecError(
            f"{target} cannot express the plan: {'; '.join(found)}",
            key="--to",
            value=target,
            rule="An export trains as the plan does, or is refused",
            fix="Choose another target, or change the plan",
        )
