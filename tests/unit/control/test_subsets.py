"""Subsets by kind: what the list says is what a batch takes, and the list is complete."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from foreshard.control.search.pricing import evaluate, largest_micro_batch, pace_of, runs
from foreshard.control.search.shares import water_filling
from foreshard.control.search.subsets import (
    COSTS,
    SubsetClasses,
    balanced_shares,
    data_parallel,
    even_shares,
    sample_s,
)
from foreshard.control.slots import Chain, State, Structure, WorkerPipeline
from foreshard.errors import InfeasibleError, SpecError


def chain_of(width, layers=3):
    return Chain(
        layer_s=np.full((width, layers), 0.1),
        boundary_bytes=np.full(layers - 1, 1e3),
        sync_bytes=np.array([1e6, 2e6, 3e6])[:layers],
        state_bytes=np.full(layers, 1e6),
        saved_bytes=np.full(layers, 1e3),
        memory_bytes=np.full(width, 1e9),
    )


def state_of(speed, price, *, sites=None, available=None):
    width = len(speed)
    site = np.zeros(width, dtype=int) if sites is None else np.array(sites)
    apart = site[:, None] != site[None, :]
    return State(
        speed=np.array(speed, float),
        available=np.ones(width, bool) if available is None else np.array(available),
        bandwidth_bytes_per_s=np.where(apart, 1e6, 1e8),
        latency_s=np.where(apart, 1e-2, 1e-4),
        usd_per_h=np.array(price, float),
        busy_w=np.full(width, 400.0),
        idle_w=np.full(width, 100.0),
        usd_per_byte=np.where(apart, 1e-9, 0.0),
        kg_per_j=np.zeros(width),
    )


STATES = {
    "alike": state_of([1, 1, 1, 1], [1, 1, 1, 1]),
    "uneven": state_of([1, 0.5, 1, 0.25], [1, 1, 2, 1]),
    "two sites": state_of([1, 1, 0.5, 0.5, 1], [1, 2, 1, 1, 1], sites=[0, 0, 1, 1, 1]),
    "three sites": state_of([1, 1, 0.5, 0.5, 1], [1, 1, 1, 1, 1], sites=[0, 1, 1, 2, 2]),
    "one gone": state_of([1, 1, 1, 1], [1, 1, 2, 2], available=[True, False, True, True]),
}


@pytest.mark.parametrize("name", STATES)
def test_every_subset_of_devices_is_in_the_list_at_its_price(name):
    state, batch = STATES[name], 60
    chain = chain_of(len(state.speed))
    kinds = SubsetClasses.of(chain, state, batch)
    seconds = sample_s(chain, state)
    there = np.flatnonzero(state.available).tolist()
    seen = set()
    for size in range(1, len(there) + 1):
        for workers in combinations(there, size):
            at = kinds.subset(workers)
            seen.add(at)
            rate = 1.0 / seconds[list(workers)]
            found = evaluate(
                chain, state, data_parallel(workers, chain), batch * rate / rate.sum(), micro_batch=1
            )
            assert kinds.time_s[at] == pytest.approx(found.time_s, rel=1e-9)
            assert kinds.costs[at] == pytest.approx([found.costs[one] for one in COSTS], rel=1e-9)
    assert seen == set(range(len(kinds.counts)))


def test_devices_of_a_subset_are_a_subset_and_prefer_those_in_use():
    state = STATES["uneven"]
    kinds = SubsetClasses.of(chain_of(4), state, 60)
    for at in range(len(kinds.counts)):
        assert kinds.subset(kinds.devices(at)) == at
    alike = SubsetClasses.of(chain_of(4), STATES["alike"], 60)
    assert alike.devices(alike.subset((0, 1)), prefer=(3, 1)) == (1, 3)
    assert (
        alike.subset(()) is None
        and SubsetClasses.of(chain_of(4), STATES["one gone"], 60).subset((0, 1)) is None
    )


def test_the_floor_of_energy_holds_at_any_shares():
    state = replace(STATES["uneven"], busy_w=np.array([400.0, 300.0, 900.0, 120.0]))
    chain, rng = chain_of(4), np.random.default_rng(0)
    kinds = SubsetClasses.of(chain, state, 60)
    joule = COSTS.index("joule")
    for _ in range(300):
        shares = rng.dirichlet(np.ones(4)) * 60
        found = evaluate(chain, state, data_parallel((0, 1, 2, 3), chain), shares, micro_batch=1)
        assert found.costs["joule"] >= kinds.floor[kinds.subset((0, 1, 2, 3)), joule] - 1e-9


def test_a_device_that_cannot_hold_the_model_is_in_no_subset():
    state = STATES["alike"]
    small = replace(chain_of(4), memory_bytes=np.array([1e9, 1.0, 1e9, 1.0]))
    kinds = SubsetClasses.of(small, state, 60)
    assert {rank for kind in kinds.members for rank in kind} == {0, 2}
    with pytest.raises(InfeasibleError, match="holds the model"):
        SubsetClasses.of(replace(small, memory_bytes=np.ones(4)), state, 60)


def test_too_many_kinds_are_refused():
    state = state_of(np.linspace(0.5, 1.0, 20), np.ones(20))
    with pytest.raises(SpecError, match="subsets"):
        SubsetClasses.of(chain_of(20), state, 60)


def test_balanced_shares_have_the_least_makespan():
    rng = np.random.default_rng(1)
    for _ in range(100):
        seconds, batch = rng.uniform(0.1, 1.0, 3), int(rng.integers(1, 12))
        least = min(
            max(a * seconds[0], b * seconds[1], (batch - a - b) * seconds[2])
            for a in range(batch + 1)
            for b in range(batch + 1 - a)
        )
        shares = balanced_shares(seconds, batch)
        assert shares.sum() == batch and (shares >= 0).all()
        assert (shares * seconds).max() == pytest.approx(least)


def test_even_shares_are_even():
    assert even_shares(3, 8).tolist() == [3, 3, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_subset_of_devices_at_random_places_is_listed_as_it_is_priced(cases, seed):
    """Rates are drawn from few values, so that devices see the same rates but not to the same others."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(3, 9))
    links = np.triu(rng.choice([1.0, 0.2, 0.05], size=(width, width)), 1)
    delays = np.triu(rng.choice([0.0, 0.1], size=(width, width)), 1)
    state = cases.state(
        rng.choice([1.0, 0.5], size=width),
        bandwidth_bytes_per_s=links + links.T + np.eye(width),
        latency_s=delays + delays.T,
    )
    chain = cases.chain(np.full(3, 0.1), width, sync=1.0)
    subsets = SubsetClasses.of(chain, state, 64)
    exact = []
    for count in range(1, width + 1):
        for workers in combinations(range(width), count):
            at = subsets.subset(workers)
            pace = pace_of(chain, state, data_parallel(workers, chain), micro_batch=1)
            split = water_filling(pace.start_s, pace.rate_s, 64.0)
            assert subsets.time_s[at] == pytest.approx(split.time_s, rel=1e-9)
            exact.append(split.time_s)
    assert subsets.time_s.min() == pytest.approx(min(exact), rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(cases, seed):
    rng = np.random.default_rng(seed)
    depth, most, share = (int(rng.integers(1, high)) for high in (5, 17, 40))
    chain = cases.chain(
        np.ones(6), depth, saved=rng.uniform(0.1, 1.0, 6), memory=rng.uniform(8.0, 20.0, depth)
    )
    cuts = (0, *sorted(rng.choice(np.arange(1, 6), depth - 1, replace=False).tolist()), 6)
    pipeline = WorkerPipeline(workers=tuple(range(depth)), cuts=cuts)
    structure, state = Structure(groups=(pipeline,)), cases.state(np.ones(depth))
    size = largest_micro_batch(chain, pipeline, share, most)
    fits = [
        n for n in range(1, min(most, share) + 1) if runs(chain, state, structure, [share], micro_batch=n)
    ]
    assert size == max(fits, default=1)
