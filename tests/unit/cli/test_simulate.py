"""`foreshard simulate`: the object, the same bytes for the same seed, budgets and what is refused."""

import json
from pathlib import Path

import pytest

from foreshard.cli.program import run

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
STRAGGLERS = str(SCENARIOS / "stragglers.toml")


def ask(capsys, *args):
    code = run(["simulate", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_object_has_what_the_contract_names(capsys):
    code, out, _ = ask(capsys, STRAGGLERS, "--slots", 60, "--seeds", 2, "--json")
    found = json.loads(out)
    assert code == 0 and found["schema_version"] == 1 and found["seeds"] == [0, 1]
    for name in ("lyapunov", "equal-share"):
        one = found["policies"][name]
        assert one["mean_step_time_s"] > 0 and one["steps"] == 600 and one["violation"] >= 0
        assert set(one["mean_cost"]) == {"usd", "rent_usd", "egress_usd", "joule", "carbon_kg"}
        assert set(one["budget"]) == {"usd"} and len(one["series"]["step_time_s"]) == 60
        assert {"reconfigurations", "reshares"} <= set(one)
    fastest = found["policies"]["greedy-fastest"]
    assert one["budget"]["usd"] == pytest.approx(0.6 * fastest["mean_cost"]["usd"])
    assert fastest["violation"] == pytest.approx(1 / 0.6 - 1)
    kept = [one for one in found["policies"].values() if one["violation_max"] == 0.0]
    assert kept and all(one["mean_step_time_s"] > found["bound"]["mean_step_time_s"] for one in kept)


def test_the_same_seed_gives_the_same_bytes(capsys):
    asked = (STRAGGLERS, "--slots", 40, "--policy", "lyapunov,lb-bsp", "--json")
    assert ask(capsys, *asked)[1] == ask(capsys, *asked)[1]


def test_people_see_who_kept_the_budget(capsys):
    code, out, _ = ask(capsys, STRAGGLERS, "--slots", 40, "--policy", "lyapunov,equal-share")
    assert code == 0 and "broken" in out and "over the bound" in out and "0.6 of what greedy-fastest" in out


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ((STRAGGLERS, "--policy", "magic"), "policy"),
        ((STRAGGLERS, "--seeds", "0"), "--seeds"),
        (("nowhere.toml",), None),
    ],
)
def test_what_is_refused_is_named(capsys, args, key):
    code, out, _ = ask(capsys, *args, "--json")
    assert code == 2 and json.loads(out)["error"]["key"] == key


def test_a_budget_of_a_policy_that_needs_one_is_refused(capsys, tmp_path):
    text = Path(STRAGGLERS).read_text(encoding="utf-8").replace('of = "greedy-fastest"', 'of = "lyapunov"')
    file = tmp_path / "s.toml"
    file.write_text(text, encoding="utf-8")
    code, out, _ = ask(capsys, file, "--slots", 5, "--json")
    assert code == 2 and "needs budgets itself" in json.loads(out)["error"]["what"]


def test_the_report_holds_the_figures_and_loads_nothing(capsys, tmp_path, monkeypatch):
    from foreshard.control import sweeps

    monkeypatch.setattr(sweeps, "_LONGEST", 30)
    file = tmp_path / "r.html"
    code, _, err = ask(
        capsys, STRAGGLERS, "--slots", 30, "--policy", "lyapunov,equal-share,static-best", "--report", file
    )
    page = file.read_text(encoding="utf-8")
    assert code == 0 and "report:" in err
    assert "68.59 %" in page and page.count("<svg") >= 8 and "default-src 'none'" in page
    assert "http://" not in page and "https://" not in page
    for title in ("heterogeneity", "Rate of change", "over V", "Regret"):
        assert title in page


@pytest.mark.parametrize("name", ["stragglers", "two_sites", "spot"])
def test_shipped_scenarios_play(capsys, name):
    asked = (SCENARIOS / f"{name}.toml", "--slots", 30, "--policy", "lyapunov,equal-share", "--json")
    code, out, _ = ask(capsys, *asked)
    found = json.loads(out)
    assert code == 0 and found["bound"]["mean_step_time_s"] > 0
