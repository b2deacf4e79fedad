"""Words of other tools: those that mean one of ours, and what to write for those that do not.

An entry counts only where its words are among the known ones, so one table serves every vocabulary:
precisions, optimizers, schedules, offloads, engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from foreshard.errors import did_you_mean

_SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}
_SPELLINGS |= {"float64": "fp64", "double": "fp64", "gpu": "cuda"}
_SPELLINGS |= {
    **dict.fromkeys(("bfloat", "bf16-mixed", "mixed-bf16"), "bf16"),
    **dict.fromkeys(("fp16-mixed", "mixed-fp16", "16-mixed"), "fp16"),
    **dict.fromkeys(("fp8-mixed", "mixed-fp8", "te-fp8", "fp8-hybrid", "fp8-e4m3"), "fp8"),
    **dict.fromkeys(("float", "single", "fp32-true", "32-true"), "fp32"),
    **dict.fromkeys(
        ("adam", "adam-w", "adamw-torch", "adamw-torch-fused", "fused-adam", "fused-adamw"), "adamw"
    ),
    **dict.fromkeys(("distributed-adam", "adamw-apex-fused", "apex-adam", "fusedadam"), "adamw"),
    **dict.fromkeys(("adam8bit", "adam-8bit", "adamw8bit", "8bit-adam", "8bit-adamw"), "adamw-8bit"),
    **dict.fromkeys(("moonlight", "dist-muon", "distributed-muon"), "muon"),
    **dict.fromkeys(("adamw-bnb-8bit", "bnb-adamw-8bit"), "adamw-8bit"),
    **dict.fromkeys(("interleaved-1f1b", "interleaved1f1b", "1f1b-interleaved"), "interleaved"),
    **dict.fromkeys(("1f1b-flush", "pipedream-flush", "one-f-one-b", "schedule1f1b"), "1f1b"),
    **dict.fromkeys(("afab", "all-forward-all-backward", "schedulegpipe"), "gpipe"),
    **dict.fromkeys(("off", "no", "false"), "none"),
    "alpha-beta": "closed-form",
    "standard": "alltoall",
    **dict.fromkeys(("allreduce", "ar"), "all-reduce"),
    **dict.fromkeys(("allgather", "ag"), "all-gather"),
    **dict.fromkeys(("reducescatter", "rs"), "reduce-scatter"),
    **dict.fromkeys(("alltoall", "a2a", "all2all"), "all-to-all"),
    "bcast": "broadcast",
    **dict.fromkeys(("p2p", "sendrecv", "send-recv", "point-to-point"), "send"),
    **dict.fromkeys(("tree", "double-binary-tree", "nccl-tree"), "double-tree"),
    **dict.fromkeys(("rhd", "recursive-halving-doubling"), "halving-doubling"),
    **dict.fromkeys(("throughput", "speed", "fastest", "step-time", "tokens-per-s"), "time"),
    **dict.fromkeys(("cheapest", "price", "usd", "money", "dollars"), "cost"),
    **dict.fromkeys(("power", "joules", "kwh"), "energy"),
    **dict.fromkeys(("google", "google-cloud", "gce"), "gcp"),
    **dict.fromkeys(("amazon", "ec2"), "aws"),
    **dict.fromkeys(("microsoft", "ms-azure"), "azure"),
    **dict.fromkeys(("flash-attention-2", "flash2", "fa-2", "flash-attn-2", "flashattention2"), "fa2"),
    **dict.fromkeys(("flashattention-2", "flash-attn2", "flash-attention2"), "fa2"),
    **dict.fromkeys(("flash-attention-3", "flash3", "fa-3", "flash-attn-3", "flashattention3"), "fa3"),
    **dict.fromkeys(("flashattention-3", "flash-attn3", "flash-attention3"), "fa3"),
    **dict.fromkeys(("flash-attention-1", "flash1", "fa-1", "flashattention-1"), "fa1"),
    **dict.fromkeys(("eager", "math", "naive", "local"), "unfused"),
    **dict.fromkeys(("mem-efficient", "memory-efficient", "xformers", "efficient-attention"), "efficient"),
    **dict.fromkeys(("current", "current-scaling", "per-tensor", "fp8-cs"), "tensorwise"),
    **dict.fromkeys(("delayed-scaling", "fp8-ds"), "delayed"),
    **dict.fromkeys(("per-row", "row-wise"), "rowwise"),
    **dict.fromkeys(("block", "block-wise", "per-block", "128x128", "fp8-sc"), "blockwise"),
    **dict.fromkeys(("cudnn-attention", "fused-cudnn"), "cudnn"),
    **dict.fromkeys(("zbh1", "zb1", "zero-bubble-h1", "zero-bubble", "zerobubble"), "zb-h1"),
    **dict.fromkeys(("zbh2", "zb2", "zero-bubble-h2"), "zb-h2"),
    **dict.fromkeys(("zb-v", "zbvzerobubble", "zbv-zero-bubble", "zero-bubble-v"), "zbv"),
    **dict.fromkeys(("dual-pipe", "dualpipe-bidirectional"), "dualpipe"),
    **dict.fromkeys(("dualpipe-v", "dual-pipe-v"), "dualpipev"),
}
"""Ours of each word that means it alone, in lower case and joined by hyphens."""

_MEANT = {
    "fp64": "fp32",
    "double": "fp32",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "fp4": "nvfp4",
    "mxfp4": "nvfp4",
    "momentum": "sgd",
    "looped-bfs": "interleaved",
    "vpp": "interleaved",
    "pipedream": "1f1b",
    "zb": "zb-h1",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zero-bubble": "zb-h1",
    "zbvzerobubble": "zbv",
    "interleavedzerobubble": "zb-h1",
    "opt": "optimizer",
    "optimizer-states": "optimizer",
    "states": "optimizer",
    "act": "activations",
    "checkpoints": "activations",
}
"""What is meant by words of other tools, by the word in lower case; only known words are suggested."""


_BETWEEN: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    **dict.fromkeys(
        ("mixed", "amp", "mixed-precision", "autocast"),
        ((("bf16", "fp16"), "mixed precision is either, with fp32 master weights"),),
    ),
    "16": ((("bf16", "fp16"), "two formats have 16 bits"),),
    "32": ((("fp32", "tf32"), "tf32 has the products of fp32 in 19 bits"),),
    "8": ((("fp8", "mxfp8"), "two formats have 8 bits"),),
    "hybrid": ((("fp8",), "e4m3 forward and e5m2 backward"),),
    **dict.fromkeys(
        ("bf16-true", "pure-bf16", "16-true"), ((("bf16",), "fp32 master weights are then counted too"),)
    ),
    **dict.fromkeys(
        ("int8", "int4", "nf4", "4bit", "8bit"),
        ((("bf16", "fp8"), "quantised weights of an inference or QLoRA format are not modelled"),),
    ),
    "dion": ((("muon",), "it makes updates of low rank orthogonal, which is not modelled"),),
    **dict.fromkeys(
        ("signsgd", "rmsprop", "adagrad", "lars", "nesterov"),
        ((("sgd",), "one state of each weight, as its momentum"),),
    ),
    **dict.fromkeys(("lamb", "nadam", "radam", "adan"), ((("adamw",), "two states of each weight"),)),
    **dict.fromkeys(
        ("shampoo", "soap", "galore", "adam-mini", "sophia"),
        ((("adamw", "adafactor"), "factored or projected states are between theirs"),),
    ),
    **dict.fromkeys(
        ("paged-adamw-8bit", "paged-adamw-32bit", "cpu-adam", "deepspeedcpuadam"),
        ((("adamw", "adamw-8bit"), "add --offload optimizer for states in host memory"),),
    ),
    **dict.fromkeys(
        ("flash", "fa", "flash-attention", "flash-attn", "flashattn", "flashattention"),
        ((("fa2", "fa3"), "FlashAttention has several releases"),),
    ),
    "sdpa": (
        (("fa2", "cudnn", "efficient"), "torch's SDPA takes one of them; leave it out for the usual one"),
    ),
    **dict.fromkeys(
        ("te", "fused", "transformer-engine"),
        ((("cudnn", "fa2", "unfused"), "Transformer Engine takes one of them; leave it out for cudnn"),),
    ),
    **dict.fromkeys(
        ("fa4", "flash4", "flex-attention", "ring", "splash", "sage", "linear"),
        ((("fa2", "cudnn"), "that kernel is not modelled"),),
    ),
    "flex": (
        (("fa2", "cudnn"), "that kernel is not modelled"),
        (("deepep", "hybridep"), "Megatron's flex dispatcher runs either"),
    ),
    **dict.fromkeys(
        ("accelerate", "trainer", "hf", "transformers", "trl", "pytorch", "torch", "ddp", "fsdp2"),
        ((("fsdp", "deepspeed"), "what the Trainer and Accelerate run, as they are configured"),),
    ),
    **dict.fromkeys(
        ("nemo", "megatron-core", "megatron-lm", "mcore", "megatron-bridge"),
        ((("megatron",), "flags of Megatron-LM, which it is built on"),),
    ),
    "torchtitan@0.3": (
        (("torchtitan@0.2",), "later releases are configured by Python code, which is not read"),
    ),
    "params": ((("all", "cpu"), "weights alone are not offloaded"),),
    "parameters": ((("all", "cpu"), "weights alone are not offloaded"),),
    **dict.fromkeys(
        ("nvme", "zero-infinity", "ssd", "disk"),
        ((("optimizer", "cpu"), "offload to disks is not modelled, to host memory it is"),),
    ),
    **dict.fromkeys(("true", "on", "yes", "host"), ((("cpu", "optimizer"), "say what is offloaded"),)),
    **dict.fromkeys(("simulator", "simulation", "des"), ((("event",), "it simulates shared resources"),)),
    **dict.fromkeys(("fast", "closed-form", "formula"), ((("analytical",), "closed formulas"),)),
    **dict.fromkeys(
        ("flow", "packet"),
        (
            (("event",), "or add --network flow to another engine"),
            (("flow", "closed-form"), "transfers share links and NICs, or take their time alone"),
        ),
    ),
    **dict.fromkeys(
        ("nccl", "rccl", "default", "library"), ((("auto",), "the library chooses, as when it is not given"),)
    ),
    **dict.fromkeys(
        ("nvls", "double-tree", "double-binary-tree"), ((("tree",), "NCCL's Tree, NVLS and NVLSTree"),)
    ),
}
"""What to write for words of no single meaning here, and why; an entry counts where its words are known."""
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
    for ours, why in _BETWEEN.get(word, ()):
        if set(ours) <= set(known):
            return f"Write {' or '.join(ours)}: {why}"
    if word in _BETWEEN or word in _FOREIGN:
        return None
    meant = _MEANT.get(word)
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
