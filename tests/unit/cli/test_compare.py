"""`foreshard compare` with predictors beside the engines, on one run and on measured ones."""

import pytest

TOY = "NAME = 'toy'\n\ndef predict(run):\n    return 1e-15 * run.plan.tokens * run.model.active_params\n"
PICKY = (
    "from foreshard.validation.predictors import RefusedRun\nNAME = 'picky'\n\n"
    "def predict(run):\n    raise RefusedRun('everything')\n"
)
RUN = ("llama3.2-1b", "1x2xh100-sxm", "--global-batch", "4", "--seq", "1024")


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def test_predictors_stand_beside_the_engines_on_one_run(shell, toy, tmp_path):
    picky = tmp_path / "picky.py"
    picky.write_text(PICKY)
    found = shell("compare", *RUN, "--predictor", toy, "--predictor", picky, "--json")
    first, second = found.json["others"]
    assert found.code == 0 and first["step_time_s"] == pytest.approx(1e-15 * 4096 * 1.2358e9, rel=1e-3)
    assert second == {"name": "picky", "step_time_s": None, "peak_bytes": None, "refused": "everything"}
    text = shell("compare", *RUN, "--predictor", toy).out
    assert "Other predictors" in text and "toy" in text


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ((), "MODEL"),
        (("llama3.2-1b",), "CLUSTER"),
        ((*RUN, "--report", "x.md"), "--report"),
        ((*RUN[:2], "--tables", "all"), "MODEL"),
        (("--tables", "all", "--tp", "2"), "--tp"),
        ((*RUN, "--peer", "calculon"), "--peer"),
        ((*RUN, "--predictor", "none.py"), "--predictor"),
    ],
)
def test_what_is_wrong_is_named(shell, args, key):
    answer = shell("compare", *args, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key


def test_no_tables_in_the_folder_is_an_error(shell, monkeypatch, tmp_path):
    monkeypatch.setenv("FORESHARD_MEASURED", str(tmp_path))
    answer = shell("compare", "--tables", "all", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--tables"
