"""Scenario files: what is read, and what is refused by name."""

import dataclasses
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from foreshard.errors import SpecError
from foreshard.spec.scenario import BudgetTable, Scenario, StochasticProcess, load_scenario, ranks_of

SHIPPED = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))
HEAD = 'model = "gpt2"\ncluster = "1x4xa100-sxm-80gb"\nglobal_batch = 8\n'


def load(tmp_path, text):
    file = tmp_path / "s.toml"
    file.write_text(HEAD + text, encoding="utf-8")
    return load_scenario(file)


def test_three_scenarios_are_shipped_and_load():
    names = {path.stem for path in SHIPPED}
    assert {"stragglers", "two_sites", "spot"} <= names
    for path in SHIPPED:
        found = load_scenario(path)
        assert found.slots >= 10_000 and found.budget and found.doc


def test_files_are_beside_the_scenario(tmp_path):
    found = load(tmp_path, "")
    assert found.path_of("a/b.csv") == tmp_path / "a" / "b.csv"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[[process]]\nwhat = "speed"\nhow = "failures"', "process[0].how"),
        ('[[process]]\nwhat = "speed"\nhow = "fixed"', "process[0].factor"),
        ('[[process]]\nwhat = "speed"\nhow = "markov"\nstay = 0.5', "process[0].factors"),
        ('[[process]]\nwhat = "speed"\nhow = "fixed"\nfactor = 0', "process[0].factor"),
        ('[[process]]\nwhat = "speed"\nhow = "fixed"\nfactor = 1\nranks = "a"', "process[0].ranks"),
        (
            '[[process]]\nwhat = "speed"\nhow = "fixed"\nfactor = 1\nbetween = ["a", "b"]',
            "process[0].between",
        ),
        ('[[process]]\nwhat = "bandwidth"\nhow = "fixed"\nfactor = 1\nranks = "1"', "process[0].ranks"),
        ('[[budget]]\nname = "x"', "budget[0].limit"),
        ('[[budget]]\nname = "x"\nlimit = 1\nof = "lb-bsp"\nshare = 1', "budget[0].limit"),
        ('[[budget]]\nname = "x"\nlimit = 1\n[[budget]]\nname = "x"\nlimit = 2', "budget[1].name"),
        ("pause = 3", "pause"),
        ('colour = "red"', "colour"),
        ('file = "x"', "file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, key):
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    assert caught.value.key == key and str(tmp_path) in caught.value.file


def test_ranks_are_read_and_refused():
    assert ranks_of("", 3) == (0, 1, 2) and ranks_of("0-1, 5", 6) == (0, 1, 5)
    for wrong in ("0-6", "1, 1", "3-1"):
        with pytest.raises(SpecError):
            ranks_of(wrong, 6)


def test_the_schema_names_every_key():
    text = files("foreshard.report").joinpath("schema", "scenario.toml").read_text(encoding="utf-8")
    keys = tomllib.loads(text)
    for name, table in (("scenario", Scenario), ("process", StochasticProcess), ("budget", BudgetTable)):
        own = {field.name for field in dataclasses.fields(table)} - (
            {"file"} if name == "scenario" else set()
        )
        assert set(keys[name]) == own
