"""An accelerate config (``accelerate launch --config_file``) as a run: FSDP, DeepSpeed or plain DDP.

Source: huggingface/accelerate 1.15.0.dev0 at 16cb6eb (commands/config/config_args.py, commands/launch.py,
utils/dataclasses.py for defaults).
"""

from __future__ import annotations

from typing import Any

from foreshard.interop.importers import deepspeed
from foreshard.interop.importers.mappings import parsed
from foreshard.interop.importers.stated_run import ConfigTable, StatedRun, unread
from foreshard.spec.plan import WHOLE_MODEL

_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = dict(
    zip(
        "12345",
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        strict=True,
    )
)
_WRAPS = {"transformer_based_wrap": 1, "no_wrap": WHOLE_MODEL, "size_based_wrap": None}
_PREFETCHES = {"backward_pre": None, "backward_post": None, "1": None, "2": None, "no_prefetch": 0}
_EAGER = ("NO", "FALSE", "EAGER", "AOT_EAGER")
"""Values of dynamo_backend with which no kernels are made; YAML reads NO as false."""
_UNREAD = {"fsdp_forward_prefetch": False, "fsdp_ignored_modules": ""}
"""Keys of FSDP that change time or memory and no plan states, with their defaults."""
_UNSTATED = ("micro_batch", "global_batch", "seq_len")
_DEGREES = {
    "cp": "parallelism_config_cp_size",
    "tp": "parallelism_config_tp_size",
}
_KEYS = {degree: f"parallelism_config.{name}" for degree, name in _DEGREES.items()}


def read(text: str, file: str) -> StatedRun:
    """Return the run of an accelerate config."""
    config = ConfigTable(parsed(text, file), file)
    kind = str(config.get("distributed_type") or "NO").upper()
    if kind == "FSDP":
        return _fsdp(config)
    if kind == "DEEPSPEED":
        return _deepspeed(config)
    if kind in ("MULTI_GPU", "NO"):
        precision = config.word("mixed_precision", _PRECISIONS, default="no")
        compiled, notes = _compile(config)
        choices = {"framework": "ddp", "zero": 0, "precision": precision} | compiled
        unstated = (*_UNSTATED, "recompute")
        return StatedRun(choices=choices, num_devices=_devices(config), unstated=unstated, notes=notes)
    raise config.invalid("distributed_type", "Must be FSDP, DEEPSPEED, MULTI_GPU or NO")


def _devices(config: ConfigTable) -> int | None:
    return config.whole("num_processes")


def _fsdp(config: ConfigTable) -> StatedRun:
    fsdp, degrees = config.table("fsdp_config"), config.table("parallelism_config")
    version = fsdp.whole("fsdp_version", default=1)
    compiled, notes = _compile(config)
    choices: dict[str, Any] = {
        "framework": "hf" if version == 2 else "composer",
        "precision": config.word("mixed_precision", _PRECISIONS, default="no"),
        "recompute": "full" if fsdp.switch("fsdp_activation_checkpointing") else "none",
        "sp": False,
        **compiled,
    }
    if fsdp.switch("fsdp_offload_params"):
        raise fsdp.cannot("fsdp_offload_params", "offload of weights")
    for degree, name in _DEGREES.items():
        choices[degree] = degrees.whole(name, default=1)
    if degrees.whole("parallelism_config_sp_size", default=1) != 1:
        raise degrees.cannot("parallelism_config_sp_size", "Ulysses sequence parallelism")
    if version == 2 and (choices["tp"], choices["cp"]) != (1, 1):
        choices["framework"] = "torchtitan"
        notes = ("FSDP2 with tensor or context parallelism is predicted as torchtitan, which has it.", *notes)
    copies = degrees.whole("parallelism_config_dp_replicate_size", default=1)
    assert copies is not None
    if version == 2:
        choices["zero"] = 3 if fsdp.switch("fsdp_reshard_after_forward", default=True) else 2
    else:
        choices["zero"] = _strategy(fsdp)
    shard = degrees.whole("parallelism_config_dp_shard_size")
    if shard == 1 and choices["cp"] == 1:
        choices["zero"], copies = 0, 1
    if version == 1:
        notes = ("FSDP1 is predicted as composer, which uses it.", *notes)
    if choices["zero"] >= 2:
        found, said = _units(fsdp, version)
        choices, notes = choices | found, notes + said
    return StatedRun(
        choices=choices,
        keys=_KEYS,
        shard_instances=copies,
        num_devices=_devices(config),
        unstated=_UNSTATED,
        notes=notes,
    )


def _compile(config: ConfigTable) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Return whether TorchInductor compiles the modules, and that another compiler is not predicted."""
    dynamo = config.table("dynamo_config")
    backend = str(dynamo.get("dynamo_backend") or "NO").upper()
    if backend == "INDUCTOR":
        return {"compile": True}, ()
    return {}, () if backend in _EAGER else unread(dynamo.key("dynamo_backend"))


def _units(fsdp: ConfigTable, version: int | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return units of FSDP and how far they are gathered ahead, and what is not predicted of them.

    FSDP2 has no backward_prefetch: it gathers the next unit ahead.

    Source
    ------
    accelerate 1.15 utils/dataclasses.py FullyShardedDataParallelPlugin.__post_init__: without a policy the
    model is one unit, and FSDP1 gathers none ahead.
    """
    found: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    wrap = fsdp.word("fsdp_auto_wrap_policy", _WRAPS, default="NO_WRAP")
    if wrap is None:
        size = fsdp.whole("fsdp_min_num_params", default=100_000_000, least=0)
        notes = (f"Units of at least {size:,} parameters (SIZE_BASED_WRAP) are predicted as single blocks.",)
    elif wrap != 1:
        found["wrap"] = wrap
    if version == 1:
        ahead = fsdp.word("fsdp_backward_prefetch", _PREFETCHES, default="NO_PREFETCH")
        if ahead is not None:
            found["prefetch"] = ahead
    return found, notes + unread(*fsdp.unlike(_UNREAD))


def _strategy(fsdp: ConfigTable) -> int:
    """Return the ZeRO level of FSDP1's strategy; hybrid ones shard inside a node, which no file states."""
    name = (
        "fsdp_sharding_strategy"
        if fsdp.get("fsdp_sharding_strategy") is not None
        else "fsdp_reshard_after_forward"
    )
    value = str(fsdp.get(name) or "FULL_SHARD").upper()
    value = _NUMBERED.get(value, value)
    if value.startswith("HYBRID"):
        raise fsdp.cannot(
            name, "shards inside a node without their number (state the run by --zero and --shard-size)"
        )
    if value not in _STRATEGIES:
        raise fsdp.invalid(name, f"Must be one of {', '.join(_STRATEGIES)}")
    return _STRATEGIES[value]


def _deepspeed(config: ConfigTable) -> StatedRun:
    """Return the run of DeepSpeed's part of the config, whose keys are shorter than those of its own file."""
    own = config.table("deepspeed_config")
    if own.get("deepspeed_config_file") is not None:
        raise own.cannot(
            "deepspeed_config_file", "a file inside a file: import that one with --from deepspeed"
        )
    precision = config.word("mixed_precision", _PRECISIONS, default="no")
    values = {
        "zero_optimization": {
            "stage": own.whole("zero_stage", default=2, least=0),
            "offload_optimizer": {"device": own.get("offload_optimizer_device") or "none"},
            "offload_param": {"device": own.get("offload_param_device") or "none"},
        },
        "gradient_accumulation_steps": own.whole("gradient_accumulation_steps", default=1),
        **({precision: {"enabled": True}} if precision in ("fp16", "bf16") else {}),
    }
    run = deepspeed.stated(ConfigTable(values, config.file))
    unstated = ("micro_batch", "seq_len", "recompute")
    return StatedRun(choices=run.choices, passes=run.passes, num_devices=_devices(config), unstated=unstated)
