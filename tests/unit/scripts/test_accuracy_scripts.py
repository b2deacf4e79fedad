"""The protocol behind docs/accuracy.md, on runs made up from the model itself."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("scipy")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import ablate_terms
import accuracy_goals
import accuracy_intervals
import accuracy_tables
import cross_validate
import fit_part
from accuracy_rows import Run
from fit_training import HOLD, SPREAD, Runs, batch_of, robust_residuals, weights

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import with_constants
from foreshard.spec.degrees import plan_from_degrees
from foreshard.validation.scoring import RowOutcome

TRUTH = replace(TrainingConstants(), gemm_derate=1.35, host_eager=900e-6, flash_forward=1.0)
NAMES = ["gemm_derate", "flash_forward"]


def made_up_rows():
    model, cluster = load_model("llama-3-8b"), load_cluster("1x8xa100-sxm-80gb")
    rows = []
    for tp in (1, 2, 4, 8):
        for seq_len in (2048, 8192, 32768):
            plan = plan_from_degrees(model.num_layers, 8, tp=tp, seq_len=seq_len, global_batch=8)
            rows.append(
                SimpleNamespace(
                    model=model,
                    cluster=cluster,
                    plan=plan,
                    family=f"f{tp}",
                    framework=load_framework("megatron-core"),
                )
            )
    return tuple(rows)


@pytest.fixture(scope="module")
def runs():
    rows = made_up_rows()
    batch = batch_of(rows)
    return Runs(rows=rows, measured_s=step_times(with_constants(batch, TRUTH)).total, batch=batch)


def test_a_fit_of_some_constants_finds_what_made_the_times(runs):
    others = replace(TRUTH, gemm_derate=1.16, flash_forward=1.15)
    free = fit_part.Prior(mean=np.full(2, 0.5), root=1e-3 * np.eye(2))
    found = fit_part.fit_part(runs, NAMES, others=others, start=others, prior=free, rounds=20)
    assert found.gemm_derate == pytest.approx(1.35, rel=2e-3)
    assert found.flash_forward == pytest.approx(1.0, rel=2e-2)
    assert found.host_eager == TRUTH.host_eager


def test_a_prior_keeps_what_the_runs_do_not_show(runs):
    prior = fit_part.posterior(runs, TRUTH)
    spread = np.sqrt(np.diag(np.linalg.inv(prior.root.T @ prior.root)))
    names = fit_part.all_names()
    assert spread[names.index("gemm_derate_4bit")] == pytest.approx(1.0 / HOLD)  # no run has four bits
    assert spread[names.index("gemm_derate")] < 0.6 / HOLD
    unseen = ["gemm_derate_4bit"]
    moved = fit_part.fit_part(runs, unseen, others=TRUTH, start=replace(TRUTH, gemm_derate_4bit=1.5))
    assert moved.gemm_derate_4bit == pytest.approx(TrainingConstants().gemm_derate_4bit, rel=1e-3)


def test_an_error_past_the_spread_counts_less_than_its_square_whatever_its_weight():
    errors = np.array([0.01, -0.01, 10.0]) * SPREAD
    for weight in (0.01, 1.0):
        loss = 0.5 * robust_residuals(errors, np.full(3, weight)) ** 2
        assert loss / weight == pytest.approx(np.sqrt(1.0 + (errors / SPREAD) ** 2) - 1.0)
        assert loss[0] == pytest.approx(0.5 * weight * 0.01**2, rel=1e-3)
        assert loss[2] < 10.0 * weight
    assert robust_residuals(errors, np.ones(3))[1] < 0.0


def test_tensor_parallelism_over_pcie_counts_nothing(runs):
    one, two = runs.rows[0], runs.rows[3]
    bus = {"cluster": load_cluster("1x8xl40s")}
    rows = (two, SimpleNamespace(**vars(two) | bus), SimpleNamespace(**vars(one) | bus))
    assert [row.plan.groups[0].stages[0].tp for row in rows] == [2, 2, 1]
    found = weights(Runs(rows=rows, measured_s=np.ones(3), batch=runs.batch))
    assert (found > 0).tolist() == [True, False, True]


def test_places_in_ranges_and_values_are_inverse():
    names = fit_part.all_names()
    again = fit_part.from_unit(fit_part.to_unit(TRUTH, names), names, TrainingConstants())
    assert asdict(again) == pytest.approx(asdict(TRUTH))


def test_every_constant_belongs_to_one_term_and_its_off_value_is_known():
    owned = [name for term in ablate_terms.TERMS for name in term.names()]
    assert sorted(owned) == sorted(fit_part.all_names())
    assert set(asdict(ablate_terms.constants_off(()))) == set(owned)
    with pytest.raises(KeyError):
        ablate_terms.owner("warp_factor")
    assert sorted(t.title for t in ablate_terms.order_of_addition()) == sorted(
        t.title for t in ablate_terms.TERMS
    )


def test_a_term_that_is_off_costs_nothing(runs):
    def seconds(on):
        here = ablate_terms.switched(runs, on)
        return step_times(with_constants(here.batch, ablate_terms.constants_off(on)))

    nothing, everything = seconds(()), seconds(ablate_terms.TERMS)
    for part in ("host", "tensor_comm", "straggler"):
        assert np.all(nothing.parts[part] == 0.0)
    assert np.all(everything.parts["host"] > 0.0)
    assert np.all(nothing.total < seconds((ablate_terms.KERNELS,)).total)
    serial = tuple(term for term in ablate_terms.TERMS if term is not ablate_terms.OVERLAP)
    assert np.all(seconds(serial).total >= everything.total - 1e-12)


def test_folds_keep_configurations_whole():
    rows = [SimpleNamespace(n=i // 3) for i in range(90)]
    fold = cross_validate.folds_of(rows, lambda row: row.n)
    assert all(len(set(fold[3 * k : 3 * k + 3])) == 1 for k in range(30))
    assert np.bincount(fold).tolist() == [18] * cross_validate.FOLDS
    assert np.array_equal(fold, cross_validate.folds_of(rows, lambda row: row.n))
    assert not np.array_equal(fold, cross_validate.folds_of(rows, lambda row: row.n, seed=1))


def test_order_of_groups_of_two_and_three():
    def one(i, measured, predicted, key):
        return RowOutcome(id=str(i), family="v", measured_s=measured, predicted_s=predicted, rank_key=key)

    rows = [one(0, 1.0, 2.0, "a"), one(1, 2.0, 1.0, "a")]
    rows += [one(2, 1.0, 1.0, "b"), one(3, 2.0, 2.0, "b"), one(4, 3.0, 3.0, "b")]
    found = cross_validate.order_figures(rows)
    assert found["groups_of_2"] == {"groups": 2, "regret_mean": 0.5, "regret_max": 1.0, "best_found": 1}
    assert found["groups_of_3"] == {"groups": 1, "regret_mean": 0.0, "regret_max": 0.0, "best_found": 1}


@pytest.mark.parametrize(("value", "met"), [(0.05, True), (0.06, True), (0.061, False), (None, None)])
def test_a_goal_is_met_up_to_its_limit(value, met):
    assert accuracy_goals.below("x", value, 0.06).met is met


def test_both_limits_of_an_error_count():
    good = {"median_ape": 0.04, "p90_ape": 0.12}
    assert accuracy_goals.errors_below("x", good, (0.05, 0.13), 3).met
    assert not accuracy_goals.errors_below("x", good, (0.05, 0.11), 3).met
    assert accuracy_goals.errors_below("x", good, (0.05,), 3).met
    table = accuracy_goals.goal_table(
        [accuracy_goals.below("x", 0.1, 0.06), accuracy_goals.below("y", 0.0, 0.06)]
    )
    assert table[0] == "1 of 2 goals are met."
    assert any("**not met**" in line for line in table)


def row(i, family, key, **more):
    stated = {"memory_kind": "allocated", "oom": False} | more
    return SimpleNamespace(id=str(i), family=family, config_key=(family, i), rank_key=key, **stated)


def run_of(i, measured, predicted, *, family="f", key="g", memory=(1.0, 1.0), fits=True, **more):
    mine = row(i, family, key, **more)
    outcome = RowOutcome(
        id=str(i),
        family=family,
        measured_s=measured,
        predicted_s=predicted,
        config_key=(i,),
        rank_key=key,
        measured_peak_bytes=memory[0],
        predicted_peak_bytes=memory[1],
        fits=fits,
        oom=mine.oom,
    )
    return Run(row=mine, outcome=outcome, prediction=None)


def test_memory_is_scored_by_what_is_stated():
    runs = [
        run_of(0, 1.0, 1.0, memory=(1.0, 1.02)),
        run_of(1, 1.0, 1.0, memory=(1.0, 1.2), memory_kind="reserved"),
    ]
    runs += [run_of(2, None, None, memory=(None, None), oom=True, fits=True, memory_kind="")]
    scores = accuracy_tables.memory_scores(runs)
    assert scores.allocated == pytest.approx(0.02)
    assert scores.elsewhere == pytest.approx(0.2)
    assert (scores.wrong_oom, scores.wrong_ran) == (1.0, 0.0)


def test_pairs_as_close_as_repeats_have_no_order():
    runs = [run_of(i, t, p) for i, (t, p) in enumerate([(1.0, 1.0), (1.01, 0.9), (2.0, 2.0)])]
    found = accuracy_tables.order_line(runs)
    assert found["tau"] == pytest.approx(1 / 3)
    assert found["tau_apart"] == 1.0
    assert found["most"] == pytest.approx(1.0) and found["equal"] == 0


def test_no_order_is_found_among_equal_predictions():
    runs = [run_of(i, t, p) for i, (t, p) in enumerate([(1.0, 3.0), (1.2, 3.0), (2.0, 2.0)])]
    found = accuracy_tables.order_line(runs)
    assert found["most"] == pytest.approx(2.0 / 6.0**0.5)  # one of three pairs is equal
    assert found["tau"] == pytest.approx(-2.0 / 6.0**0.5)
    assert (found["equal"], found["pairs"]) == (1, 3)


def test_residuals_name_each_point_once():
    from residual_classes import LeftOut

    names = ("dense:flash:wide:fitted", "dense:flash:wide", "dense:flash", "dense", "all")
    rows = [
        LeftOut(family="a", measured_s=1.0, predicted_s=1.1, classes=names, features=(1.0, i % 4))
        for i in range(30)
    ]
    paths = tuple(f"{name}:datasheet" for name in names[1:])
    blind = [replace(row, measured_s=1.05, classes=paths) for row in rows]
    blind += [replace(row, measured_s=2.2, classes=paths[2:]) for row in rows]
    text = accuracy_intervals.document(rows, [], [], {"datasheet": blind})
    assert text == accuracy_intervals.document(rows, [], [], {"datasheet": blind})
    data = json.loads(text)
    assert set(data["classes"]) == {*names, *paths}
    bounds = {name: entry["bounds"]["0.9"] for name, entry in data["classes"].items()}
    assert bounds["dense:flash:wide:datasheet"] == bounds["dense:flash:wide:fitted"]  # never surer
    assert bounds["dense:datasheet"] == [-0.6931, 0.6931]  # runs of its own say more
    assert data["classes"]["dense:datasheet"]["scale"] == data["classes"]["dense"]["scale"]
    assert data["points"] == {names[0]: [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]}
    assert bounds["dense"] == [-0.0953, 0.0953]
