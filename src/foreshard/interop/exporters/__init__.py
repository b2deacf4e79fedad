"""Plans as files of other tools, one module per target, each imported when it is asked for.

Decides how a plan is said in the words of another tool, and refuses what that tool cannot express, with
every reason. A plan goes in, with model, cluster and prediction where the tool needs them; files and
notes come out. A new exporter is one file and an entry of ``TARGETS`` below. Read ``exported.py`` first, then
``megatron.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from foreshard.errors import SpecError, unknown

if TYPE_CHECKING:
    from foreshard.interop.exporters.exported import Exported
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.model import Model
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction


class Target(NamedTuple):
    """One tool; `frameworks` are the beginnings of those whose plans it runs as predicted.

    Its function returns the text of the one `file`, or names and texts of several, and notes.
    """

    module: str
    tool: str
    version: str
    file: str = ""
    function: str = "export"
    frameworks: tuple[str, ...] = ("",)


_MEGATRON, _TITAN = ("megatron", "nemo", "mlperf"), ("torchtitan",)
TARGETS = {
    "megatron": Target(
        "megatron", "Megatron", "Megatron-LM core_v0.19.0", "megatron_args.sh", frameworks=_MEGATRON
    ),
    "torchtitan@0.2": Target(
        "torchtitan", "torchtitan", "torchtitan 0.2.2", "train.toml", "export_toml", _TITAN
    ),
    "torchtitan@0.3": Target(
        "torchtitan", "torchtitan", "torchtitan 0.3.0", "foreshard_recipe.py", "export_recipe", _TITAN
    ),
    "deepspeed": Target(
        "deepspeed", "DeepSpeed", "DeepSpeed 0.19.8", "ds_config.json", frameworks=("deepspeed",)
    ),
    "fsdp": Target("fsdp", "accelerate", "accelerate 1.15.0.dev0", "accelerate.json"),
    "nccl": Target("nccl", "NCCL", "NCCL ext-tuner/example 3ea7eed"),
    "msccl": Target("msccl", "MSCCL", "msccl-tools 030a750"),
    "slurm": Target("slurm", "Slurm", "Slurm 25.05", "train.sbatch"),
    "skypilot": Target("skypilot", "SkyPilot", "SkyPilot 0.14", "task.yaml"),
}


_BESIDE = ("nccl", "msccl", "slurm", "skypilot")
"""Targets that start a plan or carry its collectives, and say nothing of the model."""
_NEWEST = {"torchtitan": "torchtitan@0.3"}
"""Target of a tool's name without a release: the newest that is known."""


def target_of(name: str) -> str:
    """Return the target that a name means; without a release, that of the newest."""
    return _NEWEST.get(name, name)


def export(
    plan: Plan,
    target: str,
    *,
    model: Model | None = None,
    cluster: Cluster | None = None,
    prediction: Prediction | None = None,
) -> Exported:
    """Return the plan as a file of another tool, as `api.export`; slurm and skypilot state a prediction."""
    target = target_of(target)
    if target not in TARGETS:
        raise unknown("target", target, TARGETS, key="--to", rule="Targets are")
    from foreshard.interop.exporters.exported import Exported, ExportRequest
    from foreshard.interop.exporters.uniform import other_framework_note, placement_note, wire_notes

    tool = TARGETS[target]
    if plan.lora is not None and target not in _BESIDE:
        what = f"{target} cannot express the plan: adapters (lora {plan.lora})"
        fix = "Set the adapters up in the tool, and leave lora out of the exported plan"
        rule = "An export trains exactly as the plan does"
        raise SpecError(what, key="--to", value=target, rule=rule, fix=fix)
    request = ExportRequest(
        plan=plan, target=target, version=tool.version, model=model, cluster=cluster, prediction=prediction
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
            *(() if carries_sums else wire_notes(plan)),
            *other_framework_note(plan, tool.frameworks, tool.tool),
        ),
    )
