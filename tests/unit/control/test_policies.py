"""Policies on one path: what each does, what it may know, and that ours keeps the budget near the bound."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.control.test_clairvoyant import WIDTH, environment_of

from foreshard.control.options import ControllerOptions
from foreshard.control.slots import MP_OVER_DP, Budget
from foreshard.simulate.clairvoyant_bound import bound_of
from foreshard.simulate.hindsight import best_subset, violation
from foreshard.simulate.policy_adapter import controller_rule
from foreshard.simulate.reference_policies import (
    BY_SHARES,
    BankedBudget,
    EqualShare,
    Greedy,
    WholeClusterPlan,
    on_subset,
)
from foreshard.simulate.slot_loop import Observation, play
from foreshard.spec.scenario import Scenario

IMPATIENT = ControllerOptions(patience=0.0)


def ours_of(environment, budgets, *, sees_now=True, **asked):
    scenario = Scenario(model="gpt2", cluster="x", global_batch=64, sees_now=sees_now)
    return controller_rule(environment, budgets, scenario, **asked)


def run_of(rule, environment, **more):
    return play(rule, environment, **({"sees_now": True} | more))


def budget_of(environment, share=0.75):
    run = run_of(Greedy(environment), environment)
    return Budget(name="usd", kind="usd", limit=share * float(run.costs["usd"].mean()))


def test_every_policy_uses_only_devices_that_are_there_and_trains_the_whole_batch():
    environment = environment_of()
    budget = budget_of(environment)
    rules = [made(environment, None) for made in BY_SHARES.values()]
    rules += [
        WholeClusterPlan(environment),
        WholeClusterPlan(environment, (budget,)),
        Greedy(environment),
        Greedy(environment, (budget,)),
    ]
    rules += [BankedBudget(environment, (budget,)), ours_of(environment, (budget,))]
    for rule in rules:
        for t in range(environment.path.num_slots):
            condition, pattern = int(environment.path.condition[t]), int(environment.path.pattern[t])
            structure, shares = rule.decide(Observation(condition=condition, pattern=pattern))
            assert sum(shares) == environment.work.batch and min(shares) > 0
            assert environment.path.available[pattern, list(structure.workers)].all()


def test_a_decision_is_made_on_what_was_seen_before():
    environment = environment_of()
    seen = []

    class Spy(EqualShare):
        def decide(self, one):
            seen.append(one)
            return super().decide(one)

    run_of(Spy(environment), environment, sees_now=False)
    condition = environment.path.condition
    assert [one.condition for one in seen] == [condition[0], *condition[:-1]]
    assert [one.pattern for one in seen] == environment.path.pattern.tolist()
    seen.clear()
    run_of(Spy(environment), environment)
    assert [one.condition for one in seen] == condition.tolist()


def test_after_the_first_batch_of_a_changed_slot_a_policy_decides_again():
    environment = environment_of()
    late = run_of(BY_SHARES["lb-bsp"](environment, None), environment, sees_now=False)
    often = run_of(BY_SHARES["lb-bsp"](environment, None), environment, sees_now=False, batches=10)
    knows = run_of(BY_SHARES["lb-bsp"](environment, None), environment)
    changed = np.flatnonzero(np.diff(environment.path.condition)) + 1
    steady = np.setdiff1d(np.arange(1, environment.path.num_slots), changed)
    batches = lambda run: run.time_s - run.change_s  # noqa: E731
    assert batches(late).mean() > batches(often).mean() > batches(knows).mean()
    assert batches(often)[steady] == pytest.approx(batches(knows)[steady])
    mixed = 0.1 * batches(late)[changed] + 0.9 * batches(knows)[changed]
    assert batches(often)[changed] == pytest.approx(mixed)


def test_changes_cost_a_pause_and_bytes_and_shares_are_free():
    environment = environment_of()
    both, one = environment.structure((0, 1)), environment.structure((0,))
    joined_s, costs = environment.change(one, both, 0, 0)
    assert joined_s == pytest.approx(0.5 + 2e6 / 1e7)
    assert costs["rent_usd"] == pytest.approx(joined_s * environment.state(0, 0).usd_per_h[:2].sum() / 3600.0)
    assert environment.change(both, one, 0, 0)[0] == pytest.approx(0.5)
    run = run_of(BY_SHARES["lb-bsp"](environment, lambda seen: (0, 2)), environment)
    assert run.reconfigurations == 0 and run.reshares > 0 and not run.change_s.any()


def test_greedy_bounds_the_others():
    environment = environment_of()
    fastest = run_of(Greedy(environment), environment)
    batches = fastest.time_s - fastest.change_s
    assert batches.mean() == pytest.approx(bound_of(environment, ()).mean_step_time_s, rel=0.02)
    cheapest = run_of(Greedy(environment, (budget_of(environment),)), environment)
    for made in BY_SHARES.values():
        run = run_of(made(environment, None), environment)
        assert run.costs["usd"].mean() > cheapest.costs["usd"].mean()


@pytest.mark.slow
def test_ours_keeps_the_budget_near_the_bound_and_the_books_close():
    environment = environment_of(seed=1, slots=2000)
    budget = budget_of(environment)
    ours = ours_of(environment, (budget,))
    free = type(environment)(work=environment.work, path=environment.path, pause_s=0.0, _memo={})
    run = run_of(ours, environment)
    bound = bound_of(environment, (budget,))
    assert violation(run, (budget,)) <= 0.01
    # States change in every slot here, and every change costs a pause.
    assert run.time_s.mean() - run.change_s.mean() <= 1.10 * bound.mean_step_time_s
    assert ours.policy.queues.identity_error() < 1e-9
    assert free.path is environment.path
    other = run_of(
        BY_SHARES["lb-bsp"](
            environment, on_subset(environment, best_subset(environment, "lb-bsp", (budget,), sees_now=True))
        ),
        environment,
    )
    assert run.time_s.mean() < other.time_s.mean()


def test_on_stages_that_split_micro_batches_ours_keeps_the_budget_and_the_books_close():
    environment = environment_of(seed=1, slots=300)
    environment = replace(environment, work=replace(environment.work, micro_batch=8), _memo={})
    budget = budget_of(environment, 0.7)
    ours, free = (ours_of(environment, some, reading=MP_OVER_DP) for some in ((budget,), ()))
    run, fast = run_of(ours, environment), run_of(free, environment)
    assert violation(run, (budget,)) <= 0.01 < violation(fast, (budget,))
    assert fast.time_s.mean() < run.time_s.mean()
    assert ours.policy.queues.identity_error() < 1e-9
    ours.policy.check_invariants()
    assert run.reconfigurations > 0 and run.used.min() < 4


def test_without_budgets_ours_is_the_fastest_and_with_a_small_weight_the_cheapest():
    environment = environment_of()
    rule = ours_of(environment, (), options=IMPATIENT)
    fastest = run_of(Greedy(environment), environment)
    assert (run_of(rule, environment).time_s - fastest.time_s).mean() == pytest.approx(0.0, abs=0.05)
    budget = budget_of(environment, 0.3)
    thrifty = run_of(ours_of(environment, (budget,), weight=1e-6, options=IMPATIENT), environment)
    cheapest = run_of(Greedy(environment, (budget,)), environment)
    batch_usd = lambda run: float(run.costs["usd"][50:].mean())  # noqa: E731
    assert batch_usd(thrifty) == pytest.approx(batch_usd(cheapest), rel=0.05)


def test_the_subset_of_hindsight_is_the_best_that_keeps_the_budget():
    environment = environment_of(seed=3)
    budget = budget_of(environment)
    found = best_subset(environment, "lb-bsp", (budget,), sees_now=True)
    run = run_of(BY_SHARES["lb-bsp"](environment, on_subset(environment, found)), environment)
    everyone = run_of(BY_SHARES["lb-bsp"](environment, None), environment)
    assert violation(run, (budget,)) < violation(everyone, (budget,))


def test_a_subset_that_is_gone_runs_on_what_is_left():
    environment = environment_of()
    devices = on_subset(environment, (1,))
    assert devices(Observation(condition=0, pattern=0)) == (1,)
    assert devices(Observation(condition=0, pattern=1)) == (0, 2, 3)
    assert WIDTH == 4


def test_the_controller_of_the_runtime_plays_too():
    environment = environment_of(seed=1, slots=120)
    budget = budget_of(environment)
    rule = ours_of(environment, (budget,), sees_now=False)
    run = run_of(rule, environment, sees_now=False)
    rule.policy.check_invariants()
    assert np.isfinite(run.time_s).all() and rule.policy.queues.steps == 120
    assert rule.policy.queues["usd"].spent == pytest.approx(run.costs["usd"].sum())
    assert rule._structure == rule.policy.choice.structure


@pytest.mark.parametrize("seed", range(4))
def test_speeds_of_devices_out_of_use_are_known_as_they_were_in_the_batch_before(seed):
    # A device that was idled on one value far off was never told of again, and believed slow for ever.
    environment = environment_of(seed=seed, slots=300)
    path = environment.path
    path = replace(path, condition=np.repeat(path.condition[:100], 3), pattern=np.zeros(300, int))
    environment = replace(environment, path=path, _memo={})
    rule = ours_of(environment, (budget_of(environment, 0.6),), sees_now=False)
    decide, looked = rule.decide, 0

    def checked(seen):
        nonlocal looked
        idle = np.setdiff1d(np.arange(WIDTH), rule._structure.workers)
        ordered = decide(seen)
        believed, was = rule.policy.estimates.state().speed, path.speed[seen.condition]
        assert believed[idle] == pytest.approx(was[idle], rel=0.03), seen
        looked += len(idle)
        return ordered

    rule.decide = checked
    run_of(rule, environment, sees_now=False, batches=10)
    assert looked > 100
