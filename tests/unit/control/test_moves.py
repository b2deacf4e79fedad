"""Layers move to whoever lacks them, from the nearest that has any; everybody waits and is paid."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.moves import move, move_costs, spans_of
from foreshard.control.slots import MP_OVER_DP, Structure, WorkerPipeline
from foreshard.spec.plan_moves import moves_between


def pair(*groups):
    return Structure(groups=tuple(WorkerPipeline(workers=w, cuts=c) for w, c in groups))


@pytest.fixture
def world(cases):
    chain = cases.chain(np.ones(4) * 0.1, 3, states=2.0)
    rate = np.array([[np.inf, 10.0, 1.0], [10.0, np.inf, 4.0], [1.0, 4.0, np.inf]])
    price = np.array([[0.0, 0.0, 5.0], [0.0, 0.0, 3.0], [5.0, 3.0, 0.0]])
    state = cases.state(
        [1.0] * 3, bandwidth_bytes_per_s=rate, usd_per_byte=price, usd_per_h=np.full(3, 3600.0)
    )
    return chain, state


def test_a_newcomer_is_sent_the_whole_state_by_the_nearest(world):
    chain, state = world
    done = move(chain, state, pair(((0,), (0, 4)), ((1,), (0, 4))), pair(((1,), (0, 4)), ((2,), (0, 4))))
    size = float(chain.before_state[-1])
    assert done.time_s == pytest.approx(size / 4.0) and done.egress_usd == pytest.approx(3.0 * size)
    costs = move_costs(state, pair(((1,), (0, 4)), ((2,), (0, 4))), done, pause_s=1.0)
    assert costs["rent_usd"] == pytest.approx(2.0 * (1.0 + done.time_s))
    assert costs["usd"] == pytest.approx(costs["rent_usd"] + done.egress_usd)


def test_only_what_is_missing_moves_and_nothing_when_nothing_is(world):
    chain, state = world
    old, new = pair(((0, 1), (0, 2, 4))), pair(((0, 1), (0, 3, 4)))
    assert move(chain, state, old, new).time_s == pytest.approx(float(chain.state_bytes[2]) / 10.0)
    assert move(chain, state, old, old).time_s == 0.0
    assert move(chain, state, pair(((0,), (0, 4))), pair(((0,), (0, 4)))).egress_usd == 0.0


def test_stages_of_several_workers_hold_what_their_group_holds():
    stages = Structure(
        groups=(WorkerPipeline(workers=(0, 1), cuts=(0, 2)), WorkerPipeline(workers=(2,), cuts=(2, 4))),
        reading=MP_OVER_DP,
    )
    assert dict(spans_of(stages)) == {0: (0, 2), 1: (0, 2), 2: (2, 4)}


def test_the_controller_prices_the_bytes_that_a_run_moves(cases):
    """The price is an estimate in arrays of what `plan_moves` works out layer by layer."""
    draw, layers, width = np.random.default_rng(0), 5, 4
    chain = cases.chain(np.ones(layers) * 0.1, width, states=2.0)
    billed = np.ones((width, width)) - np.eye(width)
    state = cases.state([1.0] * width, usd_per_byte=billed)

    def drawn():
        workers = draw.permutation(width).tolist()
        deep = int(draw.integers(1, width))
        cuts = (0, *sorted(draw.choice(np.arange(1, layers), deep - 1, replace=False).tolist()), layers)
        rest = [((worker,), (0, layers)) for worker in workers[deep:] if draw.random() < 0.7]
        return pair((tuple(workers[:deep]), cuts), *rest)

    def held(structure):
        return {worker: frozenset(range(*span)) for worker, span in spans_of(structure)}

    for _ in range(40):
        old, new = drawn(), drawn()
        moves, missing = moves_between(held(old), held(new), layer_of=int, order=int)
        size = sum(chain.state_bytes[layer] for moved in moves.values() for layer in moved)
        assert not missing and move(chain, state, old, new).egress_usd == pytest.approx(float(size))
