"""The Plan: groups of devices that are pipelines inside and data-parallel across.

The file format is JSON, schema version 1 (docs/design.md). Group and stage keys override
``defaults``; in memory every default is already pushed down, so a reader never looks it up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from foreshard.errors import SpecError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe")
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "sgd")
RECOMPUTE_MODULES = (
    "core_attn",
    "mlp",
    "layernorm",
    "moe",
    "moe_act",
    "shared_experts",
    "mla_up_proj",
    "op",
)
COMM_OPTIONS = ("tp_overlap", "grad_overlap", "param_gather_overlap", "p2p_overlap", "expert_overlap", "context_gather")
MAX_BATCH = 2**31

DEFAULTS: dict[str, Any] = {
    "micro_batch": 1,
    "schedule": "1f1b",
    "zero": 1,
    "shard_size": None,
    "recompute": "none",
    "offload": "none",
    "sp": False,
}
_PLAN_KEYS = (
    "schema_version",
    "global_batch",
    "seq_len",
    "precision",
    "optimizer",
    "framework",
    "defaults",
    "groups",
    "comm",
)
_GROUP_KEYS = ("share", "stages", *DEFAULTS)
_STAGE_KEYS = (
    "ranks",
    "layers",
    "tp",
    "cp",
    "ep",
    "etp",
    "rank_shares",
    "zero",
    "shard_size",
    "recompute",
    "offload",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers of one replica on some ranks; tp varies fastest, then cp, then inner dp."""

    ranks: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    rank_shares: tuple[int, ...] | None = None
    zero: int = 1
    shard_size: int | None = None
    recompute: str = "none"
    offload: str = "none"

    @property
    def inner_dp(self) -> int:
        """Data-parallel ranks inside the stage."""
        return len(self.ranks) // (self.tp * self.cp)

    @property
    def num_layers(self) -> int:
        """Layers on the stage, embedding and head counted."""
        return sum(stop - start for start, stop in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One pipeline that holds one replica of the model and takes `share` samples of each step."""

    share: int
    stages: tuple[Stage, ...]
    micro_batch: int = 1
    schedule: str = "1f1b"
    sp: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches a step; the last one may be short."""
        return -(-self.share // self.micro_batch)

    @property
    def num_chunks(self) -> int:
        """Virtual stages per rank."""
        return len(self.stages[0].layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained on a cluster."""

    global_batch: int
    seq_len: int
    groups: tuple[Group, ...]
    precision: str = "bf16"
    optimizer: str = "adamw"
    framework: str = "megatron-core"
    comm: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank the plan uses, in plan order."""
        return tuple(rank for group in self.groups for stage in group.stages for rank in stage.ranks)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as its file stores it; `parse_plan` reads it back equal."""
        return {
            "schema_version": self.schema_version,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "framework": self.framework,
            "defaults": {},
            "groups": [
                {
                    "share": group.share,
                    "micro_batch": group.micro_batch,
                    "schedule": group.schedule,
                    "sp": group.sp,
                    "stages": [_stage_dict(stage) for stage in group.stages],
                }
                for group in self.groups
            ],
            "comm": dict(self.comm),
        }


def _stage_dict(stage: Stage) -> dict[str, Any]:
    out: dict[str, Any] = {key: getattr(stage, key) for key in _STAGE_KEYS}
    out["ranks"] = list(stage.ranks)
    out["layers"] = [list(span) for span in stage.layers]
    out["rank_shares"] = None if stage.rank_shares is None else list(stage.rank_shares)
    return out


class _Reader:
    """Reads values out of parsed JSON and raises errors that name file and key."""

    def __init__(self, file: str | None):
        self.file = file

    def fail(self, key: str, value: Any, rule: str, fix: str | None = None) -> SpecError:
        shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
        return SpecError(
            f"{shown} is not valid", file=self.file, key=key, value=value, rule=rule, fix=fix
        )

    def mapping(self, value: Any, key: str, known: Sequence[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(key, value, "must be a JSON object")
        for name in value:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}"
                where = f"{key}.{name}" if key else name
                raise SpecError(f"unknown key {name!r}", file=self.file, key=where, value=name, fix=fix)
        return value

    def integer(self, value: Any, key: str, low: int = 1, high: int = MAX_BATCH) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, value, f"must be a whole number from {low} to {high}")
        return value

    def choice(self, value: Any, key: str, known: Sequence[str]) -> str:
        if value not in known:
            near = get_close_matches(str(value), known, n=1)
            raise self.fail(
                key, value, f"must be one of {', '.join(known)}", f"Did you mean {near[0]!r}?" if near else None
            )
        return value

    def array(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.fail(key, value, "must be a non-empty JSON array")
        return value


def check_recompute(value: Any, *, key: str = "recompute", file: str | None = None) -> str:
    """Return the recompute rule in normal form: none, full[:uniform:N|:block:N], selective:..., every-N."""
    read = _Reader(file)
    rule = "must be none, selective[:MODULE(+MODULE)*], full[:uniform:N|:block:N] or every-N"
    if not isinstance(value, str):
        raise read.fail(key, value, rule)
    head, _, rest = value.partition(":")
    if value in ("none", "full"):
        return value
    if head == "full":
        kind, _, count = rest.partition(":")
        if kind in ("uniform", "block") and count.isdecimal() and 0 < int(count) < 10**6:
            return value
    if head == "selective":
        modules = rest.split("+") if rest else ["core_attn"]
        if all(module in RECOMPUTE_MODULES for module in modules):
            return "selective:" + "+".join(modules)
    if value.startswith("every-") and value[6:].isdecimal() and 0 < int(value[6:]) < 10**6:
        return value
    raise read.fail(key, value, rule, f"Known modules: {', '.join(RECOMPUTE_MODULES)}")


def _stage_options(read: _Reader, data: Mapping[str, Any], inherited: dict[str, Any], key: str) -> dict[str, Any]:
    merged = {name: data.get(name, inherited[name]) for name in ("zero", "shard_size", "recompute", "offload")}
    merged["zero"] = read.integer(merged["zero"], f"{key}.zero", 0, 3)
    if merged["shard_size"] is not None:
        merged["shard_size"] = read.integer(merged["shard_size"], f"{key}.shard_size")
    merged["recompute"] = check_recompute(merged["recompute"], key=f"{key}.recompute", file=read.file)
    merged["offload"] = read.choice(merged["offload"], f"{key}.offload", ("none", "optimizer", "activations", "all"))
    return merged


def _parse_stage(read: _Reader, data: Any, inherited: dict[str, Any], key: str) -> Stage:
    data = read.mapping(data, key, _STAGE_KEYS)
    for name in ("ranks", "layers"):
        if name not in data:
            raise SpecError(f"missing key {name!r}", file=read.file, key=key, rule="a stage names its ranks and layers")
    ranks = tuple(read.integer(r, f"{key}.ranks", 0) for r in read.array(data["ranks"], f"{key}.ranks"))
    spans = []
    for span in read.array(data["layers"], f"{key}.layers"):
        if not isinstance(span, list) or len(span) != 2:
            raise read.fail(f"{key}.layers", span, "must be half-open intervals [start, stop]")
        start = read.integer(span[0], f"{key}.layers", 0)
        spans.append((start, read.integer(span[1], f"{key}.layers", start + 1)))
    degrees = {name: read.integer(data.get(name, 1), f"{key}.{name}") for name in ("tp", "cp", "ep", "etp")}
    shares = data.get("rank_shares")
    if shares is not None:
        shares = tuple(read.integer(s, f"{key}.rank_shares", 0) for s in read.array(shares, f"{key}.rank_shares"))
    options = _stage_options(read, data, inherited, key)
    return Stage(ranks=ranks, layers=tuple(spans), rank_shares=shares, **degrees, **options)


def _parse_group(read: _Reader, data: Any, defaults: dict[str, Any], key: str) -> Group:
    data = read.mapping(data, key, _GROUP_KEYS)
    merged = {**defaults, **{name: data[name] for name in DEFAULTS if name in data}}
    for name in ("share", "stages"):
        if name not in data:
            raise SpecError(f"missing key {name!r}", file=read.file, key=key, rule="a group states share and stages")
    if not isinstance(merged["sp"], bool):
        raise read.fail(f"{key}.sp", merged["sp"], "must be true or false")
    stages = tuple(
        _parse_stage(read, stage, merged, f"{key}.stages[{i}]")
        for i, stage in enumerate(read.array(data["stages"], f"{key}.stages"))
    )
    return Group(
        share=read.integer(data["share"], f"{key}.share"),
        stages=stages,
        micro_batch=read.integer(merged["micro_batch"], f"{key}.micro_batch"),
        schedule=read.choice(merged["schedule"], f"{key}.schedule", SCHEDULES),
        sp=merged["sp"],
    )


def parse_plan(data: Any, *, file: str | None = None) -> Plan:
    """Return the Plan that parsed JSON describes; rules that need the model are in `spec.checks`.

    Raises
    ------
    SpecError
        Naming file, key, value and rule.
    """
    read = _Reader(file)
    data = read.mapping(data, "", _PLAN_KEYS)
    for name in ("global_batch", "seq_len", "groups"):
        if name not in data:
            raise SpecError(f"missing key {name!r}", file=file, key=name, rule="a plan states it")
    if data.get("schema_version", 1) != 1:
        raise read.fail("schema_version", data["schema_version"], "must be 1")
    defaults = {**DEFAULTS, **read.mapping(data.get("defaults", {}), "defaults", tuple(DEFAULTS))}
    comm = read.mapping(data.get("comm", {}), "comm", COMM_OPTIONS)
    for name, value in comm.items():
        if not isinstance(value, bool):
            raise read.fail(f"comm.{name}", value, "must be true or false")
    framework = data.get("framework", "megatron-core")
    if not isinstance(framework, str):
        raise read.fail("framework", framework, "must be a name, optionally name@release")
    return Plan(
        global_batch=read.integer(data["global_batch"], "global_batch"),
        seq_len=read.integer(data["seq_len"], "seq_len", 1, 2**26),
        precision=read.choice(data.get("precision", "bf16"), "precision", PRECISIONS),
        optimizer=read.choice(data.get("optimizer", "adamw"), "optimizer", OPTIMIZERS),
        framework=framework,
        groups=tuple(
            _parse_group(read, group, defaults, f"groups[{i}]")
            for i, group in enumerate(read.array(data["groups"], "groups"))
        ),
        comm=comm,
    )


def load_plan(path: str) -> Plan:
    """Return the Plan stored in a JSON file."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(8_000_001)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the plan: {error}", file=str(path), fix="give a JSON plan file") from None
    if len(text) > 8_000_000:
        raise SpecError("the plan file is larger than 8 MB", file=str(path), rule="a plan is at most 8 MB")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not valid JSON: {error}", file=str(path), fix="check for a truncated file") from None
    return parse_plan(data, file=str(path))
