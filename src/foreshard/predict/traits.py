"""What a framework does, as numbers that formulas take: one value, or one per row of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreshard.catalog.kernels import keeps_rate
from foreshard.catalog.memory_profiles import memory_profile
from foreshard.catalog.stacks import attention_constants, attention_on
from foreshard.catalog.training import HOST_CLASSES
from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.plan import COMM_OPTIONS

_GRACE = ("gb200", "gb300", "gh200")
_COMPILING = ("google", "aws")  # XLA and Neuron run a compiled step
_PCIE_4 = 32e9  # of a device whose host link is not published: PCIe 4.0 x16
# NVLink-C2C between Grace and its GPUs, one direction: 450 GB/s (NVIDIA Grace whitepaper, recalled), for one
# Hopper or shared by two Blackwells.
_C2C = {"gh200": 450e9, "gb200": 225e9, "gb300": 225e9}
# Size of a gradient bucket: DistributedDataParallel's bucket_cap_mb, DeepSpeed's reduce_bucket_size
# (runtime/zero/config.py), InternEvo's reduce_bucket_size (configs/7B_sft.py).
_BUCKET_BYTES = {"ddp": 25 * 2**20}
_BUCKET_ELEMENTS = {"deepspeed": 5e8, "megatron-deepspeed": 5e8, "internevo": 512 * 1024.0**2}
# The pipeline engine of DeepSpeed exchanges with a neighbour by one blocking call after another.
_IN_TURN = ("deepspeed", "megatron-deepspeed")
# ZeRO 1 and 2 all-reduce buckets (stage_1_and_2.py use_multi_rank_bucket_allreduce), and so does the
# BF16_Optimizer (bf16_optimizer.py, engine.py buffered_allreduce_fallback).
_SUMS_WHOLE = ("deepspeed", "megatron-deepspeed")
# Of DeepSpeed's max_reuse_distance of 1e9 elements, passed in forward and again in backward
# (partitioned_param_coordinator.py __params_to_release).
_KEPT_ELEMENTS = 5e8
_NARROW = ("fp8", "mxfp8", "nvfp4")
_TIMED = ("fa3", "sdpa")
"""Kernels whose backward was timed alone on Hopper: Shah et al. 2024, figure 6; torch's on an H200
(docs/derivations/kernels.md, section 3)."""
_MASKED = 2.0
"""Times as long as flash attention 2, which takes no mask, that the memory-efficient kernel runs instead:
as the first flash kernel (Dao 2023, arXiv 2307.08691, abstract)."""
_B200_FLOPS_A_CYCLE = 2250e12 / (148 * 1.965e9)  # of a multiprocessor, 16 bit: those of the newest published
_NO_MATRIX_UNITS = ("kepler", "maxwell", "pascal")
# Bytes that torchao moves for an activation and for a weight that two products read: the scale of a tensor
# takes a pass of its own; scales per row take one kernel along each axis and, in between, a transposed copy
# in 16 bit (pytorch/ao 0598012 testing/training/roofline_utils.py get_tensor_memory_traffic_ovhd_s). The
# kernels along the other axis reach a part of a stream's rate: on an H200 (torch 2.11, torchao 0.18) casts
# per row of a Llama-3-8B step, compiled, took 36.8 ms, 2.6 times what these bytes stream in; those of a
# tensor 9.1, as counted. TransformerEngine's current scaling finds the largest value first (cast.cuh,
# recipe/current_scaling.cu).
_OWN_CASTS = {
    "fused": (0.0, 0.0),
    "current": (6.0, 0.0),
    "tensorwise": (6.0, 8.0),
    "rowwise": (2.6 * 8.0, 2.6 * 10.0),
    "blockwise": (0.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Flags (0 or 1), bytes and class numbers of a framework on a device."""

    flash: Any
    masked: Any  # times as long as attention takes where its windows are a mask to the kernel, 0 where not
    timed_backward: Any  # 1 where the backward of flash attention was timed by itself
    wide_softmax: Any  # 1 where softmax without a flash kernel runs in 32 bit, operation by operation
    hopper: Any
    blackwell: Any
    static: Any  # 1 where neither load nor collectives slow the arithmetic
    eager: Any
    norm_cast: Any
    drops: Any  # dropout runs unless arguments say otherwise, whatever the model says
    plain_code: Any  # model code of transformers and peft: norms, rotations, adapters kernel by kernel
    autocasts: Any  # 1 where weights and residual are in 32 bit, and operands cast in front of products
    exact_rows: Any  # rows of a product of the run that take as long as one in 32 bit, where routers are
    host_class: Any
    arm_host: Any
    graphs: Any  # 0 none, 0.5 partial, 1 full CUDA graphs
    loads_aligned: Any  # 1 where matrix units of NVIDIA run products, whose rows begin at 16 bytes
    sm_cycles_per_s: Any  # cycles of all multiprocessors
    grad_bytes: Any
    grad_reduce_bytes: Any
    tp_overlap: Any
    grad_overlap: Any
    param_gather_overlap: Any
    p2p_overlap: Any
    p2p_scatter: Any
    p2p_in_turn: Any  # 1 where a stage exchanges with a neighbour by one blocking call after another
    reduce_whole: Any  # 1 where ZeRO 1 and 2 sum gradients on every rank, which keeps its shard of the sum
    bucket_elements: Any  # of a gradient bucket; 0 where only the first chunk of a pipeline has several
    tensor_async: Any
    grads_fused: Any
    grads_widened: Any
    block_scaled: Any  # casts carry a scale per block of elements
    own_casts: Any  # bytes moved to cast an element of an activation to 8 bit, 0 for a fused kernel's
    own_weight_casts: Any  # of a weight, in forward and backward together
    row_scaled: Any  # CUTLASS runs 8-bit products, whose operands have a scale per row or column
    wide_operands: Any  # tensor parallelism gathers operands of 8-bit products in 16 bit
    any_layout: Any  # 8-bit products take operands along either axis
    expert_overlap: Any
    context_gather: Any
    shared_overlap: Any
    narrow_gather: Any
    regathers: Any  # 1 where sharded weights are gathered again before backward
    regathers_table: Any  # 1 where the embedding is too, though no gradient reads it
    prefetches: Any  # 1 where a layer asks for the weights of the next before it runs
    prefetch: Any  # units of FSDP that are gathered ahead of the one at work
    wrap: Any  # blocks of a unit, 0 where one unit holds the whole model
    kept_elements: Any  # of the last units, which stay gathered from forward to backward
    flat_copies: Any  # 1 where kernels of their own cast weights, and copy them in and out of flat buffers
    holds_units: Any  # 1 where a pipeline gathers and reduces them once a step
    accumulates_whole: Any  # 1 where the last micro-batch alone reduces gradients of sharded weights
    grouped: Any
    uneven_routing: Any
    dropped: Any
    fast_dispatch: Any  # a kernel that sends each token once per node
    watts: Any  # power limit of the device, 0 where it is not published
    dispatch_bytes: Any  # of an element on its way to an expert, 0 for those of an activation
    dispatch_sms: Any
    gather_tokens: Any  # the dispatcher all-gathers tokens instead of sending them
    fused_loss: Any
    loss_bytes: Any  # that a loss moves for a logit, 0 where its kernels were not counted
    param_bytes: Any  # of a gathered weight
    orthogonal: Any  # 1 where updates of matrices are made orthogonal (Muon)
    optimizer_bytes: Any  # moved per parameter of an optimizer step
    once_fitted: Any  # 1 where what a step does once besides is as fitted, 0 where it is counted
    vocab_multiple: Any
    pruned: Any  # 1 where a compiler drops what is recomputed and nobody reads
    host_link_bytes_per_s: Any  # between a device and its host, one direction


def _host_link(device: Device) -> float:
    for name, rate in _C2C.items():
        if device.name.startswith(name):
            return rate
    return float(device.pcie_bytes_per_s) or _PCIE_4


# Bytes a logit, in 16 bit and in 32. Unfused, of Megatron: cast 6, largest 4, minus it 8, exponential 8, sum
# 4, over it 8; backward times the gradient 8, cast 6. Native, the same in compiled parts: cast with the
# largest 6, exponential with its sum 8, over the sum 8; backward 10. Torch, of transformers and torchtitan:
# cast 6, log-softmax 8 at half the rate of a stream, zeros for its gradient 4, its backward 8 at half the
# rate, cast 6 (kernels of a profile on an H200, torch 2.11). Transformer Engine's, read twice with its
# gradient written over it, 6, and in backward times the gradient, 4, is what `loss_traffic` makes of 6.
_LOSS_BYTES = {"unfused": (52.0, 40.0), "native": (32.0, 36.0), "torch": (48.0, 36.0)}


def _loss_bytes(framework: Framework, wide: float) -> float:
    """Return the bytes that a loss moves for a logit, 0 where a compiler joins its operations as it will.

    Source
    ------
    Megatron-LM d98e8a6 core/tensor_parallel/cross_entropy.py VocabParallelCrossEntropy,
    core/fusions/fused_cross_entropy.py; TransformerEngine v2.17 common/triton/cross_entropy.py.
    """
    if framework.cross_entropy == "unfused" and framework.elementwise == "compiled":
        return 0.0
    return _LOSS_BYTES.get(framework.cross_entropy, (0.0, 0.0))[wide > 2.0]


_STATED = (
    *("norm_cast", "p2p_scatter", "tensor_async", "grads_widened", "prefetch", "wrap", "accumulates_whole"),
    *("dispatch_bytes", "dispatch_sms", "vocab_multiple", "grad_bytes"),
)
"""Traits that are as the framework states them."""
_GRAPHS = {"none": 0.0, "partial": 0.5, "full": 1.0}
# Over AdamW's two moments in fp32, read and written: one moment less is 8.
_OPTIMIZER_BYTES = {
    "adamw": 0.0,
    "adamw-8bit": -12.0,
    "adafactor": -14.0,
    "muon": -8.0,
    "lion": -8.0,
    "sgd": -8.0,
}

# Over reading gradient, weight and states once and writing the latter two, in fp32: torch's lists of tensors
# run decay 8, first moment 12, second moment 8 + 12, root 8, its correction 8, epsilon 8, update 16 (AdamW),
# or buffer 8 + 12, update 12 (SGD with momentum) (torch 2.13 optim/adamw.py _multi_tensor_adamw, sgd.py).
_FOREACH_BYTES = {"adamw": 80.0 - 28.0, "sgd": 32.0 - 20.0}
# torch.nn.utils.clip_grad_norm_ reads every gradient for its norm, then scales it, whatever the norm is.
_CLIP_BYTES = 12.0


def update_bytes(framework: Framework, optimizer: str, wide: float = 2.0) -> float:
    """Return the bytes moved per parameter of an optimizer step, where weights have `wide` bytes."""
    masters = memory_profile(framework.memory).weights_are_master
    # Without 16-bit weights the weight itself is the master.
    copies = 0.0 if masters and framework.update != "multi-tensor" else wide
    moved = framework.grad_bytes + 4.0 * framework.moment_bytes + 2.0 * framework.master_bytes + copies
    moved = max(4.0, moved + _OPTIMIZER_BYTES[optimizer])
    listed = _FOREACH_BYTES.get(optimizer, 0.0) if framework.update == "foreach" else 0.0
    return moved + listed + framework.clips * _CLIP_BYTES


def has_arm_host(device: Device) -> bool:
    """Return whether the host of a device is Grace."""
    return device.name.startswith(_GRACE)


def launches_kernels(device: Device) -> bool:
    """Return whether the host launches the kernels of eager PyTorch one by one."""
    return device.vendor not in _COMPILING


def traits_of(
    framework: Framework,
    device: Device,
    *,
    zero: Any,
    optimizer: str = "adamw",
    comm: Mapping[str, bool] | None = None,
    precision: str = "bf16",
) -> Traits:
    """Return the numbers of a framework at a ZeRO level or several; `comm` overrides what overlaps."""
    options = {name: 1.0 * (comm or {}).get(name, framework.hides(name, zero)) for name in COMM_OPTIONS}
    if framework.host not in HOST_CLASSES:
        raise SpecError(f"unknown host class {framework.host!r}", key="framework.host", value=framework.host)
    wide = 4.0 if precision in ("fp32", "tf32") else 2.0
    # Scales of rows are not those of the shards that are gathered.
    narrow = precision == "fp8" and framework.fp8_recipe != "rowwise"
    gathers_narrow = 1.0 * narrow * options["narrow_gather"]
    gathers_narrow = 1.0 if framework.fp8_params and precision in _NARROW else gathers_narrow
    memory = memory_profile(framework.memory)
    own_casts, own_weight_casts = _OWN_CASTS[framework.fp8_recipe if precision == "fp8" else "fused"]
    return Traits(
        flash=float(attention_on(framework, device) != "unfused"),
        masked=framework.masked * (_MASKED if attention_on(framework, device) == "fa2" else 1.0),
        timed_backward=float(device.arch == "hopper" and attention_constants(framework, device) in _TIMED),
        # The fused kernel takes scores in 16 bit alone (megatron/model/fused_softmax.py).
        wide_softmax=float(framework.softmax == "wide" or (wide > 2.0 and not framework.sdpa)),
        hopper=float(device.arch == "hopper"),
        blackwell=float(device.arch == "blackwell"),
        static=float(keeps_rate(device, precision)),
        eager=float(framework.elementwise == "eager"),
        drops=float(memory.default_dropout),
        plain_code=float(memory.eager_norm and framework.elementwise != "compiled"),
        autocasts=float(memory.autocast_bytes > 0 and precision not in ("fp32", "tf32")),
        exact_rows=_exact_rows(device, precision) if memory.eager_norm else 1.0,
        host_class=float(HOST_CLASSES.index(framework.host)),
        arm_host=float(has_arm_host(device)),
        graphs=_GRAPHS[framework.cuda_graphs],
        loads_aligned=float(
            device.vendor == "nvidia" and device.arch not in _NO_MATRIX_UNITS and precision != "fp32"
        ),
        sm_cycles_per_s=sm_cycles_per_s(device),
        grad_reduce_bytes=max(float(framework.grad_reduce_bytes), wide if wide > 2.0 else 0.0),
        p2p_in_turn=float(framework.name in _IN_TURN),
        reduce_whole=float(framework.name in _SUMS_WHOLE),
        bucket_elements=_bucket_elements(framework),
        grads_fused=float(framework.grads_accumulate_fused),
        block_scaled=float(
            precision in ("mxfp8", "nvfp4") or (precision == "fp8" and framework.fp8_recipe == "blockwise")
        ),
        own_casts=own_casts,
        own_weight_casts=own_weight_casts,
        row_scaled=float(precision == "fp8" and _scales_rows_by_cutlass(framework, device)),
        wide_operands=float(framework.fp8_recipe == "rowwise"),
        any_layout=float(device.arch == "blackwell" and not device.name.startswith("rtx")),
        regathers=1.0,
        regathers_table=float(framework.fsdp == "zero3" or memory.units),
        prefetches=float(framework.explicit_prefetch),
        kept_elements=_KEPT_ELEMENTS if framework.fsdp == "zero3" else 0.0,
        flat_copies=float(framework.fsdp == "fsdp2"),
        holds_units=0.0,
        # A graph knows no counts of tokens but those of a capacity: its experts take them from the device.
        grouped=float(
            framework.grouped_gemm or (framework.cuda_graphs == "full" and framework.routing != "dropped")
        ),
        uneven_routing=float(framework.routing == "learned"),
        dropped=float(framework.routing == "dropped"),
        fast_dispatch=float(framework.dispatcher in ("deepep", "hybridep")),
        watts=float(device.tdp_w or 0.0),
        gather_tokens=float(framework.dispatcher == "allgather"),
        fused_loss=float(framework.cross_entropy in ("te", "chunked")),
        loss_bytes=_loss_bytes(framework, wide),
        param_bytes=wide - gathers_narrow * (wide - 1.0),
        orthogonal=float(optimizer == "muon"),
        optimizer_bytes=update_bytes(framework, optimizer, wide),
        once_fitted=float(framework.update == "multi-tensor"),
        pruned=float(framework.elementwise == "compiled"),
        host_link_bytes_per_s=_host_link(device),
        **{name: float(getattr(framework, name)) for name in _STATED},
        **options,
    )


def _exact_rows(device: Device, precision: str) -> float:
    """Return how much longer a product takes in 32 bit, which torch does not round to TF32 unless told to."""
    exact = device.peak_flops_per_s.get("fp32", 0.0)
    return max(device.peak(precision) / exact, 1.0) if exact and device.supports(precision) else 1.0


def sm_cycles_per_s(device: Device) -> float:
    """Return cycles a second of all multiprocessors; where not published, those of a B200 by its peak."""
    published = device.num_sms * device.clock_hz
    return published or max(device.peak_flops_per_s.get("bf16", 0.0), 1.0) / _B200_FLOPS_A_CYCLE


def _scales_rows_by_cutlass(framework: Framework, device: Device) -> bool:
    """Return whether products with scales per row are CUTLASS's: cuBLASLt has them from 12.9 on, on Hopper.

    Those took as long on an H200 as products with a scale of the tensor (torch 2.11).

    Source
    ------
    pytorch/pytorch issue 153555, pull requests 160693 and 166744.
    """
    return framework.fp8_recipe == "rowwise" and not (framework.rows_by_cublas and device.arch == "hopper")


def _bucket_elements(framework: Framework) -> float:
    """Return the elements after which a gradient bucket leaves; what is not known is taken as Megatron."""
    if framework.bucket_bytes:
        return framework.bucket_bytes / framework.grad_bytes
    if framework.name in _BUCKET_BYTES:
        return _BUCKET_BYTES[framework.name] / framework.grad_bytes
    return _BUCKET_ELEMENTS.get(framework.name, 0.0)
