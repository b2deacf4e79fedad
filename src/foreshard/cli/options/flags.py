"""Flags as users of other tools know them: other spellings, and what flags that we lack are called here."""

from __future__ import annotations

import re

from foreshard.words import option_name

_MEANT = {
    "ga|gas|accum(ulation)?(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "bs|batch": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "batch-size": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "gradient-accumulation(-steps)?|grad-accum(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "(gradient|activation)-checkpointing|activation-recompute|remat": "--recompute full",
    "ac|activation-checkpoint.*|(no-)?checkpoint-activations": "--recompute full or selective",
    "recompute-granularity": "--recompute full or selective",
    "fsdp2?": "--framework torchtitan --zero 3",
    "ddp": "--framework ddp --zero 0",
    "zero-stage|stage": "--zero",
    "zero-?[0-3]|deepspeed-stage.*": "--zero N",
    "(use-)?distributed-optimizer": "--zero 1, Megatron's default here",
    "ulysses.*|ring-attention.*": "--cp",
    "(num-)?layers-per-virtual-(pipeline-)?stage.*": "--vpp: virtual stages of a rank",
    "ctx|context|context-window|max-length|max-len": "--seq",
    "(num-)?(train-)?epochs|max-steps|train-iters|steps": "--tokens of the whole run",
    "hours|days|time": "--max-hours (of plan)",
    "qlora|load-in-4bit|quantization.*": "--lora RANK; weights of 4 bits are not modelled",
    "format|output-format": "--json",
    "v|vv|verbose|debug": "--explain",
    "torch-compile|jit|inductor|dynamo.*": "--compile",
    "model(-name(-or-path)?)?": "MODEL first, without a flag",
    "clusters?": "CLUSTER after MODEL, without a flag",
    "(no-)?cpu-offload(ing)?|offload-optimizer": "--offload cpu",
    "bf16|fp16|fp32|fp8|tf32": "--dtype",
    "mixed-precision": "--dtype bf16",
    "(grad-reduce-in-bf16|(main-)?grads?-dtype|reduce-dtype)": "--set grad_bytes=2 and grad_reduce_bytes=2",
    "(enable-)?cuda-graphs?(-impl|-scope)?": "--set cuda_graphs=full",
    "(exp-avg|exp-avg-sq|moment)-dtype|use-precision-aware-optimizer": "--set moment_bytes=bf16",
    "main-params-dtype|master-dtype": "--set master_bytes=bf16",
    "fp8-param(-gather|s)?": "--set fp8_params=on",
    "(cross-entropy-(loss-)?fusion.*|fused-(cross-entropy|ce))": "--set cross_entropy=te",
    "(no-)?moe-grouped-gemm|grouped-gemm": "--set grouped_gemm=on",
    "moe-router-force-load-balancing": "--set routing=balanced",
    "(max-grad-norm|clip-grad|gradient-clipping)": "--set clips=on",
    "(num-)?(gpus?|devices?|nodes?)|nnodes|nproc-per-node|world-size|ngpus": "CLUSTER, as 2x8xh100",
    "max-(gpus?|nodes?)|(num-)?max-gpus": "--max-devices",
    "gpu-type|device-type|accelerators?": "CLUSTER, as 8xh100",
    "(nic|bandwidth|network-bandwidth|interconnect)": "CLUSTER, as 2x8xh100@400Gb/s/gpu",
    "price|usd-per-hour|cost-per-hour|gpu-price": "--usd-per-device-hour",
    "num-tokens|train-tokens|total-tokens": "--tokens",
    "deadline|max-time|max-days": "--max-hours",
    "budget|max-cost|max-price": "--max-usd (of the run) or --budget-s (of the search)",
    "timeout|time-limit": "--budget-s",
    "lora-(r|rank)|peft": "--lora RANK",
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
