"""Stages priced by the analytical engine: the problem the mixed planner solves.

Every option is priced for every distinct stage at once. What depends on the rest of a plan (which links lead
to neighbours, where replicas are, how many pipelines there are) is taken at its best, so that no plan is
faster by the engine than by the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.catalog.offers import offers_of
from foreshard.comm.fabric import Fabric, fabric_between
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.graph.shapes import RankShape, layer_order, layer_shape
from foreshard.planner.pricing.stage_memory import MAX_STAGES, fewest_devices, rooms_in
from foreshard.planner.pricing.stage_options import StageKind, fits_alone, stage_options
from foreshard.planner.pricing.stage_types import StageTypes, rank_row, row, stage_types
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Problem
from foreshard.predict.analytical.end_of_step import end_of_step
from foreshard.predict.analytical.stage import StageTimes, stage_times
from foreshard.predict.batch import Batch, Boundaries
from foreshard.predict.machine import Machine
from foreshard.predict.placement import domain_block
from foreshard.predict.run_setup import RunSetup
from foreshard.predict.traits import Traits
from foreshard.spec.device import Device

T = TypeVar("T")

COPIES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
"""Numbers of pipelines at which the gradient collectives are priced anew."""
FEW_COPIES = (1, 2, 4, 8, 16, 32, 64, 128)
"""The same where only a bound is asked for: collectives of more pipelines take no less than of fewer."""
_SEVERAL = 3.0
"""Pipelines, and stages of each, from which on communicators take no more memory."""
_FEWEST_STAGES = 2
"""Of interleaved pipelines: with more, a stage has no more memory for each chunk."""


def price_stages(
    request: PlanRequest,
    use: tuple[int, ...],
    *,
    reserve_bytes: float = 0.0,
    extra: Sequence[StageKind] = (),
    compute_only: bool = False,
    apart: bool = False,
    by_domain: bool = False,
    every: bool = False,
    chunks: int = 1,
    stages: int | None = None,
    copies_at: Sequence[int] = COPIES,
    shared: dict[bool, SharedPrices] | None = None,
) -> Problem:
    """Return the problem of a request: options of some node groups, priced for every stage of the model.

    Parameters
    ----------
    request : PlanRequest
    use : tuple of int
        The node groups that take part, every one of them: gradients join over the links between them.
    reserve_bytes : float
        Memory of each device to leave free.
    extra : sequence of StageKind
        Options to price besides.
    compute_only : bool
        Stages take as long as their computation alone.
    apart : bool
        Pipelines share no link domain, are as wide as each other and send over the network, instead of all at
        its best: no bound, but nearer to what plans take. With `by_domain` those within a domain do not, and
        a stage of others sends on one side alone where its domain has room for a neighbour as large.
    by_domain : bool
        Tell pipelines that lie within one link domain from others, whose messages leave it: `leave_s`.
        Without it all messages are taken to stay inside as soon as any pipeline fits a domain.
    every : bool
        Offer every stage of the space: also those that cut experts or split sequences.
    chunks : int
        Of layers that each device of a pipeline of several stages holds, interleaved; times are of all.
    stages : int, optional
        Most stages of a pipeline: every device has memory for the chunks of one so long. Without it there is
        the memory of 1f1b, of which interleaved pipelines need no less.
    copies_at : sequence of int
        Numbers of pipelines at which gradient collectives are priced anew.
    shared : dict, optional
        Prices that pipelines of other depths left here, everything else asked for being the same; takes up
        what is priced anew.
    """
    types = stage_types(request)
    whole = [stage_options(request, use, at_once=chunks == 1)]  # neither experts cut nor sequences split
    more = [stage_options(request, use, every=True, at_once=chunks == 1)] if every else []
    kinds = list(dict.fromkeys(chain(*whole, extra, *more)))
    rank = rank_row(request, kinds)
    used = sum(request.cluster.nodes[g].num_devices for g in use)
    beside = min(_SEVERAL, float(used)) if apart else 1.0
    is_more = np.array([fits_alone(request, kind) for kind in kinds])
    is_offered = ~is_more | (types.has_embedding * types.has_head > 0.0)

    def rooms_of(stages: int | None) -> np.ndarray:
        fit = rooms_in(request, kinds, types, rank, reserve_bytes, (chunks, stages), beside=beside)
        return np.where(is_offered, fit, 0)

    rooms = rooms_of(stages)
    domains = [domain_block(group) if g in use else 0 for g, group in enumerate(request.cluster.nodes)]
    fewest = fewest_devices(kinds, types, rooms)
    crosses = fewest > max(domains)
    copies = tuple(n for n in copies_at if n <= min(max(used / fewest, 1.0), request.global_batch))
    alone = apart and not by_domain
    prices = None if shared is None else shared.get(crosses)
    if prices is None:
        widest = rooms if shared is None else rooms_of(_FEWEST_STAGES)
        priced = _Priced.of(types, (widest > 0) | compute_only)
        batch = _batch(request, use, kinds, types, priced, rank, crosses=crosses, apart=alone, chunks=chunks)
        if crosses and by_domain and apart:  # every pipeline is one whose messages leave a domain
            batch = _crossing(batch, priced, kinds, domains, apart=True)
        prices = SharedPrices(priced, batch, stage_times(batch), {})
        if shared is not None:
            shared[crosses] = prices
    priced, batch, stage, known_tails = prices
    priced = priced.shown((rooms > 0) | compute_only)
    blocks = priced.of_options([float(domains[kind.node_group]) for kind in kinds])
    is_tied = bool(np.count_nonzero(batch.pipeline.tied))  # only a shared table knows where the ends lie
    computed = stage.parts["compute"] + stage.parts["recompute"]
    depth = _most_stages(request, stages)
    seconds = computed if compute_only else _pass(batch, stage, depth if apart else None)
    leave_s = leave_tail_s = None
    if by_domain and not (crosses or compute_only):
        far = _crossing(batch, priced, kinds, domains, apart=apart)
        leave_s = priced.table(_pass(far, stage_times(far), depth if apart else None) - seconds)
        longer_s = _leave_tail(far, batch, stage, blocks) if is_tied else 0.0
        # At best the ends of a pipeline that leaves a domain lie in one all the same.
        leave_tail_s = priced.table(longer_s if apart else np.minimum(longer_s, 0.0))
    wide = num_domains(request, use)
    for n in copies:
        if n not in known_tails:
            known_tails[n] = _tail(batch, stage, n, blocks, wide, apart=apart)
    tails = [known_tails[n] for n in copies]
    if crosses and is_tied and not apart:  # at best both ends lie in one domain, or in two
        near = replace(batch, pipeline=replace(batch.pipeline, ends_cross=np.zeros_like(blocks)))
        ends = [_tail(near, stage, n, blocks, wide, apart=False) for n in copies]
        tails = [np.minimum(one, other) for one, other in zip(tails, ends, strict=True)]
    nodes = request.cluster.nodes
    takes = np.zeros((len(kinds), len(nodes)), dtype=int)
    for i, kind in enumerate(kinds):
        takes[i, kind.node_group] = kind.num_devices
    return Problem(
        counts=tuple(group.num_devices if g in use else 0 for g, group in enumerate(nodes)),
        global_batch=request.global_batch,
        max_stages=depth,
        types=types.table,
        takes=takes,
        shortest=priced.table(stage.host / np.maximum(stage.total, 1e-12)),
        micro_batch=np.array([kind.samples for kind in kinds]),
        grain=np.array([kind.inner_dp for kind in kinds]),
        time_s=priced.table(seconds, otherwise=np.inf),
        copies=copies,
        tail_s=np.array([priced.table(tail) for tail in tails]),
        max_in_flight=rooms.T.copy(),
        hop_s=np.zeros((len(kinds), len(kinds))),
        jitter=request.constants.jitter,
        names=tuple(kinds),
        leave_s=leave_s,
        leave_tail_s=leave_tail_s,
        domains=() if leave_s is None else tuple(domains),
        max_pipelines=None if apart or wide == 1 else wide,
        forward_s=priced.table(stage.forward),
        backward_s=priced.table(stage.backward),
    )


class _Priced(NamedTuple):
    """The stages that are priced, each by an option, of all types and options; arrays of shape (stages,).

    In batches they are columns of one row.
    """

    types: np.ndarray
    options: np.ndarray
    shape: tuple[int, int]
    is_shown: np.ndarray

    @classmethod
    def of(cls, types: StageTypes, is_priced: np.ndarray) -> _Priced:
        """Return those that are priced of all, shape (types, options)."""
        types_of, options_of = np.nonzero(is_priced)
        shape = is_priced.shape[0], is_priced.shape[1]
        return cls(types_of, options_of, shape, np.ones(len(types_of), dtype=bool))

    def shown(self, is_shown: np.ndarray) -> _Priced:
        """Return the same stages, of which tables show some of all, shape (types, options)."""
        return self._replace(is_shown=is_shown[self.types, self.options])

    def of_types(self, values: np.ndarray) -> np.ndarray:
        """Return the values of their types, given in shape (types, 1), in shape (1, stages)."""
        return values[self.types].T

    def of_options(self, values: Any) -> np.ndarray:
        """Return the values of their options, in shape (1, stages)."""
        return np.asarray(values)[None, self.options]

    def ranks(self, row: T) -> T:
        """Return what has fields of shape (1, options) with those of the stages."""
        taken = {f.name: getattr(row, f.name)[:, self.options] for f in fields(row)}  # type: ignore[arg-type]
        return type(row)(**taken)

    def table(self, values: Any, otherwise: float = 0.0) -> np.ndarray:
        """Return values of the stages by option and type."""
        found = np.full(self.shape[::-1], otherwise)
        shown = self.is_shown
        own = np.broadcast_to(values, (1, len(self.types)))[0, shown]
        found[self.options[shown], self.types[shown]] = own
        return found


class SharedPrices(NamedTuple):
    """Prices of stages that pipelines of any depth have alike, tails by numbers of pipelines."""

    priced: _Priced
    batch: Batch
    stage: StageTimes
    tails: dict[int, np.ndarray]


def _pass(batch: Batch, stage: StageTimes, depth: int | None) -> np.ndarray:
    """Return the seconds of a micro-batch on every stage, in the steady state.

    Without a depth, at their best: messages that a stage exchanges in turn hold it twice in the steady state,
    but once while the pipeline fills and drains, for which the same seconds stand. In pipelines of so many
    stages, all like this one, a chunk that goes back to the first stage takes a pass a stage; how much longer
    that is than the passes of all stages is shared by them. Where chunks differ by a layer, stages wait for
    each other in every turn of as many micro-batches as there are stages, as the engine has it
    (`predict/analytical/engine.py`); each has its part of that too.
    """
    chunks = np.asarray(batch.pipeline.num_chunks)
    if depth is None:
        return np.asarray(
            stage.total - (chunks <= 1) * batch.machine.traits.p2p_in_turn * stage.messages.each
        )
    around_s = np.maximum(stage.forward, stage.backward) + chunks * stage.messages.each / 2.0
    waited_s = (1.0 - 1.0 / chunks) * np.maximum(around_s - stage.total, 0.0)
    layers = np.asarray(sum(batch.counts))
    layer_s = (stage.forward + stage.backward) / np.maximum(layers, 1.0)
    turn = np.maximum(depth - 2.0 - np.floor(layers / chunks), 0.0) / depth
    uneven_s = np.where(np.mod(layers, chunks) > 0.0, turn * layer_s, 0.0)
    return np.asarray(stage.total + waited_s + uneven_s)


def _most_stages(request: PlanRequest, stages: int | None) -> int:
    """Return the most stages of a pipeline: one, where the framework runs no 1f1b."""
    if "1f1b" not in offers_of(request.framework).schedules:
        return 1
    # The embedding and the head are places of their own: a stage may hold one of them alone.
    return min(stages or MAX_STAGES, request.choices.most_of("pp", MAX_STAGES), request.model.num_layers + 2)


def _tail(
    batch: Batch, stage: StageTimes, copies: int, blocks: np.ndarray, wide: int, *, apart: bool
) -> np.ndarray:
    """Return the tail of every stage in a plan of so many pipelines or more, wherever they are.

    Stages of the same layers in other pipelines lie in other link domains and have half to twice as many
    inner data-parallel ranks, but any cp; a domain holds no more of them than as narrow stages as this one
    find room for, and at most twice as many ranks with the same experts; where one cuts experts, all do, each
    over ranks that follow each other. All are terms of the space. Where there is one domain, all are in it.
    """
    rank = batch.machine.rank
    width, room = rank.shard, np.maximum(1.0, np.floor(blocks / rank.tp))
    alike = np.maximum(1.0, rank.tp * width / rank.ep)  # ranks of the stage that hold the same experts
    # Sets of ranks that hold all experts: of a stage so many begin in one domain.
    begin = np.minimum(np.ceil(alike), np.ceil(blocks / rank.ep))
    if apart or copies == 1:
        inside = np.minimum(np.ceil(width), room)
        if copies > wide:
            inside = np.maximum(inside, np.ceil(copies * width / wide))
        experts = np.minimum(np.ceil(alike), begin)
        return _tail_of(batch, stage, width * copies, (inside, experts), blocks, apart=apart)
    fewest = width + (copies - 1) * np.ceil(rank.dp / 2.0) * rank.cp
    if wide == 1:
        return _tail_of(batch, stage, fewest, (room, np.maximum(blocks, 1.0)), blocks)
    any_cut = np.where(rank.ep > 1, begin, 1.0).max(initial=1.0)
    experts = np.minimum(np.ceil(alike * (2.0 - 1.0 / copies)), np.where(rank.ep > 1, any_cut, blocks))
    if np.any(rank.cp > 1):  # stages that split sequences otherwise have other numbers of ranks
        return _tail_of(batch, stage, fewest, (room, experts), blocks)
    # The engine takes the mean over domains for what each holds: at most twice as many as this stage has
    # ranks, and then every domain but one at least one less.
    tail = _tail_of(batch, stage, fewest, (np.minimum(width, blocks), experts), blocks)
    twice = np.minimum(np.ceil(width * (2.0 - 1.0 / copies)), room) >= 2.0 * width
    if not twice.any():
        return tail
    many = np.maximum(fewest, (2.0 * width - 1.0) * copies + 1.0)
    other = _tail_of(batch, stage, many, (np.where(twice, 2.0 * width, width), experts), blocks)
    return np.where(twice, np.minimum(tail, other), tail)


def _leave_tail(far: Batch, near: Batch, stage: StageTimes, blocks: np.ndarray) -> np.ndarray:
    """Return how much longer the tail of every stage is where its pipeline leaves a link domain.

    A table that the first and the last stage share crosses it with them, however many pipelines there are.
    """
    return _tail(far, stage, 1, blocks, 1, apart=False) - _tail(near, stage, 1, blocks, 1, apart=False)


def _tail_of(
    batch: Batch,
    stage: StageTimes,
    replicas: np.ndarray,
    inside: tuple[np.ndarray, np.ndarray],
    blocks: np.ndarray,
    *,
    apart: bool = False,
) -> np.ndarray:
    """Return the tail of every stage when so many ranks join its gradients, those of cp counted.

    What the first stage waits for before its first forward counts in its tail: it comes once a step, as what
    the last micro-batch reduces for all.

    `inside` are the members of a collective in each domain, of dense weights and of experts.
    """
    rank = batch.machine.rank
    stride, expert_stride = (np.where(replicas > 1, blocks / n * (1.0 - 1e-9), 1.0) for n in inside)
    spread = replace(
        rank,
        dp=replicas / rank.cp,
        copies=replicas / rank.shard,
        sync_stride=stride,
        expert_stride=expert_stride,
    )
    # The last micro-batch of a bound may have fewer samples, unless each rank has but one.
    least = (rank.micro_batch > 1) & (not apart)
    end = end_of_step(replace(batch, machine=replace(batch.machine, rank=spread)), stage, least=least)
    # All of a pipeline follows its first forward; other stages wait for their weights while it fills.
    first_s = (end.first_s + end.wait) * (np.asarray(batch.has_embedding) > 0)
    return np.asarray(end.tail_s + end.update_s + first_s + stage.reduce_once)


def _batch(
    request: PlanRequest,
    use: tuple[int, ...],
    kinds: Sequence[StageKind],
    types: StageTypes,
    priced: _Priced,
    ranks: RankShape,
    *,
    crosses: bool = False,
    apart: bool = False,
    chunks: int = 1,
) -> Batch:
    """Return the stages that are priced as columns of one row, each alone in its plan.

    A pipeline that crosses link domains sums a table that its ends share over the network; its messages stay
    inside where the stage leaves its neighbours room, unless stages are `apart`.
    """
    setup, nodes = request.setup, request.cluster.nodes
    blocks = [domain_block(group) for group in nodes]
    fabric = priced.ranks(row(_fabrics(request, kinds), Fabric))
    joined = row([_fabric(request, {g: nodes[g].num_devices for g in use})] * len(kinds), Fabric)
    kernels = [_kernels(setup, group.device) for group in nodes]
    traits = {
        (g, zero): setup.traits(nodes[g].device, zero)
        for g, zero in dict.fromkeys((kind.node_group, kind.zero) for kind in kinds)
    }
    has_embedding, has_head = priced.of_types(types.has_embedding), priced.of_types(types.has_head)
    alone = has_embedding * has_head
    leaves, ends = (
        priced.of_options([_leaves(kind, blocks, apart=far) for kind in kinds])
        for far in (apart, crosses or apart)
    )
    num_stages = np.where(alone > 0, 1.0, 2.0)
    rank, moved = setup.as_moved(
        priced.ranks(ranks),
        priced.ranks(row([traits[kind.node_group, kind.zero] for kind in kinds], Traits)),
        num_stages,
    )
    return Batch(
        kinds=tuple(layer_shape(block) for block, _ in request.model.block_kinds()),
        counts=tuple(priced.of_types(types.counts[:, i : i + 1]) for i in range(types.counts.shape[1])),
        order=layer_order(request.model.block_order()),
        machine=Machine(
            kernels=priced.ranks(row([kernels[kind.node_group] for kind in kinds], KernelModel)),
            fabric=fabric,
            sync=priced.ranks(joined),
            link=priced.ranks(row(_fabrics(request, kinds, sending=True), Fabric)),
            traits=moved,
            rank=rank,
            constants=request.constants,
        ),
        recompute=priced.ranks(row([recompute_of(kind.recompute, 1) for kind in kinds], Recompute)),
        has_embedding=has_embedding,
        has_head=has_head,
        multiplicity=np.ones_like(alone),
        boundaries=Boundaries(
            first=0.0, far_inside=0.0, far_first=leaves, far_last=leaves, far_each=2.0 * leaves
        ),
        pipeline=setup.pipeline(
            num_micro_batches=1e6,
            num_stages=num_stages,
            num_chunks=np.where(alone > 0, 1.0, float(chunks)),
            zero_bubble=0.0,
            all_forward=0.0,
            ends_cross=ends,
            num_devices=8.0,
        ),
    )


def _crossing(
    batch: Batch, priced: _Priced, kinds: Sequence[StageKind], blocks: Sequence[int], *, apart: bool
) -> Batch:
    """Return the same stages, in pipelines that leave their link domain.

    With `apart` a stage that leaves a neighbour of its size room sends over the network to the other one.
    """
    ones = np.ones_like(batch.multiplicity)
    far = replace(batch, pipeline=replace(batch.pipeline, ends_cross=ones))
    if not apart:
        return far
    rooms = priced.of_options(
        [2.0 if 2 * kind.num_devices > blocks[kind.node_group] else 1.0 for kind in kinds]
    )
    return replace(far, boundaries=replace(batch.boundaries, far_first=ones, far_last=ones, far_each=rooms))


def _leaves(kind: StageKind, blocks: Sequence[int], *, apart: bool) -> float:
    """Return whether messages of a stage leave its link domain: where it fills one, there is no neighbour."""
    return float(apart or kind.num_devices >= blocks[kind.node_group])


def joins_alike(request: PlanRequest, some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Return whether gradients of some node groups join over the links that they do among others.

    Then no stage of some has a lower price by :func:`price_stages` for them than for others that hold them
    all: what its prices take at best is no worse where there are more devices.
    """
    nodes = request.cluster.nodes
    joined = (_fabric(request, {g: nodes[g].num_devices for g in use}) for use in (some, others))
    one_domain = num_domains(request, some) == 1 < num_domains(request, others)  # it may hold more pipelines
    return len(set(joined)) == 1 and not one_domain


def num_domains(request: PlanRequest, use: tuple[int, ...]) -> int:
    """Return the link domains of some node groups."""
    return sum(request.cluster.nodes[g].num_devices // domain_block(request.cluster.nodes[g]) for g in use)


def _fabrics(request: PlanRequest, kinds: Sequence[StageKind], *, sending: bool = False) -> list[Fabric]:
    """Return the links inside the stage of each option, the best that any of its stages can have.

    Or those that its messages take, if no other stage sends from the node meanwhile.
    """
    nodes = request.cluster.nodes
    places = [(kind.node_group, kind.num_devices if sending else None) for kind in kinds]
    found = {(g, n): _fabric(request, {g: nodes[g].num_devices}, n) for g, n in dict.fromkeys(places)}
    return [found[place] for place in places]


def _fabric(request: PlanRequest, devices: Mapping[int, int], senders: int | None = None) -> Fabric:
    """Return the links that join the first so many devices of some node groups, of which so many send."""
    ranks: list[int] = []
    first = 0
    for g, nodes in enumerate(request.cluster.nodes):
        ranks += range(first, first + devices.get(g, 0))
        first += nodes.num_devices
    return fabric_between(request.cluster, ranks, senders=senders, **request.setup.fabric_options)


def _kernels(setup: RunSetup, device: Device) -> KernelModel:
    """Return the kernels of a device; one that lacks the precision is priced, though not used, in fp32."""
    known = device.supports(setup.precision)
    return (setup if known else replace(setup, precision="fp32")).kernels(device)
