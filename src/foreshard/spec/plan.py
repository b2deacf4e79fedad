"""The Plan: groups of devices that are pipelines inside and data-parallel across.

The file format is JSON, schema version 1 (docs/design.md). Group and stage keys override
``defaults``; in memory every default is already pushed down, so a reader never looks it up.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn

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
COMM_OPTIONS = (
    "tp_overlap",
    "grad_overlap",
    "param_gather_overlap",
    "p2p_overlap",
    "expert_overlap",
    "context_gather",
)
OFFLOADS = ("none", "optimizer", "activations", "all")
MAX_BATCH = 2**31
MAX_SEQ_LEN = 2**26
MAX_FILE_BYTES = 8_000_000
_MAX_CHARS = 64

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


def shown(value: Any) -> str:
    """Return a value as an error message quotes it: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no repr
        return f"a very long {type(value).__name__}"


def _quoted(value: Any) -> Any:
    """Return a value as the error object carries it: the value itself where JSON can hold it in a line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    if isinstance(value, bool) or value is None or (isinstance(value, int) and abs(value) < 10**18):
        return value
    return shown(value)


def invalid(
    value: Any, rule: str, *, key: str, name: str = "", fix: str | None = None, file: str | None = None
) -> SpecError:
    """Return the error of a value that breaks a rule, to be raised."""
    text = json.dumps(value) if file and (value is None or isinstance(value, bool)) else shown(value)
    what = f"{text} is not a valid {name}" if name else f"{text} is not valid"
    return SpecError(what, file=file, key=key, value=_quoted(value), rule=rule, fix=fix)


def whole(
    value: Any, low: int = 1, high: int = MAX_BATCH, *, key: str, name: str = "", file: str | None = None
) -> int:
    """Return the value if it is a whole number in a range; True and 2.0 are not.

    Raises
    ------
    SpecError
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        rule = f"Must be {low}" if low == high else f"Must be a whole number from {low} to {high}"
        raise invalid(value, rule, key=key, name=name, file=file)
    return value


def one_of(value: Any, known: Sequence[str], *, key: str, name: str = "", file: str | None = None) -> str:
    """Return the value if it is one of the known words.

    Raises
    ------
    SpecError
        With the nearest word as the fix.
    """
    if isinstance(value, str) and value in known:
        return value
    near = get_close_matches(value[:_MAX_CHARS], known, n=1) if isinstance(value, str) else []
    fix = f"Did you mean {near[0]!r}?" if near else None
    raise invalid(value, f"Must be one of {', '.join(known)}", key=key, name=name, fix=fix, file=file)


class _Reader:
    """Reads values out of parsed JSON and raises errors that name file and key."""

    def __init__(self, file: str | None):
        self.file = file

    def fail(self, key: str, value: Any, rule: str, fix: str | None = None) -> SpecError:
        return invalid(value, rule, key=key, fix=fix, file=self.file)

    def mapping(self, value: Any, key: str, known: Sequence[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(key, value, "Must be a JSON object")
        for name in value:
            if name not in known:
                raise self._unknown(name, key, known)
        return value

    def _unknown(self, name: Any, key: str, known: Sequence[str]) -> SpecError:
        text = name[:_MAX_CHARS] if isinstance(name, str) else shown(name)
        near = get_close_matches(text, known, n=1)
        return SpecError(
            f"unknown key {text!r}",
            file=self.file,
            key=f"{key}.{text}" if key else text,
            value=text,
            rule=f"Known keys: {', '.join(known)}",
            fix=f"Did you mean {near[0]!r}?" if near else None,
        )

    def integer(self, value: Any, key: str, low: int = 1, high: int = MAX_BATCH) -> int:
        return whole(value, low, high, key=key, file=self.file)

    def choice(self, value: Any, key: str, known: Sequence[str]) -> str:
        return one_of(value, known, key=key, file=self.file)

    def required(self, data: Mapping[str, Any], key: str, names: Sequence[str], owner: str) -> None:
        for name in names:
            if name not in data:
                raise SpecError(
                    f"missing key {name!r}",
                    file=self.file,
                    key=key or name,
                    rule=f"{owner} states {', '.join(names)}",
                    fix=f"Add {name!r}",
                )

    def array(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.fail(key, value, "Must be a non-empty JSON array")
        return value


def check_recompute(value: Any, *, key: str = "recompute", file: str | None = None) -> str:
    """Return the recompute rule in normal form: none, full[:uniform:N|:block:N], selective:..., every-N."""
    read = _Reader(file)
    rule = "Must be none, selective[:MODULE(+MODULE)*], full[:uniform:N|:block:N] or every-N"
    if not isinstance(value, str):
        raise read.fail(key, value, rule)
    head, _, rest = value.partition(":")
    if value in ("none", "full"):
        return value
    if head == "full":
        kind, _, count = rest.partition(":")
        if kind in ("uniform", "block") and _is_count(count):
            return value
    if head == "selective":
        modules = list(dict.fromkeys(rest.split("+"))) if rest else ["core_attn"]
        if all(module in RECOMPUTE_MODULES for module in modules):
            return "selective:" + "+".join(modules)
    if value.startswith("every-") and _is_count(value[6:]):
        return value
    raise read.fail(key, value, rule, f"Known modules: {', '.join(RECOMPUTE_MODULES)}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) > 0


def _option(read: _Reader, name: str, value: Any, key: str) -> Any:
    """Return an option of `defaults`, a group or a stage as the plan holds it."""
    if name == "sp":
        if not isinstance(value, bool):
            raise read.fail(key, value, "Must be true or false")
        return value
    if name == "recompute":
        return check_recompute(value, key=key, file=read.file)
    if name in ("schedule", "offload"):
        return read.choice(value, key, SCHEDULES if name == "schedule" else OFFLOADS)
    if name == "shard_size" and value is None:
        return None
    return read.integer(value, key, 0, 3) if name == "zero" else read.integer(value, key)


def _options(
    read: _Reader, data: Mapping[str, Any], inherited: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return the inherited options with those that `data` states, checked where they are written."""
    stated = {name: _option(read, name, data[name], f"{key}.{name}") for name in inherited if name in data}
    return {**inherited, **stated}


def _parse_stage(read: _Reader, data: Any, inherited: dict[str, Any], key: str) -> Stage:
    data = read.mapping(data, key, _STAGE_KEYS)
    read.required(data, key, ("ranks", "layers"), "a stage")
    ranks = tuple(read.integer(r, f"{key}.ranks", 0) for r in read.array(data["ranks"], f"{key}.ranks"))
    spans = tuple(
        _parse_span(read, span, f"{key}.layers") for span in read.array(data["layers"], f"{key}.layers")
    )
    tp, cp, ep, etp = (read.integer(data.get(name, 1), f"{key}.{name}") for name in ("tp", "cp", "ep", "etp"))
    shares = data.get("rank_shares")
    if shares is not None:
        where = f"{key}.rank_shares"
        shares = tuple(read.integer(share, where, 0) for share in read.array(shares, where))
    options = _options(read, data, inherited, key)
    return Stage(ranks=ranks, layers=spans, tp=tp, cp=cp, ep=ep, etp=etp, rank_shares=shares, **options)


def _parse_span(read: _Reader, span: Any, key: str) -> tuple[int, int]:
    if not isinstance(span, list) or len(span) != 2:
        raise read.fail(key, span, "Must be half-open intervals [start, stop]")
    start, stop = read.integer(span[0], key, 0), read.integer(span[1], key, 0)
    if stop <= start:
        raise read.fail(key, span, "Must be half-open intervals [start, stop] of at least one layer")
    return start, stop


def _parse_group(read: _Reader, data: Any, defaults: dict[str, Any], key: str) -> Group:
    data = read.mapping(data, key, _GROUP_KEYS)
    merged = _options(read, data, defaults, key)
    read.required(data, key, ("share", "stages"), "a group")
    inherited = {name: merged[name] for name in ("zero", "shard_size", "recompute", "offload")}
    stages = tuple(
        _parse_stage(read, stage, inherited, f"{key}.stages[{i}]")
        for i, stage in enumerate(read.array(data["stages"], f"{key}.stages"))
    )
    return Group(
        share=read.integer(data["share"], f"{key}.share"),
        stages=stages,
        micro_batch=merged["micro_batch"],
        schedule=merged["schedule"],
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
    read.required(data, "", ("global_batch", "seq_len", "groups"), "a plan")
    read.integer(data.get("schema_version", 1), "schema_version", 1, 1)
    stated = read.mapping(data.get("defaults", {}), "defaults", tuple(DEFAULTS))
    defaults = _options(read, stated, DEFAULTS, "defaults")
    comm = read.mapping(data.get("comm", {}), "comm", COMM_OPTIONS)
    for name, value in comm.items():
        if not isinstance(value, bool):
            raise read.fail(f"comm.{name}", value, "Must be true or false")
    framework = data.get("framework", "megatron-core")
    if not isinstance(framework, str):
        raise read.fail("framework", framework, "Must be a name, optionally name@release")
    return Plan(
        global_batch=read.integer(data["global_batch"], "global_batch"),
        seq_len=read.integer(data["seq_len"], "seq_len", 1, MAX_SEQ_LEN),
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
    """Return the Plan stored in a JSON file.

    Raises
    ------
    SpecError
        When the file cannot be read, is no JSON, or describes no plan.
    """
    file = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"cannot read the plan: {why}", file=file, fix="Give a JSON plan file") from None
    if len(data) > MAX_FILE_BYTES:
        rule = f"A plan file has at most {MAX_FILE_BYTES // 10**6} MB"
        raise SpecError("the plan file is too large", file=file, rule=rule, fix="Check the path")
    if not data.strip():
        raise SpecError("the file is empty", file=file, rule="A plan is JSON", fix="Give a JSON plan file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"byte {error.start} is not UTF-8", file=file, rule="A plan is JSON", fix="Give a JSON plan file"
        ) from None
    try:
        parsed = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_keys_once)
    except (ValueError, RecursionError) as error:
        fix = "Check for a truncated file"
        raise SpecError(f"not valid JSON: {error}", file=file, rule="A plan is JSON", fix=fix) from None
    return parse_plan(parsed, file=file)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"key {name[:_MAX_CHARS]!r} appears twice in one object")
        made[name] = value
    return made
