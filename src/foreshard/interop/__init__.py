"""Plans as files of other tools, one module per target, each imported when it is asked for.

Decides how a plan is said in the words of another tool, and refuses what that tool cannot express, with
every reason. A plan goes in, with model, cluster and prediction where the tool needs them; files and
notes come out. A new exporter is one file and an entry of ``TARGETS`` below. Read ``exported.py`` first, then
``megatron.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from foreshard.errors import unknown

if TYPE_CHECKING:
    from foreshard.interop.exported import Exported
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.model import Model
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction

TARGETS = {
    "megatron": ("megatron", "export"),
    "torchtitan@0.2": ("torchtitan", "export_toml"),
    "torchtitan@0.3": ("torchtitan", "export_recipe"),
    "deepspeed": ("deepspeed", "export"),
    "fsdp": ("fsdp", "export"),
    "slurm": ("slurm", "export"),
    "skypilot": ("skypilot", "export"),
}


def export(
    plan: Plan,
    target: str,
    *,
    model: Model | None = None,
    cluster: Cluster | None = None,
    prediction: Prediction | None = None,
) -> Exported:
    """Return the plan as a file of another tool, as `api.export`; slurm and skypilot state a prediction.

    Raises
    ------
    SpecError
        When the target cannot express the plan, with every reason, or lacks the model or cluster.
    """
    if target not in TARGETS:
        raise unknown("target", target, TARGETS, key="--to", rule="Targets are")
    module, name = TARGETS[target]
    from foreshard.interop.exported import ExportRequest

    request = ExportRequest(plan=plan, model=model, cluster=cluster, prediction=prediction)
    made: Exported = getattr(import_module(f"foreshard.interop.{module}"), name)(request)
    return made
