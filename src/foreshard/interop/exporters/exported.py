"""What an exporter takes and returns: a plan with what is known beside it, and files for another tool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from string import Template
from typing import Any

from foreshard.catalog.shipped import shipped_text
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction
from foreshard.spec.traced_module import TracedModule


class InexpressibleError(SpecError):
    """A target would not train as the plan says; `reasons` has every gap, so that it is corrected once."""

    def __init__(
        self, target: str, reasons: tuple[str, ...], fix: str = "Choose another target, or change the plan"
    ) -> None:
        what = f"{target} cannot express the plan: {'; '.join(reasons)}"
        rule = "An export trains exactly as the plan does"
        super().__init__(what, key="--to", value=target, rule=rule, fix=fix)
        self.reasons = reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A plan to export, and what the caller knows beside it."""

    plan: Plan
    target: str
    version: str
    model: Model | None = None
    traced: TracedModule | None = None
    cluster: Cluster | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of one target by name and text, and notes: what they do not state, in sentences."""

    target: str
    version: str
    files: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the first file."""
        return self.files[0][0]

    @property
    def text(self) -> str:
        """Return the text of the only file, or of all, each under its name."""
        if len(self.files) == 1:
            return self.files[0][1]
        return "\n".join(f"==> {name} <==\n{text}" for name, text in self.files)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``export --json``."""
        return {
            "schema_version": 1,
            "target": self.target,
            "checked_against": self.version,
            "files": [{"name": name, "text": text} for name, text in self.files],
            "notes": list(self.notes),
        }


def filled(template: str, **values: object) -> str:
    """Return a text of the folder ``data`` with these values for its ``$names``."""
    return Template(shipped_text(template, "foreshard.interop.exporters")).substitute(values)


def reject_if(target: str, reasons: Iterable[str]) -> None:
    """Raise if there are reasons why the target would not train as the plan says.

    The error has every reason, so that the plan is corrected once.
    """
    found = tuple(dict.fromkeys(reasons))
    if found:
        raise InexpressibleError(target, found)
