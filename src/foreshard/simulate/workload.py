"""The job and the devices of a scenario in the predictor's own prices: seconds, bytes, rates, dollars.

One device runs a stage of its own; the layers are those of a plan, 0 (embedding) to L+1 (head). Nothing is
modelled here: seconds are the analytical engine's, bytes the memory model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.control.slots import J_PER_KWH, Chain, State
from foreshard.cost.energy import WAITING_POWER
from foreshard.cost.memory import StageLoad, optimizer_state_bytes, stage_memory
from foreshard.errors import SpecError
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.model import Model
from foreshard.spec.scenario import Scenario

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job on devices at stated speeds, prices and rates.

    Attributes
    ----------
    chain : Chain
    state : State
        As stated, all devices there.
    link_of : ndarray of int, shape (devices, devices)
        Link between racks that a pair of devices uses, -1 for none.
    batch, micro_batch : int
        Samples.
    """

    chain: Chain
    state: State
    link_of: np.ndarray
    batch: int
    micro_batch: int

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return self.chain.num_workers

    def at(
        self,
        *,
        speed: np.ndarray,
        price: np.ndarray,
        link: np.ndarray,
        carbon: np.ndarray,
        available: np.ndarray,
    ) -> State:
        """Return the state at factors of the stated speeds, prices, rates between racks and carbon."""
        rate = self.state.bandwidth_bytes_per_s
        if len(link):
            rate = rate * np.append(link, 1.0)[self.link_of]
        return replace(
            self.state,
            speed=speed,
            usd_per_h=self.state.usd_per_h * price,
            available=available,
            bandwidth_bytes_per_s=rate,
            kg_per_j=self.state.kg_per_j * carbon,
        )


def cluster_of(scenario: Scenario) -> Cluster:
    """Return the cluster that a scenario names: a file beside it, or what `load_cluster` knows."""
    if not isinstance(scenario.cluster, str):
        return _inline(scenario)
    if scenario.cluster.endswith(".toml"):
        return load_cluster(str(scenario.path_of(scenario.cluster)))
    return _named(scenario, "cluster", load_cluster)


def model_of(scenario: Scenario) -> Model:
    """Return the model that a scenario names."""
    return _named(scenario, "model", load_model)


def _named(scenario: Scenario, key: str, load: Callable[[str], T]) -> T:
    """Return what a key of the scenario names; an error of the name says in which file it stands."""
    try:
        return load(getattr(scenario, key))
    except SpecError as error:
        if error.file is None:
            error.file, error.key = scenario.file, key
        raise


def _inline(scenario: Scenario) -> Cluster:
    """Return the cluster that stands in the scenario itself."""
    from foreshard.catalog import clusters
    from foreshard.catalog.cluster_file import ClusterFile, links_of, named_device
    from foreshard.spec import codec
    from foreshard.spec.cluster import Network

    file = scenario.file or "scenario"
    table = codec.decode(ClusterFile, scenario.cluster, file=file, key="cluster")
    if table.devices:
        raise SpecError(
            "devices of one's own",
            file=file,
            key="cluster.devices",
            rule="A cluster inside a scenario takes devices of the catalog",
            fix="Name a cluster file",
        )
    assumed: list[str] = []
    nodes = tuple(
        clusters._nodes(one, named_device(one.device, file, f"cluster.nodes[{i}].device"), None, assumed)
        for i, one in enumerate(table.nodes)
    )
    network = Network(kind=table.network.kind, oversubscription=table.network.oversubscription)
    return Cluster(
        name=table.name or scenario.name,
        nodes=nodes,
        network=network,
        links=links_of(table, file),
        assumptions=tuple(dict.fromkeys(assumed)),
    )


def workload(scenario: Scenario, model: Model, cluster: Cluster) -> Workload:
    """Return the prices of a scenario.

    Raises
    ------
    SpecError
        When a device has no price or cannot compute in the precision.
    """
    request = checked_request(
        model,
        cluster,
        global_batch=scenario.global_batch,
        seq_len=scenario.seq_len,
        framework=scenario.framework,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
    )
    groups = [group for group in cluster.nodes for _ in range(group.num_devices)]
    seconds = [_layer_s(request, g, scenario.micro_batch) for g in range(len(cluster.nodes))]
    layer_s = [seconds[g] for g, group in enumerate(cluster.nodes) for _ in range(group.num_devices)]
    wide = 4.0 if scenario.precision in ("fp32", "tf32") else 2.0
    sizes = _sizes(request, scenario.micro_batch)
    chain = Chain(
        layer_s=np.array(layer_s),
        boundary_bytes=np.full(model.num_layers + 1, 2.0 * model.hidden * request.seq_len * wide),
        memory_bytes=np.array([group.device.capacity_bytes for group in groups]),
        **sizes,
    )
    state, link_of = _stated(scenario, cluster, groups)
    return Workload(
        chain=chain,
        state=state,
        link_of=link_of,
        batch=scenario.global_batch,
        micro_batch=scenario.micro_batch,
    )


def _stated(scenario: Scenario, cluster: Cluster, groups: Sequence[NodeGroup]) -> tuple[State, np.ndarray]:
    rate, delay, link_of = _links(cluster)
    watts = np.array([group.device.tdp_w for group in groups])
    state = State(
        speed=np.ones(len(groups)),
        available=np.ones(len(groups), dtype=bool),
        bandwidth_bytes_per_s=rate,
        latency_s=delay,
        usd_per_h=np.array([_usd_per_h(group, scenario) for group in groups]),
        busy_w=watts,
        idle_w=WAITING_POWER * watts,
        usd_per_byte=np.where(link_of >= 0, scenario.egress_usd_per_gb / 1e9, 0.0),
        kg_per_j=np.full(len(groups), scenario.carbon_g_per_kwh / 1e3 / J_PER_KWH),
    )
    return state, link_of


def _usd_per_h(group: NodeGroup, scenario: Scenario) -> float:
    if group.usd_per_h is None:
        raise SpecError(
            f"{group.device.name} has no price",
            file=scenario.file,
            key="cluster",
            rule="Budgets need prices of all devices",
            fix="State usd_per_h of its nodes",
        )
    return group.usd_per_h / group.per_node


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


def _sizes(request: PlanRequest, micro_batch: int) -> Mapping[str, np.ndarray]:
    """Return the bytes of every layer."""
    model, framework = request.model, request.framework
    layers = model.num_layers + 2
    kinds = model.block_kinds()
    counts = np.zeros((len(kinds), layers))
    for i, (block, _) in enumerate(kinds):
        counts[i, 1:-1] = [one == block for one in model.blocks]
    ends = np.eye(layers)[[0, -1]]

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
            activation_bytes_per_element=4.0 if request.precision in ("fp32", "tf32") else 2.0,
            state_bytes=optimizer_state_bytes(request.optimizer, framework.moment_bytes),
            outer_params=model.learned_positions * model.hidden * ends[0],
            embedding_trainable=float(not model.embedding_frozen),
            head_trainable=float(not model.head_frozen),
        )

    one, two = stage_memory(load(1.0), framework), stage_memory(load(2.0), framework)
    wide = np.ones(layers)
    saved = np.maximum(two.activations - one.activations, 0.0) * wide
    return {
        "sync_bytes": one.gradients * wide,
        "state_bytes": (one.parameters + one.gradients + one.optimizer) * wide,
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
