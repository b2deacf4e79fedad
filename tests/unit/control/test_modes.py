"""What comes next: swaps at a fixed age are foreseen, changes without memory are not."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.controller import Controller
from foreshard.control.estimation.estimates import Estimates
from foreshard.control.estimation.modes import Modes
from foreshard.control.options import ControllerOptions
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan_file import parse_plan

ONE, OTHER = [1.0, 1.0, 0.25, 0.25], [0.25, 0.25, 1.0, 1.0]


def noisy(rng, speeds):
    return (np.array(speeds) * rng.lognormal(0.0, 0.05, len(speeds))).tolist()


def test_a_swap_at_a_fixed_age_is_foreseen():
    """Nine steps one way, five the other; reports of one step or of two."""
    rng, modes = np.random.default_rng(0), Modes()
    for turn in range(10):
        for speeds, stay in ((ONE, 9), (OTHER, 5)):
            left = stay
            while left:
                steps = min(int(rng.integers(1, 3)), left)
                modes.see(noisy(rng, speeds), steps)
                left -= steps
                found = modes.following()
                if turn > 4:
                    chance = 0.0 if found is None else found[0]
                    assert (chance > 0.5) == (left == 0), (turn, left, found)
    assert found[1] == pytest.approx(ONE, rel=0.05)


def test_changes_without_memory_are_as_likely_as_they_are():
    """Every step changes with one chance in ten, whatever the age: nothing says more than half."""
    rng, modes, speeds, said = np.random.default_rng(1), Modes(), ONE, []
    for _ in range(3000):
        modes.see(noisy(rng, speeds), 1)
        found = modes.following()
        said.append(0.0 if found is None else found[0])
        if rng.random() < 0.1:
            speeds = OTHER if speeds is ONE else ONE
    assert np.mean(said) == pytest.approx(0.1, abs=0.05)
    assert np.mean(np.array(said) > 0.5) < 0.02


def test_devices_out_of_use_change_with_those_that_are_seen_to(cases):
    estimates = Estimates(cases.state(np.array(ONE)))
    estimates.expect(OTHER)
    estimates.see_speed(0, 0.25)
    estimates.confirm([0])
    assert estimates.state().speed == pytest.approx(OTHER, rel=0.03)
    estimates.expect(ONE)
    estimates.see_speed(0, 0.25)
    estimates.confirm([0])
    assert estimates.state().speed == pytest.approx(OTHER, rel=0.03)


def mean_s(cases, stays, options, states=(ONE, OTHER)):
    """Return the mean step of the second half of a run in which two states swap after so many steps."""
    chain = cases.chain(np.full(4, 0.15), 4, sync=0.01)
    groups = [{"share": 16, "stages": [{"ranks": [r], "layers": [[0, 4]]}]} for r in range(4)]
    plan = parse_plan({"global_batch": 64, "seq_len": 8, "groups": groups, "defaults": {"micro_batch": 1}})
    controller = Controller(chain, cases.state(np.ones(4)), plan, max_stages=1, options=options)
    taken = []
    for turn, stay in enumerate(stays, start=1):
        speeds = states[turn % 2]
        for _ in range(stay):
            structure, state = structure_of(controller.plan), cases.state(np.array(speeds))
            took = evaluate(chain, state, structure, shares_of(controller.plan), micro_batch=1)
            taken.append(took.time_s)
            seen = {rank: speeds[rank] for rank in structure.workers}
            controller.on(StepMeasured(step=len(taken), time_s=took.time_s, relative_speed=seen))
    return np.mean(taken[len(taken) // 2 :])


def test_a_controller_that_foresees_swaps_wastes_no_step_on_them(cases):
    even, random = [9] * 40, np.random.default_rng(2).geometric(0.1, 40).tolist()
    foresees, sees = ControllerOptions(foresees=True), ControllerOptions(foresees=False)
    assert mean_s(cases, even, foresees) < 0.8 * mean_s(cases, even, sees)
    assert mean_s(cases, random, foresees) < 1.03 * mean_s(cases, random, sees)


def test_foresight_is_dropped_when_the_pattern_ends(cases):
    """Twenty even stays teach a pattern that the next sixty do not keep."""
    stays = [9] * 20 + np.random.default_rng(3).geometric(0.15, 60).tolist()
    foresees, sees = ControllerOptions(foresees=True), ControllerOptions(foresees=False)
    assert mean_s(cases, stays, foresees) < 1.03 * mean_s(cases, stays, sees)


@pytest.mark.parametrize("states", [(ONE, OTHER), ([0.0625, 0.0625, 1.0, 0.125], [0.5, 0.5, 0.125, 1.0])])
def test_plans_that_stay_pay_where_swaps_have_no_pattern(cases, states):
    """Nine of ten steps swap, at random: what is foreseen does not come, and the last speeds are wrong.

    A step waits for its slowest rank: of unequal ranks, shares for one of the states may be better in the
    mean than those for the mean speeds, which are each rank's but no step's.
    """
    stays = np.random.default_rng(0).geometric(0.9, 200).tolist()
    shares = np.indices((65, 65, 65)).reshape(3, -1)
    shares = np.vstack([shares, 64 - shares.sum(0)])[:, shares.sum(0) <= 64]
    slowest = [(shares / np.array(speeds)[:, None]).max(0) for speeds in states]
    best_s = 0.15 * 4 * np.mean(slowest, axis=0).min()
    assert mean_s(cases, stays, ControllerOptions(), states) < 1.05 * best_s
