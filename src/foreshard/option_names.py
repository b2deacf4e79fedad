"""Names of options in other tools, and what options that foreshard lacks are called here.

The command line and calls of Python read one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from foreshard.errors import SpecError, unknown

_OTHERS = {
    "global-batch": "gbs global-batch-size",
    "micro-batch": (
        "mbs micro-batch-size per-device-train-batch-size micro-batch-size-per-gpu "
        "train-micro-batch-size-per-gpu local-batch-size"
    ),
    "seq": (
        "seqlen seq-len seq-length sequence-length context-length max-seq-len max-seq-length "
        "max-sequence-length block-size ctx context-window max-length cutoff-len"
    ),
    "tp": (
        "tensor-parallel tensor-model-parallel-size tp-size tp-degree tensor-parallel-size "
        "tensor-parallel-degree"
    ),
    "pp": (
        "pipeline-parallel pipeline-model-parallel-size pp-size pp-degree pipeline-parallel-size "
        "pipeline-parallel-degree"
    ),
    "dp": "data-parallel dp-size dp-degree data-parallel-size data-parallel-degree",
    "cp": "context-parallel context-parallel-size cp-size cp-degree",
    "ep": (
        "expert-parallel expert-model-parallel-size ep-size ep-degree expert-parallel-size "
        "expert-parallel-degree"
    ),
    "etp": "expert-tensor-parallel-size etp-size etp-degree",
    "sp": "sequence-parallel",
    "no-sp": "no-sequence-parallel",
    "dtype": "precision mixed-precision mixed-precision-param",
    "schedule": "pipeline-parallel-schedule",
    "tp-overlap": "enable-async-tensor-parallel",
    "zero": "zero-stage zero-optimization.stage",
    "recompute": "activation-checkpoint.mode recompute-granularity",
    "optimizer": "optimizer.name optim",
    "compile": "compile.enable torch-compile",
    "lora": "lora-rank lora-r",
    "usd-per-device-hour": "usd-per-gpu-hour price-per-gpu-hour cost-per-gpu-hour price-per-device-hour",
    "vpp": (
        "vp virtual-pipeline-model-parallel-size virtual-pipeline-parallel-size "
        "num-virtual-stages-per-pipeline-rank"
    ),
    "attention": "attn attn-implementation attention-backend",
    "fp8-recipe": "float8-recipe recipe-name",
    "dispatcher": (
        "moe-token-dispatcher-type moe-token-dispatcher token-dispatcher moe-dispatcher "
        "moe-flex-dispatcher-backend expert-parallel-comm-backend"
    ),
}
_OVERLAPS = {
    "grad-overlap": "overlap-grad-reduce",
    "param-gather-overlap": "overlap-param-gather",
    "p2p-overlap": "overlap-p2p-communication",
    "expert-overlap": "overlap-moe-expert-parallel-comm",
    "shared-overlap": "moe-shared-expert-overlap",
    "tp-overlap": "tp-comm-overlap",
}
"""Switches, which other tools turn off by the same prefix."""
_OPTIONS = {
    **{word: ours for ours, words in _OTHERS.items() for word in words.split()},
    **{f"{no}{theirs}": f"{no}{ours}" for no in ("", "no-") for ours, theirs in _OVERLAPS.items()},
}
"""Our option of each other name of it, as flags are written but without the dashes before them."""

SWITCHES = {
    **{name: ("dtype", name) for name in ("bf16", "fp16", "fp8", "tf32")},
    "gradient-checkpointing": ("recompute", "full"),
    "recompute-activations": ("recompute", "selective"),
    "use-distributed-optimizer": ("zero", "1"),
    "cpu-offload": ("offload", "cpu"),
}
"""Switches of other tools: our option and its value."""

_MEANT = {
    "ga|gas|accum(ulation)?(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "bs|batch": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "(train-)?batch-size": "--global-batch (samples of a step) or --micro-batch (samples of a rank and pass)",
    "gradient-accumulation(-steps)?|grad-accum(-steps)?": "--global-batch: dp x micro-batch x these steps",
    "(gradient|activation)-checkpointing|activation-recompute|remat": "--recompute full",
    "ac|activation-checkpoint.*|(no-)?checkpoint-activations": "--recompute full or selective",
    "recompute-(method|num-layers)": "--recompute full:uniform:N or full:block:N",
    "fsdp2?": "--framework torchtitan --zero 3, or --framework hf where the Trainer runs it",
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
    "(gpu-)?price(-per-hour)?|usd-per-hour|cost-per-hour|hourly-(price|cost|rate)": "--usd-per-device-hour",
    "num-tokens|train-tokens|total-tokens": "--tokens",
    "deadline|within|max-(time|days|duration)": "--max-hours",
    "mtbf|mttf|(mean-)?time-between-failures|failure-rate": "--mtbf-h (of a device) or --node-mtbf-h",
    "checkpoint-(interval|period|freq(uency)?)|save-interval": "--checkpoint-every",
    "restart-time|recovery-time": "--restart-s",
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
    "(min-)?(lr|learning-rate)(-.*)?|warmup.*|weight-decay|adam(w)?-(beta|eps).*|.*seed|report-to"
    "|(save|eval|log(ging)?)-.*|(train-)?data(-path|set)?|tokenizer.*|output-dir": "nothing: it changes "
    "neither time nor memory of a step",
    "num-(hidden-)?layers|hidden-(size|dim)|(ffn|intermediate)(-hidden)?-size|num-(attention-heads|experts)"
    "|num-(query-groups|key-value-heads)|vocab-size": "MODEL: the config.json of that shape",
    "q|quiet|silent": "--json, which prints the answer alone",
}
"""What flags that foreshard lacks are called here, by a pattern of the flag without dashes."""


def option_name(name: str) -> str:
    """Return an option by our name of it, words joined by hyphens.

    Examples
    --------
    >>> option_name("tensor_parallel"), option_name("mbs"), option_name("training.seq_len")
    ('tp', 'micro-batch', 'seq')
    """
    word = re.sub(r"^(training|parallelism)\.", "", name.lower()).replace("_", "-")  # tables of torchtitan
    return _OPTIONS.get(word, word)


def switch(name: str, value: Any) -> tuple[str, Any]:
    """Return an option and its value; a switch of other tools that is on is our option of that value.

    One that is off says nothing, but that nothing is recomputed.

    Examples
    --------
    >>> switch("gradient-checkpointing", True), switch("gradient-checkpointing", False)
    (('recompute', 'full'), ('recompute', 'none'))
    >>> switch("fp8", False), switch("tp", 2)
    (('fp8', None), ('tp', 2))
    """
    if name not in SWITCHES or not isinstance(value, bool):
        return name, value
    ours, on = SWITCHES[name]
    off = (ours, "none") if name == "gradient-checkpointing" else (name, None)
    return (ours, on) if value else off


def meant(name: str) -> str | None:
    """Return what an option that foreshard lacks is called here, None where nothing comes near.

    Examples
    --------
    >>> meant("--gradient_checkpointing")
    '--recompute full'
    """
    plain = name.lstrip("-").lower().replace("_", "-")
    return next((ours for pattern, ours in _MEANT.items() if re.fullmatch(pattern, plain)), None)


def unknown_option(name: str, known: Iterable[str], *, key: str | None = None) -> SpecError:
    """Return the error of an option that is none of the known ones, with what it is called here as the fix.

    Examples
    --------
    >>> print(unknown_option("deadline", ["max_hours"]))
    deadline: unknown option 'deadline'. Options are max_hours. Write --max-hours.
    """
    error = unknown("option", name, known, key=key or name, rule="Options are", otherwise="Leave it out")
    ours = meant(name)
    error.fix = f"Write {ours}" if ours else error.fix
    return error
