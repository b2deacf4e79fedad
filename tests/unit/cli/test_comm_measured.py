"""From measured rows to a cluster: comm import --fit, comm measure --algorithm library, validate."""

import pytest

HEAD = "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"


def log(tmp_path, collective, factor, ranks=8):
    """Return a log of a machine that takes a factor longer than predicted."""
    from foreshard.api import load_cluster
    from foreshard.comm.prediction import predict_collective

    cluster, lines = load_cluster("1x8xa100-sxm-80gb"), []
    for power in range(10, 33):
        time_us = factor * predict_collective(collective, 2.0**power, cluster, ranks).time_s * 1e6
        lines.append(f"{2**power:12d} {2**power // 4:12d} float sum -1 {time_us:.2f} 0 0 N/A")
    path = tmp_path / f"{collective}.log"
    path.write_text(f"# {collective.replace('-', '_')}_perf\n{HEAD}" + "\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_fit_is_a_cluster_file_for_other_verbs(shell, tmp_path):
    out = str(tmp_path / "measured.toml")
    made = log(tmp_path, "all-gather", 1.5)
    answer = shell("comm", "import", made, "1x8xa100-sxm-80gb", "--fit", out, "--json")
    fit = answer.json["fit"]
    assert answer.code == 0 and fit["file"] == out
    assert fit["median_error"] < 0.03 < 0.3 < fit["median_error_before"]
    words = ("comm", "predict", "all-gather", "1GiB")
    before = shell(*words, "1x8xa100-sxm-80gb", "--json").json["time_s"]
    after = shell(*words, out, "--json").json["time_s"]
    assert after == pytest.approx(1.5 * before, rel=0.05)
    assert shell("predict", "gpt2", out, "--global-batch", "8", "--json").code == 0


def test_several_logs_are_fitted_together(shell, tmp_path):
    out = str(tmp_path / "measured.toml")
    first, second = log(tmp_path, "all-gather", 1.3), log(tmp_path, "all-reduce", 1.3)
    answer = shell("comm", "import", first, "1x8xa100-sxm-80gb", "--also", second, "--fit", out)
    assert answer.code == 0 and "is a cluster file for predict" in answer.out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--fit", "x.toml"), "CLUSTER"),
        (("2x8xh100-sxm", "--fit", "/nowhere/x.toml"), None),
    ],
)
def test_a_fit_that_cannot_be_made(shell, tmp_path, words, key):
    answer = shell("comm", "import", log(tmp_path, "all-gather", 1.0), *words, "--json")
    assert answer.code == 2 and (key is None or answer.json["error"]["key"] == key)


def test_constants_that_a_cluster_file_may_not_name(shell, tmp_path):
    path = tmp_path / "cluster.toml"
    nodes = '[[nodes]]\ncount = 1\nper_node = 8\ndevice = "h100-sxm"\n[nodes.collectives]\n'
    for line in ("speed = 1.0", "launch_s = -1.0", 'launch_s = "nan"'):
        path.write_text(nodes + line, encoding="utf-8")
        answer = shell("comm", "predict", "all-reduce", "1MiB", str(path), "--json")
        assert answer.code == 2 and "collectives" in answer.json["error"]["key"], line


HERE = """
name = "this machine"
[[devices]]
name = "cpu"
base = "a100-sxm-80gb"
[[nodes]]
count = 1
device = "cpu"
per_node = 2
"""


def test_a_sweep_of_the_library_is_measured_costs_of_the_devices_it_ran_on(shell, tmp_path):
    out, here = str(tmp_path / "sweep.log"), tmp_path / "here.toml"
    here.write_text(HERE, encoding="utf-8")
    words = ("--algorithm", "library", "--local", "2", "--repeats", "1", "--to", "4KiB", "--log", out)
    found = shell("comm", "measure", "all-reduce", "1KiB", *words, "--json").json
    assert [row["size_bytes"] for row in found["rows"]] == [1024, 2048, 4096] and found["backend"] == "gloo"
    assert shell("comm", "import", out, "--json").json["collective"] == "all-reduce"
    times = [row["time_s"] for row in found["rows"]]
    words = ("--costs", out, "--json")
    for size in ("1KiB", "3KiB"):
        answer = shell("comm", "predict", "all-reduce", size, here, *words).json
        assert answer["evidence"] == "table" and min(times) * 0.99 <= answer["time_s"] <= max(times) * 1.01
    # gloo on processors says nothing of NCCL on GPUs
    refused = shell("comm", "predict", "all-reduce", "1KiB", "2xh100-sxm", *words)
    assert refused.code == 2 and refused.json["error"]["value"] == "cpu"
    notes = shell("comm", "buckets", "gpt2", here, *words).json["notes"]
    assert "has the all-reduce of no bucket" in notes[0]  # all are larger than 4 KiB


@pytest.mark.slow
def test_buckets_are_reduced_in_measured_times(shell, tmp_path):
    path = tmp_path / "a.log"
    ranks = "".join(f"#  Rank {i} on host device {i} [{i}] NVIDIA H100 80GB HBM3\n" for i in range(8))
    rows = "".join(f"{2**power} 1 float sum -1 {2**power * 1e-4:.2f} 0 0 0\n" for power in range(20, 31))
    path.write_text("# all_reduce_perf\n" + ranks + HEAD + rows, encoding="utf-8")
    words = ("comm", "buckets", "bert-large", "8xh100-sxm", "--json")
    found, formula = shell(*words, "--costs", path).json, shell(*words).json
    # 1e-10 s a byte, and what a training step adds, which is the same for every size
    slower = [(one["end_s"] - one["start_s"]) / (1e-10 * one["bytes"]) for one in found["buckets"]]
    assert len(slower) > 3 and 1.0 <= slower[0] < 1.5
    assert slower == pytest.approx([slower[0]] * len(slower), rel=1e-6)
    assert f"{100 * (slower[0] - 1):.1f} %" in found["notes"][0]
    assert found["exposed_s"] > formula["exposed_s"] and "has the all-reduce of" in found["notes"][0]
    path.write_text(path.read_text().replace("all_reduce", "all_gather"), encoding="utf-8")
    other = shell(*words, "--costs", path).json
    assert other["buckets"] == formula["buckets"] and "of no bucket" in other["notes"][0]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--algorithm", "library", "--device", "cuda", "--local", "64"), "--local"),
        (("--to", "1MiB"), "--algorithm"),
        (("--device", "cuda"), "--algorithm"),
    ],
)
def test_a_sweep_that_cannot_run(shell, words, key):
    answer = shell("comm", "measure", "all-reduce", "1KiB", *words, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key


def test_a_release_has_its_own_rules(shell):
    words = ("comm", "predict", "all-reduce", "64MiB", "8x8xh100-sxm", "--json")
    now = shell(*words).json
    then = shell(*words, "--library", "nccl@2.27").json
    assert now["time_s"] == then["time_s"] and now["candidates"] != then["candidates"]
    assert any("pick of NCCL 2.27" in note for note in then["notes"])
    early = shell(*words, "--library", "nccl@2.18").json
    assert early["time_s"] > now["time_s"]


def test_only_collectives_are_scored_by_system(shell, tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    assert shell("validate", str(path), "--by-system", "--json").code == 2


HEADER = (
    "# nccl-tests version 2.17.6 nccl-library=22707\n# size count type redop root time algbw busbw #wrong\n"
)


def log_of(
    latency_us, gigabytes_per_s, log="AllReduce: {} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..3}}"
):
    """A sweep with what NCCL logs before each row."""
    rows = []
    for size in (2**power for power in range(8, 28)):
        time = latency_us + size / gigabytes_per_s / 1e3
        rows.append("host:1:1 [0] NCCL INFO " + log.format(size))
        rows.append(f"{size} {size // 4} float sum -1 {time:.4f} {size / time / 1e3:.4f} 0 0")
    return HEADER + "\n".join(rows) + "\n"


def test_constants_of_nccl_are_refitted_and_taken_by_file(shell, tmp_path):
    log, own = tmp_path / "all_reduce.log", tmp_path / "own.toml"
    # Ring/LL over 8 ranks of one node: 6.6 + 14 x 0.6 us, twice that here; 141 GB/s on the bus, 80 here.
    log.write_text(log_of(2 * (6.6 + 14 * 0.6), 80.0 * 8 / 14))
    words = ("comm", "import", log, "1x8xh100-sxm", "--collective", "all-reduce", "--fit-nccl", own)
    fit = shell(*words, "--json").json["fit_nccl"]
    expected = {
        "base_latency_us.ring.LL": 13.2,
        "hop_latency_us.nvlink.ring.LL": 1.2,
        "ll_max.hopper.1": 80.0,
    }
    assert fit["constants"] == pytest.approx(expected, rel=1e-3) and fit["measured_with"] == "2.27.7"
    assert fit["shared"] == [["base_latency_us.ring.LL", "hop_latency_us.nvlink.ring.LL"]]
    asked = ("comm", "predict", "all-reduce", "64KiB", "1x8xh100-sxm", "--json", "--library")
    mine, shipped = shell(*asked, own).json, shell(*asked, "nccl@2.27").json
    at = {one["name"]: one["estimate_s"] for one in mine["candidates"]}
    before = {one["name"]: one["estimate_s"] for one in shipped["candidates"]}
    assert at["Ring/LL"] == pytest.approx(30e-6 + 2**16 / (80e9 * 8 / 14), rel=1e-3)
    assert {name for name in at if at[name] != before[name]} == {"Ring/LL", "Tree/LL"}  # which shares ll_max
    assert mine["nccl"].endswith("refitted") and "3 constants refitted" in " ".join(mine["notes"])
    for collective, cluster in (("all-reduce", "1x8xmi300x"), ("all-to-all", "1x8xh100-sxm")):
        assert shell("comm", "predict", collective, "1MiB", cluster, "--library", own).code == 2
    own.write_text(own.read_text().replace("2.27.7", "abc"))
    wrong = shell(*asked, own)
    assert wrong.code == 2 and wrong.json["error"]["key"] == "measured_with"


@pytest.mark.parametrize("more", [("--algorithm", "Ring/LL"), ("--also", "other.log")])
def test_what_only_a_fit_reads_is_refused_without_one(shell, tmp_path, more):
    log = tmp_path / "all_reduce.log"
    log.write_text(log_of(15.0, 80.0))
    answer = shell("comm", "import", log, *more, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == more[0]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("1x8xh100-sxm", "--collective", "all-to-all"),
        ("1x8xh100-sxm", "--collective", "all-reduce", "--algorithm", "Ring"),
        ("1x8xh100-sxm", "--collective", "all-reduce", "--algorithm", "PAT/Simple"),
        ("1x8xmi300x", "--collective", "all-reduce"),
    ],
)
def test_a_fit_of_nccl_says_what_it_needs(shell, tmp_path, more):
    log = tmp_path / "all_reduce.log"
    log.write_text(log_of(15.0, 80.0))
    own = tmp_path / "own.toml"
    assert shell("comm", "import", log, *more, "--fit-nccl", own).code == 2 and not own.exists()
