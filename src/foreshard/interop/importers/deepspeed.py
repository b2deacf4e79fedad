"""``ds_config.json`` of DeepSpeed as a run.

Source: DeepSpeed 0.19.8 (runtime/config.py, runtime/constants.py, runtime/zero/config.py,
runtime/zero/offload_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.interop.importers.mappings import parsed
from foreshard.interop.importers.stated_run import ConfigTable, StatedRun, unread

_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "adamw"),
    **{name: name for name in ("sgd", "lion", "muon")},
}
_UNSTATED = ("seq_len", "recompute")
_READ = ("bfloat16", "optimizer", "scheduler", "gradient_accumulation_steps", "gradient_clipping")
_ELSEWHERE = ("pipeline", "moe", "compression_training", "curriculum_learning", "data_efficiency")


_UNREAD: dict[str, dict[str, Any]] = shipped("unread.json", "foreshard.interop.importers")["deepspeed"]
"""Keys that change time or memory and no plan states, by table, with their defaults.

Source: DeepSpeed 0.19.8 runtime/constants.py, runtime/precision_config.py, runtime/zero/config.py,
runtime/activation_checkpointing/config.py.
"""
_KEYS = {
    "tp": "tensor_parallel.autotp_size",
    "cp": "sequence_parallel_size",
    "zero": "zero_optimization.stage",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "global_batch": "train_batch_size",
}


def read(text: str, file: str) -> StatedRun:
    """Return the run of a DeepSpeed configuration; its data-parallel degree is left to the cluster."""
    return stated(ConfigTable(parsed(text, file), file))


def stated(config: ConfigTable) -> StatedRun:
    """Return the run of a DeepSpeed configuration that has been read."""
    zero = config.table("zero_optimization")
    stage = zero.whole("stage", default=0, least=0)
    assert stage is not None
    if stage > 3:
        raise zero.invalid("stage", "ZeRO has the stages 0 to 3")
    choices: dict[str, Any] = {"framework": "deepspeed", "zero": stage, "precision": _precision(config)}
    choices["optimizer"] = config.table("optimizer").word("type", _OPTIMIZERS, default="AdamW")
    if zero.get("overlap_comm") is not None:
        choices["grad_overlap"] = zero.switch("overlap_comm")
    elif stage == 3:
        choices["grad_overlap"] = True  # its default follows the stage
    offload = _offload(config, zero)
    if offload != "none":
        choices["offload"] = offload
    tensor = config.table("tensor_parallel").whole("autotp_size", default=0, least=0)
    if tensor:
        choices["tp"] = tensor
    context = config.whole("sequence_parallel_size")
    if context is not None:
        choices["cp"] = context
    size = zero.whole("zero_hpz_partition_size")
    if size not in (None, 1):
        raise zero.cannot("zero_hpz_partition_size", "a second copy of the weights inside a node (ZeRO++)")
    choices |= _batch(config)
    passes = config.whole("gradient_accumulation_steps")
    notes = tuple(_notes(config, choices))
    return StatedRun(choices=choices, keys=_KEYS, passes=passes, unstated=_UNSTATED, notes=notes)


def _precision(config: ConfigTable) -> str:
    bf16 = config.table("bf16" if "bf16" in config.values else "bfloat16")
    if bf16.switch("enabled"):
        return "bf16"
    if config.table("fp16").switch("enabled"):
        return "fp16"
    half = [name for name in ("bf16", "fp16") if config.table(name).values.get("enabled") == "auto"]
    return half[0] if half else "fp32"


def _offload(config: ConfigTable, zero: ConfigTable) -> str:
    devices = {"none": False, "cpu": True, "nvme": None}
    moved = {}
    for name in ("optimizer", "param"):
        table = zero.table(f"offload_{name}")
        moved[name] = table.word("device", devices, default="none")
        if moved[name] is None:
            raise table.cannot("device", "offload to disks")
    if zero.switch("cpu_offload"):
        moved["optimizer"] = True
    if moved["param"]:
        raise zero.cannot("offload_param", "offload of weights")
    checkpoints = config.table("activation_checkpointing").switch("cpu_checkpointing")
    if moved["optimizer"]:
        return "all" if checkpoints else "optimizer"
    return "activations" if checkpoints else "none"


def _batch(config: ConfigTable) -> dict[str, int]:
    stated = {
        "global_batch": config.whole("train_batch_size"),
        "micro_batch": config.whole("train_micro_batch_size_per_gpu"),
    }
    return {name: value for name, value in stated.items() if value is not None}


def _notes(config: ConfigTable, choices: dict[str, Any]) -> list[str]:
    notes = []
    if any(config.table(name).values.get("enabled") == "auto" for name in ("bf16", "fp16")):
        notes.append(f"'auto' was read as {choices['precision']}; --dtype states another.")
    found = config.unlike(dict.fromkeys(_ELSEWHERE))
    if found:
        notes.append(f"Not read: {', '.join(found)}.")
    notes += [f"Not a key of DeepSpeed: {key} ({meant})." for key, meant in _slips(config)]
    tables = ((config if not name else config.table(name), keys) for name, keys in _UNREAD.items())
    stated = [key for table, keys in tables for key in table.unlike(keys)]
    return [*notes, *unread(*stated)]


def _slips(config: ConfigTable) -> Iterator[tuple[str, str]]:
    """Yield keys that DeepSpeed passes over, with the one that was likely meant."""
    known = {key.partition(".")[0] for key in _KEYS.values()} | {*_UNREAD, *_UNREAD[""], *_ELSEWHERE, *_READ}
    for key in config.values:
        if key not in known and (near := get_close_matches(key, known, n=1, cutoff=0.85)):
            yield key, f"did you mean {near[0]}?"
