"""Plans as an sbatch script that starts torchrun on every node, in the order of the plan's ranks.

Source: Slurm 25.05 sbatch and heterogeneous job support (slurm.schedmd.com/sbatch.html,
heterogeneous_jobs.html); torchrun of torch 2.13 (torch/distributed/run.py).
"""

from __future__ import annotations

import math

from foreshard.interop.exported import ExportRequest
from foreshard.interop.hosts import Hosts, hosts, uneven_note
from foreshard.spec.prediction import Prediction

MARGIN = 1.25  # the limit over the upper end of the predicted run: start-up, checkpoints, evaluation


def export(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``train.sbatch``; its arguments are the training script and its flags."""
    nodes, seconds = hosts(request), _limit_s(request.prediction)
    return _script(nodes, seconds), [*_notes(nodes, seconds), *uneven_note(request.plan)]


def _limit_s(prediction: Prediction | None) -> float | None:
    if prediction is None or prediction.run_time_s is None:
        return None
    late = prediction.step_time_interval_s[1] / prediction.step_time_s
    return prediction.run_time_s * late * MARGIN


def _clock(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _script(nodes: tuple[Hosts, ...], seconds: float | None) -> str:
    lines = ["#!/bin/bash", "#SBATCH --job-name=foreshard", "#SBATCH --output=%x-%j.out"]
    if seconds is not None:
        lines.append(f"#SBATCH --time={_clock(seconds)}")
    for i, group in enumerate(nodes):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [
            f"# {group.count} x {group.per_node} x {group.device}",
            f"#SBATCH --nodes={group.count}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={group.per_node}",
            "#SBATCH --exclusive",
        ]
    return "\n".join([*lines, "", *_launch(nodes)]) + "\n"


def _launch(nodes: tuple[Hosts, ...]) -> list[str]:
    total = sum(group.count for group in nodes)
    het = "" if len(nodes) == 1 else f" --het-group=0-{len(nodes) - 1}"
    first = "SLURM_JOB_NODELIST" if len(nodes) == 1 else "SLURM_JOB_NODELIST_HET_GROUP_0"
    return [
        "# usage: sbatch train.sbatch SCRIPT.py FLAGS...",
        "set -euo pipefail",
        f'export MASTER_ADDR=$(scontrol show hostnames "${first}" | head -n 1)',
        "export MASTER_PORT=${MASTER_PORT:-29500}",
        "# SLURM_PROCID counts nodes over all groups; static rendezvous keeps ranks in that order",
        f"srun{het} --kill-on-bad-exit=1 bash -c '",
        f"  exec torchrun --nnodes={total} --nproc-per-node=gpu --node-rank=$SLURM_PROCID \\",
        '    --rdzv-backend=static --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"',
        '\' torchrun "$@"',
    ]


def _notes(nodes: tuple[Hosts, ...], seconds: float | None) -> list[str]:
    notes = []
    if seconds is None:
        notes.append("No time limit: with MODEL, CLUSTER and --tokens it is the predicted run time.")
    if len(nodes) > 1:
        notes.append(
            "A heterogeneous job: name each group's nodes with --partition or --constraint of your site; "
            "--gpus-per-node does not say which device."
        )
    return notes
