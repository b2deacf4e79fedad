"""Plans as flags of Megatron-LM's training entry points (``pretrain_gpt.py`` and its kin).

Source: NVIDIA/Megatron-LM core_v0.19.0, megatron/training/arguments.py and
megatron/core/transformer/pipeline_parallel_layer_layout.py; the flags are the same at d98e8a6 (0.20.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from shlex import quote

from foreshard.catalog.frameworks import load_framework
from foreshard.cost.memory_activations import LOGIT_BYTES
from foreshard.interop.exporters.exported import ExportRequest
from foreshard.interop.exporters.megatron_model import model_flags, model_gaps
from foreshard.interop.exporters.uniform import Uniform, option_gaps, required_uniform
from foreshard.interop.megatron_flags import FSDP_GRADIENTS, FSDP_STRATEGIES
from foreshard.spec.checks import modules_lacking
from foreshard.spec.framework import OVERRIDES, Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import COMM_OPTIONS, LOW_PRECISIONS, Plan

Flag = tuple[str, ...]

_SCHEDULES = ("1f1b", "interleaved")
_OPTIMIZERS = {"adamw": "adam", "muon": "muon", "lion": "lion", "sgd": "sgd"}
_PRECISIONS: dict[str, tuple[Flag, ...]] = {
    "fp32": (),
    "tf32": (),
    "fp16": (("--fp16",),),
    "bf16": (("--bf16",),),
    "fp8": (("--bf16",), ("--fp8-format", "hybrid")),
    "mxfp8": (("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")),
    "nvfp4": (("--bf16",), ("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")),
}
_FORCED = {"grad_overlap": 2, "param_gather_overlap": 3}
"""Levels from which Megatron-FSDP hides a collective whatever the flags say (megatron_fsdp.py, __init__)."""
_EXPERT_OVERLAP = "--overlap-moe-expert-parallel-comm"
_WRITTEN = tuple(name for name in OVERRIDES if name != "clips")
"""Overrides that flags set, if not with every value."""


def export(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``megatron_args.sh``, which fills the bash array MEGATRON_ARGS."""
    plan, model = request.plan, request.model
    degrees = required_uniform(request, _gaps, _expert_gaps, _model_gaps)
    flags = [*_degree_flags(degrees, model), *_batch_flags(plan, degrees), *_option_flags(plan, degrees)]
    flags += model_flags(model, _as_set(plan)) if model else []
    return _script(request.version, degrees, flags), _notes(plan, degrees, model)


def overlaps(plan: Plan) -> dict[str, bool]:
    """Return what communication hides: what the plan states, else the default of its framework."""
    framework = load_framework(plan.framework)
    return {name: bool(plan.comm.get(name, getattr(framework, name))) for name in COMM_OPTIONS}


def _gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    plan = request.plan
    yield from option_gaps(plan, "megatron-core", writes=_WRITTEN)
    yield from _override_gaps(plan, degrees)
    if degrees.schedule not in _SCHEDULES:
        yield f"schedule {degrees.schedule} (it has {', '.join(_SCHEDULES)})"
    if plan.optimizer not in _OPTIMIZERS:
        yield f"optimizer {plan.optimizer} (it has {', '.join(_OPTIMIZERS)})"
    fsdp = _by_fsdp(plan)
    if degrees.zero > 1 and not fsdp:
        yield f"zero {degrees.zero} of {plan.framework} (Megatron-FSDP shards so: --framework megatron-fsdp)"
    if plan.optimizer in ("muon", "lion") and fsdp:
        yield f"optimizer {plan.optimizer} (Megatron-FSDP has adam and sgd)"
    if degrees.recompute.startswith("every-"):
        yield f"recompute {degrees.recompute} (it recomputes all or the first blocks of a stage, or modules)"
    if degrees.recompute == "selective:op":
        yield "recompute selective:op"
    if degrees.offload in ("activations", "all"):
        yield f"offload {degrees.offload} (it offloads the optimizer, or some modules' activations)"
    if degrees.offload == "optimizer" and (degrees.zero != 1 or fsdp):
        yield f"offload of the optimizer with zero {degrees.zero} (the distributed optimizer, zero 1, has it)"
    if degrees.sp and degrees.tp == 1:
        yield "sequence parallelism without tensor parallelism"
    hidden = overlaps(plan)
    for name in [name for name, level in _FORCED.items() if fsdp and degrees.zero >= level]:
        if not hidden[name]:
            yield f"{name} off at zero {degrees.zero} (Megatron-FSDP switches it on)"
    if hidden["param_gather_overlap"] and not (hidden["grad_overlap"] and degrees.zero):
        yield "param_gather_overlap without grad_overlap and zero 1 or more"
    if hidden["narrow_gather"] and plan.precision == "fp8" and degrees.zero:
        yield "narrow_gather (its --fp8-param-gather keeps weights in 8 bit too)"
    if hidden["tp_overlap"] and degrees.tp > 1 and not degrees.sp:
        yield "tp_overlap without sp"
    if degrees.pp == 2 and degrees.vpp > 1 and not hidden["p2p_overlap"]:
        yield "two stages with virtual ones and no p2p_overlap"
    again = sorted({"moe_act", "layernorm"} & set(_modules(degrees.recompute)))
    if plan.precision == "fp8" and again:
        yield f"recompute of {' and '.join(again)} with fp8 (its scaling is delayed; mxfp8 can)"


def _expert_gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    """Yield what forbids to overlap the messages of experts (transformer_config.py, __post_init__)."""
    plan, model = request.plan, request.model
    if degrees.ep == 1 or not overlaps(plan)["expert_overlap"]:
        return
    if overlaps(plan)["shared_overlap"]:
        yield "shared_overlap with expert_overlap"
    if degrees.pp > 1 and degrees.vpp == 1:
        yield "expert_overlap in a pipeline without virtual stages"
    if degrees.recompute.startswith("full") or "moe" in _modules(degrees.recompute):
        yield f"expert_overlap with recompute {degrees.recompute}"
    if plan.precision in ("fp32", "tf32"):
        yield f"expert_overlap in {plan.precision}"
    if model and model.num_next_token > 1:
        yield f"expert_overlap with {model.num_next_token} next-token layers"


def _model_gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    """Yield what no flag says of the model, and recomputed modules that it does not have."""
    model = request.model
    if model is None:
        return
    yield from model_gaps(model)
    for name in sorted(modules_lacking(model) & set(_modules(degrees.recompute))):
        yield f"recompute of {name}, which {model.name} has not"


def _modules(rule: str) -> tuple[str, ...]:
    """Return the modules that a selective rule recomputes."""
    kind, _, rest = rule.partition(":")
    return tuple(rest.split("+")) if kind == "selective" else ()


def _degree_flags(degrees: Uniform, model: Model | None) -> list[Flag]:
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", str(degrees.tp)),
        ("--pipeline-model-parallel-size", str(degrees.pp)),
        ("--context-parallel-size", str(degrees.cp)),
        ("--expert-model-parallel-size", str(degrees.ep)),
        ("--expert-tensor-parallel-size", str(degrees.etp)),  # unset, it would be that of the rest
    ]
    if degrees.sp and degrees.tp > 1:
        flags.append(("--sequence-parallel",))
    if degrees.pp > 1 and not degrees.even_blocks():
        flags.append(("--pipeline-model-parallel-layout", layout(degrees, model)))
    elif degrees.vpp > 1:
        flags.append(("--num-virtual-stages-per-pipeline-rank", str(degrees.vpp)))
    return flags


def layout(degrees: Uniform, model: Model | None = None) -> str:
    """Return the stages as Megatron writes them, ``Et*5|t*6|t*5L``: embedding, blocks, (m) next-token, loss.

    Stages come in the order in which a sample passes them, virtual ones after all first ones.
    """
    head = degrees.num_blocks + 1
    parts = []
    for start, stop in degrees.chunks():
        modules = ["E"] * (start == 0) + ["t"] * (min(stop, head) - max(start, 1))
        if stop > head:
            modules += ["m"] * (model.num_next_token if model else 0) + ["L"]
        runs = ((name, len(list(same))) for name, same in groupby(modules))
        parts.append("".join(name if count == 1 else f"{name}*{count}" for name, count in runs))
    return "|".join(parts)


def _batch_flags(plan: Plan, degrees: Uniform) -> list[Flag]:
    return [
        ("--micro-batch-size", str(degrees.micro_batch)),
        ("--global-batch-size", str(plan.global_batch)),
        ("--seq-length", str(plan.seq_len)),
    ]


def _option_flags(plan: Plan, degrees: Uniform) -> list[Flag]:
    flags = [*_PRECISIONS[plan.precision], ("--optimizer", _OPTIMIZERS[plan.optimizer])]
    if plan.fp8_recipe is not None:
        flags.append(("--fp8-recipe", plan.fp8_recipe))
    flags += _override_flags(plan)
    flags += _sharding_flags(plan, degrees) + _recompute_flags(degrees.recompute)
    if degrees.offload == "optimizer":
        flags += [("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",)]
    return flags + _overlap_flags(plan, degrees)


def _as_set(plan: Plan) -> Framework:
    """Return the plan's framework with its overrides and dispatcher."""
    own = load_framework(plan.framework)
    return replace(own, dispatcher=plan.dispatcher or own.dispatcher, **plan.overrides.stated())


def _override_gaps(plan: Plan, degrees: Uniform) -> Iterator[str]:
    """Yield overrides that no flag of Megatron sets.

    Source
    ------
    Megatron-LM d98e8a6 arguments.py validate_args: main gradients are accumulated and reduced in one dtype,
    16 bit in runs of 16 bit only; other dtypes of states and 8-bit weights need the distributed optimizer.
    """
    own, stated = _as_set(plan), plan.overrides
    narrow = plan.precision not in ("fp32", "tf32")
    if not _by_fsdp(plan) and (stated.grad_bytes or stated.grad_reduce_bytes or narrow):
        sizes = own.grad_bytes, own.grad_reduce_bytes
        if sizes != (4, 4) and not (narrow and sizes == (2, 2)):
            yield f"grad_bytes {sizes[0]} and grad_reduce_bytes {sizes[1]} in {plan.precision}"
    if stated.cross_entropy not in (None, "unfused", "native"):
        yield f"cross_entropy {stated.cross_entropy} (it has unfused and native, and no more te)"
    if stated.routing == "dropped":
        yield "routing dropped (its capacity factor is not in the plan)"
    if stated.cuda_graphs == "partial":
        yield "cuda_graphs partial (the plan does not say which modules)"
    narrow_states = {2} & {stated.master_bytes, stated.moment_bytes} or stated.moment_bytes == 1
    if narrow_states and plan.optimizer != "adamw":
        yield f"narrow states of {plan.optimizer} (of adamw only)"
    if (narrow_states or _narrow_weights(plan)) and degrees.zero == 0:
        yield "narrow states or 8-bit weights at zero 0 (they need --use-distributed-optimizer)"


def _override_flags(plan: Plan) -> list[Flag]:
    """Return the flags of dtypes, graphs and fused kernels, as the plan's framework or the plan sets them.

    Source
    ------
    Megatron-LM core_v0.19.0 arguments.py validate_args: the fused loss of Transformer Engine is refused.
    """
    own, fsdp = _as_set(plan), _by_fsdp(plan)
    narrow = not fsdp and plan.precision not in ("fp32", "tf32")
    flags: list[Flag] = []
    if fsdp:
        words = {4: "fp32", 2: "fp16" if plan.precision == "fp16" else "bf16"}
        sizes = {flag: getattr(plan.overrides, name) for name, flag in FSDP_GRADIENTS.items()}
        flags += [(flag, words[size]) for flag, size in sizes.items() if size]
    elif plan.precision == "fp16":
        flags += [("--accumulate-allreduce-grads-in-fp32",)] if own.grad_bytes == 4 else []
    elif plan.overrides.grad_reduce_bytes == 2 or (narrow and own.grad_reduce_bytes == 2):
        flags.append(("--grad-reduce-in-bf16",))
    if own.cross_entropy in ("native", "te"):
        flags += [("--cross-entropy-loss-fusion",), ("--cross-entropy-fusion-impl", "native")]
    if _narrow_weights(plan):
        flags.append(("--fp8-param-gather",))
    ends = own.wide_first, own.wide_last
    if any(ends):
        flags.append(("--first-last-layers-bf16",))
        names = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
        flags += [(name, str(count)) for name, count in zip(names, ends, strict=True)]
    if plan.overrides.routing == "balanced":
        flags.append(("--moe-router-force-load-balancing",))
    if plan.overrides.cuda_graphs == "full":
        flags.append(("--cuda-graph-impl", "local"))
    moments, masters = plan.overrides.moment_bytes, plan.overrides.master_bytes
    narrower = {1: "fp8", 2: "bf16"}
    states: list[Flag] = []
    if moments in narrower:
        states += [(flag, narrower[moments]) for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")]
    if masters == 2:
        states.append(("--main-params-dtype", "fp16"))
    return [*flags, ("--use-precision-aware-optimizer",), *states] if states else flags


def _narrow_weights(plan: Plan) -> bool:
    """Return whether weights are kept in 8 bit: by the plan, or by its framework in runs of 8 bit."""
    return _as_set(plan).fp8_params and plan.precision in LOW_PRECISIONS


def _by_fsdp(plan: Plan) -> bool:
    """Return whether Megatron-FSDP shards, whatever the level."""
    return load_framework(plan.framework).fsdp == "megatron-fsdp"


def _sharding_flags(plan: Plan, degrees: Uniform) -> list[Flag]:
    fsdp = _by_fsdp(plan)
    if degrees.zero == 0 and not fsdp:
        return []
    flags: list[Flag] = [("--use-distributed-optimizer",)]
    if fsdp:
        flags += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", FSDP_STRATEGIES[degrees.zero]),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if degrees.shard_size < degrees.num_replicas:
        copies = degrees.num_replicas // degrees.shard_size
        flags.append(("--num-distributed-optimizer-instances", str(copies)))
    return flags


def _recompute_flags(rule: str) -> list[Flag]:
    if _modules(rule):
        return [("--recompute-granularity", "selective"), ("--recompute-modules", *_modules(rule))]
    kind, _, rest = rule.partition(":")
    if kind == "full":
        method, _, count = rest.partition(":") if rest else ("uniform", "", "1")
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", method),
            ("--recompute-num-layers", count),
        ]
    return []


def _overlap_flags(plan: Plan, degrees: Uniform) -> list[Flag]:
    hidden = overlaps(plan)
    wanted: list[tuple[bool, Flag]] = [
        (hidden["tp_overlap"] and degrees.tp > 1, ("--tp-comm-overlap",)),
        (hidden["grad_overlap"], ("--overlap-grad-reduce",)),
        (hidden["param_gather_overlap"], ("--overlap-param-gather",)),
        (degrees.vpp > 1 and not hidden["p2p_overlap"], ("--no-overlap-p2p-communication",)),
        (degrees.ep > 1 and hidden["expert_overlap"], (_EXPERT_OVERLAP,)),
        (degrees.cp > 1 and hidden["context_gather"], ("--cp-comm-type", "all_gather")),
        (degrees.ep > 1 and hidden["shared_overlap"], ("--moe-shared-expert-overlap",)),
    ]
    return [flag for on, flag in wanted if on]


def _script(version: str, degrees: Uniform, flags: list[Flag]) -> str:
    """Return the file to source.

    Source
    ------
    Megatron-LM d98e8a6 arguments.py validate_args; core/transformer/moe/README.md, what the overlap of
    exchanges requires; Megatron-Bridge v0.6.0 perf_recipes, 32 connections.
    """
    connections = (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1  # orders tensor-parallel collectives before Blackwell"
    )
    if ("--use-megatron-fsdp",) in flags:
        connections = "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1"
    elif (_EXPERT_OVERLAP,) in flags:
        connections = "export CUDA_DEVICE_MAX_CONNECTIONS=32  # with 1 no exchange of tokens is hidden"
    lines = [
        f"# {version}, world size {len(degrees.ranks)} = "
        f"tp {degrees.tp} x cp {degrees.cp} x dp {degrees.dp} x pp {degrees.pp}",
        '# source this; torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" (data, tokenizer, rate)',
        connections,
        "MEGATRON_ARGS=(",
        *(f"  {' '.join(quote(word) for word in flag)}" for flag in flags),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _notes(plan: Plan, degrees: Uniform, model: Model | None) -> list[str]:
    notes = []
    if model is None:
        notes.append(
            "No MODEL was given: the flags of its sizes are yours to add, --num-layers and the rest."
        )
    else:
        unknown = "the epsilon of its norms and " if model.norm_eps is None else ""
        notes.append(
            f"Yours to add: data, tokenizer, learning rate, and of the model {unknown}the initialisation."
        )
    if _as_set(plan).cross_entropy == "te":
        held = LOGIT_BYTES["native"] - LOGIT_BYTES["te"]
        notes.append(
            "Megatron 0.19 refuses the fused loss of Transformer Engine that was predicted: its native one "
            f"is written, and holds {held:g} bytes more of each logit (predicted by --set "
            "cross_entropy=native)."
        )
    if plan.precision == "tf32":
        notes.append("tf32 has no flag: set NVIDIA_TF32_OVERRIDE=1.")
    if plan.comm.get("p2p_overlap") and degrees.vpp == 1:
        notes.append(
            "p2p_overlap acts on virtual stages only; without them Megatron waits for each transfer."
        )
    return notes
