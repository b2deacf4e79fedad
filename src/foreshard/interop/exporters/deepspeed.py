"""Plans as ``ds_config.json`` of DeepSpeed.

Source: DeepSpeed 0.19.8 (runtime/constants.py, runtime/config.py, runtime/zero/config.py), which has no MiCS.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from foreshard.interop.exporters.exported import ExportRequest
from foreshard.interop.exporters.uniform import Uniform, overlap_gaps, required_uniform
from foreshard.spec.plan import Plan


def export(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``ds_config.json``; pipelines and experts live in DeepSpeed user code, so they are rejected."""
    degrees = required_uniform(request, _gaps)
    return json.dumps(_config(request.plan, degrees), indent=2) + "\n", _notes(degrees)


def _gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    plan = request.plan
    yield from overlap_gaps(plan, "deepspeed")
    for name, value in (("pp", degrees.pp), ("cp", degrees.cp), ("ep", degrees.ep), ("tp", degrees.tp)):
        if value > 1:
            yield f"{name} {value} (its file states data parallelism only; the rest is model code)"
    if plan.precision not in ("fp32", "tf32", "fp16", "bf16"):
        yield f"precision {plan.precision}"
    if plan.optimizer != "adamw":
        yield f"optimizer {plan.optimizer}"
    if degrees.zero and degrees.shard_size < degrees.dp:
        yield f"shards of {degrees.shard_size} among {degrees.dp} ranks (since 0.19.8 it shards over all)"
    if degrees.offload in ("activations", "all") and degrees.recompute != "full":
        yield f"offload {degrees.offload} without full recompute (it offloads checkpoints)"
    if degrees.offload == "optimizer" and _level(plan, degrees) == 0:
        yield "offload of the optimizer with zero 0"


def _config(plan: Plan, degrees: Uniform) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.num_micro_batches,
        "zero_optimization": _zero(plan, degrees),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
    }
    if plan.precision in ("bf16", "fp16"):
        made[plan.precision] = {"enabled": True}
    if degrees.offload in ("activations", "all"):
        made["activation_checkpointing"] = {"cpu_checkpointing": True}
    return made


def _zero(plan: Plan, degrees: Uniform) -> dict[str, Any]:
    made: dict[str, Any] = {"stage": _level(plan, degrees)}
    if "grad_overlap" in plan.comm:
        made["overlap_comm"] = plan.comm["grad_overlap"]
    if degrees.offload in ("optimizer", "all"):
        made["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return made


def _level(plan: Plan, degrees: Uniform) -> int:
    """Return the level of sharding; on one rank too, since DeepSpeed offloads from level 1 on."""
    return degrees.zero if degrees.dp > 1 else plan.groups[0].stages[0].zero


def _notes(degrees: Uniform) -> list[str]:
    notes = []
    if degrees.recompute != "none":
        notes.append(
            f"recompute {degrees.recompute} is model code (gradient_checkpointing_enable() in transformers)."
        )
    return [*notes, "The learning rate is a placeholder; sequence length and data are the script's."]
