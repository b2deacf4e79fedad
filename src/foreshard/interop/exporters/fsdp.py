"""Plans as an accelerate config for FSDP2.

Source: huggingface/accelerate 1.15.0.dev0 at 16cb6eb (commands/config/config_args.py reads the file,
commands/launch.py names the keys).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from foreshard.interop.exporters.exported import ExportRequest
from foreshard.interop.exporters.traced import export_traced
from foreshard.interop.exporters.uniform import Uniform, overlap_gaps, required_uniform
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import WHOLE_MODEL, Plan

_PRECISIONS = {"fp32": "no", "tf32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def export(request: ExportRequest) -> tuple[str | tuple[tuple[str, str], ...], list[str]]:
    """Return ``accelerate.json`` for ``accelerate launch --config_file``, or Python for a traced module."""
    if request.traced is not None:
        return export_traced(request, request.traced)
    plan, cluster = request.plan, request.cluster
    degrees = required_uniform(request, _gaps)
    return json.dumps(_config(plan, degrees, cluster), indent=2) + "\n", _notes(plan, degrees, cluster)


def _gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    plan = request.plan
    yield from overlap_gaps(plan, "hf")
    for name, value in (("pp", degrees.pp), ("ep", degrees.ep), ("etp", degrees.etp)):
        if value > 1:
            yield f"{name} {value}"
    if degrees.zero not in (2, 3):
        yield f"zero {degrees.zero} (FSDP shards weights too: zero 2 keeps them gathered, zero 3 does not)"
    if plan.precision not in _PRECISIONS:
        yield f"precision {plan.precision}"
    if degrees.shard_size % degrees.cp:
        yield f"a shard group of {degrees.shard_size} that splits the context group of {degrees.cp}"
    if degrees.recompute not in ("none", "full"):
        yield f"recompute {degrees.recompute} (none or full)"
    if degrees.offload != "none":
        yield f"offload {degrees.offload} (it offloads weights, gradients and optimizer together)"
    if degrees.sp and degrees.tp > 1:
        yield "sequence parallelism beside tensor parallelism (the model's tensor plan decides it)"


def _config(plan: Plan, degrees: Uniform, cluster: Cluster | None) -> dict[str, Any]:
    shard = degrees.shard_size // degrees.cp
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": _PRECISIONS[plan.precision],
        "num_processes": len(degrees.ranks),
        "main_training_function": "main",
        "rdzv_backend": "static",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": degrees.zero == 3,
            "fsdp_auto_wrap_policy": "NO_WRAP" if plan.wrap == WHOLE_MODEL else "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": degrees.recompute == "full",
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": degrees.dp // shard,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": degrees.tp,
            "parallelism_config_cp_size": degrees.cp,
        },
    }
    if cluster is not None:
        made["num_machines"] = len({cluster.node_of(rank) for rank in degrees.ranks})
    return made


def _notes(plan: Plan, degrees: Uniform, cluster: Cluster | None) -> list[str]:
    notes = []
    if cluster is None:
        notes.append("No CLUSTER was given: add num_machines, and on each machine machine_rank.")
    notes.append(
        f"In the script: Accelerator(gradient_accumulation_steps={degrees.num_micro_batches}), a data loader "
        f"of batch size {degrees.micro_batch} per rank and sequences of {plan.seq_len}, optimizer "
        f"{plan.optimizer}."
    )
    return notes
