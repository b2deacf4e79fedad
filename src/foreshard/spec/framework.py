"""What a training framework does at a release: capabilities only, no time.

A framework ships with defaults. Launch scripts change some of them, and plans keep what was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from foreshard.errors import SpecError, did_you_mean, unknown
from foreshard.words import spelled

_FLAG = "--set"
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element of each dtype: `grad_bytes=bf16` means 2."""
_MOST_LAYERS = 4096
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Capabilities of one framework at one release (booleans, dtypes, names), with source.

    attention : unfused | efficient | fa1 | fa2 | fa3 | cudnn | sdpa (what torch prefers); what runs is up
        to the device (catalog.stacks)
    sdpa : attention is torch's scaled_dot_product_attention, which also has a memory-efficient kernel
    masked : it is given a window as a mask, and takes all scores (catalog.stacks)
    softmax : fused | wide   scale, mask and softmax of attention without a flash kernel: one kernel, or
        operation by operation in 32 bit
    elementwise : eager | jit | fused | compiled   how norms, activations and residuals run
    host : name of the host-launch class (catalog/data/training_constants.json)
    nccl : era of the collective library, old | 2.1x | 2.2x
    grad_bytes, grad_reduce_bytes : bytes of a main gradient, and of one on the wire
    master_bytes, moment_bytes : bytes of the master weight, and of one Adam moment
    grads_accumulate_fused : weight-gradient products add straight into the main gradient
    grads_widened : a 16-bit gradient is copied to fp32 before it is added to the main gradient
    tp_overlap, grad_overlap, param_gather_overlap, p2p_overlap, expert_overlap : what is hidden by default
    shared_overlap : shared experts run beside the exchange of tokens, unless that is hidden otherwise
    narrow_gather : with 8-bit products, sharded weights are cast first and gathered in 8 bit
    context_gather : context parallelism gathers keys and values first instead of passing them on a ring
    tensor_async : backward collectives of tensor parallelism run beside the weight-gradient product
    norm_cast : the residual is cast to fp32 before each norm, and both run again in backward
    p2p_scatter : without sequence parallelism, each tensor rank sends its part of a stage's output
    fsdp : none | fsdp1 | fsdp2 | megatron-fsdp | zero3
    pipeline_holds_units : with a pipeline, sharded weights stay gathered from their first forward, and
        gradients whole until the last micro-batch
    accumulates_whole : gradients of sharded weights stay whole until the last micro-batch, which reduces all
    explicit_prefetch : weights of the next layer are asked for before a layer runs; else when the host gets
        there, and experts whose tokens it counts stop it until they are counted
    cuda_graphs : none | partial | full
    grouped_gemm : experts run in one launch; False = one product per local expert, unless a CUDA graph holds
        them and no capacity says how many tokens each gets
    routing : learned | balanced (every expert gets equal tokens) | dropped (capacity factor 1)
    dispatcher : allgather | alltoall | deepep | hybridep
    dispatch_bytes : of an element on its way to an expert; 0: as activations are, which come back as they are
    dispatch_sms : processors that the dispatcher takes from computation beside it (DeepEP's default)
    cross_entropy : unfused | native | te | eager | torch | chunked   torch: its own, of logits cast to fp32
    collectives : algorithm of all-reduces, auto (the library's choice) | ring | tree
    bucket_bytes : of gradients that leave together, 0 for the framework's own buckets
    prefetch : units of FSDP gathered ahead of the one at work, 0 in turn with computation
    wrap : blocks of a unit of FSDP, 0 for one unit that holds the whole model
    update : multi-tensor | fused | foreach   how weights are updated: by multi-tensor kernels of the
        framework, or by torch.optim, in one kernel that reads and writes everything once, or operation by
        operation over lists of tensors
    clips : torch.nn.utils.clip_grad_norm_ runs before the update
    default_recompute : recompute rule unless another is stated
    fp8_params : weights are stored and gathered in 8 bit
    fp8_recipe : fused | current | tensorwise | rowwise | blockwise   how 8-bit operands are made: one kernel
        writes both layouts, with the scale of earlier steps, or a pass finds that of the tensor first
        (TransformerEngine); the same pass, or each row has a scale, each layout a kernel, and communication
        16 bit (both torchao, which cast weights where they are used); 128 elements have a scale, or 128 x 128
        of a weight (DeepSeek-V3, TransformerEngine)
    wide_first, wide_last : layers at either end of the model whose products stay in 16 bit
    wide_groups : products of the other layers that do, of `spec.block.WIDE_GROUPS`, joined by +
    rows_by_cublas : torch comes with a cuBLAS (from 12.9) that has 8-bit products with scales a row
    memory : name of the memory profile
    """

    name: str
    release: str = ""
    attention: str = "cudnn"
    sdpa: bool = False
    masked: bool = False
    softmax: str = "fused"
    elementwise: str = "fused"
    host: str = "megatron-core"
    nccl: str = "2.2x"
    default_zero: int = 1
    default_recompute: str = "none"
    grad_bytes: int = 4
    grad_reduce_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 4
    grads_accumulate_fused: bool = True
    grads_widened: bool = False
    tp_overlap: bool = False
    grad_overlap: bool = False
    param_gather_overlap: bool = False
    p2p_overlap: bool = True
    tensor_async: bool = True
    norm_cast: bool = False
    p2p_scatter: bool = False
    expert_overlap: bool = False
    context_gather: bool = False
    shared_overlap: bool = False
    narrow_gather: bool = False
    fsdp: str = "none"
    pipeline_holds_units: bool = False
    accumulates_whole: bool = False
    explicit_prefetch: bool = True
    cuda_graphs: str = "none"
    grouped_gemm: bool = True
    routing: str = "learned"
    dispatcher: str = "alltoall"
    dispatch_bytes: int = 0
    dispatch_sms: int = 20
    cross_entropy: str = "te"
    collectives: str = "auto"
    bucket_bytes: int = 0
    prefetch: int = 1
    wrap: int = 1
    update: str = "multi-tensor"
    clips: bool = False
    fp8_params: bool = False
    fp8_recipe: str = "fused"
    wide_first: int = 0
    wide_last: int = 0
    wide_groups: str = ""
    rows_by_cublas: bool = False
    vocab_multiple: int = 128
    memory: str = "megatron-core"
    source: str = ""

    @property
    def label(self) -> str:
        """Name and release, as `--framework` takes it."""
        return f"{self.name}@{self.release}" if self.release else self.name

    def recompute(self, rule: str) -> str:
        """Return a recompute rule, its bare ``selective`` as this framework means the word."""
        own = self.default_recompute
        return own if rule.strip().lower() == "selective" and own.startswith("selective:") else rule

    def hides(self, name: str, zero: Any) -> Any:
        """Return whether an option of communication is on by default at a ZeRO level, or at each of several.

        Source
        ------
        DeepSpeed edaa722 runtime/zero/config.py: overlap_comm is on at stage 3 only.
        """
        by_level = self.fsdp == "zero3" and name in ("grad_overlap", "param_gather_overlap")
        return getattr(self, name) & (zero >= 3) if by_level else getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Overrides of `Framework`, by its names of what they set; None is the framework's own.

    With a `grad_bytes` of 6 a gradient of 16 bit is kept beside the main one.
    """

    grad_bytes: Literal[2, 4, 6] | None = None
    grad_reduce_bytes: Literal[2, 4] | None = None
    master_bytes: Literal[2, 4] | None = None
    moment_bytes: Literal[1, 2, 4] | None = None
    cuda_graphs: Literal["none", "partial", "full"] | None = None
    grouped_gemm: bool | None = None
    routing: Literal["learned", "balanced", "dropped"] | None = None
    cross_entropy: Literal["unfused", "native", "te", "eager", "torch", "chunked"] | None = None
    fp8_params: bool | None = None
    clips: bool | None = None
    wide_first: int | None = None
    wide_last: int | None = None

    def stated(self) -> dict[str, Any]:
        """Return what is not left to the framework."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


OVERRIDES: tuple[str, ...] = tuple(one.name for one in fields(Overrides))


@cache
def _known() -> dict[str, tuple[Any, ...]]:
    """Return the values that each override may have, none of a count."""
    found = {}
    for name, hint in get_type_hints(Overrides).items():
        kind = next(part for part in get_args(hint) if part is not type(None))
        found[name] = (False, True) if kind is bool else get_args(kind)
    return found


def checked_override(name: str, value: Any, *, key: str = _FLAG) -> tuple[str, Any]:
    """Return an override by our name of it and its value, or raise SpecError with the key it came by.

    Examples
    --------
    >>> checked_override("grad-bytes", "bf16"), checked_override("cuda_graphs", "full")
    (('grad_bytes', 2), ('cuda_graphs', 'full'))
    """
    ours = str(name).strip().lower().replace("-", "_")
    known = _known().get(ours)
    if known is None:
        rule = "Overrides of a framework are"
        raise unknown("override", str(name), OVERRIDES, key=key, rule=rule, otherwise="Leave it out")
    read = _read(value, ours, known) if isinstance(value, str) else value
    is_count = not known and type(read) is int and 0 <= read <= _MOST_LAYERS
    if not is_count and not any(read == one and type(read) is type(one) for one in known):
        if not known:
            rule = f"{ours} is a number of layers from 0 to {_MOST_LAYERS}"
            raise SpecError(f"{ours} {value!r}", key=key, value=value, rule=rule, fix="Write it like 4")
        shown = ["on", "off"] if known == (False, True) else [str(one) for one in known]
        rule = f"{ours} is one of {', '.join(shown)}"
        fix = did_you_mean(str(value), shown, otherwise="Leave it out for the framework's own")
        raise SpecError(f"{ours} {value!r}", key=key, value=value, rule=rule, fix=fix)
    return ours, read


def _read(text: str, name: str, known: tuple[Any, ...]) -> Any:
    """Return what a word means as a value of an override."""
    word = text.strip().lower()
    if known == (False, True):
        return _SWITCH.get(word, word)
    if name.endswith("_bytes") or not known:
        return int(word) if word.isdecimal() else _BYTES.get(spelled(word, tuple(_BYTES)), word)
    return spelled(word, known)


def checked_overrides(given: Overrides | Mapping[str, Any] | Iterable[str] | str | None) -> Overrides:
    """Return overrides that are given as such, by name, or as texts KEY=VALUE, one or several."""
    if isinstance(given, Overrides):
        return given
    if isinstance(given, str):
        given = (given,)
    if given is not None and not isinstance(given, Iterable):
        rule, fix = "Overrides are by name, or texts KEY=VALUE", "Write overrides={'cuda_graphs': 'full'}"
        raise SpecError(f"overrides {given!r}", key=_FLAG, value=given, rule=rule, fix=fix)
    pairs = given.items() if isinstance(given, Mapping) else map(_pair, given or ())
    return Overrides(**dict(checked_override(name, value) for name, value in pairs))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = str(text).partition("=")
    if not equals:
        rule, fix = "An override is KEY=VALUE", f"Write --set {text}=VALUE"
        raise SpecError(f"{text!r} has no value", key=_FLAG, value=text, rule=rule, fix=fix)
    return name, value
