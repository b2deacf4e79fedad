"""Constants fitted to measured steps: known ones come back, error bars hold, more steps err less."""

import json
from dataclasses import replace

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import load_calibration, training_constants
from foreshard.errors import SpecError
from foreshard.predict.batch import PlannedRun
from foreshard.profile.step_calibration import (
    TERMS,
    Steps,
    TimedStep,
    calibrate_steps,
    fit_steps,
    left_out_residuals,
    scaled,
    shots,
)
from foreshard.spec.degrees import plan_from_degrees

START = training_constants()
NAMES = [term.name for term in TERMS]


@pytest.fixture(scope="module")
def runs():
    """Runs of two models under degrees that stress different terms: 18 of them."""
    made = []
    cluster = api.load_cluster("4x8xa100-sxm-80gb@100Gb/s")
    degrees = (
        (1, 1, 1),
        (1, 2, 4),
        (2, 1, 4),
        (2, 4, 2),
        (4, 2, 1),
        (8, 1, 8),
        (8, 4, 1),
        (1, 4, 1),
        (4, 1, 2),
    )
    framework = load_framework("megatron-core")
    for name, seq in (("llama3-8b", 2048), ("gpt2-medium", 1024)):
        model = api.load_model(name)
        for tp, pp, micro_batch in degrees:
            plan = plan_from_degrees(
                model.num_layers,
                32,
                tp=tp,
                pp=pp,
                micro_batch=micro_batch,
                global_batch=1024,
                seq_len=seq,
            )
            made.append(PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework))
    return made


def timed(runs, log_factors, noise, seed=0):
    """Return the runs as measured where constants are so much off, with errors of a steady size."""
    constants = scaled(START, np.asarray(log_factors))
    steps = Steps([TimedStep(name=str(i), run=run, measured_s=1.0) for i, run in enumerate(runs)], constants)
    off = np.random.default_rng(seed).normal(0.0, noise, len(runs))
    seconds = np.exp(steps.log_predicted(np.zeros(len(TERMS))) + off)
    return [
        TimedStep(name=f"run-{i}", run=run, measured_s=float(s))
        for i, (run, s) in enumerate(zip(runs, seconds, strict=True))
    ]


def factors(**moved):
    return np.array([np.log(moved.get(name, 1.0)) for name in NAMES])


def test_known_constants_come_back_within_their_error_bars(runs):
    truth = factors(products=1.15, host=1.5, tensor_comm=1.3, attention=0.8)
    made = fit_steps(Steps(timed(runs, truth, 0.01), START))
    known = made.sds <= 0.5 * np.array([term.sd for term in TERMS])
    assert known[NAMES.index("products")] and known[NAMES.index("host")]
    off = (made.log_factors - truth) / made.sds
    assert np.abs(off).max() < 3.0
    assert abs(made.log_factors[NAMES.index("products")] - np.log(1.15)) < 0.03


def test_error_bars_hold_the_truth_as_often_as_they_say(runs):
    """Truths drawn from the prior: nine of ten in the 90 % interval, counted over terms and draws."""
    inside = []
    sds = np.array([term.sd for term in TERMS])
    for seed in range(4):
        truth = np.random.default_rng(seed).normal(0.0, sds)
        made = fit_steps(Steps(timed(runs, truth, 0.07, seed), START))
        inside += list(np.abs(made.log_factors - truth) <= 1.645 * made.sds)
    assert 0.82 <= np.mean(inside) <= 0.98


def test_what_no_step_says_anything_of_stays_and_says_so(runs):
    made = calibrate_steps(timed(runs, factors(products=1.2), 0.01), start=START, seeds=1)
    terms = {term["name"]: term for term in made["terms"]}
    for name in ("experts", "expert_comm"):  # no run has experts
        assert terms[name]["factor"] == pytest.approx(1.0) and not terms[name]["identified"]
        assert terms[name]["interval"] == pytest.approx(terms[name]["prior_interval"])
        assert terms[name]["by"] == []
    assert terms["products"]["identified"] and terms["products"]["by"][0]["share_of_step"] > 0.5
    low, high = terms["products"]["interval"]
    assert low < 1.2 < high
    assert made["error"]["after"]["median_ape"] < made["error"]["before"]["median_ape"]


def test_left_out_residuals_are_those_of_fits_without_the_step(runs):
    few = timed(runs[:9], factors(products=1.1), 0.03)
    steps = Steps(few, START)
    at = fit_steps(steps).log_factors
    alone = left_out_residuals(steps, at)
    again = fit_steps(Steps(few[1:], START)).log_factors
    assert alone[0] == pytest.approx(np.log(few[0].measured_s) - steps.log_predicted(again)[0], abs=2e-3)
    assert not np.allclose(alone, steps.log_measured - steps.log_predicted(at))


def test_one_odd_step_does_not_bend_the_fit(runs):
    clean = timed(runs, factors(), 0.01)
    odd = [replace(clean[0], measured_s=4.0 * clean[0].measured_s), *clean[1:]]
    moved = fit_steps(Steps(odd, START)).log_factors - fit_steps(Steps(clean, START)).log_factors
    assert np.abs(moved).max() < 0.05


def test_the_curve_falls_with_every_step_in_the_median_over_twenty_orders(runs):
    curve = shots(Steps(timed(runs, factors(products=1.2, host=0.6, data_comm=1.4), 0.02), START))
    medians = [shot.median_ape for shot in curve]
    assert [shot.steps for shot in curve] == [0, 1, 2, 4, 8]
    assert medians == sorted(medians, reverse=True)
    assert medians[-1] < 0.4 * medians[0]
    assert all(shot.low <= shot.median_ape <= shot.high for shot in curve)
    assert shots(Steps(timed(runs[:7], factors(), 0.02), START)) == ()


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "costs.json"
    made = calibrate_steps(timed(runs, factors(products=1.3), 0.01), start=START, seeds=1)
    path.write_text(json.dumps(made), encoding="utf-8")
    return path, made


def test_predict_and_plan_price_by_the_file(written, runs):
    path, made = written
    run = {"tp": 2, "pp": 2, "seq": 2048, "global_batch": 256, "engine": "analytical"}
    cluster = "1x8xa100-sxm-80gb"
    plain, own = (api.predict("llama3-8b", cluster, costs=costs, **run) for costs in (None, str(path)))
    assert own.step_time_s > 1.1 * plain.step_time_s
    assert own.fidelity == "calibrated" and "products x1.2" in own.assumptions[0]
    found = api.plan(
        "llama3-8b", cluster, global_batch=256, seq_len=2048, costs=str(path), engine="analytical", budget_s=5
    )
    first = found.plans[0]
    again = api.predict("llama3-8b", cluster, first.plan, costs=str(path), engine="analytical")
    assert first.prediction.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)
    assert first.prediction.fidelity == "calibrated"
    assert len(made["residuals"]) == len(runs)


def test_a_query_far_from_the_measured_steps_gets_a_wider_interval(written):
    path, _ = written

    def width(model, devices, **more):
        made = api.predict(model, devices, costs=str(path), engine="analytical", **more)
        low, high = made.step_time_interval_s
        assert low < made.step_time_s < high
        return high / low

    near = width("llama3-8b", "4x8xa100-sxm-80gb", tp=2, pp=4, micro_batch=2, global_batch=1024, seq=2048)
    far = width("llama3.1-405b", "512x8xa100-sxm-80gb", tp=8, pp=16, global_batch=4096, seq=8192)
    assert far > near


def test_constants_of_other_devices_and_broken_files_are_refused(written, tmp_path):
    path, _ = written
    with pytest.raises(SpecError, match="no step on h100-sxm was measured") as caught:
        api.predict("llama3-8b", "1x8xh100", costs=str(path))
    assert caught.value.file == str(path) and "a100-sxm-80gb" in caught.value.rule
    with pytest.raises(SpecError, match="datasheet"):
        api.predict("llama3-8b", "1x8xa100-sxm-80gb", costs=str(path), fidelity="datasheet")
    text = path.read_text(encoding="utf-8")
    cut = tmp_path / "cut.json"
    cut.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(SpecError):
        api.predict("llama3-8b", "1x8xa100-sxm-80gb", costs=str(cut))
    cut.write_text(text.replace('"jitter"', '"jiter"'), encoding="utf-8")
    with pytest.raises(SpecError, match=r"jitt?er is") as caught:
        load_calibration(str(cut))
    assert caught.value.key.startswith("constants.ji")


def test_no_step_and_other_tables_are_refused():
    with pytest.raises(SpecError, match="no measured step"):
        calibrate_steps([], start=START)
