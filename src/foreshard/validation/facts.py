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

_MOST = 2**31
"""Above every size, count and batch of a published run."""


def _rules(section: str) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = shipped("cell_facts.toml", "foreshard.validation")[section]
    return rules


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
    named = ((rule, re.search(rule["pattern"], low)) for rule in _rules("precision"))
    precision = next((rule.get("precision", found[0]) for rule, found in named if found), "")
    if not precision and not mixed:
        raise SpecError(f"unknown dtype {text!r}", key="dtype", value=text, rule="A known training precision")
    if mixed and precision in ("", "fp32", "tf32"):
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
    head = head.strip().replace(" ", "")
    cells = {"policy": low.replace("-", "_"), "head": head}
    for named in _rules("recompute"):
        found = re.search(named["pattern"], cells[named["of"]])
        if found:
            rule = check_recompute(found.expand(named["rule"]))
            if named["of"] == "policy":
                notes = (*notes, f"remat policy {text!r} read as {rule}")
            elif rule == "full" and head != "full":
                notes = (*notes, f"recompute {text!r} read as full")
            return rule, offload, notes
    if head.startswith("partial") or "selective" in head:
        rule, exact = _selective(head.partition("selective")[2])
        return (
            check_recompute(rule),
            offload,
            notes if exact else (*notes, f"recompute {text!r} read as {rule}"),
        )
    try:
        return check_recompute(head), offload, notes
    except SpecError:
        if head.startswith("full"):
            return "full", offload, (*notes, f"recompute {text!r} read as full")
        raise


def _selective(listed: str) -> tuple[str, bool]:
    """Return the rule that recomputes the modules of a list, and whether it is just what the list says."""
    wanted = [part for part in re.split(r"[:+,()]", listed) if part]
    known = [part for part in wanted if part in RECOMPUTE_MODULES]
    return f"selective:{'+'.join(known or ['core_attn'])}", bool(wanted) and known == wanted


def sharding_of(text: str, default: int) -> tuple[int, int | None, str]:
    """Return (ZeRO stage, shard size or None, FSDP flavour or '') of a zero_stage_or_fsdp cell."""
    low = text.lower()
    size = re.search(r"over (\d+) |fsdp (?:in slice \(ici\) )?(\d+)|fsdp[^,;]* (\d+) \(ici\)", low)
    shard = next((int(part) for part in size.groups() if part), None) if size else None
    for rule in _rules("sharding"):
        found = re.search(rule["pattern"], low)
        if found:
            stage = rule["stage"] if "stage" in rule else int(next(filter(None, found.groups())))
            return stage, shard if rule.get("shards", True) else None, rule.get("flavour", "")
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
    for fact in _rules("facts"):
        found = re.search(fact["pattern"], cells.get(fact["column"], "").lower())
        if found and "takes" in fact:
            value = _VALUES.get(found[1], found[1])
            facts[fact["takes"]] = int(value) if str(value).isdecimal() else value
        elif found:
            facts |= fact["sets"]
    return replace(framework, **facts)
