"""Plans as NCCL's settings: the CSV of its example tuner plugin, and the environment that reads it.

Source: NVIDIA/nccl ext-tuner/example/README.md for both; `collective_schedules/nccl_tuner.py` for the fields.
"""

from __future__ import annotations

from foreshard.comm.nccl.communicator import Communicator, communicator_between
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.nccl_tuner import TunerChoice, nccl_tuner_csv, picked_choices
from foreshard.interop.exporters.exported import ExportRequest, filled
from foreshard.interop.exporters.rank_sets import rank_sets
from foreshard.interop.exporters.uniform import NCCL_ALGORITHMS

_TUNER, _ENVIRONMENT = "nccl_tuner.csv", "nccl_env.sh"


def export(request: ExportRequest) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return the tuner file, with rows for every shape of communicator that the plan has, and its script."""
    plan = request.plan
    if request.cluster is None:
        raise SpecError(
            "no cluster",
            key="CLUSTER",
            rule="NCCL's choice follows from the devices and links of each communicator",
            fix="Name it: foreshard export PLAN MODEL CLUSTER --to nccl",
        )
    sets = rank_sets(plan)
    comms: dict[tuple[int, int], Communicator] = {}
    unlike: list[str] = []
    for one in sets:
        comm = communicator_between(request.cluster, one.ranks)
        first = comms.setdefault((comm.num_nodes, comm.num_ranks), comm)
        if first != comm:
            unlike.append(f"{comm.num_ranks} ranks on {comm.num_nodes} nodes")
    algorithms = NCCL_ALGORITHMS.get(plan.collectives)
    rows: list[TunerChoice] = []
    for comm in comms.values():
        rows += picked_choices(comm, all_reduces=algorithms, exact=True)
    forced = f"export NCCL_ALGO=allreduce:{','.join(algorithms)}" if algorithms else ""
    script = filled("nccl_env.sh.txt", tuner=_TUNER, forced=forced)
    files = ((_TUNER, nccl_tuner_csv(rows)), (_ENVIRONMENT, script))
    return files, _notes(list(dict.fromkeys(unlike)), has_rows=bool(rows))


def _notes(unlike: list[str], *, has_rows: bool) -> list[str]:
    notes = [
        "Communicators that no row names run as ring with simple: so the plugin does without a row. "
        "All-to-alls and messages have no choice of algorithm."
    ]
    if unlike:
        notes.append(
            f"Communicators of {', '.join(unlike)} differ in devices or links; rows are those of the first."
        )
    if not has_rows:
        notes.append("No two ranks of the plan sum or gather: the file has no row.")
    return notes
