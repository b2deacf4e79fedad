"""Flags win over the environment, the environment over --config, --config over defaults."""

import pytest

pytestmark = pytest.mark.usefixtures("stand_in")


def tp_of(answer):
    return answer.json["plan"]["groups"][0]["stages"][0]["tp"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('tp = 2\nglobal-batch = 64\n[predict]\ndtype = "fp8"\n')
    return path


def test_order_of_precedence(shell, config, monkeypatch):
    run = ("predict", "llama3-8b", "2x8xh100-sxm", "--json")
    assert tp_of(shell(*run)) == 1
    assert tp_of(shell(*run, "--config", config)) == 2
    monkeypatch.setenv("FORESHARD_TP", "4")
    assert tp_of(shell(*run, "--config", config)) == 4
    assert tp_of(shell(*run, "--config", config, "--tp", "8")) == 8


def test_a_verbs_table_holds_for_that_verb(shell, config):
    run = ("llama3-8b", "2x8xh100-sxm", "--json", "--config", config)
    assert shell("predict", *run).json["plan"]["precision"] == "fp8"
    assert shell("compare", *run).json["predictions"][0]["plan"]["precision"] == "bf16"


@pytest.mark.parametrize("text", ['set = ["cuda_graphs=full", "clips=on"]', 'set = "cuda_graphs=full"'])
def test_a_flag_that_is_repeated_takes_an_array(shell, tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--json", "--config", path)
    stated = answer.json["plan"]["overrides"]
    assert stated["cuda_graphs"] == "full" and stated.get("clips", False) == ("clips" in text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("set = [[1]]", "set"),
        ("set = 3", "set"),
        ("tpp = 2", "tpp"),
        ("[predit]\ntp = 2", "predit"),
        ("tp = [2]", "tp"),
        ("tp = ", None),
        ("tp = -1", "tp"),
        ('recompute = "some"', "recompute"),
    ],
)
def test_mistakes_in_the_config_are_named(shell, tmp_path, text, key):
    path = tmp_path / "c.toml"
    path.write_text(text)
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--json", "--config", path)
    assert answer.code == 2 and answer.json["error"]["key"] == key
    assert "Traceback" not in answer.err


def test_variables_that_are_no_options_are_known(shell, monkeypatch):
    for name in ("FORESHARD_SECRET", "FORESHARD_MEASURED", "FORESHARD_DEBUG"):
        monkeypatch.setenv(name, "")
    assert shell("predict", "llama3-8b", "2x8xh100-sxm").code == 0


def test_a_bad_environment_variable_is_named(shell, monkeypatch):
    monkeypatch.setenv("FORESHARD_TP", "many")
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--json")
    error = answer.json["error"]
    assert answer.code == 2 and error["key"] == "FORESHARD_TP" and error["value"] == "many"
    monkeypatch.setenv("FORESHARD_TP", "2")
    monkeypatch.setenv("FORESHARD_RECOMPUTE", "some")
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "FORESHARD_RECOMPUTE"


def test_a_variable_no_verb_reads_is_refused(shell, monkeypatch):
    monkeypatch.setenv("FORESHARD_TPP", "2")
    error = shell("devices", "--json").json["error"]
    assert error["key"] == "FORESHARD_TPP" and "FORESHARD_TP" in error["fix"]
    monkeypatch.delenv("FORESHARD_TPP")
    monkeypatch.setenv("FORESHARD_TP", "2")
    assert shell("devices", "--json").code == 0, "a variable of another verb is no mistake"


def test_paths_begin_at_the_users_home(shell, tmp_path, monkeypatch):
    """Shells leave ~ as it is in --report=~/a.html, in variables and in files; a folder ~ was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORESHARD_OUTPUT", "~/b.json")
    (tmp_path / "c.toml").write_text('trace = "~/c.json"\n')
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--report=~/a.html", "--config=~/c.toml")
    assert answer.code == 0
    assert {"a.html", "b.json", "c.json"} <= {path.name for path in tmp_path.iterdir()}
    answer = shell("calibrate", "--profile", "h100-sxm=~/none.json", "--device", "h100-sxm")
    assert f"{tmp_path}/none.json" in answer.err
