"""The benchmark: who answers, who refuses, what is scored, a predictor added as one file, and the page."""

import csv
import re
from dataclasses import fields
from pathlib import Path

import pytest

from foreshard.errors import SpecError
from foreshard.report.benchmark_page import benchmark_document, benchmark_picture, benchmark_screen
from foreshard.validation.benchmark import benchmark
from foreshard.validation.predictors import (
    RefusedRun,
    RunInputs,
    StepAnswer,
    StepPredictor,
    engine_predictors,
    left_out_constants,
    load_predictor,
)
from foreshard.validation.tables import read_table

DOC = Path(__file__).parents[3] / "docs" / "benchmark.md"
PLANS = ({"tp": "4", "pp": "4"}, {"tp": "8", "pp": "2"}, {"tp": "2", "pp": "8"})
MEASURED = (10.5, 12.0, 11.0)


@pytest.fixture
def table(tmp_path, cells):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(cells))
        writer.writeheader()
        for i, (plan, seconds) in enumerate(zip(PLANS, MEASURED, strict=True)):
            more = {"id": f"megatronbridge-{i}", "metric_step_time_s": str(seconds), "vpp": "1", **plan}
            writer.writerow(cells | more)
        writer.writerow(cells | {"id": "megatronbridge-9", "notes": "OOM: no", "metric_step_time_s": ""})
    return read_table(path)


def known(run):
    """Return the measured seconds: the stages of a plan tell which row it is."""
    stages = len(run.plan.groups[0].stages)
    return dict(zip((4, 2, 8), MEASURED, strict=True))[stages]


def refuses_deep(run):
    if len(run.plan.groups[0].stages) == 8:
        raise RefusedRun("deep pipelines")
    return StepAnswer(step_time_s=2 * known(run), interval_s=(1.0, 100.0))


def wrong_order(run):
    return 1.0 / known(run)


def fails(run):
    raise ZeroDivisionError("nothing")


def never(run):
    return float("nan")


def scores(table, *predictors):
    found = benchmark([table], [StepPredictor(name=p.__name__, predict=p) for p in predictors])
    return found, {score.name: score for score in found.predictors}


def test_each_is_scored_on_what_it_answers_and_all_on_what_all_answer(table):
    found, by_name = scores(table, known, refuses_deep, wrong_order)
    assert (found.rows, found.common) == (3, 2)
    best, deep, wrong = (by_name[p.__name__] for p in (known, refuses_deep, wrong_order))
    assert (best.answered, best.refused, best.failed) == (3, 0, 0)
    assert best.own["mape"] == 0 and best.own["kendall_tau"] == 1 and best.own["regret_mean"] == 0
    assert (deep.answered, deep.refused) == (2, 1) and deep.reasons == {"deep pipelines": 1}
    assert deep.own["median_ape"] == pytest.approx(1.0) and deep.own["coverage"] == 1.0
    assert wrong.own["kendall_tau"] == -1 and wrong.own["regret_mean"] == pytest.approx(12.0 / 10.5 - 1)
    assert all(score.common["rows"] == 2 for score in by_name.values())
    assert by_name["known"].by_family == {"megatronbridge": (3, 0.0)}
    assert all(score.cpu_s >= 0 for score in by_name.values())


def test_failures_are_counted_and_not_scored(table):
    found, by_name = scores(table, known, fails, never)
    assert by_name["fails"].failed == 3 and "ZeroDivisionError" in next(iter(by_name["fails"].reasons))
    assert by_name["never"].failed == 3 and by_name["never"].own["mape"] is None
    assert found.common == 0


def test_a_predictor_never_sees_what_was_measured():
    assert {field.name for field in fields(RunInputs)} == {"model", "cluster", "plan", "framework", "family"}


def test_our_engines_take_part_with_constants_that_never_saw_the_row(table):
    ours = engine_predictors()
    assert {"foreshard analytical", "foreshard graph", "foreshard event"} < {one.name for one in ours}
    found = benchmark([table], [one for one in ours if "event" not in one.name])
    assert all(score.answered == 3 and score.own["coverage"] is not None for score in found.predictors)
    assert left_out_constants("megatronbridge") != left_out_constants("a family of one's own")
    assert left_out_constants("megatronbridge_memory") == left_out_constants("megatronbridge")


def test_the_example_of_the_page_is_a_predictor_of_under_60_lines(tmp_path, table):
    text = re.search(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)[1]
    assert len(text.splitlines()) < 60
    path = tmp_path / "toy.py"
    path.write_text(text)
    predictor = load_predictor(str(path))
    found = benchmark([table], [predictor])
    (score,) = found.predictors
    assert score.name == "half of peak" and score.answered == 3
    # by hand: 6 FLOPs x 70.6e9 parameters x 128 x 8192 tokens at half of 64 x 989 TFLOP/s
    seconds = 6 * 70.55e9 * 128 * 8192 / (0.5 * 64 * 989e12)
    error = sorted(abs(seconds / measured - 1) for measured in MEASURED)[1]
    assert score.own["median_ape"] == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("def predict(run): return 1", "NAME"),
        ("NAME = 'x'", "predict"),
        ("NAME = ''\ndef predict(run): return 1", "NAME"),
        ("import no_such_library", "--predictor"),
        ("NAME = ", "--predictor"),
    ],
)
def test_a_file_that_is_no_predictor_is_named(tmp_path, text, key):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_predictor(str(path))
    assert caught.value.file == str(path) and caught.value.key == key and caught.value.fix


def test_two_of_one_name_and_no_measured_step_are_errors(table):
    with pytest.raises(SpecError, match="known"):
        scores(table, known, known)
    with pytest.raises(SpecError, match="no measured"):
        benchmark([], [StepPredictor(name="x", predict=known)])


def test_the_page_keeps_what_is_around_its_markers(table):
    found, _ = scores(table, known, refuses_deep, fails)
    text = benchmark_document(
        found, "# Mine\n\n<!-- benchmark -->\nold\n<!-- /benchmark -->\nafter\n", "b.svg"
    )
    assert text.startswith("# Mine\n") and text.endswith("<!-- /benchmark -->\nafter\n") and "old" not in text
    assert "![Error and time of each predictor](b.svg)" in text and "deep pipelines" in text
    again = benchmark_document(found, text, "b.svg")
    assert again == text
    fresh = benchmark_document(found, "", "b.svg")
    assert fresh.count("<!-- benchmark -->") == 1
    assert benchmark_screen(found).tables[0].rows[2][1:3] == ("0", "3")


def test_the_picture_holds_who_answers(table):
    found, _ = scores(table, refuses_deep, fails)
    picture = benchmark_picture(found)
    assert picture.count("<circle") == 1 and "refuses_deep, 100.0 %" in picture
    assert len(picture.encode()) < 200_000 and picture.rstrip().endswith("</svg>")
