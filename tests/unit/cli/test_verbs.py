"""The verbs that list and describe; schema files cannot drift from the code they describe."""

from dataclasses import fields

import pytest
from click import Context, MissingParameter

from foreshard.cli.options.missing import missing
from foreshard.cli.verbs import VERBS, commands
from foreshard.spec.plan_file import GroupEntry, PlanFile, StageEntry
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS, Prediction


def test_the_verbs_are_these(shell):
    assert list(VERBS) == [
        "predict",
        "compare",
        "whatif",
        "plan",
        "export",
        "import",
        "profile",
        "calibrate",
        "run",
        "replan",
        "lab",
        "simulate",
        "comm",
        "validate",
        "devices",
        "models",
        "clusters",
        "schema",
        "doctor",
    ]
    text = shell("--help").out
    assert all(verb in text for verb in VERBS)


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_help_of_each_verb(shell, words):
    answer = shell(*words.split(), "--help")
    assert answer.code == 0 and "--json" in answer.out and "--config" in answer.out


@pytest.mark.parametrize("verb", ["devices", "models", "clusters", "schema"])
def test_lists_are_one_json_object_and_a_table(shell, verb):
    found = shell(verb, "--json").json
    assert found["schema_version"] == 1 and len(next(v for v in found.values() if v != 1)) >= 4
    assert len(shell(verb).out.splitlines()) > 4


def test_one_device_by_any_of_its_names(shell):
    assert shell("devices", "H100-SXM-80GB", "--json").json["devices"][0]["name"] == "h100-sxm"
    assert shell("devices", "h100-sxn").code == 2


def test_networks_that_are_traced_are_listed_with_their_samples(shell):
    found = {network["name"]: network["sample"] for network in shell("models", "--json").json["networks"]}
    assert found["resnet50"] == "image of 224 x 224" and found["waveglow"] == "8,000 samples of sound"
    assert {"ssd300", "mask_rcnn", "tacotron2"} <= found.keys() and "ssd300" in shell("models").out


def test_one_model_in_full(shell):
    found = shell("models", "llama3-8b", "--json").json["models"][0]
    assert found["num_params"] == 8_030_261_248
    assert "8,030,261,248" in shell("models", "llama3-8b").out


def test_a_cluster_says_what_it_assumes(shell):
    found = shell("clusters", "2x8xh100-sxm+1x4xa100-sxm-40gb@100Gb/s", "--json").json["cluster"]
    assert found["num_devices"] == 20 and found["assumptions"]
    assert shell("clusters", "2x8x").code == 2


def test_plan_schema_lists_exactly_the_keys_of_the_parser(shell):
    keys = shell("schema", "plan", "--json").json["keys"]
    tables = {"plan": PlanFile, "group": GroupEntry, "stage": StageEntry}
    known = {name: {field.name for field in fields(table)} for name, table in tables.items()}
    shared = known["group"] & known["stage"]
    assert set(keys["plan"]) == known["plan"] and set(keys["stage"]) == known["stage"]
    assert set(keys["group"]) == known["group"] - shared
    for key in shared:
        assert "Also a key of groups" in keys["stage"][key]["doc"]


def test_prediction_schema_lists_exactly_its_fields(shell):
    keys = shell("schema", "prediction", "--json").json["keys"]["prediction"]
    assert set(keys) == {*(field.name for field in fields(Prediction)), "energy_j_total"}
    assert all(part in keys["time_breakdown_s"]["doc"] for part in TIME_PARTS)
    assert all(part in keys["memory"]["doc"] for part in MEMORY_PARTS)


def test_the_schema_of_measured_tables_lists_every_column(shell):
    from foreshard.profile.step_table import COLUMNS
    from foreshard.validation.cells import INPUTS
    from foreshard.validation.tables import table_rules

    keys = shell("schema", "measured", "--json").json["keys"]
    assert set(keys["steps"]) == set(COLUMNS)
    assert set(keys["training"]) == {"id", *INPUTS, "metric_step_time_s"}
    needed = {name for name, about in keys["training"].items() if about.get("required")}
    of_each = [set(table["columns"]) for table in table_rules()["tables"] if table["layout"] == "llm"]
    assert needed == set.intersection(*of_each)


def test_config_schema_lists_the_flags(shell):
    keys = shell("schema", "config", "--json").json["keys"]
    assert {"tp", "global-batch", "seq", "dtype", "usd-per-device-hour"} <= set(keys["predict"])


def test_unknown_schema(shell):
    assert shell("schema", "plans", "--json").json["error"]["code"] == 2


def test_doctor_says_what_is_broken(shell, monkeypatch):
    import foreshard.catalog.models as place

    def broken():
        raise ValueError("torn")

    monkeypatch.setattr(place, "models", broken)
    answer = shell("doctor", "--json")
    assert answer.code == 1 and answer.json["healthy"] is False
    assert {c["check"]: c["status"] for c in answer.json["checks"]}["models"] == "broken"


@pytest.mark.usefixtures("stand_in")
def test_doctor_on_a_healthy_install(shell):
    answer = shell("doctor", "--json")
    assert answer.code == 0 and answer.json["healthy"] is True
    checked = {check["check"] for check in answer.json["checks"]}
    assert {"python", "numpy", "click", "devices", "models", "prices", "frameworks", "prediction"} <= checked


def test_version(shell):
    from foreshard import __version__

    assert shell("--version").out == f"foreshard {__version__}\n"


def test_doctor_answers_where_foreshard_runs_from_its_sources(shell, monkeypatch):
    from importlib import metadata

    def uninstalled(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", uninstalled)
    checks = {row["check"] for row in shell("doctor", "--json").json["checks"]}
    assert "python" in checks and "click" not in checks


def test_doctor_names_every_extra_of_the_package():
    import tomllib
    from pathlib import Path

    from foreshard.cli.doctor import _EXTRAS

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    stated = set(project["project"]["optional-dependencies"]) - {"test", "dev"}
    assert {extra for extra, _ in _EXTRAS.values()} == stated


def test_what_a_verb_needs_is_said_with_an_example(shell):
    """Of every required option and argument of every verb: what it is, one to copy, and exit code 2."""
    for name, command in commands():
        for param in command.params:
            if not param.required:
                continue
            said = missing(MissingParameter(param=param, ctx=Context(command, info_name=name)))
            assert said is not None and "for example" in str(said), (name, param.opts)
            assert said.exit_code == 2
    found = shell("plan", "llama3-8b", "1x8xh100-sxm")
    assert found.code == 2
    assert "--global-batch: not given" in found.err and "--global-batch 512" in found.err


def test_one_device_is_no_devices(shell):
    assert "\n1 device in 1 node, " in shell("clusters", "1xh100-sxm").out
    assert "\n16 devices in 2 nodes, " in shell("clusters", "2x8xh100-sxm").out
