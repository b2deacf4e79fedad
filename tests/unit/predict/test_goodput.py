"""Goodput of a run: against a run simulated failure by failure, Daly's estimate and a published training."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.predict.goodput import best_interval_steps, daly_interval_s, segment_s
from foreshard.spec.variation import Reliability

DAY_S = 86400.0
# Llama Team, The Llama 3 Herd of Models (2024), 3.3.4: unexpected interruptions of 54 days on 16,384 devices.
INTERRUPTIONS, DAYS, DEVICES = 419, 54, 16_384
MTBF_H = DAYS * 24.0 * DEVICES / INTERRUPTIONS


def simulated_run_s(rng, *, useful_s, every_s, save_s, restart_s, failures_per_s) -> float:
    """Return the seconds of one run, failure by failure."""
    now_s, done_s = 0.0, 0.0
    fails_s = float(rng.exponential(1.0 / failures_per_s))
    while done_s < useful_s:
        length_s = min(every_s, useful_s - done_s) + save_s
        while fails_s < now_s + length_s:
            now_s = fails_s
            fails_s += float(rng.exponential(1.0 / failures_per_s))
            while fails_s < now_s + restart_s:  # fails again while it restarts
                now_s = fails_s
                fails_s += float(rng.exponential(1.0 / failures_per_s))
            now_s += restart_s
        now_s += length_s
        done_s += every_s
    return now_s


@pytest.mark.parametrize(
    ("save_s", "restart_s", "mtbf_s"), [(3, 300, 11_000), (60, 120, 1_200), (20, 900, 700)]
)
def test_a_segment_takes_what_simulated_runs_take_on_average(save_s, restart_s, mtbf_s):
    rng, every_s = np.random.default_rng(0), daly_interval_s(save_s, 1.0 / mtbf_s)
    useful_s = 200 * every_s
    runs = [
        simulated_run_s(
            rng,
            useful_s=useful_s,
            every_s=every_s,
            save_s=save_s,
            restart_s=restart_s,
            failures_per_s=1.0 / mtbf_s,
        )
        for _ in range(200)
    ]
    expected_s = 200 * segment_s(every_s, save_s, restart_s, 1.0 / mtbf_s)
    assert np.mean(runs) == pytest.approx(expected_s, abs=4.0 * np.std(runs) / np.sqrt(len(runs)))
    assert np.mean(runs) == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_interval_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    step_s, save_s = rng.uniform(0.5, 20.0), 10.0 ** rng.uniform(-1, 3)
    rate = 1.0 / 10.0 ** rng.uniform(2, 6)

    def taken(steps):
        return segment_s(steps * step_s, save_s, 0.0, rate) / steps

    found = best_interval_steps(step_s, save_s, rate)
    most = int(4 * found + 50)
    tried = sorted({*range(1, min(most, 400)), *np.linspace(1, most, 300, dtype=int).tolist()})
    assert taken(found) <= min(map(taken, tried)) * (1.0 + 1e-12)


def predicted(times: float, **stated):
    """Return the published training with so many times its failures."""
    given = {
        "mtbf_h": MTBF_H / times,
        "restart_s": 600.0,  # to notice, replace a host and start; stated in docs/event_engine.md
        "checkpoint_bytes_per_s": 2e12,  # sustained rate of the storage, section 3.3.1
    }
    return api.predict(
        "llama3-405b",
        "2048x8xh100-sxm",
        tp=8,
        pp=16,
        global_batch=2048,
        engine="analytical",
        **given | stated,
    )


def test_the_published_training_is_effective_for_more_than_nine_tenths_of_its_time():
    found = predicted(1.0)
    assert found.run.failures_per_day * DAYS == pytest.approx(INTERRUPTIONS)
    assert 0.90 < found.goodput < 0.97
    assert found.goodput + sum(found.run.lost.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("times", [1.0, 4.0, 16.0])
def test_the_search_is_as_good_as_daly_and_what_simulated_runs_give(times):
    run = predicted(times, restart_s=300.0).run
    daly = predicted(times, restart_s=300.0, checkpoint_every_s=run.young_daly_every_s)
    assert run.goodput == pytest.approx(daly.goodput, rel=0.02) and run.goodput >= daly.goodput * (1 - 1e-9)
    rng, segments = np.random.default_rng(3), 20_000
    taken_s = simulated_run_s(
        rng,
        useful_s=segments * run.checkpoint_every_s,
        every_s=run.checkpoint_every_s,
        save_s=run.checkpoint_s,
        restart_s=run.restart_s,
        failures_per_s=1.0 / run.mtbf_s,
    )
    assert run.goodput == pytest.approx(segments * run.checkpoint_every_s / taken_s, rel=0.02)


def test_failures_make_a_run_longer_and_dearer_and_steps_wait_for_data():
    plain, failing = (
        api.predict("llama3-8b", "2x8xh100-sxm", tp=2, tokens=1e12, engine="analytical", **choices)
        for choices in ({}, {"mtbf_h": 2000.0, "restart_s": 300.0, "checkpoint_s": 30.0})
    )
    assert failing.run_time_s == pytest.approx(plain.run_time_s / failing.goodput)
    assert failing.cost.usd_total == pytest.approx(plain.cost.usd_total / failing.goodput)
    slow = api.predict(
        "llama3-8b",
        "2x8xh100-sxm",
        tp=2,
        engine="analytical",
        loader_tokens_per_s=plain.tokens_per_s / 2.0,
    )
    assert slow.goodput == pytest.approx(0.5) and slow.run.lost["loading_data"] == pytest.approx(0.5)


def test_a_spare_that_stands_by_and_saving_beside_training_take_no_time():
    """Restarts and saves of no time leave what is done again, and loads; with every step saved only these."""
    free = predicted(1, restart_s=0.0, checkpoint_s=0.0).run
    assert free.lost["checkpoints"] == 0.0 and free.checkpoint_every_steps == 1
    assert free.restart_s == free.load_s > 0.0
    dearer = predicted(1, restart_s=1.0, checkpoint_s=0.1)
    assert dearer.goodput < free.goodput < 1.0
    assert free.goodput + sum(free.lost.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "stated",
    [
        {"restart_s": 60.0},
        {"mtbf_h": 100.0, "checkpoint_s": 5.0},
        {"mtbf_h": 100.0, "restart_s": 60.0},
        {"mtbf_h": -1.0},
        {"mtbf_h": float("nan")},
    ],
)
def test_what_is_not_known_of_failures_is_asked_for(stated):
    with pytest.raises(SpecError) as error:
        Reliability(**stated)
    assert error.value.key.startswith("--") and error.value.fix
