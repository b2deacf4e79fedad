"""Where the ranks of a plan are: which share a stage's samples, a link domain, the gradients of a layer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.plan import Group, Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Ranks of a stage that are alike: same node group, same samples of each micro-batch."""

    node_group: int
    share: float
    rank: int  # the first of them


def stage_workers(cluster: Cluster, group: Group, stage: Stage) -> tuple[Worker, ...]:
    """Return the kinds of ranks of a stage that take samples, in rank order.

    A micro-batch is split over the inner data-parallel ranks by `rank_shares`, else evenly; ranks that
    cannot split it evenly are all priced at the larger part.
    """
    # A group with fewer samples than a micro-batch has one short micro-batch.
    shares = stage.rank_shares or (-(-min(group.share, group.micro_batch) // stage.inner_dp),)
    if len(cluster.nodes) == 1:
        biggest = max(range(len(shares)), key=shares.__getitem__)
        return (
            Worker(
                node_group=0, share=float(shares[biggest]), rank=stage.ranks[biggest * stage.tp * stage.cp]
            ),
        )
    ends = tuple(accumulate(nodes.num_devices for nodes in cluster.nodes))
    split = stage.tp * stage.cp
    first = bisect_right(ends, min(stage.ranks))
    if max(stage.ranks) < ends[first]:
        alike = {share: stage.ranks[i * split] for i, share in reversed(list(enumerate(shares))) if share > 0}
        kinds = dict.fromkeys(share for share in shares if share > 0)
        return tuple(Worker(node_group=first, share=float(share), rank=alike[share]) for share in kinds)
    where = np.searchsorted(ends, stage.ranks, side="right").tolist()
    found: dict[tuple[int, float], int] = {}
    for i, (rank, node_group) in enumerate(zip(stage.ranks, where, strict=True)):
        share = float(shares[(i // split) % len(shares)])
        if share > 0.0:
            found.setdefault((node_group, share), rank)
    return tuple(Worker(node_group=key[0], share=key[1], rank=rank) for key, rank in found.items())


def layer_replicas(plan: Plan, num_layers: int) -> np.ndarray:
    """Return the data-parallel ranks, over all groups, that hold each layer; shape (num_layers + 2,)."""
    change = np.zeros(num_layers + 3)
    for group in plan.groups:
        for stage in group.stages:
            for start, stop in stage.layers:
                change[start] += stage.inner_dp
                change[stop] -= stage.inner_dp
    return np.cumsum(change)[:-1]


def sync_width(stage: Stage, replicas: np.ndarray) -> float:
    """Return the data-parallel ranks that reduce the gradients of a stage: the most of any of its layers."""
    return float(max(replicas[start:stop].max() for start, stop in stage.layers))


def domain_block(nodes: NodeGroup) -> int:
    """Return the devices a job takes from each link domain: the most that divide it into equal blocks.

    A job of 256 on racks of 72 gets 64 from each of four, as block scheduling places it.
    """
    whole = min(nodes.num_devices, max(nodes.per_node, nodes.nvlink_domain))
    fits = range(whole - whole % nodes.per_node, 0, -nodes.per_node)
    return next((size for size in fits if nodes.num_devices % size == 0), nodes.per_node)


def link_domains(cluster: Cluster) -> np.ndarray:
    """Return, per rank, the number of the node or NVLink domain it shares device links in."""
    parts, before = [], 0
    for nodes in cluster.nodes:
        domains = np.arange(nodes.num_devices) // domain_block(nodes)
        parts.append(before + domains)
        before += int(domains[-1]) + 1
    return np.concatenate(parts)


def crosses_node(here: Stage, there: Stage, domains: np.ndarray) -> bool:
    """Return whether any rank of a stage and its neighbour in another stage share no device links."""
    one, other = _facing(here, there)
    return bool(np.any(domains[one] != domains[other]))


def _facing(here: Stage, there: Stage) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks of two stages that exchange messages, pair by pair."""
    wide = max(len(here.ranks), len(there.ranks))
    place = np.arange(wide)
    one, other = (np.array(stage.ranks)[place * len(stage.ranks) // wide] for stage in (here, there))
    return one, other


def nic_senders(cluster: Cluster, plan: Plan) -> list[list[int]] | None:
    """Return by group and stage how many ranks of one node send to other stages over its NICs at once.

    Of both boundaries of a stage the most, at either end; on equal nodes the most of any of its group, since
    runs of equal stages are priced once. None where every rank has NICs of its own.
    """
    if all(nodes.num_nics == nodes.per_node for nodes in cluster.nodes):
        return None
    domains, node_of = link_domains(cluster), _node_of(cluster)
    out, into = np.zeros((2, cluster.num_nodes), dtype=np.int64)
    nodes_of: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for group in plan.groups:
        nodes_of.append([])
        for here, there in boundaries(group):
            one, other = _facing(here, there)
            leaves = domains[one] != domains[other]
            senders, receivers = (node_of[np.unique(ranks[leaves])] for ranks in (one, other))
            np.add.at(out, senders, 1)
            np.add.at(into, receivers, 1)
            nodes_of[-1].append((senders, receivers))
    found = []
    for group, pairs in zip(plan.groups, nodes_of, strict=True):
        each = [max(out[a].max(initial=0), into[b].max(initial=0)) for a, b in pairs]
        count = len(group.stages)
        each += [0] * (count - len(each))
        most = [int(max(each[s - 1], each[s])) for s in range(count)]
        found.append(most if len(cluster.nodes) > 1 else [max(most)] * count)
    return found


def first_of_equals(cluster: Cluster, plan: Plan) -> list[int]:
    """Return for each group of a plan the first one that is the same but for the numbers of its ranks."""
    if len(plan.groups) == 1:
        return [0]
    domains, nodes, senders = link_domains(cluster), _node_of(cluster), nic_senders(cluster, plan)
    first: dict[Any, int] = {}
    found = []
    for g, group in enumerate(plan.groups):
        ranks = np.array([rank for stage in group.stages for rank in stage.ranks])
        kinds = tuple(
            tuple(dict.fromkeys(id(cluster.node_group_of(rank)) for rank in stage.ranks))
            for stage in group.stages
        )
        bare = replace(
            group, stages=tuple(replace(stage, ranks=(len(stage.ranks),)) for stage in group.stages)
        )
        sent = tuple(senders[g]) if senders else ()
        same = bare, kinds, _numbered(domains[ranks]), _numbered(nodes[ranks]), sent
        found.append(first.setdefault(same, g))
    return found


def _node_of(cluster: Cluster) -> np.ndarray:
    """Return the node of each rank."""
    sizes = [nodes.per_node for nodes in cluster.nodes for _ in range(nodes.count)]
    return np.repeat(np.arange(len(sizes)), sizes)


def _numbered(places: np.ndarray) -> tuple[int, ...]:
    """Return places by the order in which they first come: those of ranks elsewhere may be the same."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places.tolist())


def spread_stride(members: np.ndarray, domain: float) -> float:
    """Return the stride at which a communicator has as many members in a link domain as it really has.

    `members` holds the link domain of each member, shape (communicators, ranks); the communicator that
    spreads widest counts. A full domain has `domain` devices.
    """
    count = members.shape[1]
    if count == 1:
        return 1.0
    ordered = np.sort(members, axis=1)
    widest = int((np.diff(ordered, axis=1) != 0).sum(1).max()) + 1
    inside = -(-count // widest)
    return domain / inside * (1.0 - 1e-9)


def stage_strides(
    plan: Plan,
    stage: Stage,
    domains: np.ndarray,
    domain: float,
    across: dict[tuple[int, float], tuple[float, float]],
) -> dict[str, float]:
    """Return the strides of every communicator a stage takes part in, from where its ranks are.

    `domains` is of `link_domains`; a full one has `domain` devices. `across` keeps the strides of
    communicators over several groups, by first layer and domain: stages of the same layers have the same.
    """
    places = domains[np.array(stage.ranks)]
    dense = places.reshape(-1, stage.cp, stage.tp)  # tp fastest, then cp, then inner dp
    experts = places.reshape(-1, stage.ep, stage.etp)
    own = spread_stride(dense.reshape(-1, stage.tp).T, domain)
    own_experts = spread_stride(experts.reshape(len(experts), -1).T, domain)
    sync = own, own_experts
    if len(plan.groups) > 1:
        key = stage.layers[0][0], domain
        if key not in across:
            across[key] = _strides_across_groups(plan, *key, domains)
        sync = across[key]
    return {
        "tp_stride": spread_stride(dense.reshape(-1, stage.tp), domain),
        "cp_stride": spread_stride(dense.swapaxes(1, 2).reshape(-1, stage.cp), domain),
        "ep_stride": spread_stride(experts.swapaxes(1, 2).reshape(-1, stage.ep), domain),
        "etp_stride": spread_stride(experts.reshape(-1, stage.etp), domain),
        "sync_stride": sync[0],
        "expert_stride": sync[1],
        "own_stride": own,
        "own_expert_stride": own_experts,
    }


def _strides_across_groups(plan: Plan, layer: int, domain: float, domains: np.ndarray) -> tuple[float, float]:
    """Return the strides of the communicators that sum gradients of a layer and of its experts."""
    holders = [
        stage
        for group in plan.groups
        for stage in group.stages
        if any(start <= layer < stop for start, stop in stage.layers)
    ]
    dense = np.concatenate([domains[np.array(stage.ranks[:: stage.tp])] for stage in holders])
    experts = np.concatenate([domains[np.array(stage.ranks[:: stage.ep * stage.etp])] for stage in holders])
    return spread_stride(dense[None], domain), spread_stride(experts[None], domain)


def boundaries(group: Group) -> list[tuple[Stage, Stage]]:
    """Return the pairs of stages that exchange messages; with virtual stages the last feeds the first."""
    stages = group.stages
    pairs = list(pairwise(stages))
    return [*pairs, (stages[-1], stages[0])] if len(stages) > 1 and group.num_chunks > 1 else pairs
