"""Policies on one path: what each does, what it may know, and that ours keeps the budget near the bound."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.control.test_clairvoyant import WIDTH, arena_of

from foreshard.control.options import ControllerOptions
from foreshard.control.search.subsets import COSTS
from foreshard.control.slots import MP_OVER_DP, Budget
from foreshard.simulate.clairvoyant_bound import bound_of
from foreshard.simulate.hindsight import best_subset, violation
from foreshard.simulate.policies import BY_SHARES, Banked, EqualShare, Fleet, Greedy, on_subset
from foreshard.simulate.policy_adapter import controller_rule
from foreshard.simulate.slot_loop import Seen, play
from foreshard.spec.scenario import Scenario

IMPATIENT = ControllerOptions(patience=0.0)


def ours_of(arena, budgets, *, sees_now=True, **asked):
    scenario = Scenario(model="gpt2", cluster="x", global_batch=64, sees_now=sees_now)
    return controller_rule(arena, budgets, scenario, **asked)


def run_of(rule, arena, **more):
    return play(rule, arena, arena.path, kinds=COSTS, **({"sees_now": True} | more))


def budget_of(arena, share=0.75):
    run = run_of(Greedy(arena), arena)
    return Budget(name="usd", kind="usd", limit=share * float(run.costs["usd"].mean()))


def test_every_policy_uses_only_devices_that_are_there_and_trains_the_whole_batch():
    arena = arena_of()
    budget = budget_of(arena)
    rules = [made(arena, None) for made in BY_SHARES.values()]
    rules += [Fleet(arena), Fleet(arena, (budget,)), Greedy(arena), Greedy(arena, (budget,))]
    rules += [Banked(arena, (budget,)), ours_of(arena, (budget,))]
    for rule in rules:
        for t in range(arena.path.num_slots):
            condition, pattern = int(arena.path.condition[t]), int(arena.path.pattern[t])
            structure, shares = rule.decide(Seen(slot=t, condition=condition, pattern=pattern))
            assert sum(shares) == arena.work.batch and min(shares) > 0
            assert arena.path.available[pattern, list(structure.workers)].all()


def test_a_decision_is_made_on_what_was_seen_before():
    arena = arena_of()
    seen = []

    class Spy(EqualShare):
        def decide(self, one):
            seen.append(one)
            return super().decide(one)

    run_of(Spy(arena), arena, sees_now=False)
    condition = arena.path.condition
    assert [one.condition for one in seen] == [condition[0], *condition[:-1]]
    assert [one.pattern for one in seen] == arena.path.pattern.tolist()
    seen.clear()
    run_of(Spy(arena), arena)
    assert [one.condition for one in seen] == condition.tolist()


def test_after_the_first_batch_of_a_changed_slot_a_policy_decides_again():
    arena = arena_of()
    late = run_of(BY_SHARES["lb-bsp"](arena, None), arena, sees_now=False)
    often = run_of(BY_SHARES["lb-bsp"](arena, None), arena, sees_now=False, batches=10)
    knows = run_of(BY_SHARES["lb-bsp"](arena, None), arena)
    changed = np.flatnonzero(np.diff(arena.path.condition)) + 1
    steady = np.setdiff1d(np.arange(1, arena.path.num_slots), changed)
    batches = lambda run: run.time_s - run.change_s  # noqa: E731
    assert batches(late).mean() > batches(often).mean() > batches(knows).mean()
    assert batches(often)[steady] == pytest.approx(batches(knows)[steady])
    mixed = 0.1 * batches(late)[changed] + 0.9 * batches(knows)[changed]
    assert batches(often)[changed] == pytest.approx(mixed)


def test_changes_cost_a_pause_and_bytes_and_shares_are_free():
    arena = arena_of()
    both, one = arena.structure((0, 1)), arena.structure((0,))
    joined_s, costs = arena.change(one, both, 0, 0)
    assert joined_s == pytest.approx(0.5 + 2e6 / 1e7)
    assert costs["rent_usd"] == pytest.approx(joined_s * arena.state(0, 0).usd_per_h[:2].sum() / 3600.0)
    assert arena.change(both, one, 0, 0)[0] == pytest.approx(0.5)
    run = run_of(BY_SHARES["lb-bsp"](arena, lambda seen: (0, 2)), arena)
    assert run.reconfigurations == 0 and run.reshares > 0 and not run.change_s.any()


def test_greedy_bounds_the_others():
    arena = arena_of()
    fastest = run_of(Greedy(arena), arena)
    batches = fastest.time_s - fastest.change_s
    assert batches.mean() == pytest.approx(bound_of(arena, ()).mean_step_time_s, rel=0.02)
    cheapest = run_of(Greedy(arena, (budget_of(arena),)), arena)
    for made in BY_SHARES.values():
        run = run_of(made(arena, None), arena)
        assert run.costs["usd"].mean() > cheapest.costs["usd"].mean()


def test_ours_keeps_the_budget_near_the_bound_and_the_books_close():
    arena = arena_of(seed=1, slots=2000)
    budget = budget_of(arena)
    ours = ours_of(arena, (budget,))
    free = type(arena)(work=arena.work, path=arena.path, pause_s=0.0, _memo={})
    run = run_of(ours, arena)
    bound = bound_of(arena, (budget,))
    assert violation(run, (budget,)) <= 0.01
    # States change in every slot here, and every change costs a pause.
    assert run.time_s.mean() - run.change_s.mean() <= 1.10 * bound.mean_step_time_s
    assert ours.policy.queues.identity_error() < 1e-9
    assert free.path is arena.path
    other = run_of(
        BY_SHARES["lb-bsp"](arena, on_subset(arena, best_subset(arena, "lb-bsp", (budget,), sees_now=True))),
        arena,
    )
    assert run.time_s.mean() < other.time_s.mean()


def test_on_stages_that_split_micro_batches_ours_keeps_the_budget_and_the_books_close():
    arena = arena_of(seed=1, slots=300)
    arena = replace(arena, work=replace(arena.work, micro_batch=8), _memo={})
    budget = budget_of(arena, 0.7)
    ours, free = (ours_of(arena, some, reading=MP_OVER_DP) for some in ((budget,), ()))
    run, fast = run_of(ours, arena), run_of(free, arena)
    assert violation(run, (budget,)) <= 0.01 < violation(fast, (budget,))
    assert fast.time_s.mean() < run.time_s.mean()
    assert ours.policy.queues.identity_error() < 1e-9
    ours.policy.check_invariants()
    assert run.reconfigurations > 0 and run.used.min() < 4


def test_without_budgets_ours_is_the_fastest_and_with_a_small_weight_the_cheapest():
    arena = arena_of()
    rule = ours_of(arena, (), options=IMPATIENT)
    fastest = run_of(Greedy(arena), arena)
    assert (run_of(rule, arena).time_s - fastest.time_s).mean() == pytest.approx(0.0, abs=0.05)
    budget = budget_of(arena, 0.3)
    thrifty = run_of(ours_of(arena, (budget,), weight=1e-6, options=IMPATIENT), arena)
    cheapest = run_of(Greedy(arena, (budget,)), arena)
    batch_usd = lambda run: float(run.costs["usd"][50:].mean())  # noqa: E731
    assert batch_usd(thrifty) == pytest.approx(batch_usd(cheapest), rel=0.05)


def test_the_subset_of_hindsight_is_the_best_that_keeps_the_budget():
    arena = arena_of(seed=3)
    budget = budget_of(arena)
    found = best_subset(arena, "lb-bsp", (budget,), sees_now=True)
    run = run_of(BY_SHARES["lb-bsp"](arena, on_subset(arena, found)), arena)
    everyone = run_of(BY_SHARES["lb-bsp"](arena, None), arena)
    assert violation(run, (budget,)) < violation(everyone, (budget,))


def test_a_subset_that_is_gone_runs_on_what_is_left():
    arena = arena_of()
    devices = on_subset(arena, (1,))
    assert devices(Seen(slot=0, condition=0, pattern=0)) == (1,)
    assert devices(Seen(slot=0, condition=0, pattern=1)) == (0, 2, 3)
    assert WIDTH == 4


def test_the_controller_of_the_runtime_plays_too():
    arena = arena_of(seed=1, slots=120)
    budget = budget_of(arena)
    rule = ours_of(arena, (budget,), sees_now=False)
    run = run_of(rule, arena, sees_now=False)
    rule.policy.check_invariants()
    assert np.isfinite(run.time_s).all() and rule.policy.queues.steps == 120
    assert rule.policy.queues["usd"].spent == pytest.approx(run.costs["usd"].sum())
    assert rule._structure == rule.policy.choice.structure
