"""What the cells of a training row say, in the words of a Plan and a Framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.plan import RECOMPUTE_MODULES, check_recompute

# XLA keeps what its policy names and recomputes the rest of the layer.
_REMAT = (
    ("save_qkv_out_proj", "selective:core_attn+mlp+layernorm"),
    ("save_qkv_proj", "selective:core_attn+mlp+layernorm"),
    ("ffn1", "selective:core_attn+mlp+layernorm"),
    ("mlpwi", "selective:core_attn+mlp+layernorm"),
    ("qkv_proj_offloaded", "selective:core_attn+mlp+layernorm"),
    ("save_dot", "selective:core_attn+layernorm"),
    ("minimal", "selective:core_attn+layernorm"),
)


_FULL = re.compile(
    "full|true|yes|on|1|enabled|all|blocks?|(per)?layer|checkpoint(ing)?|(activation|gradient)checkpointing|"
    "ac|remat|recompute"
)


def number(raw: Mapping[str, str], key: str) -> float | None:
    """Return a cell as a float, None when blank.

    Raises
    ------
    SpecError
        When the cell is not a finite number.
    """
    text = raw.get(key, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise SpecError(f"{text!r} is not a number", key=key, value=text, rule="A finite number or blank")
    return value


def integer(raw: Mapping[str, str], key: str) -> int | None:
    """Return a cell as a whole number >= 1, None when blank."""
    value = number(raw, key)
    if value is None:
        return None
    if value != int(value) or value < 1:
        raise SpecError(
            f"{raw[key]!r} is not valid", key=key, value=raw[key], rule="A whole number >= 1 or blank"
        )
    return int(value)


def widest(device: Device) -> str:
    """Return the 16-bit precision runs on this device train in."""
    return "bf16" if device.supports("bf16") else "fp16"


def precision_of(text: str, device: Device) -> tuple[str, tuple[str, ...]]:
    """Return the training precision a dtype cell names, as the device can run it."""
    low = re.sub(r"[\s_]", "", text.lower()).replace("float", "fp").replace("bfp16", "bf16")
    mixed = re.search("mixed|amp|half|16bit|16-bit", low) is not None
    if "int8" in low:
        if "int8" not in device.peak_flops_per_s:
            raise SpecError(f"{device.name} has no int8", key="dtype", value=text)
        return "fp8", ("int8 products read as 8-bit ones at the device's int8 rate",)
    if "nvfp4" in low or "fp4" in low:
        precision = "nvfp4"
    elif re.search("mxfp8|fp8-?mx|sub-channel", low):
        precision = "mxfp8"
    elif "fp8" in low or "e4m3" in low:
        precision = "fp8"
    else:
        found = re.search("bf16|fp16|tf32|fp32", low)
        if found is None and not mixed:
            raise SpecError(
                f"unknown dtype {text!r}", key="dtype", value=text, rule="A known training precision"
            )
        precision = found[0] if found else widest(device)
        if found is None or (mixed and precision in ("fp32", "tf32")):
            return widest(device), (f"dtype {text!r} read as {widest(device)}",)
    if precision == "mxfp8" and not device.supports("mxfp8") and device.supports("fp8"):
        return "fp8", (f"{device.name} has no block-scaled fp8: sub-channel scaling read as fp8",)
    return precision, ()


def recompute_of(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (recompute, offload, assumptions) of an act_recompute cell in the normal form of a plan."""
    low = text.lower().strip()
    head, _, rest = low.partition(";")
    offload = "activations" if "offload" in low else "none"
    notes = (
        (f"activation offload of part of the layers: {rest.strip() or head}",) if offload != "none" else ()
    )
    for word, rule in _REMAT:
        if word in low.replace("-", "_"):
            return check_recompute(rule), offload, (*notes, f"remat policy {text!r} read as {rule}")
    head = head.strip().replace(" ", "")
    if head in ("", "none", "false", "no", "off", "0", "disabled") or head.startswith(("no-", "without")):
        return "none", offload, notes
    if _FULL.fullmatch(head) or (not head.startswith(("full", "selective", "every")) and "full" in head):
        return "full", offload, notes if head == "full" else (*notes, f"recompute {text!r} read as full")
    if head.startswith("partial") or (not head.startswith("selective") and "selective" in head):
        head = "selective" + head.partition("selective")[2]
    every = re.fullmatch(r"every-?(\d+)(?:nd|rd|th)?(?:-?(?:layers?|blocks?))?", head)
    if every:
        return check_recompute(f"every-{every[1]}"), offload, notes
    if head.startswith("selective"):
        wanted = [part for part in re.split(r"[:+,()]", head.removeprefix("selective")) if part]
        if wanted and wanted[0].isdecimal():
            return check_recompute(f"every-{wanted[0]}"), offload, notes
        known = [part for part in wanted if part in RECOMPUTE_MODULES] or ["core_attn"]
        lost = [part for part in wanted if part not in RECOMPUTE_MODULES]
        if lost or not wanted:
            notes = (*notes, f"recompute {text!r} read as selective:{'+'.join(known)}")
        return check_recompute("selective:" + "+".join(known)), offload, notes
    try:
        return check_recompute(head), offload, notes
    except SpecError:
        if head.startswith("full"):
            return "full", offload, (*notes, f"recompute {text!r} read as full")
        raise


def sharding_of(text: str, default: int) -> tuple[int, int | None, str]:
    """Return (ZeRO stage, shard size or None, FSDP flavour or '') of a zero_stage_or_fsdp cell."""
    low = text.lower()
    size = re.search(r"over (\d+) |fsdp (?:in slice \(ici\) )?(\d+)|fsdp[^,;]* (\d+) \(ici\)", low)
    shard = next((int(part) for part in size.groups() if part), None) if size else None
    stage = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?(\d)|stage[-_ ]?(\d)|^z?(\d)(?:\.0)?$", low)
    if not low:
        return default, None, ""
    if "megatron" in low and "fsdp" in low:
        return 3, None, "megatron-fsdp"
    if stage:
        return int(next(part for part in stage.groups() if part)), shard, ""
    if "shard_grad_op" in low:
        return 2, shard, "fsdp"
    if re.search("fsdp|full_shard|full shard|hybrid_shard|hsdp", low):
        return 3, shard, "fsdp"
    if re.search("distributed[ _-]optimizer|dist[_ -]?opt", low):
        return 1, shard, ""
    if low.startswith(("none", "ddp", "no", "false", "off")):
        return 0, None, ""
    return default, None, ""


def _overlap_facts(text: str) -> dict[str, bool]:
    """Return what in_dp_overlap states; keys it does not name keep the framework's default."""
    low = text.lower()
    if low.startswith("none"):
        return {"grad_overlap": False, "param_gather_overlap": False}
    facts: dict[str, bool] = {}
    names = (
        ("grad_reduce", "grad_overlap"),
        ("param_gather", "param_gather_overlap"),
        ("p2p_overlap", "p2p_overlap"),
    )
    for word, key in names:
        found = re.search(rf"\b{word}=(true|false)", low)
        if found:
            facts[key] = found[1] == "true"
    if "overlap backward" in low:
        facts["grad_overlap"] = True
    if "p2p overlap enabled" in low:
        facts["p2p_overlap"] = True
    return facts


def _graph_fact(text: str) -> dict[str, str]:
    """Return how much of a step in_cuda_graph puts into graphs; whole layers count as full."""
    low = text.lower()
    if not low or low.startswith("n/a"):
        return {}
    if low.startswith("none"):
        return {"cuda_graphs": "none"}
    whole = low.startswith(("full_iteration", "local", "per-layer", "mcore local"))
    return {"cuda_graphs": "full" if whole else "partial"}


def _release_graphs(other: str) -> str:
    """Return the CUDA graphs of the release's recipe, for a row that departs from it elsewhere."""
    found = re.search(r"release config has .*?cuda_graph=(.*?)(?: tp_overlap=|$)", other)
    return found[1] if found else ""


def _expert_facts(text: str) -> dict[str, Any]:
    """Return what in_moe_dispatcher states about experts."""
    low = text.lower()
    facts: dict[str, Any] = {}
    found = re.search("hybridep|deepep|alltoall|allgather", low)
    if found:
        facts["dispatcher"] = found[0]
    for word, key in (("ep_a2a_overlap", "expert_overlap"), ("grouped_gemm", "grouped_gemm")):
        state = re.search(rf"\b{word}=(true|false)", low)
        if state:
            facts[key] = state[1] == "true"
    if "tokendrop" in low:
        facts["routing"] = "dropped"
    elif "forced balance" in low:
        facts["routing"] = "balanced"
    return facts


_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "float8": 1, "fp8": 1}


def _optimizer_facts(text: str) -> dict[str, int]:
    """Return the bytes of gradients, master weights and moments that in_optimizer_dtypes states."""
    low = text.lower()
    facts: dict[str, int] = {}
    dtype = r"(float32|fp32|bfloat16|bf16|float16|fp16|float8|fp8)"
    moments = re.search(rf"exp_avg(?:/exp_avg_sq)? {dtype}", low)
    if moments:
        facts["moment_bytes"] = _BYTES[moments[1]]
    if re.search(r"grad_reduce_in_fp32=true", low):
        facts |= {"grad_bytes": 4, "grad_reduce_bytes": 4}
    if re.search(r"grad (?:reduce|sync)(?:/buffer)? bf16|grad_sync_dtype bf16|grad-reduce-in-bf16", low):
        facts |= {"grad_bytes": 2, "grad_reduce_bytes": 2}  # the buffer takes the dtype of the reduction
    if "grad_sync_dtype none" in low:  # Apex reduces in the optimizer's dtype, fp32
        facts |= {"grad_bytes": 4, "grad_reduce_bytes": 4}
    main = re.search(rf"main_grads {dtype}", low)
    if main:
        facts["grad_bytes"] = _BYTES[main[1]]
    if "with dtype=bf16" in low:  # Apex keeps bf16 moments and the low half of the fp32 weight
        facts |= {"moment_bytes": 2, "master_bytes": 2}
    return facts


def stated(framework: Framework, raw: Mapping[str, str]) -> Framework:
    """Return the framework with what the row's in_* cells state; blank cells keep its defaults."""
    facts: dict[str, Any] = {}
    overlap = raw.get("in_tp_overlap", "").lower()
    if overlap:
        facts["tp_overlap"] = overlap.startswith("userbuffers")
    facts |= _overlap_facts(raw.get("in_dp_overlap", ""))
    facts |= _graph_fact(raw.get("in_cuda_graph", "") or _release_graphs(raw.get("in_other", "")))
    facts |= _expert_facts(raw.get("in_moe_dispatcher", ""))
    facts |= _optimizer_facts(raw.get("in_optimizer_dtypes", ""))
    recipe = raw.get("in_fp8_recipe", "").lower()
    if "fp8_param" in recipe:
        facts["fp8_params"] = re.search(r"fp8_param(?:s|_gather)=true", recipe) is not None
    elif recipe in ("bf16", "fp16"):
        facts["fp8_params"] = False
    if "MP mode PURE" in raw.get("notes", ""):  # Composer: parameters and reduction in bf16
        facts["grad_reduce_bytes"] = 2
    return replace(framework, **facts)
