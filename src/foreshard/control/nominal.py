"""What a job takes on a cluster before anything is measured: seconds and bytes of layers, links, prices.

Seconds are the analytical engine's, bytes the memory model's; one device runs a stage of its own, and the
layers are those of a plan, 0 (embedding) to L + 1 (head). Scenarios are simulated with these numbers, and a
run whose costs were not measured starts from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from foreshard.catalog.memory_profiles import profile_of
from foreshard.catalog.stacks import attention_on
from foreshard.control.slots import J_PER_KWH, Chain, State
from foreshard.cost.energy import WAITING_POWER
from foreshard.cost.memory import StageLoad, stage_memory
from foreshard.cost.memory_activations import recompute_of, stage_activations
from foreshard.cost.memory_states import stage_states
from foreshard.errors import SpecError
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.device import Device
from foreshard.spec.model import Block, Model

_PARTS = (1, 2, 4, 8, 16)
"""Parts of a model that stages are weighed at for what they hold beside their layers."""


def predicted_chain(request: PlanRequest, micro_batch: int) -> Chain:
    """Return the layers of a model on every device of a cluster, as predicted.

    What a stage holds beside its layers (buffers, work space, what the device and its allocator keep) is
    taken off the memory of a device: the most of the stages that it has room for.

    Raises
    ------
    SpecError
        When a device cannot compute in the precision.
    """
    cluster, model = request.cluster, request.model
    seconds = [_layer_s(request, g, micro_batch) for g in range(len(cluster.nodes))]
    layers = _layer_bytes(request, micro_batch)
    memory = [
        group.device.capacity_bytes - _beside_bytes(request, g, micro_batch, layers)
        for g, group in enumerate(cluster.nodes)
    ]
    groups = [g for g, group in enumerate(cluster.nodes) for _ in range(group.num_devices)]
    return Chain(
        layer_s=np.array([seconds[g] for g in groups]),
        boundary_bytes=np.full(
            model.num_layers + 1, 2.0 * model.hidden * request.seq_len * request.setup.element_bytes
        ),
        memory_bytes=np.array([memory[g] for g in groups]),
        **layers,
    )


def cluster_state(cluster: Cluster) -> tuple[State, np.ndarray]:
    """Return a cluster as it is stated, every rank at nominal speed, and the inter-rack link of each pair.

    Prices, powers and carbon that are not stated count as 0; `unstated` names them.

    Returns
    -------
    state : State
    link_of : ndarray of int, shape (devices, devices)
        Index into `cluster.links` of the link that a pair of devices uses, -1 for none.
    """
    groups = [cluster.node_group_of(rank) for rank in range(cluster.num_devices)]
    rate, latency_s, link_of = _links(cluster)
    busy, idle = np.array([power_w(group) for group in groups]).T
    state = State(
        speed=np.ones(len(groups)),
        available=np.ones(len(groups), dtype=bool),
        bandwidth_bytes_per_s=rate,
        latency_s=latency_s,
        usd_per_h=np.array([(group.usd_per_h or 0.0) / group.per_node for group in groups]),
        busy_w=busy,
        idle_w=idle,
        usd_per_byte=np.zeros_like(rate),
        kg_per_j=np.array([group.carbon_kg_per_kwh or 0.0 for group in groups]) / J_PER_KWH,
    )
    return state, link_of


def power_w(group: NodeGroup) -> tuple[float, float]:
    """Return the power of a device, busy and idle: as stated, else from its power limit."""
    busy = group.device.tdp_w if group.busy_w is None else group.busy_w
    return busy, WAITING_POWER * busy if group.idle_w is None else group.idle_w


def _layer_s(request: PlanRequest, group: int, micro_batch: int) -> np.ndarray:
    """Return seconds per sample of every layer on the devices of a node group."""
    device = request.cluster.nodes[group].device
    if not device.supports(request.precision):
        raise SpecError(
            f"{device.name} has no {request.precision}",
            key="precision",
            value=request.precision,
            rule="Every device must compute in the precision of the job",
            fix="Name another precision",
        )
    kind = StageKind(node_group=group, tp=1, inner_dp=1, micro_batch=micro_batch, recompute="none", zero=1)
    problem = price_stages(request, (group,), extra=(kind,), compute_only=True)
    row = problem.time_s[list(problem.names).index(kind)]
    places = request.model.num_layers + 2
    return np.array([row[problem.types[i, i + 1]] for i in range(places)]) / micro_batch


def _layer_bytes(request: PlanRequest, micro_batch: int) -> dict[str, np.ndarray]:
    """Return the bytes of every layer: what lasts through a step, and what each micro-batch keeps."""
    layers, framework = request.model.num_layers + 2, request.framework
    each = [(layer, layer + 1) for layer in range(layers)]
    single, double = (_load(request, each, request.cluster.devices, micro_batch, n) for n in (1.0, 2.0))
    profile, wide = profile_of(framework), np.ones(layers)
    states = stage_states(single, framework, profile)
    one, two = (stage_activations(load, framework, profile).saved for load in (single, double))
    return {
        "sync_bytes": states.gradients * wide,
        "state_bytes": (states.parameters + states.gradients + states.optimizer) * wide,
        "saved_bytes": np.maximum(two - one, 0.0) * wide / micro_batch,
    }


def _beside_bytes(
    request: PlanRequest, group: int, micro_batch: int, layers: Mapping[str, np.ndarray]
) -> float:
    """Return the most that a stage on the devices of a node group holds beside the bytes of its layers.

    Of the stages that fit, and of one that fills the device: what an allocator keeps grows with a stage.
    """
    blocks, device = request.model.num_layers, request.cluster.nodes[group].device
    own = layers["state_bytes"] + micro_batch * layers["saved_bytes"]
    most = 0.0
    parts = [part for part in reversed(_PARTS) if part <= blocks]
    first = [(0, 1 + blocks // n) for n in parts[:-1]]
    last = [(1 + blocks - math.ceil(blocks / n), blocks + 2) for n in parts[:-1]]
    for ends in (first, last):
        stages = [*ends, (0, blocks + 2)]
        peak = stage_memory(_load(request, stages, (device,), micro_batch, 1.0), request.framework).peak
        beside = peak - [own[start:stop].sum() for start, stop in stages]
        fits = peak <= device.capacity_bytes
        full = np.interp(device.capacity_bytes, peak, beside)
        most = max(most, float(full), float(beside[fits].max(initial=0.0)))
    return most


def _load(
    request: PlanRequest,
    stages: Sequence[tuple[int, int]],
    devices: Sequence[Device],
    micro_batch: int,
    in_flight: float,
) -> StageLoad:
    """Return what a rank holds of each of some stages, layers [start, stop), as a prediction takes it."""
    model, setup = request.model, request.setup
    last = model.num_layers + 2
    counts = [
        np.array([sum(other == block for other in _blocks(model, stage)) for stage in stages], float)
        for block, _ in model.block_kinds()
    ]
    ends = np.array([(start == 0, stop == last) for start, stop in stages], float).T
    unfused = [device for device in devices if attention_on(request.framework, device) == "unfused"]
    alone = {"tp": 1.0, "cp": 1.0, "ep": 1.0, "etp": 1.0, "sp": 0.0, "shard": 1.0}
    return setup.load(
        setup.rank(**alone, dp=2.0, zero=0.0, micro_batch=float(micro_batch)),
        counts=counts,
        has_embedding=ends[0],
        has_head=ends[1],
        in_flight=in_flight,
        num_micro_batches=1e6,
        num_stages=np.where(ends.all(0), 1.0, 2.0),
        devices=(*unfused, *devices)[:1],
        recompute=recompute_of("none", 1),
    )


def _blocks(model: Model, stage: tuple[int, int]) -> Sequence[Block]:
    """Return the blocks of a stage; its layers count the embedding and the head."""
    start, stop = stage
    return model.blocks[max(start - 1, 0) : max(stop - 1, 0)]


def _links(cluster: Cluster) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rate, latency and link between racks of every pair of devices."""
    width = cluster.num_devices
    groups = [cluster.node_group_of(rank) for rank in range(width)]
    nodes = [cluster.node_of(rank) for rank in range(width)]
    joins = {frozenset(link.between): k for k, link in enumerate(cluster.links)}
    rate, delay = np.full((width, width), np.inf), np.zeros((width, width))
    link_of = np.full((width, width), -1)
    for u in range(width):
        for v in range(width):
            a, b = groups[u], groups[v]
            if u == v:
                continue
            if nodes[u] == nodes[v]:
                rate[u, v] = a.device.link_bytes_per_s or a.device.pcie_bytes_per_s or a.nic_bytes_per_s
                continue
            # A device has its part of its node's card, and no more than the other end takes.
            rate[u, v] = min(a.nic_bytes_per_s / a.per_node, b.nic_bytes_per_s / b.per_node)
            delay[u, v] = max(a.nic_latency_s, b.nic_latency_s)
            k = joins.get(frozenset((a.rack or "", b.rack or "")), -1)
            if k >= 0:
                rate[u, v] = min(rate[u, v], cluster.links[k].bandwidth_bytes_per_s)
                delay[u, v] += cluster.links[k].latency_s
                link_of[u, v] = k
    return rate, delay, link_of
