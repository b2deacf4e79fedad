import csv
import os
import re
import tomllib
from dataclasses import fields, replace
from datetime import date
from importlib.resources import files
from pathlib import Path

import pytest

from foreshard.catalog import cluster_file
from foreshard.catalog.clusters import load_cluster, with_device, with_nic
from foreshard.catalog.devices import devices
from foreshard.catalog.instances import default_nic, default_price, instances, is_old
from foreshard.errors import SpecError
from foreshard.spec.cluster import Network

MEASURED = Path(
    os.environ.get("FORESHARD_MEASURED", Path(__file__).resolve().parents[4] / "shared" / "measured" / "dev")
)

TWO_SITES = """
name = "two sites"
[[nodes]]
count = 8
device = "h100-sxm"
per_node = 8
nic = "3200 Gb/s"
nic_latency = "5 us"
usd_per_h = 98.32
rack = "r0"
[[nodes]]
count = 2
device = "mine"
per_node = 4
nic = "25 Gb/s"
rack = "r1"
[network]
kind = "fat-tree"
oversubscription = 2.0
[[links]]
between = ["r0", "r1"]
bandwidth = "100 Gb/s"
latency = "1 ms"
[[devices]]
name = "mine"
base = "rtx-3090"
memory = "48 GiB"
"""


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refuse(cluster):
    with pytest.raises(SpecError) as caught:
        load_cluster(cluster)
    assert caught.value.rule and caught.value.fix
    return caught.value


def test_shorthand():
    cluster = load_cluster("8x8xh100-sxm")
    (group,) = cluster.nodes
    assert (cluster.num_devices, group.count, group.per_node, group.device.name) == (64, 8, 8, "h100-sxm")
    assert group.nic_bytes_per_s == 400e9
    assert group.nvlink_domain == 8
    assert any("NIC 3200 Gb/s" in one and "azure-nd96isr-h100-v5" in one for one in cluster.assumptions)


def test_shorthand_of_a_mixed_cluster_with_a_rate():
    cluster = load_cluster("2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s")
    assert [group.device.name for group in cluster.nodes] == ["a100-sxm-40gb", "v100-sxm-16gb"]
    assert {group.nic_bytes_per_s for group in cluster.nodes} == {12.5e9}
    assert not any("NIC 1" in one for one in cluster.assumptions)


def test_a_device_without_price_gives_no_price():
    cluster = load_cluster("1x1xrtx-3090")
    assert cluster.usd_per_h is None
    assert cluster.nodes[0].price_date is None
    assert load_cluster("1x8xh100-sxm+1x1xrtx-3090").usd_per_h is None


def test_instances_are_clusters():
    cluster = load_cluster("4xaws-p5.48xlarge")
    assert cluster.num_devices == 32
    assert cluster.usd_per_h == pytest.approx(4 * 98.32)
    assert cluster.nodes[0].price_date == "2025-03-02"
    assert load_cluster("Azure-ND96isr_H100_v5").nodes[0].nic_bytes_per_s == 400e9
    for name in instances():
        assert load_cluster(name).num_devices == instances()[name].per_node
        assert load_cluster(f"3x{name}").num_nodes == 3


def test_an_open_device_name_is_listed_as_an_assumption():
    assert any("taken as SXM 80 GB" in one for one in load_cluster("2x4xa100").assumptions)
    assert any("does not say which H100" in one for one in load_cluster("lambda-gpu-1x-h100").assumptions)


@pytest.mark.parametrize(
    ("shorthand", "domain"),
    [
        ("8x8xh100-sxm", 8),
        ("2x16xv100-sxm3-32gb", 16),
        ("18x4xgb200-nvl72", 72),
        ("1x1xgb300-nvl72", 72),
        ("8x8xl40s", 1),
        ("2x4xa100-pcie-80gb", 1),
        ("2x2xrtx-3090", 1),
        ("2x8xmi300x", 8),
        ("64x4xtpu-v5e", 256),
        ("4x4xgh200-96gb", 4),
        ("2x8xgaudi-2", 8),
    ],
)
def test_nvlink_domain(shorthand, domain):
    assert load_cluster(shorthand).nodes[0].nvlink_domain == domain


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "@",
        "+",
        "8x8x",
        "x8xh100-sxm",
        "0x8xh100-sxm",
        "8x0xh100-sxm",
        "-1x8xh100-sxm",
        "8x8xh100-sxm+",
        "8x8xh100-sxm@",
        "8x8xh100-sxm@100",
        "8x8xh100-sxm@-1 Gb/s",
        "8x8xh100-sxm@0 Gb/s",
        "8x8xh100-sxm@nanGb/s",
        "1e30x8xh100-sxm",
        "9999999x9999999xh100-sxm",
        "1000000x8xh100-sxm",
        "٣x8xh100-sxm",
        "aws-p9",
        "nope",
        "0xaws-p5.48xlarge",
        "8x8xh100-sxm@1e99GB/s",
        "a" * 100_000,
        "\x00",
        "missing.toml",
        "\ud800",
    ],
)
def test_what_is_no_cluster_is_an_error(text):
    error = refuse(text)
    assert len(str(error)) < 1500


def test_a_near_miss_is_suggested():
    assert "'aws-p5.48xlarge'" in refuse("4xaws-p5.48xlrge").fix
    assert "'h100-sxm'" in refuse("8x8xh100-sxn").fix


def test_file(tmp_path):
    cluster = load_cluster(write(tmp_path, TWO_SITES))
    first, second = cluster.nodes
    assert cluster.name == "two sites"
    assert (first.nic_bytes_per_s, first.nic_latency_s) == (400e9, pytest.approx(5e-6))
    assert (first.usd_per_h, first.price_date, first.rack) == (98.32, None, "r0")
    assert second.device.name == "mine"
    assert second.device.memory_bytes == second.device.capacity_bytes == 48 * 2**30
    assert second.device.peak("bf16") == devices()["rtx-3090"].peak("bf16")
    assert (cluster.network.kind, cluster.network.oversubscription) == ("fat-tree", 2.0)
    assert cluster.links[0].between == ("r0", "r1")
    assert cluster.links[0].bandwidth_bytes_per_s == 12.5e9
    assert cluster.links[0].latency_s == pytest.approx(1e-3)
    assert load_cluster(str(tmp_path / "c.toml")) == cluster


def test_a_device_of_ones_own_without_base(tmp_path):
    text = """
        nodes = [{count = 1, device = "toy", per_node = 2}]
        [[devices]]
        name = "toy"
        peak = {fp32 = "10 TFLOP/s"}
        memory = "4 GiB"
        memory_bandwidth = "100 GB/s"
    """
    group = load_cluster(write(tmp_path, text)).nodes[0]
    assert group.device.peak("fp32") == 10e12
    assert (group.nvlink_domain, group.usd_per_h) == (1, None)
    error = refuse(write(tmp_path, text.replace('memory = "4 GiB"', "")))
    assert error.key == "devices[0].memory"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("count = 8", "count = 8.0", "nodes[0].count"),
        ("count = 8", "count = true", "nodes[0].count"),
        ("count = 8", "count = 0", "nodes[0].count"),
        ("count = 8", "count = 99999999999999999999999", "nodes[0].count"),
        ("count = 8", 'count = "8"', "nodes[0].count"),
        ("count = 8", "cuont = 8", "nodes[0].cuont"),
        ("count = 8\n", "", "nodes[0].count"),
        ("per_node = 4", "per_node = -4", "nodes[1].per_node"),
        ('"h100-sxm"', '"h100-sxn"', "nodes[0].device"),
        ('"h100-sxm"', '""', "nodes[0].device"),
        ('"3200 Gb/s"', "3200", "nodes[0].nic"),
        ('"3200 Gb/s"', '"3200 Gb"', "nodes[0].nic"),
        ('"3200 Gb/s"', '"0 Gb/s"', "nodes[0].nic"),
        ('"5 us"', '"-5 us"', "nodes[0].nic_latency"),
        ("98.32", "nan", "nodes[0].usd_per_h"),
        ("98.32", "-1.0", "nodes[0].usd_per_h"),
        ("98.32", '"98.32 USD/h"', "nodes[0].usd_per_h"),
        ('"fat-tree"', '"fattree"', "network.kind"),
        ("oversubscription = 2.0", "oversubscription = 0.5", "network.oversubscription"),
        ("oversubscription = 2.0", "oversubscription = inf", "network.oversubscription"),
        ("[network]", "[netwrk]", "netwrk"),
        ('["r0", "r1"]', '["r0", "r7"]', "links[0].between"),
        ('["r0", "r1"]', '["r0", "r0"]', "links[0].between"),
        ('["r0", "r1"]', '["r0"]', "links[0].between"),
        ('"1 ms"', '"1 m"', "links[0].latency"),
        ('name = "mine"', 'name = "h100-sxm"', "devices[0].name"),
        ('base = "rtx-3090"', 'base = "rtx-9999"', "devices[0].base"),
        ('"48 GiB"', '"48"', "devices[0].memory"),
    ],
)
def test_an_error_in_a_file_names_file_and_key(tmp_path, old, new, key):
    assert old in TWO_SITES
    path = write(tmp_path, TWO_SITES.replace(old, new, 1))
    error = refuse(path)
    assert error.file == str(path)
    assert error.key == key


def test_unknown_keys_get_suggestions(tmp_path):
    assert "'nic_latency'" in refuse(write(tmp_path, TWO_SITES.replace("nic_latency", "nic_latncy"))).fix
    assert "'fat-tree'" in refuse(write(tmp_path, TWO_SITES.replace('"fat-tree"', '"fat_tree"'))).fix
    assert "'mine'" in refuse(write(tmp_path, TWO_SITES.replace('device = "mine"', 'device = "mien"'))).fix


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nodes = []",
        b"nodes = 3",
        b"\xff\xfe\x00",
        TWO_SITES[:60].encode(),
        b"[" * 100_000,
        b"a = " + b"[" * 5000,
        b"x = 1\n" * 2,
        b"# " + b"a" * 5 * 2**20,
    ],
)
def test_a_file_that_is_no_cluster_is_an_error(tmp_path, content):
    assert refuse(write(tmp_path, content)).file


def test_a_missing_file_and_a_directory_are_errors(tmp_path):
    assert "No such file" in refuse(tmp_path / "none.toml").what
    (tmp_path / "plan.json").write_text('{"groups": []}')
    refused = refuse(tmp_path / "plan.json")
    assert refused.what == "JSON, no cluster" and "2x8xh100-sxm" in refused.rule and "--plan" in refused.fix
    assert refuse(tmp_path).file
    assert refuse(str(tmp_path)).file


def test_the_schema_lists_exactly_the_keys_the_decoder_takes():
    schema = tomllib.loads(files("foreshard.catalog").joinpath("schema", "cluster.toml").read_text())
    tables = {
        "cluster": cluster_file.ClusterFile,
        "nodes": cluster_file.NodesTable,
        "network": Network,
        "links": cluster_file.LinkTable,
        "devices": cluster_file.DeviceTable,
    }
    for name, table in tables.items():
        assert list(schema[name]) == [field.name for field in fields(table)]
        for entry in schema[name].values():
            assert entry["doc"] and ("default" in entry) != (
                entry.get("required") is True or "required" in entry
            )


def test_default_nics_are_those_of_the_instances_they_cite():
    assert default_nic("h100-sxm", 8).value == instances()["azure-nd96isr-h100-v5"].nic_bytes_per_s
    assert default_nic("h100-sxm", 4).value == 200e9
    assert default_nic("a100-sxm-80gb", 8).value == 200e9
    assert default_nic("v100-sxm-32gb", 8).value == default_nic("v100-sxm-32gb", 4).value == 12.5e9
    assert default_nic("b200-sxm", 8).value == 400e9
    assert default_nic("gb200-nvl72", 4).value == 200e9
    for name in devices():
        assert default_nic(name, 8).value > 0


def test_default_prices():
    today = date(2025, 6, 1)
    exact = default_price("h100-sxm", 8, today=today)
    assert (exact.value, exact.price_date) == (98.32, "2025-03-02")
    assert "aws-p5.48xlarge" in exact.source and "year old" not in exact.source
    scaled = default_price("h100-sxm", 4, today=today)
    assert scaled.value == pytest.approx(98.32 / 2)
    assert "scaled from 8 to 4" in scaled.source
    assert "year old" in default_price("h100-sxm", 8, today=date(2026, 6, 1)).source
    assert default_price("rtx-3090", 1) is None


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("2025-03-02", False),
        ("2025", False),
        ("2024-Q2", True),
        ("2024-01-01", True),
        (None, True),
        ("undated", True),
    ],
)
def test_age_of_prices(text, old):
    assert is_old(text, today=date(2025, 6, 1)) == old


def test_every_instance_of_the_table_is_in_the_catalog():
    path = MEASURED / "hw_cloud_instances.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    prices = {(one.usd_per_h, one.per_node) for one in instances().values()}
    for row in rows:
        price = float(row["on_demand_usd_per_h"]) if row["on_demand_usd_per_h"] else None
        assert (price, int(row["gpu_count"])) in prices
    recalled = [one for one in instances().values() if "recalled, not re-read" in one.spec_source]
    assert all(one.usd_per_h is None for one in recalled)
    assert len(instances()) - len(recalled) == len({(row["provider"], row["instance"]) for row in rows})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100-sxm", "Write '1xh100-sxm' for one, '8xh100-sxm' for a node of them"),
        ("99999999x8xh100-sxm", "more than 1048576 devices"),
    ],
)
def test_a_bare_device_and_a_count_beyond_all_are_said(text, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        load_cluster(text)


@pytest.mark.parametrize("text", ["4090", "RTX 3090", "GeForce RTX 4090", "L40S", "A6000", "a100-pcie"])
def test_the_name_of_a_card_is_one_of_them(text):
    assert replace(load_cluster(text), name="") == replace(load_cluster(f"1x{text}"), name="")


@pytest.mark.parametrize("rate", ["", "@25Gb/s", "@400Gb/s/gpu"])
@pytest.mark.parametrize("device", ["b200", "rtx-4090", "mi300x", "v100"])
def test_another_device_leaves_what_a_fresh_shorthand_gives(rate: str, device: str) -> None:
    changed = with_device(load_cluster(f"2x8xh100-pcie{rate}"), device)
    fresh = load_cluster(f"2x8x{device}{rate}")
    assert replace(changed, name=fresh.name) == fresh


def test_another_device_leaves_the_site_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        '[[nodes]]\ncount = 2\nper_node = 8\ndevice = "a100-sxm-80gb"\nnic = "200 Gb/s"\nrack = "r1"\n'
        'carbon_kg_per_kwh = 0.3\nhost_memory = "1 TiB"\nnic_latency = "9 us"\n'
    )
    before = load_cluster(path).nodes[0]
    after = with_device(load_cluster(path), "h100-sxm").nodes[0]
    assert after.device.name == "h100-sxm"
    for kept in ("nic_bytes_per_s", "nic_latency_s", "rack", "carbon_kg_per_kwh", "host_memory_bytes"):
        assert getattr(after, kept) == getattr(before, kept)


def test_a_stated_rate_takes_the_place_of_the_assumed_one() -> None:
    changed = with_nic(load_cluster("2x8xh100-sxm"), "100Gb/s")
    fresh = load_cluster("2x8xh100-sxm@100Gb/s")
    assert changed.nodes == fresh.nodes
    assert set(changed.assumptions) == set(fresh.assumptions)
    assert changed.warnings == fresh.warnings


def test_a_folder_of_the_same_name_does_not_hide_a_cluster(tmp_path, monkeypatch):
    """A run may write to a folder that is named by its cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2x8xh100-sxm").mkdir()
    (tmp_path / "other").mkdir()
    assert load_cluster("2x8xh100-sxm").num_devices == 16
    with pytest.raises(SpecError, match="Is a directory"):
        load_cluster("other")
