import numpy as np
import pytest
from scipy.stats import kendalltau

from foreshard.validation.scoring import (
    RowOutcome,
    distinct,
    kendall_tau_b,
    rank_regrets,
    rank_tau,
    score,
    summarise,
)


def run(i, measured, predicted, **more):
    return RowOutcome(id=f"f-{i}", family="f", measured_s=measured, predicted_s=predicted, **more)


@pytest.mark.parametrize("seed", range(30))
def test_tau_b_equals_scipy_with_and_without_ties(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    x = rng.integers(0, 6 if seed % 2 else 1000, n)
    y = rng.integers(0, 6 if seed % 2 else 1000, n)
    want = kendalltau(x, y).statistic
    got = kendall_tau_b(x, y)
    assert got is None if np.isnan(want) else got == pytest.approx(want, abs=1e-12)


def test_errors_by_hand():
    rows = [run(1, 1.0, 1.1), run(2, 2.0, 1.0), run(3, 4.0, 5.0)]
    s = summarise(rows)
    assert s["mape"] == pytest.approx((0.1 + 0.5 + 0.25) / 3)
    assert s["median_ape"] == pytest.approx(0.25)
    assert s["bias"] == pytest.approx(0.1)
    assert s["p90_ape"] == pytest.approx(np.quantile([0.1, 0.5, 0.25], 0.9))


def test_a_skipped_row_counts_one_in_mape_all_only():
    rows = [run(1, 1.0, 1.1), RowOutcome(id="f-2", family="f", status="skipped", reason="no", measured_s=3.0)]
    s = summarise(rows)
    assert s["mape"] == pytest.approx(0.1)
    assert s["mape_all"] == pytest.approx(0.55)
    assert (s["rows"], s["skipped"]) == (2, 1)


def test_repeats_count_once_with_their_median():
    rows = [run(i, t, 2.0, config_key="same") for i, t in enumerate((1.0, 2.0, 30.0))] + [run(9, 1.0, 1.5)]
    merged = distinct(rows)
    assert len(merged) == 2
    assert merged[0].measured_s == 2.0
    assert summarise(rows)["median_ape"] == pytest.approx(0.25)


def test_order_needs_three_distinct_inputs():
    pair = [run(i, t, p, rank_key="g", config_key=i) for i, (t, p) in enumerate([(1, 2), (2, 1)])]
    assert rank_tau(pair) is None
    assert rank_regrets(pair) == []
    assert rank_regrets(pair, least=2) == [1.0]
    repeats = [*pair, run(5, 2.0, 1.0, rank_key="g", config_key=1)]
    assert summarise(repeats)["kendall_tau"] is None


def test_tau_is_weighted_by_pairs_and_regret_is_a_ratio():
    good = [run(i, t, t, rank_key="a") for i, t in enumerate((1.0, 2.0, 3.0, 4.0))]
    bad = [run(i, t, 10 - t, rank_key="b") for i, t in enumerate((1.0, 2.0, 3.0))]
    assert rank_tau(good + bad) == pytest.approx((6 * 1.0 + 3 * -1.0) / 9)
    assert rank_regrets(good + bad) == pytest.approx([0.0, 2.0])


def test_coverage_and_width():
    rows = [run(1, 1.0, 1.0, interval_s=(0.9, 1.3)), run(2, 2.0, 1.0, interval_s=(0.9, 1.1))]
    s = summarise(rows)
    assert s["coverage"] == 0.5
    assert s["relative_width_median"] == pytest.approx(0.3)


def test_feasibility_counts_does_not_fit_as_positive():
    rows = [
        RowOutcome(id="1", family="f", oom=True, fits=False),
        RowOutcome(id="2", family="f", oom=True, fits=True),
        RowOutcome(id="3", family="f", measured_peak_bytes=1.0, predicted_peak_bytes=1.1, fits=True),
        RowOutcome(id="4", family="f", measured_peak_bytes=1.0, predicted_peak_bytes=0.8, fits=False),
        RowOutcome(id="5", family="f", measured_s=1.0, predicted_s=1.0, fits=False),
    ]
    s = summarise(rows)
    assert s["feasibility"] == {"tp": 1, "fp": 1, "tn": 1, "fn": 1}
    assert s["memory_median_ape"] == pytest.approx(0.15)
    assert s["mape"] == 0.0


def test_an_oom_row_has_no_time_error():
    s = summarise([RowOutcome(id="1", family="f", oom=True, fits=False, predicted_s=3.0)])
    assert s["mape"] is None
    assert s["mape_all"] is None
    assert s["skipped"] == 0


def test_vtrain_order_is_stated_apart():
    others = [
        RowOutcome(id=str(i), family="a", measured_s=t, predicted_s=t, rank_key="a")
        for i, t in enumerate((1.0, 2.0, 3.0))
    ]
    vtrain = [
        RowOutcome(id=str(i), family="vtrain_single", measured_s=t, predicted_s=9 - t, rank_key="v")
        for i, t in enumerate((1.0, 2.0, 3.0))
    ]
    summary = score(others + vtrain)["summary"]
    assert summary["overall"]["kendall_tau"] == 1.0
    assert summary["by_family"]["vtrain_single"]["kendall_tau"] == -1.0
    assert score(vtrain)["summary"]["overall"]["kendall_tau"] == -1.0


def test_the_shape_of_the_contract():
    out = score([run(1, 1.0, 1.1, interval_s=(1.0, 1.2), predict_s=1e-3)])
    assert list(out) == ["schema_version", "rows", "summary"]
    assert list(out["rows"][0]) == [
        "id",
        "family",
        "status",
        "reason",
        "measured_s",
        "predicted_s",
        "interval_s",
        "measured_peak_bytes",
        "predicted_peak_bytes",
        "predict_s",
    ]
    assert list(out["summary"]) == ["overall", "by_family", "intervals"]
    assert list(out["summary"]["overall"]) == [
        "rows",
        "skipped",
        "mape",
        "mape_all",
        "median_ape",
        "p90_ape",
        "bias",
        "coverage",
        "kendall_tau",
        "regret_mean",
        "relative_width_median",
        "memory_median_ape",
        "feasibility",
    ]
