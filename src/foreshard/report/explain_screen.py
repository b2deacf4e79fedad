"""Each number of a prediction expanded into its formula, with the values of this run, and its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foreshard import quantity
from foreshard.advise.traced_request import Asked, TracedRequest
from foreshard.report.plan_words import counted
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS, Prediction
from foreshard.units import number_of

# What each time part means and where its formula is derived.
_TIME = {
    "compute": "matrix products, attention and memory-bound kernels of forward and backward on the critical "
    "rank; each is tiles shared over processors, bound by rate or memory (docs/derivations/kernels.md 1-5)",
    "recompute": "forward kernels that run again in the backward, as the recompute rule says",
    "tensor_comm": "all-reduce, or all-gather and reduce-scatter under sequence parallelism, four a layer "
    "and micro-batch, less what the framework overlaps (docs/derivations/collectives.md, Forms)",
    "context_comm": "exchange of keys and values between context-parallel ranks, less what attention hides",
    "expert_comm": "dispatch and combine of routed tokens, less what the framework overlaps",
    "pipeline_comm": "sends between stages that the next operation waits for",
    "bubble": "time a stage waits while the pipeline fills and drains, as the schedule orders its work",
    "data_comm": "gradient reduction and weight gathering that no computation hides",
    "optimizer": "bytes of weights, gradients and states that the update streams, over the memory bandwidth",
    "host": "launches that the host issues more slowly than the device works",
    "straggler": "waiting for the slowest rank: a slowdown for each doubling of devices beyond 8, fitted",
}
_OF_TRACE = {
    "compute": "operations as traced, forward and backward, on the critical rank, each a kernel of its own "
    "bound by rate, memory or instructions (docs/traced_modules.md, How it works)",
    "tensor_comm": "sums over the ranks that compute a layer together, which nothing hides",
    "memory parameters": "in 32 bit, and their copies in 16",
    "memory gradients": "in 32 bit",
    "memory optimizer": "moments in 32 bit, sharded from zero 1 on",
    "memory temporary": "what a backward holds on its way, or the optimizer's step where that is more",
}
"""What parts of a traced module's step and memory are, where they are others."""
_MEMORY = {
    "parameters": "weights in the training dtype and their low-precision copies, sharded as zero says",
    "gradients": "main gradients in the framework's dtype, sharded from zero 2 on",
    "optimizer": "master weights and moments, sharded from zero 1 on",
    "activations": "what the forward saves for the backward, for the micro-batches in flight on the stage",
    "temporary": "the largest of logits, working set of a layer, and the optimizer's temporaries at the peak",
    "comm_buffers": "buckets, gathered weights and collective workspaces",
    "reserved": "context of driver and framework, and memory the allocator holds without using it",
}


def explanations(request: Asked, prediction: Prediction) -> dict[str, str]:
    """Return formula, values and source by the name of each number of the prediction.

    What the predictor itself explains comes first and wins.
    """
    found = _all(request, prediction)
    if isinstance(request, TracedRequest):
        found |= {name: words for name, words in _OF_TRACE.items() if name in found}
        del found["energy_j_per_step"]  # not known
    return {**prediction.explain, **{k: v for k, v in found.items() if k not in prediction.explain}}


def _all(request: Asked, prediction: Prediction) -> dict[str, str]:
    return {
        "step_time_s": _sum(prediction.time_breakdown_s, TIME_PARTS, quantity.seconds),
        "step_time_interval_s": _interval(prediction),
        **{name: _TIME[name] for name in TIME_PARTS if prediction.time_breakdown_s.get(name)},
        **_rates(request, prediction),
        "peak_bytes": _sum(
            prediction.memory.breakdown_bytes, MEMORY_PARTS, lambda value: f"{quantity.gib(value)} GiB"
        )
        + f" on rank {prediction.memory.peak_rank} (docs/derivations/memory.md)",
        **{
            f"memory {name}": _MEMORY[name]
            for name in MEMORY_PARTS
            if prediction.memory.breakdown_bytes.get(name)
        },
        "capacity_bytes": "what the driver reports for the device where known, else its datasheet memory",
        **_money(request, prediction),
        "energy_j_per_step": "power limit of the devices while they compute, a stated share of it while they "
        "wait; hosts, switches and cooling are not counted",
    }


def _sum(parts: Mapping[str, float], names: tuple[str, ...], show: Callable[[float], str]) -> str:
    return " + ".join(f"{name} {show(parts[name])}" for name in names if parts.get(name))


def _interval(prediction: Prediction) -> str:
    step = prediction.step_time_s
    ends = ", ".join(
        f"{level:.0%} {low / step:.3f} to {high / step:.3f}"
        for level, (low, high) in prediction.step_time_intervals_s.items()
    )
    return (
        f"{ends} of the step: split-conformal quantiles of measured over predicted on families left out of "
        f"the fit; class: {prediction.evidence}"
    )


def _rates(request: Asked, prediction: Prediction) -> dict[str, str]:
    if isinstance(request, TracedRequest):
        return _traced_rates(request, prediction)
    plan, model = prediction.plan, request.trained
    full = model.flops_per_token(plan.seq_len, False)
    causal = model.flops_per_token(plan.seq_len, True)
    devices = _peaks(request, plan)
    return {
        "tokens_per_s": f"{plan.tokens:,} tokens of a step / {quantity.seconds(prediction.step_time_s)}",
        "mfu": f"{full:.4g} FLOPs a token, full attention, x {plan.tokens:,} tokens / step "
        f"/ ({devices}, dense {plan.precision})",
        "mfu_causal": f"the same with causal attention counted half: {causal:.4g} FLOPs a token",
        "hfu": "as mfu, with the forward work that recompute repeats",
    }


def _traced_rates(request: TracedRequest, prediction: Prediction) -> dict[str, str]:
    plan = prediction.plan
    flops = request.module.flops(plan.groups[0].micro_batch) / plan.groups[0].micro_batch
    batch = number_of(plan.global_batch, "sample")
    return {
        "samples_per_s": f"{batch} of a step / {quantity.seconds(prediction.step_time_s)}",
        "mfu": f"{flops:.4g} FLOPs of forward and backward a sample, as traced, x {batch} / step "
        f"/ ({_peaks(request, plan)}, dense {plan.precision})",
    }


def _peaks(request: Asked, plan: Plan) -> str:
    """Return how many devices of which peak there are."""
    peaks: dict[str, int] = {}
    for rank in plan.ranks:
        device = request.cluster.device_of(rank)
        label = f"{device.name} {device.peak(plan.precision) / 1e12:.4g} TFLOP/s"
        peaks[label] = peaks.get(label, 0) + 1
    return " + ".join(f"{count} x {label}" for label, count in peaks.items())


def _money(request: Asked, prediction: Prediction) -> dict[str, str]:
    if prediction.cost.usd_per_step is None:
        return {"cost": "no price is known for every node; null, not zero"}
    paid = request.cluster.in_use(prediction.plan.ranks)
    if request.usd_per_device_hour is not None:
        rate = (
            f"${request.usd_per_device_hour:g} a device-hour, stated, "
            f"x {number_of(paid.num_devices, 'device')}"
        )
    else:
        hourly = quantity.usd(paid.usd_per_h)
        nodes = number_of(paid.num_nodes, "node")
        rate = f"{hourly} an hour for {nodes}, prices of {prediction.cost.price_date}"
    step = quantity.seconds(prediction.step_time_s)
    many = f"{prediction.plan.tokens:,} {counted(prediction.plan)}"
    return {"cost": f"{rate} x {step} / {many}; idle devices of these nodes are paid too"}
