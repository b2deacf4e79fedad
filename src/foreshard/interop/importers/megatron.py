"""Flags of Megatron-LM's training entry points as a run.

Source: NVIDIA/Megatron-LM core_v0.19.0, megatron/training/arguments.py (flags and defaults) and
megatron/core/transformer/pipeline_parallel_layer_layout.py. Flags that change time or memory and no plan
states are in ``data/megatron_unread.toml``.
"""

from __future__ import annotations

import re
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.interop.importers.launch_script import LaunchFlags, read_flags
from foreshard.interop.importers.stated_run import StatedRun
from foreshard.interop.megatron_flags import FSDP_GRADIENTS, FSDP_STRATEGIES
from foreshard.spec.framework import Overrides
from foreshard.spec.plan import LOW_PRECISIONS

_DEGREES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}
_STRATEGIES = {word: level for level, word in FSDP_STRATEGIES.items()}
_RECIPES = {"delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8", "mxfp8": "mxfp8"}
_REFUSED = {
    "--use-torch-fsdp2": "torch's FSDP2 inside Megatron",
    "--hybrid-context-parallel": "context parallelism by sample",
    "--account-for-embedding-in-pipeline-split": "blocks that are split with the embedding as one of them",
    "--account-for-loss-in-pipeline-split": "blocks that are split with the head as one of them",
    "--cpu-offloading": "offload of activations by layer",
    "--rampup-batch-size": "a batch that grows",
}
_SECOND = "--exp-avg-sq-dtype"
_MOMENTS = ("fp32", "fp16", "bf16", "fp8")
_STATES = {
    "grad_bytes": ("--main-grads-dtype", ("fp32", "bf16")),
    "master_bytes": ("--main-params-dtype", ("fp32", "fp16")),
    "moment_bytes": ("--exp-avg-dtype", _MOMENTS),
}
"""Dtypes of the precision-aware optimizer."""
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_ATTENTIONS = {"fused": "cudnn", "unfused": "unfused", "local": "unfused"}
"""Kernels by --attention-backend; flash is one of several, which the device and what is installed choose."""
_USUAL = {"--attention-backend": ("auto", *_ATTENTIONS), "--transformer-impl": ("transformer_engine",)}
"""Values of such flags that are read, or that Megatron has without the flag (d98e8a6)."""
_PART = re.compile(r"\(([A-Za-z|]+)\)\*(\d+)|([A-Za-z])(?:\*(\d+))?|\|")


_BATCH = {
    "micro_batch": "--micro-batch-size",
    "global_batch": "--global-batch-size",
    "seq_len": "--seq-length",
}


def read(text: str, file: str) -> StatedRun:
    """Return the run that the flags of a launch script or a file of arguments state."""
    flags = read_flags(text, file)
    if not any(flag in flags for flag in (*_DEGREES.values(), "--micro-batch-size", "--num-layers")):
        rule = (
            "Flags of Megatron are --tensor-model-parallel-size, --micro-batch-size, --num-layers and others"
        )
        fix = "Give the script or the file of arguments that starts pretrain_gpt.py"
        raise SpecError("no flags of Megatron are in the file", file=file, key="--from", rule=rule, fix=fix)
    for flag, what in _REFUSED.items():
        if flag in flags:
            raise flags.cannot(flag, what)
    fsdp = "--use-megatron-fsdp" in flags
    choices: dict[str, Any] = {"framework": "megatron-fsdp" if fsdp else "megatron-core"}
    choices |= {degree: flags.whole(flag, 1) for degree, flag in _DEGREES.items()}
    experts = "--num-experts" in flags
    choices["etp"] = flags.whole("--expert-tensor-parallel-size", choices["tp"] if experts else 1)
    choices["sp"] = "--sequence-parallel" in flags and choices["tp"] > 1
    choices |= _sharding(flags) | _batch(flags)
    choices |= _overlaps(flags, choices)
    choices["precision"] = _precision(flags)
    if choices["precision"] == "fp8":
        choices["fp8_recipe"] = _fp8_recipe(flags)
    if (choices["ep"] or 1) > 1:
        choices["dispatcher"] = _dispatcher(flags)
    kernel = _ATTENTIONS.get(" ".join(flags.values.get("--attention-backend", ())))
    if kernel is not None:
        choices["attention"] = kernel
    choices["overrides"] = _overrides(flags, choices["precision"], experts=experts)
    optimizer = flags.choice("--optimizer", ("adam", "sgd", "muon", "dist_muon", "lion"), "adam")
    choices["optimizer"] = {"adam": "adamw", "dist_muon": "muon"}.get(optimizer, optimizer)
    choices["recompute"] = _recompute(flags)
    if "--optimizer-cpu-offload" in flags:
        choices["offload"] = "optimizer"
    blocks = flags.whole("--num-layers")
    counts = _block_counts(flags, choices["pp"], blocks)
    choices |= _virtual(flags, choices["pp"], blocks, counts)
    return StatedRun(
        choices=choices,
        keys=_DEGREES | _BATCH | {"etp": "--expert-tensor-parallel-size"},
        num_blocks=blocks,
        block_counts=counts,
        passes=None if "global_batch" in choices else 1,  # a step of micro-batch x dp
        shard_instances=flags.whole("--num-distributed-optimizer-instances", 1) or 1,
        notes=_notes(flags),
    )


def _batch(flags: LaunchFlags) -> dict[str, int]:
    found = {name: flags.whole(flag) for name, flag in _BATCH.items()}
    return {name: value for name, value in found.items() if value is not None}


def _sharding(flags: LaunchFlags) -> dict[str, int]:
    if "--use-megatron-fsdp" in flags:
        word = flags.choice("--data-parallel-sharding-strategy", tuple(_STRATEGIES), "optim_grads_params")
        return {"zero": _STRATEGIES[word]}
    return {"zero": int("--use-distributed-optimizer" in flags)}


def _overlaps(flags: LaunchFlags, choices: dict[str, Any]) -> dict[str, bool]:
    """Return what is hidden.

    Source
    ------
    Megatron-LM core_v0.19.0 megatron_fsdp.py, __init__: sharded gradients are always reduced, and sharded
    weights gathered, while products run.
    """
    forced = choices["zero"] if choices["framework"] == "megatron-fsdp" else 0
    found = {
        "tp_overlap": "--tp-comm-overlap" in flags,
        "grad_overlap": "--overlap-grad-reduce" in flags or forced >= 2,
        "param_gather_overlap": "--overlap-param-gather" in flags or forced == 3,
        "expert_overlap": "--overlap-moe-expert-parallel-comm" in flags,
        "shared_overlap": "--moe-shared-expert-overlap" in flags,
    }
    if choices["cp"] > 1:
        found["context_gather"] = flags.word("--cp-comm-type", "p2p") == "all_gather"
    return found


def _precision(flags: LaunchFlags) -> str:
    if "--fp4-format" in flags:
        return "nvfp4"
    if any(flag in flags for flag in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3")):
        return _RECIPES[_fp8_recipe(flags)]
    return "bf16" if "--bf16" in flags else "fp16" if "--fp16" in flags else "fp32"


def _overrides(flags: LaunchFlags, precision: str, *, experts: bool) -> Overrides:
    """Return what a script sets otherwise than the catalog's Megatron does: dtypes, graphs, fused kernels.

    Source
    ------
    Megatron-LM d98e8a6 core/transformer/transformer_config.py: one layer at either end stays in 16 bit unless
    their numbers are stated.
    """
    stated: dict[str, Any] = {}
    wide = precision != "fp16" or "--accumulate-allreduce-grads-in-fp32" in flags
    if "--use-megatron-fsdp" in flags:
        for name, flag in FSDP_GRADIENTS.items():
            word = flags.choice(flag, ("auto", "fp32", "bf16", "fp16"), "auto")
            if word != "auto":
                stated[name] = _STATE_BYTES[word]
        if "grad_bytes" in stated:
            stated.setdefault("grad_reduce_bytes", stated["grad_bytes"])
    elif "--grad-reduce-in-bf16" in flags or not (wide or precision == "fp32"):
        stated |= {"grad_bytes": 2, "grad_reduce_bytes": 2}
    if "--use-precision-aware-optimizer" in flags:
        second = flags.choice(_SECOND, _MOMENTS, "fp32")
        if _STATE_BYTES[second] != _STATE_BYTES[flags.choice("--exp-avg-dtype", _MOMENTS, "fp32")]:
            raise flags.cannot(_SECOND, "moments of two widths")
        for name, (flag, known) in _STATES.items():
            word = flags.choice(flag, known, "fp32")
            if _STATE_BYTES[word] != 4:
                stated[name] = _STATE_BYTES[word]
        if "grad_bytes" in stated:  # they are reduced as they are
            stated["grad_reduce_bytes"] = stated["grad_bytes"]
    if "--fp8-param-gather" in flags and precision in LOW_PRECISIONS:
        stated["fp8_params"] = True
    fused = "--cross-entropy-loss-fusion" in flags
    loss = flags.choice("--cross-entropy-fusion-impl", ("native", "te"), "native") if fused else "unfused"
    if loss != "te":
        stated["cross_entropy"] = loss
    if "--first-last-layers-bf16" in flags and precision in LOW_PRECISIONS:
        stated["wide_first"] = flags.whole("--num-layers-at-start-in-bf16", 1, least=0)
        stated["wide_last"] = flags.whole("--num-layers-at-end-in-bf16", 1, least=0)
    if experts and "--moe-grouped-gemm" not in flags:
        stated["grouped_gemm"] = False
    if experts and "--moe-router-force-load-balancing" in flags:
        stated["routing"] = "balanced"
    impls = ("none", "local", "transformer_engine", "full_iteration")
    older = "--enable-cuda-graph" in flags or "--external-cuda-graph" in flags
    if older or flags.choice("--cuda-graph-impl", impls, "none") != "none":
        parts = "--cuda-graph-modules" in flags or flags.word("--cuda-graph-scope", "full") != "full"
        stated["cuda_graphs"] = "partial" if parts else "full"
    return Overrides(**stated)


def _dispatcher(flags: LaunchFlags) -> str:
    """Return what sends tokens to experts: of flex its backend, which --moe-enable-deepep was before."""
    kind = flags.choice("--moe-token-dispatcher-type", ("allgather", "alltoall", "flex"), "allgather")
    if kind != "flex":
        return kind
    return flags.choice("--moe-flex-dispatcher-backend", ("deepep", "hybridep"), "deepep")


def _fp8_recipe(flags: LaunchFlags) -> str:
    return flags.choice("--fp8-recipe", tuple(_RECIPES), "delayed")


def _recompute(flags: LaunchFlags) -> str:
    granularity = "selective" if "--recompute-activations" in flags else None
    granularity = flags.word("--recompute-granularity", granularity)
    if granularity is None:
        return "none"
    if flags.choice("--recompute-granularity", ("full", "selective"), granularity) == "selective":
        modules = flags.values.get("--recompute-modules", ("core_attn",))
        return f"selective:{'+'.join(modules)}"
    method = flags.choice("--recompute-method", ("uniform", "block"), "uniform")
    count = flags.whole("--recompute-num-layers", 1)
    return "full" if (method, count) == ("uniform", 1) else f"full:{method}:{count}"


def _virtual(
    flags: LaunchFlags, pp: int, blocks: int | None, counts: tuple[int, ...] | None
) -> dict[str, int]:
    """Return the virtual stages of a rank and whether messages between stages are hidden."""
    vpp = flags.whole("--num-virtual-stages-per-pipeline-rank")
    each = flags.whole("--num-layers-per-virtual-pipeline-stage")
    if counts is not None and "--pipeline-model-parallel-layout" in flags:
        if len(counts) % pp:
            raise flags.invalid("--pipeline-model-parallel-layout", f"Must have a multiple of {pp} parts")
        vpp = len(counts) // pp
    elif each is not None:
        if blocks is None:
            raise flags.invalid("--num-layers-per-virtual-pipeline-stage", "Needs --num-layers")
        if blocks % (pp * each):
            rule = f"Must divide the {blocks} blocks over {pp} stages"
            raise flags.invalid("--num-layers-per-virtual-pipeline-stage", rule)
        vpp = blocks // (pp * each)
    if vpp in (None, 1):
        return {}
    assert vpp is not None
    return {"vpp": vpp, "p2p_overlap": "--no-overlap-p2p-communication" not in flags}


def _block_counts(flags: LaunchFlags, pp: int, blocks: int | None) -> tuple[int, ...] | None:
    layout = flags.word("--pipeline-model-parallel-layout")
    if layout is not None:
        return _layout(layout, flags)
    first, last = (flags.whole(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is None and last is None:
        return None
    rest = pp - (first is not None) - (last is not None)
    left = (blocks or 0) - (first or 0) - (last or 0)
    if "--num-virtual-stages-per-pipeline-rank" in flags:
        raise flags.cannot("--decoder-first-pipeline-num-layers", "uneven first stages with virtual ones")
    if blocks is None or left < 0 or (left % rest if rest else left):
        end = "first" if first is not None else "last"
        raise flags.invalid(
            f"--decoder-{end}-pipeline-num-layers",
            f"Must leave blocks of --num-layers that {rest} stages share evenly",
        )
    ends = [[] if end is None else [end] for end in (first, last)]
    return (*ends[0], *([left // rest] * rest if rest else []), *ends[1])


def _layout(text: str, flags: LaunchFlags) -> tuple[int, ...]:
    """Return the blocks of each part of a layout such as ``Et*3|(tt|)*29|tL``."""
    found = 0
    parts = [0]
    for match in _PART.finditer(text):
        found += match.end() - match.start()
        word = match[1] * int(match[2]) if match[1] else (match[3] or "|") * int(match[4] or 1)
        for letter in word:
            if letter == "|":
                parts.append(0)
            elif letter == "t":
                parts[-1] += 1
            elif letter not in "EmL":
                raise flags.invalid(
                    "--pipeline-model-parallel-layout", "Has E, t, m and L, and | between parts"
                )
    if found != len(text):
        raise flags.invalid("--pipeline-model-parallel-layout", "Is written as Et*5|t*6|t*5L")
    return tuple(parts)


def _notes(flags: LaunchFlags) -> tuple[str, ...]:
    """Return what the script sets and no plan states, though the step's time or memory depend on it."""
    notes = ["Not read: the file that --yaml-cfg names."] if "--yaml-cfg" in flags else []
    stated = {
        flag.replace("--disable-", "--no-", 1): flag
        for flag, values in flags.values.items()
        if values not in [(usual,) for usual in _USUAL.get(flag, ())]
    }
    unread = shipped("megatron_unread.toml", "foreshard.interop.importers")
    for what, names in unread.items():
        given = [stated[name] for name in names if name in stated]
        if given:
            notes.append(f"Not predicted: {', '.join(given)} ({what}).")
    return tuple(notes)
