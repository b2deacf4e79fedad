"""Which cluster to rent: the best plan on each kind of node that clouds sell, at useful numbers of nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.instances import instances as catalog_instances
from foreshard.catalog.instances import sellers
from foreshard.errors import InfeasibleError, LimitError, SpecError
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.grid.ray_sweep import each_in_tasks, num_at_once
from foreshard.planner.headroom import beside_whole_memory, leaving_free
from foreshard.planner.ranking import Limits, ranked
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.result import PlanResult, Ranked
from foreshard.planner.search import plans_under
from foreshard.planner.settings import (
    AS_SHIPPED,
    Setting,
    checked_precisions,
    left_out,
    settings,
    switches,
)
from foreshard.planner.settings_search import search_settings
from foreshard.spec.adapters import with_adapters
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import one_of
from foreshard.spec.model import Model
from foreshard.spec.shown import Shown

DEFAULT_DEVICES = 512
"""Devices to rent at most when the caller does not say: what one order of a cloud region can hope for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes to rent, and the best plan on them.

    Attributes
    ----------
    cluster : str
        As ``foreshard plan`` takes it.
    instance : str
    num_nodes : int
    usd_per_h : float
        Of all nodes, on demand unless the caller gave another price.
    price_date : str, optional
    ranked : Ranked
        Its `why` compares the offer with the first.
    """

    cluster: str
    instance: str
    num_nodes: int
    usd_per_h: float
    price_date: str | None
    ranked: Ranked

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for an offer."""
        return {
            "cluster": self.cluster,
            "instance": self.instance,
            "num_nodes": self.num_nodes,
            "usd_per_h": self.usd_per_h,
            "price_date": self.price_date,
            **self.ranked.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RentResult(Shown):
    """Offers best first; instances that were left out, with the reason.

    infeasible says why there is no offer, or none within the limits.
    """

    offers: tuple[Offer, ...]
    left_out: dict[str, str]
    evaluated: int
    pruned: int
    wall_s: float
    interrupted: bool = False
    infeasible: InfeasibleError | LimitError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        made: dict[str, Any] = {
            "schema_version": 1,
            "offers": [one.to_dict() for one in self.offers],
            "left_out": self.left_out,
            "evaluated": self.evaluated,
            "pruned": self.pruned,
            "wall_s": self.wall_s,
            "interrupted": self.interrupted,
        }
        if self.infeasible is not None:
            made["error"] = self.infeasible.to_dict()
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The search of one instance."""

    name: str
    request: PlanRequest
    chosen: tuple[Setting, ...]


@dataclass(slots=True, kw_only=True)
class _Search:
    found: list[tuple[str, Ranked]]
    left_out: dict[str, str]
    evaluated: int = 0
    pruned: int = 0
    interrupted: bool = False
    stopped: bool = False


def rent(
    model: Model,
    *,
    global_batch: int,
    tokens: float,
    max_devices: int = DEFAULT_DEVICES,
    objective: tuple[str, ...] | str = ("cost", "time"),
    vendors: Sequence[str] | None = None,
    instances: Sequence[str] | None = None,
    usd_per_h: Mapping[str, float] | None = None,
    max_nodes: Mapping[str, int] | None = None,
    top: int = 5,
    budget_s: float = 60.0,
    **asked: Any,
) -> RentResult:
    """Return which instances to rent, how many, and the plan to run on them.

    Every instance is searched at all numbers of nodes of
    :func:`foreshard.planner.grid.node_counts.sizes_of`; plans are then ordered over all of them. The nodes of
    the offers are then searched as `plan` does, unequal pipelines too, in the seconds that are left.

    Parameters
    ----------
    model : Model
    global_batch : int
    tokens : float
        Of the whole run.
    max_devices : int
    objective : tuple of str
        The first decides: 'cost', 'time' or 'energy'.
    vendors : sequence of str, optional
        As ``aws``; default all.
    instances : sequence of str, optional
        Names of the catalog; default all with a price.
    usd_per_h : mapping of instance to float, optional
        Prices of a node in place of those of the catalog: spot, reserved, another region.
    max_nodes : mapping of instance to int, optional
        Nodes that can be had.
    top : int
        Offers to return, each of another instance or number of nodes.
    budget_s : float
    asked
        max_usd, max_hours, seq_len, framework, precision, comm, optimizer, engine, executor, lora,
        memory_margin, usd_per_device_hour (of every instance) and choices of the plans, as for `plan`.

    Raises
    ------
    SpecError
        For an unknown vendor or instance, or bad input.
    """
    started = time.perf_counter()
    instances = _of_vendors(vendors) if instances is None and vendors is not None else instances
    objectives = (objective,) if isinstance(objective, str) else tuple(objective)
    adapters = asked.pop("lora", None)
    model = model if adapters is None else with_adapters(model, adapters)
    words = {"objective": objectives, "tokens": tokens, "global_batch": global_batch, **asked}
    search = _Search(found=[], left_out={})
    rate = asked.get("usd_per_device_hour")
    prices = {} if rate is None else {name: rate * one.per_node for name, one in catalog_instances().items()}
    clusters = _clusters(instances, prices | dict(usd_per_h or {}), max_nodes or {}, max_devices, search)
    parts = _parts(model, clusters, words, search)
    if parts and parts[0].request.executor != "local":
        _search_in_tasks(parts, search, budget_s)
    else:
        _search_one_by_one(parts, search, started + budget_s)
    request = parts[0].request if parts else None
    offers, error = _offers(search, clusters, request, objectives)
    if objectives[0] != "energy" and not search.interrupted:
        _search_offers(parts, search, offers[:top], started + budget_s)
        offers, error = _offers(search, clusters, request, objectives)
    if adapters is not None:
        offers = tuple(replace(offer, ranked=offer.ranked.with_lora(adapters)) for offer in offers)
    return RentResult(
        offers=offers[:top],
        left_out=search.left_out,
        evaluated=search.evaluated,
        pruned=search.pruned,
        wall_s=time.perf_counter() - started,
        interrupted=search.interrupted,
        infeasible=error,
    )


def _of_vendors(vendors: Sequence[str]) -> list[str]:
    """Return the instances made for training that vendors sell."""
    sold = {one_of(name, sellers(), key="--rent", name="vendor") for name in vendors}
    return [
        name
        for name, one in catalog_instances().items()
        if name.partition("-")[0] in sold and "made for inference" not in one.notes
    ]


def _parts(
    model: Model, clusters: Mapping[str, Cluster], words: dict[str, Any], search: _Search
) -> list[_Part]:
    """Return the search of each instance that has a precision asked for."""
    precisions = checked_precisions(words.pop("precision", None) or "bf16")
    may = words.pop("comm", None) or AS_SHIPPED
    found = []
    for name, cluster in clusters.items():
        request = leaving_free(checked_request(model, cluster, top=1, precision=precisions[0], **words))
        able = [precision for precision in precisions if precision not in left_out(request, precisions)]
        if not able:
            search.left_out[name] = f"no {' or '.join(precisions)}"
            continue
        chosen = tuple(settings(request, able, switches(may, request.framework)))
        found.append(_Part(name=name, request=request, chosen=chosen))
    return found


def _search_one_by_one(parts: Sequence[_Part], search: _Search, deadline: float) -> None:
    """Search instance after instance; each gets an even part of the seconds that are left."""
    ended = 0
    try:
        for i, part in enumerate(parts):
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                break
            part = replace(part, request=replace(part.request, budget_s=left_s / (len(parts) - i)))
            _add(part, _searched(part), search)
            ended = i + 1
            if search.stopped:
                break
    except KeyboardInterrupt:
        if not search.found:
            raise
    for part in parts[ended:]:
        search.interrupted = True
        search.left_out[part.name] = "not searched before the end"


def _search_offers(parts: Sequence[_Part], search: _Search, offers: Sequence[Offer], deadline: float) -> None:
    """Search the nodes of each offer as `plan` does, unequal pipelines too, while seconds are left."""
    of_instance = {part.name: part for part in parts}
    for i, offer in enumerate(offers):
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            break
        part = of_instance[offer.instance]
        nodes = replace(part.request.cluster.nodes[0], count=offer.num_nodes)
        asked = replace(
            part.request,
            cluster=replace(part.request.cluster, nodes=(nodes,)),
            objectives=("time",),
            limits=Limits(),
            budget_s=left_s / (len(offers) - i),
            executor="local",
        )
        try:
            result = plans_under(asked, part.chosen)
        except KeyboardInterrupt:
            search.interrupted = True
            break
        search.evaluated += result.evaluated
        search.pruned += result.pruned
        search.found += [(part.name, one) for one in result.plans]
        if result.stopped:
            search.interrupted = True
            break


def _search_in_tasks(parts: Sequence[_Part], search: _Search, budget_s: float) -> None:
    """Search every instance in a task of Ray; Ctrl-C keeps what has ended."""
    executor = parts[0].request.executor
    rounds = -(-len(parts) // num_at_once(executor))
    calls = []
    for part in parts:
        request = replace(part.request, budget_s=budget_s / rounds, executor="local")
        calls.append((replace(part, request=request),))
    done: dict[int, PlanResult | str] = {}
    try:
        done.update(each_in_tasks(_searched, calls, executor))
    except KeyboardInterrupt:
        if not done:
            raise
    for i, (part,) in enumerate(calls):  # in the order of a local search, whichever ended first
        if i in done:
            _add(part, done[i], search)
        else:
            search.interrupted = True
            search.left_out[part.name] = "not searched before the end"


def _searched(part: _Part) -> PlanResult | str:
    """Return the plans on one instance at every number of nodes, or what the catalog does not know of it.

    Prices and limits are compared afterwards. For the objective cost all sizes are searched that may be
    cheaper than larger ones: their plans are the front of time and cost, and whatever limits allow is on it.
    """
    asked = part.request
    asked = asked if asked.objectives[0] == "energy" else replace(asked, objectives=("cost", "time"))
    try:
        return search_settings(
            replace(asked, limits=Limits()), part.chosen, lambda one: search_homogeneous(one, explain=False)
        )
    except SpecError as unpriced:
        return unpriced.what


def _add(part: _Part, result: PlanResult | str, search: _Search) -> None:
    """Add what a search of one instance found."""
    if isinstance(result, str):
        search.left_out[part.name] = result
        return
    search.evaluated += result.evaluated
    search.pruned += result.pruned
    search.found += [(part.name, one) for one in (*result.plans, *result.front)]
    if result.interrupted:
        search.interrupted = True
        search.stopped = result.stopped
        search.left_out[part.name] = "not all numbers of nodes were searched within the budget"
    elif not result.plans:
        search.left_out[part.name] = "no plan fits its memory"


def _clusters(
    asked: Sequence[str] | None,
    usd_per_h: Mapping[str, float],
    max_nodes: Mapping[str, int],
    max_devices: int,
    search: _Search,
) -> dict[str, Cluster]:
    """Return as many nodes of each instance as may be rented, at their price; note what is left out."""
    known, found = catalog_instances(), {}
    for name in (*(asked or known), *usd_per_h, *max_nodes):
        if name not in known:
            raise SpecError(
                f"unknown instance {name!r}",
                key="instances",
                value=name,
                rule="Instances are those of the catalog",
                fix="See 'foreshard clusters'",
            )
    for name in asked or known:
        price = usd_per_h.get(name, known[name].usd_per_h)
        count = min(max_devices // known[name].per_node, max_nodes.get(name, max_devices))
        if known[name].nic_bytes_per_s is None and price is not None and count > 1:
            search.left_out[name] = "more than one node: the catalog does not know its network"
            count = 1
        if asked is None and "made for inference" in known[name].notes:
            search.left_out[name] = "made for inference"
        elif price is None:
            search.left_out[name] = "no price in the catalog"
        elif count < 1:
            search.left_out[name] = f"no node of {known[name].per_node} devices may be rented"
        else:
            cluster = load_cluster(f"{count}x{name}")
            date = None if name in usd_per_h else cluster.nodes[0].price_date
            nodes = replace(cluster.nodes[0], usd_per_h=price, price_date=date)
            found[name] = replace(cluster, nodes=(nodes,))
    return found


def _offers(
    search: _Search, clusters: Mapping[str, Cluster], request: PlanRequest | None, objectives: tuple[str, ...]
) -> tuple[tuple[Offer, ...], InfeasibleError | LimitError | None]:
    """Return the offers in order, one for each instance and number of nodes."""
    limits = request.limits if request else Limits()
    error: InfeasibleError | LimitError | None
    order, error = ranked([one.prediction for _, one in search.found], objectives, limits, len(search.found))
    names = {id(one.prediction): name for name, one in search.found}
    offers: dict[tuple[str, int], Offer] = {}
    for prediction in order:
        name = names[id(prediction.prediction)]
        nodes = clusters[name].nodes[0]
        count = -(-len(prediction.plan.ranks) // nodes.per_node)
        offer = Offer(
            cluster=f"{count}x{name}",
            instance=name,
            num_nodes=count,
            price_date=nodes.price_date,
            usd_per_h=count * (nodes.usd_per_h or 0.0),
            ranked=beside_whole_memory(prediction, clusters[name], request.framework)
            if request
            else prediction,
        )
        offers.setdefault((name, count), offer)
    if not order:
        error = InfeasibleError(
            "no instance holds the model",
            key="--max-devices",
            value=None if request is None else request.cluster.num_devices,
            rule="The fullest device of a plan fits its memory",
            fix="Allow more devices, or another framework that shards more",
        )
    return tuple(offers.values()), error
