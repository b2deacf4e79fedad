"""What the cells of a training row say, in the words of a Plan and a Framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreshard.catalog.shipped import shipped
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


_MOST = 2**31
"""Above every size, count and batch of a published run."""


def number(raw: Mapping[str, str], key: str) -> float | None:
    """Return a cell as a float, None when blank."""
    text = (raw.get(key) or "").strip()
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
    """Return a cell as a whole number from 1 to `_MOST`, None when blank."""
    value = number(raw, key)
    if value is None:
        return None
    if value != int(value) or not 1 <= value <= _MOST:
        what, rule = f"{raw[key][:40]!r} is not valid", "A whole number from 1 or blank"
        raise SpecError(what, key=key, value=raw[key][:40], rule=rule)
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


_VALUES: Mapping[str, bool | int] = {"true": True, "false": False, "float8": 1, "fp8": 1} | (
    dict.fromkeys(("float32", "fp32"), 4) | dict.fromkeys(("bfloat16", "bf16", "float16", "fp16"), 2)
)
"""Truth of a word, or bytes of a dtype."""


def _release_graphs(other: str) -> str:
    """Return the CUDA graphs of the release's recipe, for a row that departs from it elsewhere."""
    found = re.search(r"release config has .*?cuda_graph=(.*?)(?: tp_overlap=|$)", other)
    return found[1] if found else ""


def stated(framework: Framework, raw: Mapping[str, str]) -> Framework:
    """Return the framework with what the row's in_* cells state (``data/cell_facts.toml``)."""
    graphs = raw.get("in_cuda_graph", "") or _release_graphs(raw.get("in_other", ""))
    cells = {**raw, "in_cuda_graph": graphs}
    facts: dict[str, Any] = {}
    for fact in shipped("cell_facts.toml", "foreshard.validation")["facts"]:
        found = re.search(fact["pattern"], cells.get(fact["column"], "").lower())
        if found and "takes" in fact:
            facts[fact["takes"]] = _VALUES.get(found[1], found[1])
        elif found:
            facts |= fact["sets"]
    return replace(framework, **facts)
