"""Flags as users of other tools know them: other spellings, and what flags that we lack are called here."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from foreshard.words import SWITCHES, option_name

_MEANT = {
    "ga|gas|accum(ulation)?(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "bs|batch": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "(train-)?batch-size": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "gradient-accumulation(-steps)?|grad-accum(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "(gradient|activation)-checkpointing|activation-recompute|remat": "--recompute full",
    "ac|activation-checkpoint.*|(no-)?checkpoint-activations": "--recompute full or selective",
    "recompute-(method|num-layers)": "--recompute full:uniform:N or full:block:N",
    "fsdp2?": "--framework torchtitan --zero 3",
    "deepspeed": "--framework deepspeed",
    "hsdp|replicas": "--shard-size: ranks that share one copy",
    "data-parallel-(shard|replicate)-degree": "--zero 3, with --shard-size N for shards of N ranks",
    "(fsdp-)?shard(ing)?(-strategy)?": "--zero 3 for FULL_SHARD, --zero 2 for SHARD_GRAD_OP",
    "ddp": "--framework ddp --zero 0",
    "stage|zero-optimization.*": "--zero",
    "(reduce-|ddp-)?bucket-(size|cap-mb)": "--buckets SIZE, as 25MiB",
    "regions?|zone|spot|preemptible": "--prices FILE: prices of your own",
    "currency|cost": "--usd-per-device-hour, in US dollars",
    "zero-?[0-3]|deepspeed-stage.*": "--zero N",
    "(use-)?distributed-optimizer": "--zero 1, Megatron's default here",
    "ulysses.*|ring-attention.*": "--cp",
    "(num-)?layers-per-virtual-(pipeline-)?stage.*": "--vpp: virtual stages of a rank",
    "context|max-len": "--seq",
    "(num-)?(train-)?epochs|max-steps|train-iters|steps": "--tokens of the whole run",
    "hours|days|time": "--max-hours (of plan)",
    "qlora|load-in-4bit|quantization.*": "--lora RANK; weights of 4 bits are not modelled",
    "format|output-format": "--json",
    "v|vv|verbose|debug": "--explain",
    "jit|inductor|(torch-)?dynamo.*": "--compile",
    "m|model(-name(-or-path)?)?": "MODEL first, without a flag",
    "c|clusters?": "CLUSTER after MODEL, without a flag",
    "(no-)?cpu-offload(ing)?|offload-optimizer": "--offload cpu",
    "bf16|fp16|fp32|fp8|tf32": "--dtype and the format",
    "fp8-format": "--dtype fp8",
    "activation-checkpoint\\.mode": "--recompute full or selective",
    "model\\.(name|flavor)": "MODEL first, without a flag",
    "(grad-reduce-in-bf16|(main-)?grads?-dtype|reduce-dtype)": "--set grad_bytes=2 and grad_reduce_bytes=2",
    "(enable-)?cuda-graphs?(-impl|-scope)?": "--set cuda_graphs=full",
    "(exp-avg|exp-avg-sq|moment)-dtype|use-precision-aware-optimizer": "--set moment_bytes=bf16",
    "main-params-dtype|master-dtype": "--set master_bytes=bf16",
    "fp8-param(-gather|s)?": "--set fp8_params=on",
    "first-last-layers-bf16|num-layers-at-(start|end)-in-bf16": "--set wide_first=N and wide_last=N",
    "(cross-entropy-(loss-)?fusion.*|fused-(cross-entropy|ce))": "--set cross_entropy=te",
    "(no-)?moe-grouped-gemm|grouped-gemm": "--set grouped_gemm=on",
    "moe-router-force-load-balancing": "--set routing=balanced",
    "(max-grad-norm|clip-grad|gradient-clipping)": "--set clips=on",
    "(num-|n-)?(gpus?|devices?|nodes?)|nnodes|nproc-per-node|world-size|ngpus": "CLUSTER, as 2x8xh100",
    "max-(gpus?|nodes?)|(num-)?max-gpus": "--max-devices",
    "gpu-type|device-type|accelerators?": "CLUSTER, as 8xh100",
    "(nic|bandwidth|network-bandwidth|interconnect)": "CLUSTER, as 2x8xh100@400Gb/s/gpu",
    "price|usd-per-hour|cost-per-hour|gpu-price": "--usd-per-device-hour",
    "num-tokens|train-tokens|total-tokens": "--tokens",
    "deadline|max-time|max-days": "--max-hours",
    "budget|max-cost|max-price": "--max-usd (of the run) or --budget-s (of the search)",
    "timeout|time-limit": "--budget-s",
    "lora-(target.*|modules|layers)|target-modules": "--lora RANK:TARGETS, as --lora 16:q+v",
    "peft": "--lora RANK",
    "(virtual-pipeline.*|interleave)": "--vpp",
    "(use-)?(flash|fa)-?(attn|attention)?-?[1-3]?": "--attention fa2, or fa3",
    "clouds?|vendors?|providers?": "--rent VENDORS",
    "output-file|out|save|dump": "-o",
    "(global-)?batch-(size-)?(in-)?tokens|tokens-per-(step|batch)": "--global-batch, in samples",
    "no-(tp|pp|dp|cp|ep|vpp)": "that degree as 1, as --pp 1",
    "k|n|num-plans": "--top",
    "baselines?": "--compare-with",
    "q|quiet|silent": "--json, which prints the answer alone",
}
"""What flags that foreshard lacks are called here, by a pattern of the flag without dashes."""

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def canonical(name: str) -> str:
    """Return a flag (or a name that click looks up) as foreshard spells it.

    Examples
    --------
    >>> canonical("global_batch"), canonical("mbs"), canonical("tp")
    ('global-batch', 'micro-batch', 'tp')
    """
    return option_name(name) if len(name) > 1 else name


def meant(flag: str) -> str | None:
    """Return what a flag that foreshard lacks is called here, None where nothing comes near.

    Examples
    --------
    >>> meant("--gradient_checkpointing")
    '--recompute full'
    """
    plain = flag.lstrip("-").lower().replace("_", "-")
    return next((ours for pattern, ours in _MEANT.items() if re.fullmatch(pattern, plain)), None)


def as_ours(args: Sequence[str], options: Collection[str], switches: Collection[str] = ()) -> list[str]:
    """Return words of a command line with switches of other tools as our options of that value.

    `options` are those of the command, without dashes: what is none of them stays as it is; `switches` of
    them may have the value true or false. One dash before a name counts as two, and Megatron's three words of
    recomputation are one rule here.

    Examples
    --------
    >>> as_ours(["--bf16", "-tp", "2", "--gradient_checkpointing", "True"], ("dtype", "tp", "recompute"))
    ['--dtype', 'bf16', '--tp', '2', '--recompute', 'full']
    >>> as_ours(["--sp", "false"], ("sp",), ("sp",))
    ['--no-sp']
    >>> rule = ["--recompute-granularity", "full", "--recompute-method=block", "--recompute-num-layers", "4"]
    >>> as_ours(rule, ("recompute",))
    ['--recompute', 'full:block:4']
    """
    left, found = list(args), []
    while left and left[0] != "--":
        word = left.pop(0)
        name = canonical(word.lstrip("-").partition("=")[0]) if word.startswith("-") else ""
        ours, value = SWITCHES.get(name.lower(), ("", ""))
        stated = word.partition("=")[2] or (left[0] if left and "=" not in word else "")
        if ours in options and ("=" not in word or stated.lower() in _TRUE):
            found += [f"--{ours}", value]
            left = left[1:] if "=" not in word and stated.lower() in _TRUE else left
        elif name in switches and stated.lower() in (*_TRUE, *_FALSE):
            found.append(f"--{name}" if stated.lower() in _TRUE else f"--no-{name}")
            left = left[1:] if "=" not in word else left
        elif len(name) > 1 and word[1] != "-" and name in options:
            found.append(f"-{word}")
        else:
            found.append(word)
    return _one_rule([*found, *left]) if "recompute" in options else [*found, *left]


_RULE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")


def _one_rule(args: list[str]) -> list[str]:
    """Return the words with Megatron's full recomputation in three words as one rule."""
    parts: dict[str, str] = {}
    rest, left = [], list(args)
    while left:
        name, has, value = left.pop(0).partition("=")
        key = name.replace("_", "-")
        if key in _RULE and (has or left):
            parts[key] = value if has else left.pop(0)
        else:
            rest.append(f"{name}{has}{value}")
    if parts.keys() == set(_RULE):
        return [*rest, "--recompute", ":".join(parts[name] for name in _RULE)]
    return args
