"""The plan file (JSON, schema version 1): its tables, and the Plan they mean.

Group keys override ``defaults``, stage keys override both. Rules that need the model or the cluster are in
`spec.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from foreshard.errors import SpecError
from foreshard.spec.codec import Grammar, Range, Size, decode, invalid, parse_json, read_text, whole
from foreshard.spec.framework import Overrides
from foreshard.spec.plan import (
    MAX_BATCH,
    MAX_BUCKET_BYTES,
    MAX_SEQ_LEN,
    MAX_UNITS,
    Algorithm,
    Attention,
    CommOption,
    Dispatcher,
    Group,
    Offload,
    Optimizer,
    Plan,
    Precision,
    Recipe,
    Schedule,
    Stage,
    check_recompute,
)

# A plan that names each of 100,000 ranks takes 1 MB.
MAX_FILE_BYTES = 8 * 2**20
# Default of an option that the table does not state; null is a value of its own.
_UNSTATED: Any = object()


def _span(value: Any, *, key: str, file: str | None) -> tuple[int, int]:
    """Return a half-open interval of layers."""
    if not isinstance(value, list) or len(value) != 2:
        raise invalid(value, "Must be half-open intervals [start, stop]", key=key, file=file)
    start, stop = (whole(layer, 0, key=key, file=file) for layer in value)
    if stop <= start:
        rule = "Must be half-open intervals [start, stop] of at least one layer"
        raise invalid(value, rule, key=key, file=file)
    return start, stop


Count = Annotated[int, Range(1, MAX_BATCH)]
Index = Annotated[int, Range(0, MAX_BATCH)]
Span = Annotated[tuple[int, int], Grammar(_span)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Options that ``defaults``, a group or a stage may state."""

    zero: Annotated[int, Range(0, 3)] = _UNSTATED
    shard_size: Count | None = _UNSTATED
    recompute: Annotated[str, Grammar(check_recompute)] = _UNSTATED
    offload: Offload = _UNSTATED


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(StageOptions):
    """Options that ``defaults`` or a group may state."""

    micro_batch: Count = _UNSTATED
    schedule: Schedule = _UNSTATED
    sp: bool = _UNSTATED


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry(StageOptions):
    """One entry of ``stages``."""

    ranks: Annotated[tuple[Index, ...], Size(1)]
    layers: Annotated[tuple[Span, ...], Size(1)]
    tp: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1
    rank_shares: Annotated[tuple[Index, ...], Size(1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry(GroupOptions):
    """One entry of ``groups``."""

    share: Count
    stages: Annotated[tuple[StageEntry, ...], Size(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The whole file."""

    schema_version: Literal[1] = 1
    global_batch: Count
    seq_len: Annotated[int, Range(1, MAX_SEQ_LEN)]
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    framework: str = "megatron-core"
    attention: Attention | None = None
    fp8_recipe: Recipe | None = None
    dispatcher: Dispatcher | None = None
    overrides: Overrides = field(default_factory=Overrides)
    compile: bool | None = None
    lora: Annotated[str, Size(1, 80)] | None = None
    defaults: GroupOptions = GroupOptions()
    groups: Annotated[tuple[GroupEntry, ...], Size(1)]
    comm: Mapping[CommOption, bool] = field(default_factory=dict)
    collectives: Algorithm = "auto"
    buckets: Annotated[int, Range(1, MAX_BUCKET_BYTES)] | None = None
    prefetch: Annotated[int, Range(0, MAX_UNITS)] | None = None
    wrap: Annotated[int, Range(1, MAX_UNITS)] | Literal["model"] | None = None


def parse_plan(data: Any, *, file: str | None = None) -> Plan:
    """Return the Plan that parsed JSON describes."""
    if isinstance(data, dict) and "groups" not in data and {"model_type", "architectures"} & set(data):
        what, rule = "this is the configuration of a model", "A plan says how a model is split over ranks"
        fix = "Make one: foreshard plan MODEL CLUSTER --global-batch N -o plan.json"
        raise SpecError(what, file=file, key="groups", rule=rule, fix=fix)
    table = decode(PlanFile, data, file=file)
    stated = _stated(table)
    defaults = _stated(stated.pop("defaults"))
    groups = tuple(_group(group, defaults) for group in table.groups)
    return Plan(**stated | {"groups": groups, "comm": dict(table.comm)})


def load_plan(path: str, *, selective: Callable[[str], str] | None = None) -> Plan:
    """Return the Plan stored in a JSON file: a plan, or an answer that holds one.

    Of the object of ``predict --json`` that is its plan, of ``plan --json`` the chosen one. `selective` says
    what the bare word means as a recompute rule under a framework, core attention where it is not given.

    Raises
    ------
    SpecError
        When the file cannot be read, is no JSON, or describes no plan.
    """
    data = parse_json(read_text(path, max_bytes=MAX_FILE_BYTES), file=str(path))
    return plan_of_data(data, file=str(path), selective=selective)


def plan_of_data(
    data: Any, *, file: str | None = None, selective: Callable[[str], str] | None = None
) -> Plan:
    """Return the Plan in what such a file holds."""
    found = _plan_in(data)
    if selective is not None and isinstance(found, dict) and isinstance(found.get("framework"), str):
        found = _meaning(found, selective(found["framework"]))
    return parse_plan(found, file=file)


def _meaning(data: Any, rule: str) -> Any:
    """Return parsed JSON with a rule wherever recompute is the bare word `selective`."""
    if isinstance(data, list):
        return [_meaning(value, rule) for value in data]
    if not isinstance(data, dict):
        return data
    bare = isinstance(data.get("recompute"), str) and data["recompute"].strip().lower() == "selective"
    own = {"recompute": rule} if bare else {}
    return {key: _meaning(value, rule) for key, value in data.items()} | own


def _plan_in(data: Any) -> Any:
    """Return the plan inside the object of a prediction or of a search, else the data as they are."""
    if isinstance(data, dict) and isinstance(data.get("plans"), list) and data["plans"]:
        data = data["plans"][0]
    if isinstance(data, dict) and isinstance(data.get("plan"), dict) and "groups" not in data:
        return data["plan"]
    return data


def _group(table: GroupEntry, defaults: Mapping[str, Any]) -> Group:
    options = {**defaults, **_stated(table)}
    of_stages = {
        option.name: options.pop(option.name) for option in fields(StageOptions) if option.name in options
    }
    stages = tuple(Stage(**{**of_stages, **_stated(stage)}) for stage in table.stages)
    return Group(**options | {"stages": stages})


def _stated(table: Any) -> dict[str, Any]:
    """Return the keys that a table states; `Group` and `Stage` have the defaults of the others."""
    values = ((option.name, getattr(table, option.name)) for option in fields(table))
    return {name: value for name, value in values if value is not _UNSTATED}
