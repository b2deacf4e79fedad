"""Plans as files of other tools, one module per target, each imported when it is asked for.

Decides how a plan is said in the words of another tool, and refuses what that tool cannot express, with
every reason. A plan goes in, with model, cluster and prediction where the tool needs them; files and
notes come out. A new exporter is one file and a table of ``data/targets.toml``. Read ``exported.py`` first,
then ``megatron.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.shipped import shipped
from foreshard.errors import unknown

if TYPE_CHECKING:
    from foreshard.interop.exporters.exported import Exported
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.model import Model
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.traced_module import TracedModule


class Target(NamedTuple):
    """One tool; `frameworks` are the beginnings of the labels of those whose plans it runs.

    Its function returns the text of the one `file`, or names and texts of several, and notes. `runs` is the
    framework of plans made for it, where that is not the default; `choices` are the only degrees it has,
    `instead` what it has in place of a setting of the framework that its release refuses, `same` the
    frameworks that take as long and as much memory as it, where not all do.
    A module has `model_gaps` where models differ in whether it trains them.
    """

    module: str
    tool: str
    version: str
    file: str = ""
    function: str = "export"
    frameworks: tuple[str, ...] = ("",)
    runs: str | None = None
    choices: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    instead: Mapping[str, Sequence[str]] = MappingProxyType({})
    same: tuple[str, ...] = ()


def _target(name: str, row: Mapping[str, Any]) -> Target:
    stated = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    choices = {degree: tuple(known) for degree, known in row.get("choices", {}).items()}
    return Target(name.partition("@")[0], **stated | {"choices": choices})


TARGETS = {
    name: _target(name, row) for name, row in shipped("targets.toml", "foreshard.interop.exporters").items()
}
_BESIDE = ("nccl", "msccl", "slurm", "skypilot")
"""Targets that start a plan or carry its collectives, and say nothing of the model."""
_TRACED = "fsdp"  # the target that trains traced modules
TRAINERS = {name: tool for name, tool in TARGETS.items() if name not in _BESIDE}
"""Targets that train the plan."""
_NEWEST = {"torchtitan": "torchtitan@0.3"}
"""Target of a tool's name without a release: the newest that is known."""


def target_of(name: str) -> str:
    """Return the target that a name means; without a release, that of the newest."""
    return _NEWEST.get(name, name)


def target_for(framework: str) -> str | None:
    """Return the target that trains the plans of a framework, None where there is none.

    Examples
    --------
    >>> target_for("torchtitan@0.2"), target_for("torchtitan"), target_for("megatron-deepspeed")
    ('torchtitan@0.2', 'torchtitan', None)
    """
    label = load_framework(framework).label
    own = (name for name, tool in TRAINERS.items() if all(tool.frameworks))
    target = next((name for name in own if label.startswith(TARGETS[name].frameworks)), None)
    return next((name for name, newest in _NEWEST.items() if newest == target), target)


def trains(target: str, framework: str) -> bool:
    """Return whether a target runs the plans of a framework as they were predicted."""
    return load_framework(framework).label.startswith(_frameworks_of(TARGETS[target_of(target)]))


def _frameworks_of(tool: Target) -> tuple[str, ...]:
    return tool.frameworks if all(tool.frameworks) else (tool.runs or "",)


def settings_instead(target: str, framework: str | None) -> dict[str, str]:
    """Return what a target sets in place of settings of the framework that its release refuses."""
    tool = TARGETS[target_of(target)]
    own = load_framework(framework or tool.runs or "megatron-core")
    return {name: used for name, (refused, used) in tool.instead.items() if getattr(own, name) == refused}


def model_refusals(model: Model, target: str) -> tuple[str, ...]:
    """Return the reasons why a target trains no plan of a model as it is, none where it trains some."""
    module = import_module(f"foreshard.interop.exporters.{TARGETS[target].module}")
    gaps = getattr(module, "model_gaps", None)
    return () if gaps is None else tuple(gaps(model))


def refusals(plan: Plan, target: str, *, model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Return the reasons why a target would not train as the plan says, none where it would."""
    from foreshard.interop.exporters.exported import InexpressibleError

    try:
        export(plan, target, model=model, cluster=cluster)
    except InexpressibleError as error:
        return error.reasons
    return ()


def export(
    plan: Plan,
    target: str,
    *,
    model: Model | None = None,
    traced: TracedModule | None = None,
    cluster: Cluster | None = None,
    prediction: Prediction | None = None,
) -> Exported:
    """Return the plan as a file of another tool, as `api.export`; slurm and skypilot state a prediction."""
    target = target_of(target)
    if target not in TARGETS:
        raise unknown("target", target, TARGETS, key="--to", rule="Targets are")
    from foreshard.interop.exporters.exported import Exported, ExportRequest, InexpressibleError
    from foreshard.interop.exporters.uniform import other_framework_note, placement_note, wire_notes

    tool = TARGETS[target]
    if plan.lora is not None and target not in _BESIDE:
        fix = "Set the adapters up in the tool, and leave lora out of the exported plan"
        raise InexpressibleError(target, (f"adapters (lora {plan.lora})",), fix=fix)
    if traced is not None and target not in (_TRACED, *_BESIDE):
        fix = (
            f"Use --to {_TRACED}, which writes Python for any module; of a Hugging Face model, plan and "
            "export its config.json instead of a trace"
        )
        raise InexpressibleError(target, (f"{traced.name}, a module of your own or a network",), fix=fix)
    request = ExportRequest(
        plan=plan,
        target=target,
        version=tool.version,
        model=model,
        traced=traced,
        cluster=cluster,
        prediction=prediction,
    )
    made, notes = getattr(import_module(f"foreshard.interop.exporters.{tool.module}"), tool.function)(request)
    carries_sums = target in ("nccl", "msccl")
    return Exported(
        target=target,
        version=tool.version,
        files=((tool.file, made),) if isinstance(made, str) else made,
        notes=(
            *placement_note(plan),
            *notes,
            *(() if carries_sums else wire_notes(plan, target)),
            *other_framework_note(plan, tool.same or _frameworks_of(tool), tool.version),
        ),
    )
