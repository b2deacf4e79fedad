import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.prices import load_prices
from foreshard.errors import SpecError
from foreshard.report.plan_words import dated

FILE = """
date = "2026-11-01"
region = "eu-west"
source = "our contract"
[[prices]]
device = "H100"
usd_per_device_h = 2.1
[[prices]]
instance = "aws-p5.48xlarge"
usd_per_h = 60.0
date = "2020"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize(
    ("cluster", "usd_per_h", "date"),
    [("2x8xh100", 33.6, "2026-11-01"), ("2xp5.48xlarge", 120.0, "2020"), ("8xa100", 40.97, "2025-03-02")],
)
def test_prices_of_a_file_go_before_those_of_the_catalog(file, cluster, usd_per_h, date):
    priced = load_prices(file).on(load_cluster(cluster))
    assert priced.usd_per_h == pytest.approx(usd_per_h, rel=1e-2)
    assert priced.nodes[0].price_date == date
    assert sum(": price " in line for line in priced.assumptions) == 1


def test_a_price_of_the_cluster_file_stays(file, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[[nodes]]\ncount = 1\nper_node = 8\ndevice = "h100-sxm"\nusd_per_h = 7.0\n')
    assert load_prices(file).on(load_cluster(path)).usd_per_h == 7.0


def test_a_run_says_its_device_hours_and_what_they_cost(file):
    made = api.predict("llama3.2-1b", "4xh100", tp=2, tokens=1e9, prices=file)
    assert made.run_time_s is not None and made.cost.device_hours is not None
    assert made.cost.device_hours == pytest.approx(4 * made.run_time_s / 3600)
    assert made.cost.usd_total == pytest.approx(2.1 * made.cost.device_hours)
    steps = 1e9 / made.plan.tokens
    assert made.to_dict()["energy_j_total"] == pytest.approx(steps * made.energy_j_per_step)
    assert "kWh" in str(made)
    assert api.predict("llama3.2-1b", "4xh100", tp=2).cost.device_hours is None


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"H100"', '"H1000"', "prices[0].device"),
        ('"aws-p5.48xlarge"', '"aws-p5"', "prices[1].instance"),
        ("usd_per_h = 60.0", "usd_per_device_h = 60.0", "prices[1]"),
        ("2.1", '"2.1"', "prices[0].usd_per_device_h"),
    ],
)
def test_a_wrong_entry_names_file_and_key(tmp_path, old, new, key):
    path = tmp_path / "prices.toml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load_prices(str(path))
    assert (caught.value.file, caught.value.key) == (str(path), key)


def test_an_old_price_says_so():
    assert dated("2020-Q1").endswith("over a year old") and dated("undated") == "undated"
