"""What a job takes on a cluster before anything is measured: seconds and bytes of layers, links, prices.

Seconds are the analytical engine's, bytes the memory model's; one device runs a stage of its own, and the
layers are those of a plan, 0 (embedding) to L + 1 (head). Scenarios are simulated with these numbers, and a
run whose costs were not measured starts from them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreshard.catalog.stacks import attention_on
from foreshard.control.slots import J_PER_KWH, Chain, State
from foreshard.cost.energy import WAITING_POWER
from foreshard.cost.memory import StageLoad, optimizer_state_bytes, stage_memory, table_state_bytes
from foreshard.errors import SpecError
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.spec.cluster import Cluster, NodeGroup

_WIDE_PRECISIONS = ("fp32", "tf32")
"""Precisions whose activations take 4 bytes an element; all others take 2."""


def predicted_chain(request: PlanRequest, micro_batch: int) -> Chain:
    """Return the layers of a model on every device of a cluster, as predicted.

    Raises
    ------
    SpecError
        When a device cannot compute in the precision.
    """
    cluster, model = request.cluster, request.model
    seconds = [_layer_s(request, g, micro_batch) for g in range(len(cluster.nodes))]
    devices = [(g, group.device) for g, group in enumerate(cluster.nodes) for _ in range(group.num_devices)]
    element_bytes = 4.0 if request.precision in _WIDE_PRECISIONS else 2.0
    return Chain(
        layer_s=np.array([seconds[g] for g, _ in devices]),
        boundary_bytes=np.full(model.num_layers + 1, 2.0 * model.hidden * request.seq_len * element_bytes),
        memory_bytes=np.array([device.capacity_bytes for _, device in devices]),
        **_layer_bytes(request, micro_batch),
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


def _layer_bytes(request: PlanRequest, micro_batch: int) -> Mapping[str, np.ndarray]:
    """Return the bytes of every layer."""
    model, framework = request.model, request.framework
    layers = model.num_layers + 2
    kinds = model.block_kinds()
    counts = np.zeros((len(kinds), layers))
    for i, (block, _) in enumerate(kinds):
        counts[i, 1:-1] = [other == block for other in model.blocks]
    ends = np.eye(layers)[[0, -1]]
    unfused = any(attention_on(framework, device) == "unfused" for device in request.cluster.devices)

    def load(depth: float) -> StageLoad:
        return StageLoad(
            kinds=tuple((block, counts[i]) for i, (block, _) in enumerate(kinds)),
            has_embedding=ends[0],
            has_head=ends[1],
            hidden=model.hidden,
            vocab=float(model.vocab),
            tied=float(model.tied_embeddings),
            in_flight=depth,
            num_micro_batches=1e6,
            num_stages=2.0,
            micro_batch=float(micro_batch),
            seq_len=float(request.seq_len),
            dp=2.0,
            expert_dp=2.0,
            zero=0.0,
            unfused=float(unfused),
            activation_bytes_per_element=4.0 if request.precision in _WIDE_PRECISIONS else 2.0,
            state_bytes=optimizer_state_bytes(request.optimizer, framework.moment_bytes),
            table_state_bytes=table_state_bytes(request.optimizer, framework.moment_bytes),
            outer_params=model.learned_positions * model.hidden * ends[0],
            embedding_trainable=float(not model.embedding_frozen),
            head_trainable=float(not model.head_frozen),
        )

    single, double = stage_memory(load(1.0), framework), stage_memory(load(2.0), framework)
    wide = np.ones(layers)
    saved = np.maximum(double.activations - single.activations, 0.0) * wide
    return {
        "sync_bytes": single.gradients * wide,
        "state_bytes": (single.parameters + single.gradients + single.optimizer) * wide,
        "saved_bytes": saved / micro_batch,
    }


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
