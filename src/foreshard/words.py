"""Words of other tools: those that mean one of ours, and what to write for those that do not.

An entry counts only where its words are among the known ones, so one table serves every vocabulary:
precisions, optimizers, schedules, offloads, engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from foreshard.errors import did_you_mean

_OTHERS = {
    "bf16": "bfloat16 bfloat bf16-mixed mixed-bf16",
    "fp16": "float16 half fp16-mixed mixed-fp16 16-mixed",
    "fp32": "float32 float single fp32-true 32-true",
    "fp8": "float8 fp8-mixed mixed-fp8 te-fp8 fp8-hybrid fp8-e4m3",
    "fp64": "float64 double",
    "cuda": "gpu",
    "adamw": (
        "adam adam-w adamw-torch adamw-torch-fused fused-adam fused-adamw distributed-adam "
        "adamw-apex-fused apex-adam fusedadam"
    ),
    "adamw-8bit": "adam8bit adam-8bit adamw8bit 8bit-adam 8bit-adamw adamw-bnb-8bit bnb-adamw-8bit",
    "muon": "moonlight dist-muon distributed-muon",
    "interleaved": "interleaved-1f1b interleaved1f1b 1f1b-interleaved",
    "1f1b": "1f1b-flush pipedream-flush one-f-one-b schedule1f1b",
    "gpipe": "afab all-forward-all-backward schedulegpipe",
    "none": "off no false",
    "closed-form": "alpha-beta",
    "alltoall": "standard",
    "all-reduce": "allreduce ar",
    "all-gather": "allgather ag",
    "reduce-scatter": "reducescatter rs",
    "all-to-all": "alltoall a2a all2all",
    "broadcast": "bcast",
    "send": "p2p sendrecv send-recv point-to-point",
    "double-tree": "tree double-binary-tree nccl-tree",
    "halving-doubling": "rhd recursive-halving-doubling",
    "time": "throughput speed fastest step-time tokens-per-s",
    "cost": "cheapest price usd money dollars",
    "energy": "power joules kwh",
    "gcp": "google google-cloud gce",
    "aws": "amazon ec2",
    "azure": "microsoft ms-azure",
    "fa2": (
        "flash-attention-2 flash2 fa-2 flash-attn-2 flashattention2 flashattention-2 flash-attn2 "
        "flash-attention2"
    ),
    "fa3": (
        "flash-attention-3 flash3 fa-3 flash-attn-3 flashattention3 flashattention-3 flash-attn3 "
        "flash-attention3"
    ),
    "fa1": "flash-attention-1 flash1 fa-1 flashattention-1",
    "unfused": "eager math naive local",
    "efficient": "mem-efficient memory-efficient xformers efficient-attention",
    "tensorwise": "current current-scaling per-tensor fp8-cs",
    "delayed": "delayed-scaling fp8-ds",
    "rowwise": "per-row row-wise",
    "blockwise": "block block-wise per-block 128x128 fp8-sc",
    "cudnn": "cudnn-attention fused-cudnn",
    "zb-h1": "zbh1 zb1 zero-bubble-h1 zero-bubble zerobubble",
    "zb-h2": "zbh2 zb2 zero-bubble-h2",
    "zbv": "zb-v zbvzerobubble zbv-zero-bubble zero-bubble-v",
    "dualpipe": "dual-pipe dualpipe-bidirectional",
    "dualpipev": "dualpipe-v dual-pipe-v",
}
"""Words that mean one of ours alone, in lower case and joined by hyphens."""
_SPELLINGS = {word: ours for ours, words in _OTHERS.items() for word in words.split()}

_MEANT = {
    "fp32": "fp64 double",
    "fp8": "e4m3 e5m2",
    "nvfp4": "fp4 mxfp4",
    "sgd": "momentum",
    "interleaved": "looped-bfs vpp",
    "1f1b": "pipedream",
    "zb-h1": "zb zbh1 zero-bubble interleavedzerobubble",
    "zb-h2": "zbh2",
    "zbv": "zbvzerobubble",
    "optimizer": "opt optimizer-states states",
    "activations": "act checkpoints",
}
"""What words of other tools mean, in lower case; only known words are suggested."""
_BETWEEN = {
    "mixed amp mixed-precision autocast": "bf16 or fp16: mixed precision is either, with fp32 master weights",
    "16": "bf16 or fp16: two formats have 16 bits",
    "32": "fp32 or tf32: tf32 has the products of fp32 in 19 bits",
    "8": "fp8 or mxfp8: two formats have 8 bits",
    "hybrid": "fp8: e4m3 forward and e5m2 backward",
    "bf16-true pure-bf16 16-true": "bf16: fp32 master weights are then counted too",
    "int8 int4 nf4 4bit 8bit": (
        "bf16 or fp8: quantised weights of an inference or QLoRA format are not modelled"
    ),
    "dion": "muon: it makes updates of low rank orthogonal, which is not modelled",
    "signsgd rmsprop adagrad lars nesterov": "sgd: one state of each weight, as its momentum",
    "lamb nadam radam adan": "adamw: two states of each weight",
    "shampoo soap galore adam-mini sophia": (
        "adamw or adafactor: factored or projected states are between theirs"
    ),
    "paged-adamw-8bit paged-adamw-32bit cpu-adam deepspeedcpuadam": (
        "adamw or adamw-8bit: add --offload optimizer for states in host memory"
    ),
    "flash fa flash-attention flash-attn flashattn flashattention": (
        "fa2 or fa3: FlashAttention has several releases"
    ),
    "sdpa": "fa2 or cudnn or efficient: torch's SDPA takes one of them; leave it out for the usual one",
    "te fused transformer-engine": (
        "cudnn or fa2 or unfused: Transformer Engine takes one of them; leave it out for cudnn"
    ),
    "fa4 flash4 flex-attention ring splash sage linear flex": "fa2 or cudnn: that kernel is not modelled",
    "flex": "deepep or hybridep: Megatron's flex dispatcher runs either",
    "accelerate trainer hf transformers trl pytorch torch ddp fsdp2": (
        "fsdp or deepspeed: what the Trainer and Accelerate run, as they are configured"
    ),
    "nemo megatron-core megatron-lm mcore megatron-bridge": (
        "megatron: flags of Megatron-LM, which it is built on"
    ),
    "torchtitan@0.3": "torchtitan@0.2: later releases are configured by Python code, which is not read",
    "params parameters": "all or cpu: weights alone are not offloaded",
    "nvme zero-infinity ssd disk": "optimizer or cpu: offload to disks is not modelled, to host memory it is",
    "true on yes host": "cpu or optimizer: say what is offloaded",
    "simulator simulation des": "event: it simulates shared resources",
    "fast closed-form formula": "analytical: closed formulas",
    "flow packet": "event: or add --network flow to another engine",
    "packet flow": "flow or closed-form: transfers share links and NICs, or take their time alone",
    "nccl rccl default library": "auto: the library chooses, as when it is not given",
    "nvls double-tree double-binary-tree": "tree: NCCL's Tree, NVLS and NVLSTree",
}
"""What to write for words of no single meaning, and why; an entry counts where what it names is known."""
_FOREIGN = frozenset(("none",))
"""Words that resemble known ones by their letters alone."""


def plain(text: str) -> str:
    """Return words in lower case, joined by hyphens."""
    return re.sub(r"[\s_]+", "-", text.strip().lower())


def spelled(value: Any, known: Sequence[Any]) -> Any:
    """Return the known word of which a value is another spelling, else the value as it is.

    Examples
    --------
    >>> spelled("BFloat16", ("fp32", "bf16")), spelled("mixed bf16", ("fp32", "bf16"))
    ('bf16', 'bf16')
    """
    if not isinstance(value, str) or value in known:
        return value
    word = plain(value).removeprefix("torch.")
    words = (word, _SPELLINGS.get(word, word))
    return next((ours for one in words for ours in (one, one.replace("-", "")) if ours in known), value)


def hint(text: str, known: Sequence[Any]) -> str | None:
    """Return what to write for a word that is none of the known ones; None where nothing comes near.

    Examples
    --------
    >>> hint("amp", ("bf16", "fp16", "fp32"))
    'Write bf16 or fp16: mixed precision is either, with fp32 master weights'
    >>> hint("chimera", ("gpipe", "1f1b")), hint("gpip", ("gpipe", "1f1b"))
    (None, "Did you mean 'gpipe'?")
    """
    word = plain(text)
    between = [fix for words, fix in _BETWEEN.items() if word in words.split()]
    for fix in between:
        if set(fix.partition(":")[0].split(" or ")) <= set(known):
            return f"Write {fix}"
    if between or word in _FOREIGN:
        return None
    meant = next((ours for ours, words in _MEANT.items() if word in words.split()), None)
    return f"Did you mean {meant!r}?" if meant in known else did_you_mean(text, known)


def zero_level(text: str) -> int | None:
    """Return a ZeRO level, also as zero3, stage 3, off, or FSDP's word for it; None of other words.

    Examples
    --------
    >>> zero_level("ZeRO-3"), zero_level("stage 2"), zero_level("off"), zero_level("SHARD_GRAD_OP")
    (3, 2, 0, 2)
    >>> zero_level("-1")
    """
    low = text.strip().lower()
    if low.startswith("-"):
        return None
    word = re.sub(r"[\s_-]+", "", low)
    named = re.fullmatch(r"(?:zero|stage|zerostage|level)?\+?([0-3])", word)
    if named:
        return int(named[1])
    return {"fullshard": 3, "shardgradop": 2, "noshard": 0, "off": 0, "none": 0, "no": 0}.get(word)
