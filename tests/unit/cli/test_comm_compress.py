"""`foreshard comm compress`: the contract, and the closed form by hand."""

import pytest

NODES = """name = "slow"
[[nodes]]
count = 4
device = "a100-sxm-80gb"
per_node = 1
nic = "1 Gb/s"
nic_latency = "10 us"
"""


def test_times_are_those_of_the_closed_form(shell, tmp_path):
    (tmp_path / "slow.toml").write_text(NODES)
    words = ("comm", "compress", "4MiB", str(tmp_path / "slow.toml"), "--method", "powersgd:4", "--json")
    found = shell(*words).json
    plain, row = found["plain"], found["methods"][0]
    assert found["link_bytes_per_s"] == 1.25e8 and found["num_ranks"] == 4
    assert plain["time_s"] == pytest.approx(6 * 10e-6 + 1.5 * 2**22 / 1.25e8)
    factors = 4 * 4 * (1024 + 1024)  # rank 4 of one matrix of 1024 by 1024
    assert row["link_bytes"] == 1.5 * factors
    assert row["time_s"] == pytest.approx(row["encode_s"] + 12 * 10e-6 + 1.5 * factors / 1.25e8)
    assert row["saved_s"] == pytest.approx(plain["time_s"] - row["time_s"])
    hidden = shell(*words, "--hidden-s", "10 s").json
    assert hidden["methods"][0]["saved_s"] == hidden["plain"]["exposed_s"] == 0.0


def test_all_methods_are_compared_and_bad_words_refused(shell):
    shown = shell("comm", "compress", "100MiB", "4x8xa100-sxm-80gb@25Gb/s")
    assert all(name in shown.out for name in ("powersgd:4", "topk:0.01", "onebit", "int8", "fp8"))
    for words, says in (
        (("100MiB", "4x8xa100-sxm-80gb", "--method", "zip"), "powersgd"),
        (("100MiB", "1x1xa100-sxm-80gb"), "two replicas"),
        (("100MiB", "1x4xa100-sxm-80gb", "--ranks", "9"), "4 devices"),
        (("0", "1x4xa100-sxm-80gb"), "SIZE"),
    ):
        refused = shell("comm", "compress", *words)
        assert refused.code == 2 and says in refused.err
