"""The Plan: groups of devices that are pipelines inside and data-parallel across.

Every default is pushed down to groups and stages, so a reader never looks it up; `plan_file` reads and
`Plan.to_dict` writes the JSON file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, get_args

from foreshard.errors import SpecError
from foreshard.spec.codec import invalid, one_of
from foreshard.spec.framework import Overrides, checked_overrides

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"]
Optimizer = Literal["adamw", "adamw-8bit", "adafactor", "muon", "lion", "sgd"]
Offload = Literal["none", "optimizer", "activations", "all"]
Algorithm = Literal["auto", "ring", "tree"]
Attention = Literal["unfused", "efficient", "fa1", "fa2", "fa3", "cudnn"]
Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise"]
Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
CommOption = Literal[
    "tp_overlap",
    "grad_overlap",
    "param_gather_overlap",
    "p2p_overlap",
    "expert_overlap",
    "context_gather",
    "shared_overlap",
    "narrow_gather",
]
PRECISIONS: tuple[str, ...] = get_args(Precision)
LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
"""Of matrix products in 8 bit and fewer."""
SCHEDULES: tuple[str, ...] = get_args(Schedule)
TABLED = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Schedules with a closed form, which tables of plans and the searches take."""
TURNING = ("zbv", "dualpipev")
"""Schedules whose samples pass the first virtual stages, then the second ones on the way back."""
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
OFFLOADS: tuple[str, ...] = get_args(Offload)
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
ATTENTIONS: tuple[str, ...] = get_args(Attention)
FP8_RECIPES: tuple[str, ...] = get_args(Recipe)
DISPATCHERS: tuple[str, ...] = get_args(Dispatcher)
"""How tokens are sent to experts on other ranks."""
AUTO = "auto"
"""Of `--collectives` and `--buckets`: what is fastest."""
COMM_OPTIONS: tuple[str, ...] = get_args(CommOption)
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
# Of a bucket of gradients: above the memory of any device.
MAX_BUCKET_BYTES = 2**42
# Units of FSDP gathered ahead, and blocks of one unit: above the blocks of any published model.
MAX_UNITS = 1024
WHOLE_MODEL = "model"
"""Of `wrap`: one unit holds the whole model."""
# Samples of a step, degrees and ranks: a 32-bit count, above every published run by a wide margin.
MAX_BATCH = 2**31
# Tokens of a sample: 64 Mi, above every published context.
MAX_SEQ_LEN = 2**26


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
    def num_layers(self) -> int:
        """Layers of the model, embedding and head counted."""
        return max(stop for stage in self.stages for _, stop in stage.layers)

    @property
    def held(self) -> Group:
        """Return the group with the copies that its schedule keeps as virtual stages.

        Under dualpipe a stage holds the layers of the stage as far from the other end too.
        """
        if self.schedule != "dualpipe" or self.num_chunks > 1:
            return self
        mirrored = zip(self.stages, reversed(self.stages), strict=True)
        return replace(self, stages=tuple(replace(a, layers=a.layers + b.layers) for a, b in mirrored))

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
    attention: str | None = None  # kernel of attention; None is the framework's, as the devices have it
    fp8_recipe: str | None = None  # how 8-bit operands are scaled; None is the framework's
    dispatcher: str | None = None  # what sends tokens to experts; None is the framework's
    overrides: Overrides = field(default_factory=Overrides)  # of the framework, where they are not its own
    compile: bool | None = None  # whether torch.compile makes the kernels; None is the framework's default
    comm: Mapping[str, Any] = field(default_factory=dict)
    lora: str | None = None  # adapters on frozen weights, RANK[:TARGET(+TARGET)*]
    # algorithm of all-reduces, and bytes of a bucket of gradients (None: the framework's buckets)
    collectives: str = "auto"
    buckets: int | None = None
    # of FSDP: units gathered ahead, and blocks that are one unit or 'model' (None: the framework's own)
    prefetch: int | None = None
    wrap: int | str | None = None
    schema_version: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank the plan uses, in plan order."""
        parts = [stage.ranks for group in self.groups for stage in group.stages]
        return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as its file stores it; `plan_file.parse_plan` reads it back equal."""
        names = ("schema_version", "global_batch", "seq_len", "precision", "optimizer", "framework")
        out: dict[str, Any] = {name: getattr(self, name) for name in names}
        out |= self._stated("attention", "fp8_recipe", "dispatcher")
        if stated := self.overrides.stated():
            out["overrides"] = stated
        out |= self._stated("compile", "lora")
        out |= {
            "defaults": {},
            "groups": [_group_dict(group) for group in self.groups],
            "comm": dict(self.comm),
        }
        if self.collectives != "auto":
            out["collectives"] = self.collectives
        return out | self._stated("buckets", "prefetch", "wrap")

    def _stated(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def acting(plan: Plan, comm: Mapping[str, bool]) -> dict[str, bool]:
    """Return the switches of communication that make a difference to a plan."""
    stages = [(group, stage) for group in plan.groups for stage in group.stages]
    replicas = len(plan.groups) > 1 or any(len(stage.ranks) > 1 for _, stage in stages)  # of experts too
    acts = {
        "tp_overlap": any(stage.tp > 1 and group.sp for group, stage in stages),
        "grad_overlap": replicas,
        "param_gather_overlap": replicas and any(stage.zero > 0 for _, stage in stages),
        "p2p_overlap": any(len(group.stages) > 1 and group.num_chunks > 1 for group in plan.groups),
        "expert_overlap": any(stage.ep > 1 for _, stage in stages),
        "context_gather": any(stage.cp > 1 for _, stage in stages),
        "shared_overlap": any(stage.ep > 1 for _, stage in stages),
        "narrow_gather": plan.precision == "fp8" and any(stage.zero > 0 for _, stage in stages),
    }
    return {name: value for name, value in comm.items() if acts[name]}


def _group_dict(group: Group) -> dict[str, Any]:
    names = ("share", "micro_batch", "schedule", "sp")
    stated = {name: getattr(group, name) for name in names}
    return stated | {"stages": [_stage_dict(stage) for stage in group.stages]}


def _stage_dict(stage: Stage) -> dict[str, Any]:
    """Return the stage as JSON writes it, with lists for tuples."""
    out: dict[str, Any] = {name: getattr(stage, name) for name in Stage.__slots__}
    out["ranks"] = list(stage.ranks)
    out["layers"] = [list(span) for span in stage.layers]
    out["rank_shares"] = None if stage.rank_shares is None else list(stage.rank_shares)
    return out


OF_FRAMEWORK = ("attention", "fp8_recipe", "dispatcher", "overrides", "compile")
"""Fields of a plan that set what its framework leaves to its user."""
_WORDS = {"attention": ATTENTIONS, "fp8_recipe": FP8_RECIPES, "dispatcher": DISPATCHERS}


def checked_of_framework(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stated of `OF_FRAMEWORK` as a plan holds it, or raise SpecError."""
    found: dict[str, Any] = {"overrides": checked_overrides(stated.get("overrides"))}
    for name, known in _WORDS.items():
        if stated.get(name) is not None:
            flag = name.replace("_", "-")
            found[name] = one_of(stated[name], known, key=f"--{flag}", name=flag)
    if stated.get("compile") is not None:
        if not isinstance(stated["compile"], bool):
            rule = "Must be true or false, not a text"
            raise invalid(stated["compile"], rule, key="--compile", name="compile", fix="Give compile=True")
        found["compile"] = stated["compile"]
    return found


def no_best_buckets() -> SpecError:
    """Return the error of asking for the best bucket size where the graph engine does not run."""
    return SpecError(
        "the best bucket size is found by the graph engine",
        key="--buckets",
        value=AUTO,
        rule="Closed forms have no start-up of each bucket; the graph engine lines them up",
        fix="Use --engine graph, or state a size such as 25MiB",
    )


def checked_buckets(num_bytes: Any) -> int:
    """Return the bytes of a bucket of gradients, or raise SpecError."""
    known = isinstance(num_bytes, int | float) and not isinstance(num_bytes, bool)
    if not known or not 1 <= num_bytes <= MAX_BUCKET_BYTES or num_bytes != int(num_bytes):
        rule = f"Must be whole bytes from 1 to {MAX_BUCKET_BYTES}, or auto"
        raise invalid(num_bytes, rule, key="--buckets", name="buckets", fix="Write it like 25MiB")
    return int(num_bytes)


def checked_wrap(value: Any) -> int | str:
    """Return how many blocks FSDP gathers at a time, or 'model', or raise SpecError."""
    if value == WHOLE_MODEL:
        return WHOLE_MODEL
    return _checked_units(value, 1, "wrap", f"Must be a whole number of blocks from 1, or {WHOLE_MODEL}")


def checked_prefetch(value: Any) -> int:
    """Return how many units of FSDP are gathered ahead, or raise SpecError."""
    return _checked_units(value, 0, "prefetch", "Must be a whole number of units from 0")


def _checked_units(value: Any, least: int, name: str, rule: str) -> int:
    known = isinstance(value, int) and not isinstance(value, bool)
    if not known or not least <= value <= MAX_UNITS:
        raise invalid(value, f"{rule} (at most {MAX_UNITS:,})", key=f"--{name}", name=name)
    return int(value)


def check_recompute(value: Any, *, key: str = "recompute", file: str | None = None) -> str:
    """Return the recompute rule in normal form: none, full[:uniform:N|:block:N], selective:..., every-N."""
    rule = "Must be none, selective[:MODULE(+MODULE)*], full[:uniform:N|:block:N] or every-N"
    if not isinstance(value, str):
        raise invalid(value, rule, key=key, file=file, fix=_RECOMPUTE_FIXES["true"])
    stated, value = value, _recompute_word(value)
    head, _, rest = value.partition(":")
    if value in ("none", "full"):
        return value
    if head == "full":
        kind, _, count = rest.partition(":")
        if kind in ("uniform", "block") and _is_count(count):
            return value
    if head == "selective":
        modules = list(dict.fromkeys(rest.replace("-", "_").split("+"))) if rest else ["core_attn"]
        if all(module in RECOMPUTE_MODULES for module in modules):
            return "selective:" + "+".join(modules)
    if value.startswith("every-") and _is_count(value[6:]):
        return value
    fix = _RECOMPUTE_FIXES.get(value, f"Known modules: {', '.join(RECOMPUTE_MODULES)}")
    raise invalid(stated, rule, key=key, fix=fix, file=file)


_CHECKPOINTING = re.compile(
    r"-?(?:activation|gradient)?-?(?:checkpointing|checkpoint|recompute|recomputation|ac)$|-remat$"
)
_RECOMPUTE_FIXES = {
    **dict.fromkeys(
        ("", "true", "on", "yes", "1", "all"),
        "Write full for all of each layer, or selective for what the framework recomputes under that name",
    ),
    **dict.fromkeys(("full:block", "block"), "Write full:block:N for the first N layers of a stage"),
    **dict.fromkeys(("full:uniform", "uniform"), "Write full:uniform:N for chunks of N layers"),
    **dict.fromkeys(("any", "auto", "best"), "Leave it out: foreshard plan then chooses"),
    "half": "Write every-2 for every second layer, or full:block:N for the first N of a stage",
    "sdpa": "Write selective:core_attn to recompute attention",
    "attention": "Write selective:core_attn to recompute attention",
}
"""What to write for words that leave something open."""


def _recompute_word(text: str) -> str:
    """Return a rule in the words of the grammar, as other tools' names of it are meant.

    Examples
    --------
    >>> _recompute_word("Full activation checkpointing"), _recompute_word("gradient-checkpointing")
    ('full', 'full')
    >>> _recompute_word("SelectiveAC"), _recompute_word("every 2"), _recompute_word("core_attn")
    ('selective', 'every-2', 'selective:core_attn')
    """
    value = re.sub(r"[\s]+", "-", text.strip().lower())
    if value in ("gradient-checkpointing", "gradient_checkpointing", "activation-checkpointing"):
        return "full"  # of each block, as transformers, DeepSpeed and PyTorch mean it
    if value in ("off", "no", "false", "0"):
        return "none"
    if value.replace("-", "_") in RECOMPUTE_MODULES:
        return f"selective:{value.replace('-', '_')}"
    value = re.sub(r"^(full|every)[-_:]?(block|uniform)[-_:]?", r"\1:\2:", value).rstrip(":")
    return _CHECKPOINTING.sub("", value)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) > 0
