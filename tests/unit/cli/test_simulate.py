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
    assert "95 %" not in out  # of one path


@pytest.mark.parametrize(
    ("over", "said"), [(0.12, "exceeded by 12.00 %"), (0.004, "kept, 0.40 %"), (0.0, "kept")]
)
def test_a_budget_that_is_broken_is_not_said_to_be_kept(over, said):
    from foreshard.report.simulation_table import budget_words

    assert said in budget_words(over) and ("kept" in budget_words(over)) == (over <= 0.01)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ((STRAGGLERS, "--policy", "magic"), "--policy"),
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


def test_a_budget_of_what_a_policy_spends_where_no_device_holds_the_model_is_refused(capsys, tmp_path):
    text = """
    model = "llama3.2-1b"
    global_batch = 16
    seq_len = 512
    precision = "fp16"
    [cluster]
    nodes = [{count = 2, device = "t4", per_node = 1, usd_per_h = 1.0}]
    [[budget]]
    name = "power"
    kind = "joule"
    of = "equal-share"
    share = 0.4
    """
    (tmp_path / "s.toml").write_text(text)
    code, out, _ = ask(capsys, tmp_path / "s.toml", "--slots", 20, "--json")
    error = json.loads(out)["error"]
    assert code == 3 and "holds the model" in error["what"] and error["rule"] and error["fix"]


BESIDE_A_DEAR_LINK = """
model = "opt-350m"
global_batch = 32
seq_len = 128
egress_usd_per_gb = 0.1
batches = 4
[cluster]
nodes = [
    {count = 1, device = "rtx-3090", per_node = 1, nic = "100 Gb/s", usd_per_h = 1.0, rack = "a"},
    {count = 2, device = "h100-sxm", per_node = 2, nic = "1 Gb/s", usd_per_h = 1.0, rack = "b"},
]
links = [{between = ["a", "b"], bandwidth = "1 Gb/s", latency = "1 ms"}]
[[budget]]
name = "money"
kind = "KIND"
of = "greedy-fastest"
share = 0.98
"""


def test_a_run_does_not_begin_with_what_its_budget_never_pays(capsys, tmp_path):
    """A step on all devices moves gradients for 4,000 budgets of a step: no later step pays for it."""
    (tmp_path / "s.toml").write_text(BESIDE_A_DEAR_LINK.replace("KIND", "usd"))
    code, out, _ = ask(capsys, tmp_path / "s.toml", "--slots", 60, "--policy", "lyapunov", "--json")
    found = json.loads(out)
    assert code == 0 and found["bound"]["feasible"]
    assert found["policies"]["lyapunov"]["violation"] <= 0.1  # 24 budgets of a step: within its bet


def test_a_part_of_nothing_is_no_budget(capsys, tmp_path):
    """The fastest devices share a node, and send nothing between racks."""
    (tmp_path / "s.toml").write_text(BESIDE_A_DEAR_LINK.replace("KIND", "egress_usd"))
    code, out, _ = ask(capsys, tmp_path / "s.toml", "--slots", 20, "--json")
    error = json.loads(out)["error"]
    assert code == 2 and error["key"] == "budget[0].of" and "money" in error["what"] and error["fix"]


@pytest.mark.slow
def test_the_report_holds_the_figures_and_loads_nothing(capsys, tmp_path, monkeypatch):
    from foreshard.simulate import sweeps

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


@pytest.mark.parametrize("name", ["stragglers", "two_sites", "spot", "../few_samples"])
def test_shipped_scenarios_play(capsys, name):
    asked = (SCENARIOS / f"{name}.toml", "--slots", 30, "--policy", "lyapunov,equal-share", "--json")
    code, out, _ = ask(capsys, *asked)
    found = json.loads(out)
    assert code == 0 and found["bound"]["mean_step_time_s"] > 0


@pytest.mark.slow
def test_stages_that_split_micro_batches_play_beside_replicas_and_are_not_bound_by_theirs(capsys):
    policies = "lyapunov-stages,lyapunov,static-best"
    asked = (SCENARIOS.parent / "few_samples.toml", "--policy", policies)
    code, out, _ = ask(capsys, *asked, "--slots", 120, "--json")
    found = json.loads(out)["policies"]
    ours, replicas = found["lyapunov-stages"], found["lyapunov"]
    assert code == 0 and ours["violation_max"] < 0.01
    assert ours["mean_step_time_s"] < 0.85 * replicas["mean_step_time_s"] and ours["over_bound"] < 0.0
    code, out, _ = ask(capsys, *asked, "--slots", 5)
    assert code == 0 and "the bound does not hold for it" in out


CARBON = """
[[process]]
what = "carbon"
how = "diurnal"
ranks = "0-7"
swing = 3.0
period = "21600 s"
"""


def test_money_energy_carbon_egress_and_duty_are_kept_at_once(capsys, tmp_path):
    text = (SCENARIOS / "two_sites.toml").read_text(encoding="utf-8")
    file = tmp_path / "all.toml"
    file.write_text(f"carbon_g_per_kwh = 400.0\n{text}{CARBON}", encoding="utf-8")
    budgets = {
        "usd_per_h": 20.0,
        "energy_j_per_step": 110_000.0,
        "egress_usd_per_step": 0.01,
        "duty:0": 0.7,
        "carbon_kg_per_step": 0.008,
    }
    asked = [f"--budget={name}={limit}" for name, limit in budgets.items()]
    policies = "lyapunov,lb-bsp"
    code, out, _ = ask(capsys, file, "--slots", 1500, "--policy", policies, *asked, "--json")
    found = json.loads(out)
    ours, fast = found["policies"]["lyapunov"], found["policies"]["lb-bsp"]
    assert code == 0 and set(ours["budget"]) == {"usd", *budgets}
    assert fast["violation"] > 0.1, "they bind"
    assert ours["violation"] <= 0.01
    assert ours["mean_cost"]["carbon_kg"] <= 1.01 * budgets["carbon_kg_per_step"]
    assert ours["mean_cost"]["joule"] <= 1.01 * budgets["energy_j_per_step"]


LAB = str(SCENARIOS.parent / "labs" / "swinging4.toml")


@pytest.fixture
def lab(measured_job):
    """Return the arguments of the shipped lab with costs and a plan."""
    costs, plan = measured_job(fast=1.0, cheap=2.0)
    return (LAB, "--costs", costs, "--plan", plan)


def test_a_lab_is_played_by_the_policies_of_a_run(capsys, lab):
    code, out, _ = ask(capsys, *lab, "--steps", 60, "--budget", "usd_per_h=6", "--json")
    found = json.loads(out)
    assert code == 0 and found["schema_version"] == 1 and {"lyapunov", "static"} <= set(found["policies"])
    ours, static = found["policies"]["lyapunov"], found["policies"]["static"]
    assert len(ours["series"]["step_time_s"]) == ours["steps"] == 60
    assert ours["mean_step_time_s"] < static["mean_step_time_s"]
    assert ours["violation"] < static["violation"] == pytest.approx(10.0 / 6.0 - 1.0)
    code, out, _ = ask(capsys, *lab, "--steps", 20, "--policy", "lyapunov,static")
    assert code == 0 and "simulated with measured costs" in out and "static" in out


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ((LAB,), "--costs"),
        ((LAB, "--costs", "c.json", "--plan", "p.json", "--seeds", "2"), "--seeds"),
        ((STRAGGLERS, "--steps", "20"), "--steps"),
        ((STRAGGLERS, "--budget", "love=1"), "--budget"),
        ((STRAGGLERS, "--budget", "duty:0=1.5"), "--budget"),
        ((STRAGGLERS, "--budget", "duty:99=0.5", "--slots", "5"), "budget[1].rank"),
        ((STRAGGLERS, "--budget", "carbon_kg_per_h=1", "--slots", "5"), "carbon_g_per_kwh"),
    ],
)
def test_what_does_not_go_together_is_named(capsys, args, key):
    code, out, _ = ask(capsys, *args, "--json")
    assert code == 2 and json.loads(out)["error"]["key"] == key
