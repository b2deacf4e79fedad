"""Plans as a SkyPilot task: the nodes to rent, how long for, at what price.

Source: skypilot-org/skypilot 0.14 (sky/utils/schemas.py for keys, docs for SKYPILOT_* variables,
sky/utils/accelerator_registry.py and its catalog for the names of accelerators).
"""

from __future__ import annotations

import json

from foreshard.interop.exported import ExportRequest, reject_if
from foreshard.interop.hosts import hosts, uneven_note
from foreshard.spec.prediction import Prediction

ACCELERATORS = {
    "a10": "A10",
    "a10g": "A10G",
    "a100-pcie-40gb": "A100",
    "a100-sxm-40gb": "A100",
    "a100-pcie-80gb": "A100-80GB",
    "a100-sxm-80gb": "A100-80GB",
    "b200-sxm": "B200",
    "h100-pcie": "H100",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "p100-pcie": "P100",
    "t4": "T4",
    "v100-sxm-16gb": "V100",
    "v100-sxm-32gb": "V100-32GB",
}


def export(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``task.yaml`` for ``sky launch task.yaml --env TRAIN='script.py flags'``."""
    nodes, prediction = hosts(request), request.prediction
    unnamed = sorted({node.device for node in nodes} - set(ACCELERATORS))
    reject_if(
        request.target,
        (
            *([f"{len(nodes)} kinds of nodes (a task has equal nodes)"] if len(nodes) > 1 else []),
            *(f"device {name} (not in its catalog)" for name in unnamed),
        ),
    )
    only = nodes[0]
    accelerator = ACCELERATORS[only.device]
    lines = [
        f"# {only.count} x {only.per_node} x {only.device}",
        *(f"# {line}" for line in _estimate(prediction)),
        f"name: {json.dumps('foreshard')}",
        f"num_nodes: {only.count}",
        "resources:",
        f"  accelerators: {json.dumps(f'{accelerator}:{only.per_node}')}",
        "envs:",
        "  TRAIN: train.py",
        "run: |",
        "  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc-per-node=$SKYPILOT_NUM_GPUS_PER_NODE \\",
        "    --node-rank=$SKYPILOT_NODE_RANK --rdzv-backend=static --master-port=29500 \\",
        '    --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) $TRAIN',
    ]
    notes = _notes(only.device, accelerator, prediction)
    return "\n".join(lines) + "\n", [*notes, *uneven_note(request.plan)]


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
    form = {"h100-pcie": "SXM", "h100-sxm": "PCIe", "a100-pcie-40gb": "SXM", "a100-pcie-80gb": "SXM"}.get(
        device
    )
    if form:
        notes.append(f"{accelerator} also names the {form} form: pin instance_type or infra to get {device}.")
    return notes
