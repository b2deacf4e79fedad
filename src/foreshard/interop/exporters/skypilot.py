"""Plans as a SkyPilot task: the nodes to rent, how long for, at what price.

Source: skypilot-org/skypilot 0.14 (sky/utils/schemas.py for keys, docs for SKYPILOT_* variables,
sky/utils/accelerator_registry.py and its catalog for the names of accelerators).
"""

from __future__ import annotations

from foreshard.catalog.shipped import shipped
from foreshard.interop.exporters.exported import ExportRequest, filled, reject_if
from foreshard.interop.exporters.hosts import hosts, uneven_note
from foreshard.spec.prediction import Prediction


def export(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``task.yaml`` for ``sky launch task.yaml --env TRAIN='script.py flags'``."""
    nodes, prediction = hosts(request), request.prediction
    names = shipped("accelerators.toml", "foreshard.interop.exporters")["names"]
    unnamed = sorted({node.device for node in nodes} - set(names))
    reject_if(
        request.target,
        (
            *([f"{len(nodes)} kinds of nodes (a task has equal nodes)"] if len(nodes) > 1 else []),
            *(f"device {name} (not in its catalog)" for name in unnamed),
        ),
    )
    only = nodes[0]
    accelerator = names[only.device]
    text = filled(
        "task.yaml.txt",
        count=only.count,
        per_node=only.per_node,
        device=only.device,
        accelerator=accelerator,
        estimate="".join(f"# {line}\n" for line in _estimate(prediction)),
    )
    return text, [*_notes(only.device, accelerator, prediction), *uneven_note(request.plan)]


def _estimate(prediction: Prediction | None) -> tuple[str, ...]:
    if prediction is None:
        return ()
    low, high = prediction.step_time_interval_s
    lines = [f"predicted step: {prediction.step_time_s:.4g} s ({low:.4g} to {high:.4g})"]
    if prediction.run_time_s is not None:
        lines.append(f"predicted run: {prediction.run_time_s / 3600:.4g} h of the whole cluster")
    if prediction.cost.usd_total is not None:
        lines.append(f"predicted price of the run: {prediction.cost.usd_total:.2f} USD")
    return tuple(lines)


def _notes(device: str, accelerator: str, prediction: Prediction | None) -> list[str]:
    notes = []
    if prediction is None or prediction.run_time_s is None:
        notes.append("No estimate of the whole run: it takes MODEL, CLUSTER and --tokens.")
    form = shipped("accelerators.toml", "foreshard.interop.exporters")["other_form"].get(device)
    if form:
        notes.append(f"{accelerator} also names the {form} form: pin instance_type or infra to get {device}.")
    return notes
