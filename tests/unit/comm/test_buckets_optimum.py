"""The best buckets against all ways to cut; priorities against laws and a case by hand; the advice."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from foreshard.comm.fusion.advice import bucket_advice, caps_mib
from foreshard.comm.fusion.optimum import optimal_buckets
from foreshard.comm.fusion.priority import LayerWork, best_partition, period_s
from foreshard.comm.fusion.rules import MIB, ddp_buckets, ddp_limits, merged_buckets
from foreshard.comm.fusion.timeline import Gradients, bucket_times


def random_gradients(rng, count):
    ready = np.cumsum(rng.uniform(0.0, 2.0, count))
    return Gradients(
        names=tuple(map(str, range(count))),
        num_bytes=rng.uniform(0.1, 4.0, count),
        ready_s=ready,
        backward_s=float(ready[-1]),
    )


def affine(alpha, beta):
    return lambda size: alpha + beta * np.asarray(size)


def all_ways(count):
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            edges = (0, *inner, count)
            yield tuple(pairwise(edges))


def end_s(gradients, bounds, cost):
    return bucket_times(gradients, bounds, cost)[-1].end_s


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    made = random_gradients(rng, int(rng.integers(1, 10)))
    cost = affine(rng.uniform(0.0, 2.0), rng.uniform(0.1, 1.5))
    if seed % 5 == 0:  # a cost that is no straight line, as the closed forms
        linear = cost
        cost = lambda size: linear(size) + 0.3 * np.sqrt(size)  # noqa: E731
    best = min(end_s(made, bounds, cost) for bounds in all_ways(len(made.names)))
    found = optimal_buckets(made, cost)
    assert end_s(made, found, cost) == pytest.approx(best, rel=1e-9)
    assert found[0][0] == 0 and found[-1][1] == len(made.names)
    assert all(one[1] == two[0] for one, two in pairwise(found))


@pytest.mark.parametrize("seed", range(5))
def test_no_rule_beats_the_optimum(seed):
    rng = np.random.default_rng(100 + seed)
    made, cost = random_gradients(rng, 60), affine(0.7, 0.6)
    best = end_s(made, optimal_buckets(made, cost), cost)
    for bounds in (
        merged_buckets(made, cost, 0.7),
        ddp_buckets(made.num_bytes.tolist(), (2.0, 10.0)),
        ((0, 60),),
    ):
        assert best <= end_s(made, bounds, cost) * (1 + 1e-12)


def test_free_start_ups_leave_gradients_alone_and_dear_ones_join_them():
    made = random_gradients(np.random.default_rng(1), 12)
    dear = affine(1000.0, 0.1)
    assert optimal_buckets(made, dear) == ((0, 12),)
    alone = tuple((i, i + 1) for i in range(12))
    free = affine(0.0, 1.0)
    assert end_s(made, optimal_buckets(made, free), free) == pytest.approx(end_s(made, alone, free))


def test_the_advice_is_best_of_the_caps_and_not_worse_than_the_default():
    rng = np.random.default_rng(3)
    ready = np.cumsum(rng.uniform(0.0, 2e-3, 200))
    made = Gradients(
        names=tuple(map(str, range(200))),
        num_bytes=rng.uniform(0.1, 8.0, 200) * MIB,
        ready_s=ready,
        backward_s=float(ready[-1]),
    )
    cost = affine(1e-3, 1e-9)
    advice = bucket_advice(made, cost)
    assert advice.optimum.exposed_s <= advice.best_cap.exposed_s <= advice.default.exposed_s
    assert advice.saved_s > 0 and advice.best_cap.cap_mib is not None
    bounds = ddp_buckets(made.num_bytes.tolist(), ddp_limits(advice.best_cap.cap_mib))
    assert [(one.start, one.stop) for one in advice.best_cap.times] == list(bounds)
    assert {plan.rule for plan in advice.others} == {"mg-wfbp", "horovod", "one bucket", "no fusion"}


def test_caps_reach_one_bucket_for_all():
    assert caps_mib(0.5 * MIB) == [1]
    caps = caps_mib(3000 * MIB)
    assert caps[:64] == list(range(1, 65)) and caps[-1] == 3000 and caps == sorted(set(caps))


LAYERS = tuple(LayerWork(forward_s=1.0, backward_s=1.0, num_bytes=size) for size in (2.0, 2.0, 8.0))


def test_priority_by_hand():
    # Layers 2, 1, 0 are ready at 1, 2, 3. Without partitions they send 1-9, 9-11, 11-13.
    assert period_s(LAYERS, lambda size: size, by_priority=False) == 13.0 + 3.0
    # By priority layer 0 goes before layer 1: 9-11 and 11-13; forwards at 11, 13, 14.
    assert period_s(LAYERS, lambda size: size) == 15.0
    # In partitions of 1, layer 2 sends 1-2, layer 1 2-3, layer 0 3-5, layer 1 5-6, layer 2 the other 7 until
    # 13: forwards 5-6, 6-7 and 13-14.
    assert period_s(LAYERS, lambda size: size, 1.0) == 14.0


@pytest.mark.parametrize("seed", range(10))
def test_priority_keeps_its_bounds(seed):
    rng = np.random.default_rng(seed)
    layers = [
        LayerWork(forward_s=f, backward_s=b, num_bytes=s)
        for f, b, s in rng.uniform(0.1, 2.0, (int(rng.integers(1, 12)), 3))
    ]
    compute = sum(layer.forward_s + layer.backward_s for layer in layers)
    sent = sum(layer.num_bytes for layer in layers)

    def free(size):
        return size

    fifo = period_s(layers, free, by_priority=False)
    fine = period_s(layers, free, 0.01)
    # Nothing is sent before the first gradient, and the first forward waits for a message after the backward.
    assert max(compute, layers[-1].backward_s + sent) <= fine + 1e-9
    assert fine <= fifo + 0.02 * len(layers)


def test_small_partitions_pay_start_ups():
    layers = [LayerWork(forward_s=1e-3, backward_s=2e-3, num_bytes=64.0 * MIB) for _ in range(12)]
    partition, period = best_partition(layers, affine(1e-5, 1e-10))
    assert period <= period_s(layers, affine(1e-5, 1e-10), by_priority=True)
    coarser, _ = best_partition(layers, affine(1e-2, 1e-10))
    assert partition < coarser
