"""A lab played by the controller and its rivals: times of measured costs, ranks that come and go, budgets."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from foreshard.errors import InfeasibleError, SpecError
from foreshard.lab.lab import load_lab
from foreshard.lab.simulated_run import simulate_lab
from foreshard.predict.measured.costs import load_costs
from foreshard.predict.measured.engine import rank_times, step_seconds
from foreshard.predict.measured.memory import measured_memory
from foreshard.runtime.adaptive.controller_config import ControllerConfig
from foreshard.runtime.membership.plan_repair import repaired, taken_over
from foreshard.runtime.state.migration import moves_of
from foreshard.spec.plan_file import load_plan
from foreshard.spec.plan_moves import moves_between

RANKS = (
    'clock = "cpu"\n[[ranks]]\ncount = 2\ndevice = "fast"\nusd_per_h = 4.0\n'
    '[[ranks]]\ncount = 2\ndevice = "slow"\nslow = 2.0\nusd_per_h = 1.0\n'
)


@pytest.fixture
def files(tmp_path, measured_job):
    """Return what writes a lab and gives the arguments of `simulate_lab`."""
    costs, plan = measured_job(fast=1.0, slow=2.0)

    def write(changes=""):
        (tmp_path / "lab.toml").write_text(RANKS + changes)
        return {"lab": str(tmp_path / "lab.toml"), "costs": costs, "plan": plan}

    return write


def change(step, **what):
    told = "\n".join(f"{key} = {json.dumps(value)}" for key, value in what.items())
    return f"\n[[change]]\nat_step = {step}\n{told}\n"


def test_a_static_run_takes_what_is_predicted_at_each_step(files):
    asked = files(change(5, rank=0, slow=3.0))
    found = simulate_lab(**asked, steps=10, policies=("static",))["static"]
    still = step_seconds(
        load_costs(asked["costs"]), load_lab(asked["lab"]).cluster(), load_plan(asked["plan"])
    )
    assert found.time_s[:5] == pytest.approx(still) and (found.time_s[5:] > 1.3 * still).all()
    assert found.reconfigurations == found.reshares == 0 and len(found.plans) == 1


def test_the_controller_follows_what_changes_two_steps_after_it_is_seen(files):
    found = simulate_lab(**files(change(20, rank=1, slow=4.0)), steps=40)
    ours, static = found["lyapunov"], found["static"]
    assert ours.time_s[2:20].mean() < 0.8 * static.time_s[2:20].mean()
    assert ours.time_s[20] == ours.time_s[21] > 2.0 * ours.time_s[19]
    assert ours.time_s[25:].mean() < 0.6 * ours.time_s[20]
    assert ours.time_s.mean() < static.time_s.mean()


@pytest.mark.parametrize("name", ["lyapunov", "lb-bsp", "greedy", "static"])
def test_ranks_that_go_and_come_are_left_out_and_taken_in(files, name):
    lab = files(change(10, rank=1, there=False) + change(20, rank=1, there=True))
    found = simulate_lab(**lab, steps=40, policies=(name,))[name]
    at = {step: plan.ranks for step, plan in found.plans}
    gone = [ranks for step, ranks in at.items() if 10 <= step < 20]
    assert gone and all(1 not in ranks for ranks in gone) and 10 in at
    assert found.reconfigurations >= 2 or name == "static"
    assert 1 in found.plans[-1][1].ranks


def test_a_rank_that_joins_later_is_not_there_at_first(files):
    found = simulate_lab(**files(change(0, rank=3, there=False) + change(6, rank=3, there=True)), steps=30)
    assert 3 not in found["lyapunov"].plans[0][1].ranks
    assert 3 in found["lyapunov"].plans[-1][1].ranks


def test_replicas_by_last_speeds_are_not_faster_in_calm_phases(files):
    """Few samples, dear passes: pipelines that look fast with small micro-batches are slow with real ones."""
    asked = files(
        change(0, rank=3, there=False) + change(10, rank=3, there=True) + change(40, rank=1, slow=4.0)
    )
    costs, plan = (json.loads(Path(asked[key]).read_text()) for key in ("costs", "plan"))
    for layer in costs["layers"]:
        layer.update(forward_s=[2e-3, 2e-3], backward_s=[4e-3, 4e-3], parameter_bytes=1e7)
    for group in plan["groups"]:
        group.update(share=12, micro_batch=8)
    plan["global_batch"] = 48
    Path(asked["costs"]).write_text(json.dumps(costs))
    Path(asked["plan"]).write_text(json.dumps(plan))
    found = simulate_lab(**asked, steps=70, policies=("lyapunov", "lb-bsp"))
    ours, theirs = found["lyapunov"].time_s, found["lb-bsp"].time_s
    assert all(ours[step] <= 1.01 * theirs[step] for step in (9, 39, 69))


def test_budgets_are_counted_and_ours_keeps_them(files):
    found = simulate_lab(**files(), steps=300, budgets=("usd_per_h=6",))
    ours, static = found["lyapunov"], found["static"]
    assert static.violation == pytest.approx(10.0 / 6.0 - 1.0)
    assert ours.violation < 0.02
    dollars = 3600.0 * ours.spent["usd_per_h"].sum() / ours.time_s.sum()
    assert dollars == pytest.approx(6.0 * (1.0 + ours.violation), rel=0.05)
    told = ours.to_dict()
    assert told["budget"] == {"usd_per_h": 6.0} and len(told["series"]["step_time_s"]) == 300
    assert told["mean_step_time_s"] == pytest.approx(float(np.mean(ours.time_s)))


DRAWS = 'power = "{} W"\nidle_power = "{} W"\ncarbon_kg_per_kwh = {}\n'


@pytest.mark.parametrize(
    "budget",
    [
        "usd_per_h=0.5",
        "usd_per_step=1e-6",
        "energy_j_per_h=1e4",
        "energy_j_per_step=1",
        "carbon_kg_per_h=1e-4",
        "carbon_kg_per_step=1e-9",
    ],
)
@pytest.mark.slow
def test_where_a_budget_cannot_be_kept_the_cheapest_plan_runs(files, budget):
    asked, name = files(), budget.partition("=")[0]
    lab = Path(asked["lab"])
    first, second = lab.read_text().split('device = "slow"\n')
    lab.write_text(
        first.replace("usd_per_h", DRAWS.format(300, 60, 0.4) + "usd_per_h")
        + 'device = "slow"\n'
        + DRAWS.format(120, 30, 0.1)
        + second
    )
    plan, least = json.loads(Path(asked["plan"]).read_text()), np.inf
    per = 1.0 if name.endswith("_step") else 3600.0

    def cost(found, steps):
        spent = found.spent[name][-steps:].sum()
        return spent / (steps if per == 1.0 else found.time_s[-steps:].sum() / per)

    for ranks in (ranks for n in range(1, 5) for ranks in combinations(range(4), n)):
        speed = np.array([2.0, 2.0, 1.0, 1.0])[list(ranks)]
        shares = [round(share) for share in 64 * speed / speed.sum()]
        shares[0] += 64 - sum(shares)
        groups = [plan["groups"][rank] | {"share": n} for rank, n in zip(ranks, shares, strict=True)]
        few = Path(asked["plan"]).with_name("few.json")
        few.write_text(json.dumps(plan | {"groups": groups}))
        static = simulate_lab(
            **(asked | {"plan": str(few)}), steps=2, policies=("static",), budgets=(budget,)
        )
        least = min(least, cost(static["static"], 1))
    ours = simulate_lab(**asked, steps=100, policies=("lyapunov",), budgets=(budget,))["lyapunov"]
    assert cost(ours, 20) <= 1.005 * least and ours.violation > 0.5


def test_what_cannot_be_played_is_refused(files):
    with pytest.raises(SpecError, match="unknown policy"):
        simulate_lab(**files(), policies=("magic",))
    with pytest.raises(SpecError, match="0 steps"):
        simulate_lab(**files(), steps=0)


def test_layers_move_over_the_links_of_the_step_that_has_ended(files):
    slow = change(0, rank=3, there=False) + change(7, rank=3, there=True) + change(0, bandwidth="8 Mb/s")
    before = simulate_lab(**files(slow), steps=12, policies=("lb-bsp",))["lb-bsp"]
    (moved,) = np.flatnonzero(before.change_s)
    asked = files(slow + change(int(moved), bandwidth="8 Gb/s"))
    found = simulate_lab(**asked, steps=12, policies=("lb-bsp",))["lb-bsp"]
    assert 3 in dict(found.plans)[moved].ranks
    assert found.change_s[moved] == before.change_s[moved] > 0.1
    assert found.time_s[moved + 1] < before.time_s[moved + 1]


def test_a_step_that_loses_a_rank_is_worked_twice_by_the_others(files):
    asked = files(change(5, rank=3, there=False))
    costs, lab = load_costs(asked["costs"]), load_lab(asked["lab"])
    found = simulate_lab(**asked, steps=8, policies=("static",))["static"]
    others = [one for one in rank_times(costs, lab.cluster(), load_plan(asked["plan"])) if one.rank != 3]
    assert found.change_s[5] == pytest.approx(max(one.compute_s for one in others))
    assert not found.change_s[[0, 1, 2, 3, 4, 6, 7]].any()


def test_idle_ranks_vote_too(files):
    asked = files(change(3, latency="1 s"))
    plan = json.loads(Path(asked["plan"]).read_text())
    alone = plan["groups"][0] | {"share": plan["global_batch"]}
    Path(asked["plan"]).write_text(json.dumps(plan | {"groups": [alone]}))
    found = simulate_lab(**asked, steps=6, policies=("static",))["static"]
    assert found.time_s[3] == pytest.approx(found.time_s[2] + 2 * 3 * (1.0 - 50e-6))


def test_layers_are_foretold_to_come_from_who_sends_them():
    draw, size = np.random.default_rng(0), [4.0, 1.0, 2.0, 4.0, 3.0]
    for _ in range(20):
        held, wanted = (
            {rank: {n for n in range(len(size)) if draw.random() < 0.6} for rank in range(4)} for _ in "ab"
        )
        moves, _ = moves_of(
            {rank: frozenset(("value", n, "w") for n in layers) for rank, layers in held.items()},
            {rank: frozenset(("value", n, "w") for n in layers) for rank, layers in wanted.items()},
            lambda shard: size[shard[1]],
        )
        by_pair = {(move.source, move.target): [shard[1] for shard in move.shards] for move in moves}
        found, _ = moves_between(held, wanted, layer_of=int, order=int, weight=size.__getitem__)
        assert found == by_pair


def joint(files, tmp_path, micro_batch=6):
    """Return arguments with a plan of one stage on all ranks that splits micro-batches evenly."""
    plan = json.loads(Path(files["plan"]).read_text())
    (first, *_), total = plan["groups"], plan["global_batch"]
    stage = first["stages"][0] | {"ranks": [0, 1, 2, 3], "rank_shares": None}
    plan["groups"] = [first | {"share": total, "micro_batch": micro_batch, "stages": [stage]}]
    (tmp_path / "joint.json").write_text(json.dumps(plan))
    return files | {"plan": str(tmp_path / "joint.json")}


def test_wide_stages_follow_a_straggler_and_keep_a_budget(files, tmp_path):
    asked = joint(files(change(20, rank=1, slow=4.0)), tmp_path)
    found = simulate_lab(**asked, steps=60, policies=("lyapunov", "static"))
    ours, static = found["lyapunov"], found["static"]
    assert ours.time_s[2:20].mean() < 0.9 * static.time_s[2:20].mean()
    assert ours.time_s[30:].mean() < 0.6 * static.time_s[30:].mean()
    kept = simulate_lab(**asked, steps=200, policies=("lyapunov",), budgets=("usd_per_h=5",))["lyapunov"]
    assert kept.violation < 0.02 and all(len(plan.groups) == 1 for _, plan in kept.plans)
    assert len({plan.ranks for _, plan in kept.plans}) > 1
    assert kept.time_s.mean() > ours.time_s.mean()


def test_wide_stages_go_on_without_a_rank_and_take_it_back(files, tmp_path):
    asked = joint(files(change(10, rank=1, there=False) + change(20, rank=1, there=True)), tmp_path)
    found = simulate_lab(**asked, steps=40, policies=("lyapunov",))["lyapunov"]
    gone = [plan.ranks for step, plan in found.plans if 10 <= step < 20]
    assert gone and all(1 not in ranks for ranks in gone) and 1 in found.plans[-1][1].ranks


@pytest.mark.parametrize(("name", "lost"), [("static", 0), ("lyapunov", 2)])
def test_where_everybody_of_the_plan_is_lost_an_idle_rank_takes_over_as_in_a_run(files, name, lost):
    asked = files(change(5, rank=lost, there=False))
    plan = json.loads(Path(asked["plan"]).read_text())
    alone = plan | {"groups": [plan["groups"][0] | {"share": plan["global_batch"]}]}
    Path(asked["plan"]).write_text(json.dumps(alone))
    budgets = ("usd_per_h=0.5",) if name == "lyapunov" else ()
    found = simulate_lab(**asked, steps=10, policies=(name,), budgets=budgets)[name]
    at = dict(found.plans)
    left, last = sorted({0, 1, 2, 3} - {lost}), at[max(step for step in at if step < 5)]
    assert last.ranks == (lost,) and lost not in at[5].ranks
    assert at[5] == repaired(taken_over(last, left), left)
    assert np.isfinite(found.time_s).all() and len(found.time_s) == 10


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))]
)
def test_no_steered_run_is_ever_on_more_memory_than_a_rank_has(files, seed):
    """Random memories, from what one sample of the whole model takes to what the first plan takes."""
    rng, asked = (
        np.random.default_rng(seed),
        files(change(8, rank=0, slow=4.0) + change(20, rank=2, slow=3.0)),
    )
    costs, plan = load_costs(asked["costs"]), load_plan(asked["plan"])
    lab = Path(asked["lab"])
    raw = json.loads(Path(asked["plan"]).read_text())
    raw["groups"] = [group | {"micro_batch": 1} for group in raw["groups"]]
    Path(asked["plan"]).write_text(json.dumps(raw))
    cluster = load_lab(str(lab)).cluster()
    least, most = (
        measured_memory(costs, cluster, one).peak_bytes for one in (load_plan(asked["plan"]), plan)
    )
    limits = [f"count = 2\nmemory = '{bytes_} B'\n" for bytes_ in rng.uniform(least, 1.1 * most, 2)]
    first, *parts = lab.read_text().split("count = 2\n")
    lab.write_text(first + "".join(limit + part for limit, part in zip(limits, parts, strict=True)))
    for run in simulate_lab(**asked, steps=40, policies=("lyapunov", "lb-bsp")).values():
        cluster = load_lab(str(lab)).cluster()
        assert all(measured_memory(costs, cluster, one).fits for _, one in run.plans)
        assert run.refused == 0, "nothing is ordered that does not fit"


def test_a_plan_that_starts_on_more_memory_than_a_rank_has_is_named(files):
    """A run in this lab would end in its first step; an order that does not fit is refused instead."""
    asked = files("")
    costs, plan, lab = load_costs(asked["costs"]), load_plan(asked["plan"]), Path(asked["lab"])
    held = measured_memory(costs, load_lab(str(lab)).cluster(), plan)
    lab.write_text(
        lab.read_text().replace("count = 2\n", f"count = 2\nmemory = '{0.9 * held.peak_bytes} B'\n")
    )
    with pytest.raises(InfeasibleError, match=f"rank {held.peak_rank} holds .*with the plan of step 0"):
        simulate_lab(**asked, steps=4, policies=("static",))


def test_an_order_that_does_not_fit_is_refused_and_counted(files, monkeypatch):
    asked = files(change(8, rank=0, slow=4.0))
    costs, plan, lab = load_costs(asked["costs"]), load_plan(asked["plan"]), Path(asked["lab"])
    need = measured_memory(costs, load_lab(str(lab)).cluster(), plan).peak_bytes
    lab.write_text(lab.read_text().replace("count = 2\n", f"count = 2\nmemory = '{1.01 * need} B'\n"))
    as_run = ControllerConfig.as_run

    def larger(self, plan, known):
        made = as_run(self, plan, known)
        return replace(made, groups=tuple(replace(one, micro_batch=one.share) for one in made.groups))

    monkeypatch.setattr(ControllerConfig, "as_run", larger)
    found = simulate_lab(**asked, steps=30)["lyapunov"]
    assert found.refused > 0 and found.to_dict()["refused"] == found.refused
    assert [one for _, one in found.plans] == [plan]
