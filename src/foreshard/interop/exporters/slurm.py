"""Plans as an sbatch script that starts torchrun on every node, in the order of the plan's ranks.

Source: Slurm 25.05 sbatch and heterogeneous job support (slurm.schedmd.com/sbatch.html,
heterogeneous_jobs.html); torchrun of torch 2.13 (torch/distributed/run.py).
"""

from __future__ import annotations

import math
from dataclasses import asdict

from foreshard.interop.exporters.exported import ExportRequest, filled
from foreshard.interop.exporters.hosts import Hosts, hosts, uneven_note
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


_GROUP = """# {count} x {per_node} x {device}
#SBATCH --nodes={count}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
"""


def _script(nodes: tuple[Hosts, ...], seconds: float | None) -> str:
    several = len(nodes) > 1
    return filled(
        "train.sbatch.txt",
        limit=f"#SBATCH --time={_clock(seconds)}\n" if seconds is not None else "",
        groups="#SBATCH hetjob\n".join(_GROUP.format(**asdict(group)) for group in nodes),
        first="SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST",
        het=f" --het-group=0-{len(nodes) - 1}" if several else "",
        total=sum(group.count for group in nodes),
    )


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
