"""Pipelines in a state as a bound counts them: no structure of these devices is faster or cheaper.

A cell is a pipeline's set of workers. Of its orders and cuts the best count for its own share, whatever the
others do; of the rings that sum gradients no more than their least (`least_sync_s`). Where sets of cells are
too many only the devices in use count: all of them compute all the time, and send for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from foreshard.control.search.cache import Cells, SearchCache
from foreshard.control.search.candidates import first_structures
from foreshard.control.search.cuts import front
from foreshard.control.search.pipelines import PipelineStates
from foreshard.control.search.pricing import least_sync_s
from foreshard.control.search.subsets import counts_of
from foreshard.control.slots import Budget, Chain, State, Structure, WorkerPipeline, workers_apart
from foreshard.errors import InfeasibleError

_MOST_SETS = 1000
"""Sets of cells that are listed, about half a second a state: six devices of as many classes have 876."""
_GRAIN = 0.02
"""Part by which slowest stages are taken to be faster, so that few points are all."""
_NEWTON = 60
"""Most steps of Newton's method: it ends by itself where the lines are a few."""
Rows = tuple[np.ndarray, np.ndarray]


def pipeline_rows(
    chain: Chain,
    state: State,
    budgets: Sequence[Budget],
    *,
    batch: int,
    micro_batch: int,
    max_stages: int,
    cache: SearchCache,
) -> Rows:
    """Return seconds, shape (n,), and costs, shape (n, budgets), that no pipelines side by side come below.

    Parameters
    ----------
    chain, state, budgets
    batch, micro_batch : int, samples
    max_stages : int
    cache : SearchCache
        Keeps fronts from state to state.

    Raises
    ------
    InfeasibleError
        When no pipeline holds the model.
    TooManyError
        For more subsets of the devices than can be listed.
    """
    # With a batch of one micro-batch a stage keeps one: nothing that can run is left out.
    known = PipelineStates(cache, chain, state, micro_batch, micro_batch, max_stages, workers_apart(budgets))
    sets = first_structures(known, _MOST_SETS + 1)
    if len(sets) > _MOST_SETS:
        return _by_devices(known, budgets, batch)
    points = {cell: _points(known, cell) for cell in {cell for cells in sets for cell in cells}}
    sets = [cells for cells in sets if all(len(points[cell]) for cell in cells)]
    if not sets:
        raise InfeasibleError("no pipelines hold the model", fix="Allow more stages, or add devices")
    sync_s = [least_sync_s(chain, state, _in_some_cuts(cells, chain)) for cells in sets]
    time_s = sync_s + _least_end_s([[points[cell] for cell in cells] for cells in sets], batch / micro_batch)
    used = np.zeros((len(sets), chain.num_workers))
    for at, cells in enumerate(sets):
        used[at, [worker for cell in cells for worker in cell]] = 1.0
    sent = [_least_sent_usd(chain, state, cells) for cells in sets]
    return time_s, _least_costs(chain, state, budgets, batch, used, time_s, np.array(sent))


def _points(known: PipelineStates, cell: Sequence[int]) -> np.ndarray:
    """Return fill and slowest stage of all orders and cuts that can be best, or better ones, shape (n, 2)."""
    chain, state, at = known.chain, known.state, list(cell)
    links = (state.bandwidth_bytes_per_s[np.ix_(at, at)].tobytes(), state.latency_s[np.ix_(at, at)].tobytes())
    facts = (chain.layer_s[at].tobytes(), state.speed[at].tobytes(), chain.memory_bytes[at].tobytes())

    def made() -> np.ndarray:
        found = front(*known.alone(cell), grain=_GRAIN, every_order=True)
        return np.array([(cut.fill_s, cut.slowest_s * (1.0 - _GRAIN)) for cut in found]).reshape(-1, 2)

    return known.cache.table(("bound", known.micro_batch, links, facts), made)


def _in_some_cuts(cells: Cells, chain: Chain) -> Structure:
    groups = (WorkerPipeline(workers=cell, cuts=(*range(len(cell)), chain.num_layers)) for cell in cells)
    return Structure(groups=tuple(groups))


def _least_end_s(sets: Sequence[Sequence[np.ndarray]], rounds: float) -> np.ndarray:
    """Return when the last pipeline ends at least, shape (sets,): each takes what it can until then.

    Micro-batches until an end are the most of some lines, convex; Newton's method from a late end comes down
    to where they are all of them.
    """
    width = max(len(points) for cells in sets for points in cells)
    fill = np.full((len(sets), max(map(len, sets)), width), np.inf)
    slowest = np.ones(fill.shape)
    for i, cells in enumerate(sets):
        for j, points in enumerate(cells):
            fill[i, j, : len(points)], slowest[i, j, : len(points)] = points.T
    end_s = (fill + (rounds - 1.0) * slowest)[:, 0].min(1)
    for _ in range(_NEWTON):
        lines = (end_s[:, None, None] - fill) / slowest + 1.0
        best = lines.argmax(2)[:, :, None]
        done = np.maximum(np.take_along_axis(lines, best, 2)[:, :, 0], 0.0)
        pace = np.where(done > 0.0, 1.0 / np.take_along_axis(slowest, best, 2)[:, :, 0], 0.0)
        step = np.maximum((done.sum(1) - rounds) / pace.sum(1), 0.0)
        end_s = end_s - step
        if (step <= 1e-12 * end_s).all():
            break
    return np.asarray(end_s * (1.0 - 1e-9))


def _least_sent_usd(chain: Chain, state: State, cells: Cells) -> float:
    """Return dollars for sums of gradients: each layer's ring has a hop from every pipeline to another."""
    if len(cells) == 1:
        return 0.0
    hop_usd = min(state.usd_per_byte[np.ix_(a, b)].min() for a, b in itertools.permutations(cells, 2))
    return float(2.0 * (len(cells) - 1) * chain.sync_bytes.sum() * hop_usd)


def _least_costs(
    chain: Chain,
    state: State,
    budgets: Sequence[Budget],
    batch: int,
    used: np.ndarray,
    time_s: np.ndarray,
    sent_usd: np.ndarray,
) -> np.ndarray:
    """Return costs of devices in use, shape (n, W), at least: each layer where it takes the least energy.

    Of what a budget counts of one device nothing is certain.
    """
    costs = np.zeros((len(time_s), len(budgets)))
    layer_s = chain.layer_s / state.speed[:, None]
    for i, budget in enumerate(budgets):
        if budget.worker is None and budget.kind in ("usd", "rent_usd"):
            costs[:, i] += used @ (state.usd_per_h / 3600.0) * time_s
        if budget.worker is None and budget.kind in ("usd", "egress_usd"):
            costs[:, i] += sent_usd
        if budget.worker is None and budget.kind in ("joule", "carbon_kg"):
            scale = state.kg_per_j if budget.kind == "carbon_kg" else np.ones(chain.num_workers)
            more = (scale * (state.busy_w - state.idle_w))[:, None] * layer_s
            there = np.where(used[:, :, None] > 0.0, more, np.inf).min(1).sum(1)
            costs[:, i] += used @ (scale * state.idle_w) * time_s + batch * there
    return costs


def _by_devices(known: PipelineStates, budgets: Sequence[Budget], batch: int) -> Rows:
    """Return the rows of all subsets of the devices, whose plans are not looked at.

    A sample is worth the same seconds of the mean device on whichever devices its layers are.
    """
    chain, state = known.chain, known.state
    members = list(known.pools().values())
    counts = counts_of([len(kind) for kind in members])
    first = [kind[0] for kind in members]
    counts = counts[counts @ chain.memory_bytes[first] >= chain.before_state[-1]]
    if not len(counts):
        raise InfeasibleError("no devices hold the model", fix="Add devices")
    worth = chain.layer_s.mean(0) / chain.layer_s.mean(0).sum()
    pace = (worth * state.speed[first][:, None] / chain.layer_s[first]).max(1)
    time_s = batch / (counts @ pace)
    used = np.zeros((len(counts), chain.num_workers))
    used[:, first] = counts
    return time_s, _least_costs(chain, state, budgets, batch, used, time_s, np.zeros(len(counts)))
