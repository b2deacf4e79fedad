"""What was assumed to answer, in sentences for whoever reads the prediction."""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.catalog.memory_profiles import memory_profile
from foreshard.catalog.offers import not_offered
from foreshard.catalog.stacks import attention_assumptions, stack_warnings
from foreshard.cost.energy import WAITING_POWER
from foreshard.predict.batch import PlannedRun
from foreshard.predict.placement import nic_senders
from foreshard.predict.rates import watts_of
from foreshard.predict.tasks.host import HOST_MEMORY_BYTES_PER_S
from foreshard.spec.cluster import NodeGroup
from foreshard.spec.plan import Group

_ROUTING = {
    "learned": "experts: a learned router; the fullest rank holds more tokens than the mean, as fitted",
    "balanced": "experts: every expert gets equally many tokens",
    "dropped": "experts: capacity factor 1, tokens beyond it are dropped",
}


_EXPERTS_UNDER_AUTOCAST = (
    "time of experts in 16 bit, memory in fp32; transformers 5 runs them in fp32 where weights are in fp32, "
    "since autocast knows no grouped_mm: load them in bf16, or shard the model with fully_shard"
)
_CASTS_COMPILED = (
    "casts to 8 bit are compiled (torch.compile); eager ones took some 20 times as long on an H200, and the "
    "step twice as long"
)
_COMPILED = (
    "compiled (torch.compile): elementwise operations fused and run again in backward, fewer launches; graph "
    "breaks and the time of compiling are not modelled"
)
_ONE_SHARD = (
    "one device: fully_shard on one rank casts and copies weights before both passes; a Trainer without FSDP "
    "keeps whole weights in fp32 and autocasts (--framework ddp)"
)
_SENT_BY = {
    "allgather": "gathers of all tokens on every rank (--dispatcher)",
    "alltoall": "NCCL's all-to-all, once for each expert (--dispatcher)",
    "deepep": "DeepEP, once for each rank and node",
    "hybridep": "HybridEP, once for each rank and link domain",
}
_NO_GOODPUT = "no data loading, checkpointing, evaluation or failures in the step; goodput is not predicted"
_GOODPUT = (
    "goodput: failures strike at a constant rate, a failed device is replaced within the restart, "
    "a checkpoint counts when it is saved, nothing is evaluated in between"
)


def assumptions(case: PlannedRun, *, goodput: bool = False) -> tuple[str, ...]:
    """Return what was assumed to answer, in plain sentences."""
    plan, framework = case.plan, case.framework
    zero = max(stage.zero for group in plan.groups for stage in group.stages)
    overlap = {
        name: "on" if plan.comm.get(name, framework.hides(name, zero)) else "off"
        for name in ("tp_overlap", "grad_overlap")
    }
    devices = case.cluster.devices
    said = [
        *case.cluster.assumptions,
        *case.model.assumptions,
        f"framework {framework.label}: attention {framework.attention}, "
        f"{8 * framework.grad_bytes}-bit main gradients, "
        f"tensor overlap {overlap['tp_overlap']}, gradient overlap {overlap['grad_overlap']}",
        *_eager(case),
        *_masked(case),
        *_every_expert(case),
        *([_ONE_SHARD] if framework.name == "hf" and zero > 1 and len(plan.ranks) == 1 else ()),
        *stack_warnings(framework, devices),
        *not_offered(plan, framework),
        *attention_assumptions(case.declared, devices),
        _GOODPUT if goodput else _NO_GOODPUT,
    ]
    if case.cluster.network.kind != "flat":
        said.append(
            f"network kind {case.cluster.network.kind}: priced as flat, with its oversubscription only"
        )
    said += dict.fromkeys(
        _shared_bus(nodes)
        for nodes in case.cluster.nodes
        if nodes.nvlink_domain <= 1 and nodes.per_node > 2 and nodes.pcie == "shared"
    )
    said += dict.fromkeys(_one_card(nodes) for nodes in case.cluster.nodes if _sends_alone(case, nodes))
    if watts_of(case) is None:
        said.append("energy: no power limit is known for every device, so it is not predicted")
    else:
        waiting = f"{WAITING_POWER:.0%} of it while waiting (assumed, no measurement shipped)"
        said.append(f"energy: devices at their power limit while computing, {waiting}")
    if _routes(case):
        said.append(_ROUTING[framework.routing])
        if _autocasts(case):
            said.append(_EXPERTS_UNDER_AUTOCAST)
    if any(stage.ep > 1 for group in plan.groups for stage in group.stages):
        said.append(f"tokens are sent to experts by {_SENT_BY[framework.dispatcher]}")
    if plan.compile:
        said.append(_COMPILED)
    if plan.precision == "fp8" and framework.fp8_recipe in ("tensorwise", "rowwise"):
        said.append(_CASTS_COMPILED)
    if any(stage.offload != "none" for group in plan.groups for stage in group.stages):
        rate = f"{HOST_MEMORY_BYTES_PER_S / 1e9:g} GB/s"
        said.append(
            f"offload: moved over the host link; an optimizer on the host gets {rate} of its memory (assumed)"
        )
    said += dict.fromkeys(_short(group) for group in plan.groups if group.share % group.micro_batch)
    if len(plan.ranks) < case.cluster.num_devices:
        idle = case.cluster.num_devices - len(plan.ranks)
        paid = "not powered; nodes without a rank are not paid"
        said.append(f"{idle} of {case.cluster.num_devices} devices are idle, {paid}")
    return tuple(said)


def _shared_bus(nodes: NodeGroup) -> str:
    return (
        f"{nodes.per_node} {nodes.device.name} meet on one PCIe bus, as measured on servers of such cards; "
        'where they meet otherwise, state pcie = "switch" or "host" in a cluster file'
    )


def _sends_alone(case: PlannedRun, nodes: NodeGroup) -> bool:
    """Return whether fewer ranks than a node has devices send to another stage over one card, as assumed."""
    if nodes.nics is not None or nodes.num_nics == nodes.per_node:
        return False
    senders = nic_senders(case.cluster, case.plan) or []
    return any(0 < most < nodes.per_node for stages in senders for most in stages)


def _one_card(nodes: NodeGroup) -> str:
    return (
        f"{nodes.nic_bytes_per_s * 8 / 1e9:g} Gb/s of a node of {nodes.per_node} {nodes.device.name} are one "
        "card, which a rank that sends alone to another stage has to itself; if there are more, state nics "
        "in a cluster file"
    )


def _short(group: Group) -> str:
    """Return what is said of a group whose share is no multiple of its micro-batch."""
    count, samples = group.num_micro_batches, group.share % group.micro_batch
    which = f"the last of {count} micro-batches" if count > 1 else "the only micro-batch"
    part = f"{samples} of {group.micro_batch} samples"
    return f"{which} of a group is short: {part}; not every framework takes that"


def _routes(case: PlannedRun) -> bool:
    """Return whether tokens are routed to some experts, not through all of them."""
    plain = memory_profile(case.framework.memory).eager_norm
    return any(
        block.num_experts and not (plain and block.every_expert) for block, _ in case.model.block_kinds()
    )


def _autocasts(case: PlannedRun) -> bool:
    """Return whether weights are in 32 bit and products cast them; adapters leave them in 16."""
    casts = memory_profile(case.framework.memory).autocast_bytes > 0
    return casts and case.plan.lora is None and case.plan.precision in ("bf16", "fp16")


def _masked(case: PlannedRun) -> Iterator[str]:
    """Yield what a window of attention costs where torch's attention is told of it by a mask."""
    windows = {block.window for block, _ in case.model.block_kinds() if block.window}
    if case.framework.masked and any(window <= case.plan.seq_len for window in windows):
        yield (
            "torch's attention is given windows as a mask: it takes the scores outside of them too, and "
            "every such layer keeps the mask (--attention fa2: flash attention, which knows windows)"
        )


def _every_expert(case: PlannedRun) -> Iterator[str]:
    """Yield what transformers does for a model whose experts it does not route tokens to."""
    kinds = [block for block, _ in case.model.block_kinds() if block.every_expert]
    if kinds and memory_profile(case.framework.memory).eager_norm:
        experts, used = kinds[0].num_experts, kinds[0].top_k
        yield (
            f"transformers sends every token through all {experts} experts of {case.model.name}, "
            f"zeros to those it is not routed to: {experts // used} times their work"
        )


def _eager(case: PlannedRun) -> Iterator[str]:
    """Yield what transformers does for a model that it has no fused attention for."""
    code = memory_profile(case.framework.memory).eager_norm
    codes = {block.attention_code for block, _ in case.model.block_kinds()}
    if not (code and any(codes)):
        return
    if "sinks" in codes:
        yield (
            "attention sinks make rows of scores one longer: kernels for odd rows, slower than those "
            "priced here, are not modelled"
        )
    if case.framework.attention == "unfused":
        yield f"transformers runs no fused attention for {case.model.name}: scores are kept"
    else:
        yield (
            f"transformers has no {case.framework.attention} attention for {case.model.name}; "
            "what it runs keeps the scores (--attention unfused)"
        )
