"""Sailor's formula restated: the plans its planner chose, relations of the formula, and bounds on plans."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "sailor"))
import clusters
import judge
import plans
import search
from judge import Group, Stage


@pytest.mark.parametrize("name", plans.their_plans())
def test_restated_formula_gives_what_sailors_simulator_says_of_sailors_plans(name):
    told, group = plans.their_plans()[name]
    assert 1 / judge.iteration_seconds((group,)) == pytest.approx(told, abs=6e-7)
    assert judge.fits((group,))


def test_sailors_plans_use_the_devices_of_their_clusters():
    for name, (_, group) in plans.their_plans().items():
        counts = [int(count) for count in name.split("+")]
        used = judge.devices((group,))
        assert all(used[gpu] <= count for gpu, count in zip(clusters.GPUS, counts, strict=True))
        assert judge.samples((group,)) >= plans.GLOBAL_BATCH


def test_grouping_replicas_does_not_matter_to_the_all_reduce():
    rng = np.random.default_rng(1)
    for _ in range(20):
        group = plans.random_even(rng)
        half = len(group.replicas) // 2
        if not half:
            continue
        parts = tuple(Group(some, 1, 1) for some in (group.replicas[:half], group.replicas[half:]))
        assert judge.sync_seconds(parts) == judge.sync_seconds((group,))


def test_all_reduce_of_plans_with_different_cuts_waits_for_the_largest_stage():
    whole = Group(((Stage("A100-40", 4, 0, 26),),) * 3, 4, 10)
    halves = (Stage("V100-16", 4, 0, 14), Stage("V100-16", 4, 14, 26))
    mixed = judge.sync_seconds((whole, Group((halves,) * 3, 2, 10)))
    assert mixed == judge.all_reduce_seconds(judge.gradient_bytes(0, 26) / 4, 6, "A100-40", "V100-16")


def test_what_a_stage_reduces_takes_longer_in_more_pipelines():
    layers = range(judge.NUM_LAYERS + 1)
    sizes = {
        judge.gradient_bytes(i, j) / tp for i, j in itertools.combinations(layers, 2) for tp in (1, 2, 4)
    }
    for gpu in clusters.GPUS:
        table = [[judge.all_reduce_seconds(size, n, gpu, gpu) for size in sizes] for n in range(1, 513)]
        assert np.all(np.diff(np.array(table), axis=0) > 0)


def test_a_message_to_any_kind_is_no_faster_than_to_the_senders_own():
    ends = list(itertools.product(clusters.GPUS, (1, 2, 4)))
    for size in judge.message_bytes(1, 1) * np.array([1, 2, 4, 8]):
        for sender, receiver in itertools.product(ends, ends):
            own = judge.transfer_seconds(float(size), *sender, *sender)
            assert judge.transfer_seconds(float(size), *sender, *receiver) >= own * (1 - 1e-12)


def _alone(counts, sizes=(1, 4)):
    """Yield plans of equal replicas: every kind, degree and number of stages there is room for."""
    for kind, tp, depth, size in itertools.product(range(2), (1, 2, 4), (1, 2, 3, 5), sizes):
        gpu, number = clusters.GPUS[kind], counts[kind] // (tp * depth)
        if number and (gpu, tp, size) in judge.times():
            cuts = np.linspace(0, judge.NUM_LAYERS, depth + 1).astype(int).tolist()
            replica = tuple(Stage(gpu, tp, i, j) for i, j in itertools.pairwise(cuts))
            yield (plans.even((replica,) * number, size),)


def test_search_finds_a_plan_the_judge_accepts_within_its_bound():
    counts = (8, 8)
    found = search.find(counts, 2.0)
    assert judge.fits(found.groups)
    assert judge.samples(found.groups) >= plans.GLOBAL_BATCH
    assert all(judge.devices(found.groups)[gpu] <= 8 for gpu in clusters.GPUS)
    assert judge.iteration_seconds(found.groups) == pytest.approx(found.step_time_s)
    assert found.lower_bound_s <= found.step_time_s
    told, theirs = plans.their_plans()["8+8"]
    simple = [judge.iteration_seconds(plan) for plan in _alone(counts) if judge.fits(plan)]
    assert len(simple) > 5
    assert found.lower_bound_s <= min(simple) and found.lower_bound_s <= judge.iteration_seconds((theirs,))
    assert found.step_time_s < 1 / told


@pytest.mark.slow
def test_every_plan_is_no_faster_than_the_problem_of_its_band():
    counts = (32, 96)
    for _, group in [plans.their_plans()["32+96"], *((0, one) for (one,) in _alone(counts))]:
        bounds = [_modelled(group, counts, band) for band in clusters.bands_of(counts)]
        assert min(bounds) <= judge.iteration_seconds((group,)) * (1 + 1e-9)


def _modelled(group, counts, band):
    """Return the longest replica's seconds by the problem of a band, inf where it is not of the band."""
    problem = clusters.problem_of(counts, band)
    index = {name: i for i, name in enumerate(problem.names)}
    longest = 0.0
    for replica in set(group.replicas):
        at = [(index[s.gpu, s.tp, group.micro_batch], problem.types[s.start, s.stop]) for s in replica]
        times = np.array([problem.time_s[one] for one in at])
        tails = [problem.tail_s[problem.row_of(len(group.replicas))][one] for one in at]
        longest = max(longest, times.sum() + (group.rounds - 1) * times.max() + max(tails))
    return longest
