"""``train.toml`` of torchtitan up to release 0.2 as a run.

Source: torchtitan 0.2.2, torchtitan/config/job_config.py (keys and defaults) and
distributed/pipeline_parallel.py. Releases from 0.3 on are configured by Python code, which is not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.interop.importers.mappings import parsed_toml
from foreshard.interop.importers.stated_run import ConfigTable, StatedRun, unread

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
_LOOPED = ("interleaved", "zbv", "dualpipev")
_MODES = ("none", "selective", "full")


_UNREAD: dict[str, dict[str, Any]] = shipped("unread.json", "foreshard.interop.importers")["torchtitan"]
"""Keys that change time or memory and no plan states, with their defaults (job_config.py of 0.2.2)."""
_DEGREES = {
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
_KEYS = {degree: f"parallelism.{name}" for degree, name in _DEGREES.items()} | {
    "seq_len": "training.seq_len",
    "micro_batch": "training.local_batch_size",
    "global_batch": "training.global_batch_size",
}


def read(text: str, file: str) -> StatedRun:
    """Return the run of a torchtitan configuration; model and flavor are left to MODEL."""
    if re.search(r"^(import|from|def) ", text, re.MULTILINE):
        fix = "State the run by flags of predict"
        rule = "Releases up to 0.2 are configured by TOML, and that is read"
        raise SpecError("this is Python code", file=file, key="--from", rule=rule, fix=fix)
    config = ConfigTable(parsed_toml(text, file), file)
    parallel, training = config.table("parallelism"), config.table("training")
    choices: dict[str, Any] = {"framework": "torchtitan@0.2", "recompute": _recompute(config)}
    choices |= _degrees(parallel)
    choices["precision"] = _precision(config, training)
    if choices["precision"] == "fp8":
        scaled = config.table("quantize").table("linear").table("float8")
        recipes = {"tensorwise": "tensorwise", "rowwise": "rowwise"}
        choices["fp8_recipe"] = scaled.word("recipe_name", recipes, default="tensorwise")
        choices["narrow_gather"] = scaled.switch("enable_fsdp_float8_all_gather")
    if (choices["ep"] or 1) > 1:
        backends = {"standard": "alltoall", "deepep": "deepep"}
        choices["dispatcher"] = parallel.word("expert_parallel_comm_backend", backends, default="standard")
    choices["optimizer"] = config.table("optimizer").word(
        "name", {"AdamW": "adamw", "Adam": "adamw"}, default="AdamW"
    )
    choices["seq_len"] = training.whole("seq_len", default=2048)
    if training.switch("enable_cpu_offload"):
        raise training.cannot("enable_cpu_offload", "offload of weights")
    compiled = config.table("compile").switch("enable")
    if compiled:
        choices["compile"] = True
    choices["tp_overlap"] = parallel.switch("enable_async_tensor_parallel") and compiled
    pp = choices["pp"]
    local = training.whole("local_batch_size", default=8)
    assert local is not None
    counts = _block_counts(parallel)
    passes, micro = 1, local
    if pp > 1:
        size = parallel.whole("pipeline_parallel_microbatch_size", default=1)
        assert size is not None
        if local % size:
            raise training.invalid("local_batch_size", f"Must be a multiple of the micro-batch of {size}")
        passes, micro = local // size, size
        choices |= _pipeline(parallel, pp, counts)
    choices["micro_batch"] = micro
    total = training.whole("global_batch_size", default=-1, least=-1)
    if total is not None and total > 0:
        choices["global_batch"] = total
    replicas = parallel.whole("data_parallel_replicate_degree", default=1)
    assert replicas is not None
    shard = parallel.whole("data_parallel_shard_degree", default=-1, least=-1)
    if shard == 1 and choices["cp"] == 1:
        choices["zero"], replicas = 0, 1
    else:
        choices["zero"] = _zero(parallel)
    return StatedRun(
        choices=choices,
        keys=_KEYS,
        block_counts=counts,
        passes=None if "global_batch" in choices else passes,
        shard_instances=replicas,
        notes=_notes(config),
    )


def _degrees(parallel: ConfigTable) -> dict[str, Any]:
    return {degree: parallel.whole(name, default=1) for degree, name in _DEGREES.items()}


def _zero(parallel: ConfigTable) -> int:
    """Return the ZeRO level; by either, weights stay gathered in a pipeline."""
    meanings = {"default": 3, "always": 3, "never": 2}
    level: int = parallel.word("fsdp_reshard_after_forward", meanings, default="default")
    return level


def _precision(config: ConfigTable, training: ConfigTable) -> str:
    converters = config.table("model").get("converters") or []
    if "quantize.linear.float8" in converters:
        return "fp8"
    if any(str(name).startswith("quantize.linear.mx") for name in converters):
        return "mxfp8"
    words = {"bfloat16": "bf16", "float32": "fp32"}
    half: str = training.word("mixed_precision_param", words, default="bfloat16")
    return (
        words[training.get("dtype")]
        if training.get("dtype") in words and training.get("dtype") != "float32"
        else half
    )


def _recompute(config: ConfigTable) -> str:
    checkpoint = config.table("activation_checkpoint")
    mode = str(checkpoint.get("mode") or "selective")
    if mode not in _MODES:
        raise checkpoint.invalid(
            "mode", f"Must be {', '.join(_MODES)}; a memory budget is chosen by the compiler"
        )
    if mode != "selective":
        return mode
    option = str(checkpoint.get("selective_ac_option") or "2")
    if option == "op":
        return "selective:op"
    if not option.isdigit() or int(option) < 1:
        raise checkpoint.invalid(
            "selective_ac_option", "Must be 'op', or how many blocks share a recomputed one"
        )
    return "full" if option == "1" else f"every-{option}"


def _pipeline(parallel: ConfigTable, pp: int, counts: tuple[int, ...] | None) -> dict[str, Any]:
    schedule = parallel.word("pipeline_parallel_schedule", _SCHEDULES, default="1F1B")
    if parallel.get("pipeline_parallel_schedule_csv") is not None:
        raise parallel.cannot("pipeline_parallel_schedule_csv", "a schedule of one's own")
    found: dict[str, Any] = {"schedule": schedule}
    if counts is not None:
        if len(counts) % pp:
            raise parallel.invalid("module_fqns_per_model_part", f"Must have a multiple of {pp} parts")
        found["vpp"] = len(counts) // pp
    elif schedule in _LOOPED:
        found["vpp"] = 2  # stages per rank where neither parts nor layers per stage are given
        if parallel.get("pipeline_parallel_layers_per_stage") is not None:
            what = "layers per stage (state the parts by module_fqns_per_model_part)"
            raise parallel.cannot("pipeline_parallel_layers_per_stage", what)
    return found


def _block_counts(parallel: ConfigTable) -> tuple[int, ...] | None:
    parts = parallel.get("module_fqns_per_model_part")
    if parts is None:
        return None
    if not isinstance(parts, Sequence) or not all(isinstance(part, Sequence) for part in parts):
        raise parallel.invalid("module_fqns_per_model_part", "Must be lists of module names")
    return tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)


def _notes(config: ConfigTable) -> tuple[str, ...]:
    name, flavor = config.table("model").get("name"), config.table("model").get("flavor")
    trains = (f"The file trains {name} {flavor}.",) if name and flavor else ()
    stated = [key for table, keys in _UNREAD.items() for key in config.table(table).unlike(keys)]
    return trains + unread(*stated, *_hidden_experts(config.table("parallelism")))


def _hidden_experts(parallel: ConfigTable) -> list[str]:
    """Return the key by which DualPipeV sends tokens to experts beside another micro-batch, if it does.

    Source
    ------
    torchtitan 0.2.2 distributed/dual_pipe_v.py, get_dual_pipe_v_flag.
    """
    name = "pipeline_parallel_expert_parallel_overlap"
    spread = (parallel.whole("expert_parallel_degree", default=1) or 1) > 1
    turns = str(parallel.get("pipeline_parallel_schedule")).lower() == "dualpipev"
    return [parallel.key(name)] if spread and turns and parallel.switch(name, default=True) else []
