"""The job and the devices of a scenario: what `control.nominal` says of them, and how it changes in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.control.nominal import cluster_state, predicted_chain
from foreshard.control.slots import J_PER_KWH, Chain, State
from foreshard.errors import SpecError
from foreshard.planner.request import checked_request
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.model import Model
from foreshard.spec.scenario import Scenario

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job on devices at stated speeds, prices and rates."""

    chain: Chain
    state: State  # as stated, all devices there
    # int, shape (devices, devices); link between racks that a pair of devices uses, -1 for none
    link_of: np.ndarray
    # batch, micro_batch: samples
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
    from foreshard.catalog.cluster_file import ClusterFile, links_of, named_device, network_of
    from foreshard.spec import codec

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
        clusters._nodes(node, named_device(node.device, file, f"cluster.nodes[{i}].device"), None, assumed)
        for i, node in enumerate(table.nodes)
    )
    return Cluster(
        name=table.name or scenario.name,
        nodes=nodes,
        network=network_of(table, file),
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
    for group in cluster.nodes:
        _check_price(group, scenario)
    state, link_of = cluster_state(cluster)
    state = replace(
        state,
        usd_per_byte=np.where(link_of >= 0, scenario.egress_usd_per_gb / 1e9, 0.0),
        kg_per_j=np.full(cluster.num_devices, scenario.carbon_g_per_kwh / 1e3 / J_PER_KWH),
    )
    return Workload(
        chain=predicted_chain(request, scenario.micro_batch),
        state=state,
        link_of=link_of,
        batch=scenario.global_batch,
        micro_batch=scenario.micro_batch,
    )


def _check_price(group: NodeGroup, scenario: Scenario) -> None:
    if group.usd_per_h is None:
        raise SpecError(
            f"{group.device.name} has no price",
            file=scenario.file,
            key="cluster",
            rule="Budgets need prices of all devices",
            fix="State usd_per_h of its nodes",
        )
