"""What stands behind docs/gains.md: rivals that no plan that stays can beat, and regimes that need cuts."""

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import bench_gains_runs
from bench_gains import FIXED, OURS, Match, Regime, gain, picture, played, special_regimes
from charts import gain_bars
from fixed_plans import Hindsight, every_structure

from foreshard.control.search.pricing import evaluate
from foreshard.control.slots import Chain, State
from foreshard.lab.lab import load_lab

BATCH = 12


def random_chain(draws, workers=3, layers=3):
    return Chain(
        layer_s=draws.uniform(0.01, 0.1, (workers, layers)),
        boundary_bytes=draws.uniform(0.0, 2.0, layers - 1),
        sync_bytes=draws.uniform(0.0, 3.0, layers),
        state_bytes=draws.uniform(1.0, 3.0, layers),
        saved_bytes=draws.uniform(0.0, 0.2, layers),
        memory_bytes=draws.uniform(5.0, 12.0, workers),
    )


def random_state(draws, workers=3):
    rate = draws.uniform(5.0, 50.0, (workers, workers))
    return State(
        speed=draws.uniform(0.2, 1.0, workers),
        available=np.ones(workers, bool),
        bandwidth_bytes_per_s=np.minimum(rate, rate.T),
        latency_s=np.zeros((workers, workers)),
        usd_per_h=draws.uniform(1.0, 3.0, workers),
        busy_w=np.zeros(workers),
        idle_w=np.zeros(workers),
        usd_per_byte=np.zeros((workers, workers)),
        kg_per_j=np.zeros(workers),
    )


def random_path(seed):
    draws = np.random.default_rng(seed)
    chain, first = random_chain(draws), random_state(draws)
    others = [random_state(draws) for _ in range(2)]
    states = [first, *(State(**{**_fields(one), "usd_per_h": first.usd_per_h}) for one in others)]
    return draws, chain, states, draws.uniform(0.1, 1.0, 3)


def _fields(state):
    return {name: getattr(state, name) for name in State.__dataclass_fields__ if name != "_key"}


def hindsight(chain, states, parts):
    return Hindsight(chain, states, parts, batch=BATCH, micro_batch=1, max_stages=3)


@pytest.mark.parametrize(("workers", "layers", "count"), [(1, 3, 1), (2, 3, 7), (3, 3, 37), (3, 1, 7)])
def test_every_structure_is_listed_once(workers, layers, count):
    draws = np.random.default_rng(0)
    chain = random_chain(draws, workers, layers)
    chain = Chain(**{name: getattr(chain, name) for name in _GIVEN} | {"memory_bytes": np.full(workers, 1e9)})
    found = every_structure(chain, random_state(draws, workers), batch=BATCH, micro_batch=1, max_stages=3)
    assert len(found) == len({frozenset(one.groups) for one in found}) == count


_GIVEN = ("layer_s", "boundary_bytes", "sync_bytes", "state_bytes", "saved_bytes")


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_that_stays_is_faster_than_the_best_one(seed):
    draws, chain, states, parts = random_path(seed)
    known = hindsight(chain, states, parts)
    limit = float(draws.uniform(states[0].usd_per_h.min(), states[0].usd_per_h.sum()))
    for budget in (None, limit):
        best = known.fixed(budget)
        if best is None:
            assert all(states[0].usd_per_h[list(one.workers)].sum() > budget for one in known.structures)
            continue
        for structure in known.structures:
            if budget is not None and states[0].usd_per_h[list(structure.workers)].sum() > budget:
                continue
            for shares in _some_shares(draws, len(structure.groups)):
                times = [evaluate(chain, one, structure, shares, micro_batch=1).time_s for one in states]
                assert best.time_s <= np.average(times, weights=parts) * (1 + 1e-9)
        whole = best.whole_shares(BATCH)
        assert sum(whole) == BATCH
        assert min(whole) >= 1


def _some_shares(draws, groups):
    cuts = np.sort(draws.integers(1, BATCH, (4, groups - 1)), axis=1)
    rows = np.diff(cuts, axis=1, prepend=0, append=BATCH)
    return [row for row in rows if (row > 0).all()]


@pytest.mark.parametrize("seed", range(12))
def test_the_clairvoyant_bound_is_below_every_mixture_of_plans_within_the_budget(seed):
    draws, chain, states, parts = random_path(seed)
    known, parts = hindsight(chain, states, parts), parts / parts.sum()
    rents = known.usd_per_h
    limit = float(draws.uniform(rents.min(), rents.max()))
    bound, fixed = known.clairvoyant_s(limit), known.fixed(limit)
    assert known.clairvoyant_s() <= bound * (1 + 1e-9)
    assert bound <= fixed.time_s * (1 + 1e-9)
    picks = draws.integers(len(known.structures), size=(20_000, len(states)))
    times = known.least_s[picks, range(len(states))]
    spent = (parts * times * (rents[picks, range(len(states))] - limit)).sum(1)
    mixed = itertools.product(np.flatnonzero(spent <= 0.0)[:40], np.flatnonzero(spent > 0.0)[:40])
    means = times @ parts
    for cheap, dear in mixed:
        part = spent[cheap] / (spent[cheap] - spent[dear])
        assert bound <= ((1 - part) * means[cheap] + part * means[dear]) * (1 + 1e-9)


@pytest.mark.slow
def test_cuts_and_groups_carry_the_gain_where_memory_leaves_no_replicas():
    cuts, groups = special_regimes()[0], special_regimes()[2]
    told = played(cuts, steps=150, seed=1)["policies"]
    assert told["lb-bsp@budget"] is None
    assert told[OURS]["step_s"] < 0.7 * told["shares only"]["step_s"]
    assert told["groups fixed"]["step_s"] < 0.7 * told["shares only"]["step_s"]
    told = played(groups, steps=150, seed=1)["policies"]
    assert told[OURS]["step_s"] < 0.85 * told["groups fixed"]["step_s"]


def test_nothing_is_gained_where_nothing_changes():
    row = played(Regime(name="map"), steps=60, seed=0)
    assert abs(gain([row], FIXED)[0]) < 1e-9
    assert row["bound_s"] == pytest.approx(row["fixed_bound_s"])


def test_all_policies_meet_the_same_path():
    regime = Regime(name="map", factor=3.0, fades=4.0)
    one, other = (Match(regime, 40, 5).environment.path for _ in range(2))
    assert (one.condition == other.condition).all()
    assert (one.speed == other.speed).all()


def test_who_breaks_the_budget_is_no_rival():
    row = {name: {"step_s": 1.0, "over_budget": 0.0} for name in (OURS, FIXED)}
    row[FIXED] = {"step_s": 0.5, "over_budget": 0.02}
    assert gain([{"policies": row}], FIXED) is None
    assert gain([{"policies": row}], "lb-bsp@budget") is None


def test_the_picture_is_drawn_of_what_was_played():
    drawn = picture([])
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert len(drawn) < 200_000


@pytest.mark.parametrize("regime", bench_gains_runs.REGIMES, ids=lambda one: one.name)
def test_the_lab_of_a_seed_is_always_the_same_and_has_one_straggler_at_a_time(regime, tmp_path):
    file = tmp_path / "lab.toml"
    for seed in range(3):
        file.write_text(regime.text(80, seed, 1e7))
        assert regime.text(80, seed, 1e7) == file.read_text()
        lab = load_lab(str(file))
        for step in range(80):
            slowed = [lab.slow_at(step, rank) / lab.slow[rank] for rank in range(bench_gains_runs.RANKS)]
            assert sorted(slowed)[:-1] == pytest.approx([1.0] * (bench_gains_runs.RANKS - 1), rel=2e-3)
            assert max(slowed) == pytest.approx(regime.factor, rel=2e-3)


def test_a_real_run_above_the_budget_is_no_rival_and_no_winner():
    found = [{"lyapunov": {"step_s": 1.0, "over_budget": 0.0}, "greedy": {"step_s": 2.0, "over_budget": 0.0}}]
    assert bench_gains_runs.gain(found, "greedy") == (0.5, None)
    assert bench_gains_runs.gain(found, "lb-bsp") is None
    found[0]["lyapunov"]["over_budget"] = 0.02
    assert bench_gains_runs.gain(found, "greedy") is None
    drawn = gain_bars([("a regime", [("greedy", None), ("static", (-0.1, 0.02))])], "legend")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
