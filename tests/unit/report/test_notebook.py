"""What results show in a Python session: text in blocks, HTML, frames, drawings."""

import html.parser
from types import SimpleNamespace

import pytest

import foreshard
from foreshard.errors import ExtraMissingError
from foreshard.report import notebook


@pytest.fixture(scope="module")
def results():
    return SimpleNamespace(
        prediction=foreshard.predict("llama3.2-1b", "8xh100", tp=2),
        plans=foreshard.plan(
            "llama3.2-1b", "4xh100", global_batch=16, seq_len=1024, engine="analytical", budget_s=1.0
        ),
        simulation=foreshard.simulate(
            "examples/scenarios/stragglers.toml", policies=["equal-share"], slots=50
        ),
    )


@pytest.mark.parametrize("name", ["prediction", "plans", "simulation"])
def test_a_result_prints_in_blocks(results, name):
    text = repr(getattr(results, name))
    assert text.count("\n\n") >= 2 and len(text) < 8000


@pytest.mark.parametrize("name", ["prediction", "plans", "simulation"])
def test_html_closes_what_it_opens(results, name):
    opened = []

    class Check(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Check().feed(getattr(results, name)._repr_html_())
    assert not opened


def test_names_and_objects_are_the_same_request(tmp_path):
    by_name = foreshard.predict("llama3.2-1b", "8xh100", tp=2)
    model, cluster = foreshard.load_model("llama3.2-1b"), foreshard.load_cluster("8xh100")
    by_object = foreshard.predict(model, cluster, tp=2)
    assert by_name.step_time_s == by_object.step_time_s
    assert by_name.to_dict()["plan"] == by_object.to_dict()["plan"]


@pytest.mark.parametrize(("name", "rows"), [("prediction", 1), ("plans", None), ("simulation", 1)])
def test_frames_have_a_row_for_each_answer(results, name, rows):
    pytest.importorskip("pandas")
    result = getattr(results, name)
    assert len(result.to_pandas()) == (rows or len(result.plans))


@pytest.mark.parametrize("name", ["prediction", "plans", "simulation"])
def test_drawings_are_figures(results, name):
    pytest.importorskip("matplotlib")
    assert getattr(results, name).plot().axes


def test_a_missing_library_names_the_extra(results, monkeypatch):
    def gone(name):
        raise ImportError(name)

    monkeypatch.setattr(notebook, "import_module", gone)
    for draw in (results.prediction.to_pandas, results.plans.plot):
        with pytest.raises(ExtraMissingError, match=r"foreshard\[notebook\]"):
            draw()
