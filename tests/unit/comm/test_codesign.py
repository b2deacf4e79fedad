"""The experiments of bench/bench_codesign.py, small, and the chapter that shows them."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHAPTER = (ROOT / "docs" / "communication.md").read_text(encoding="utf-8")
COMMANDS = [line for line in CHAPTER.splitlines() if line.startswith("foreshard ")]


@pytest.fixture(scope="module")
def bench():
    """The module of the experiments."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location("bench_codesign", ROOT / "bench" / "bench_codesign.py")
        made = importlib.util.module_from_spec(spec)
        sys.modules["bench_codesign"] = made
        spec.loader.exec_module(made)
        yield made
    finally:
        sys.path.remove(str(ROOT / "bench"))


def gains(found):
    return {what: {how: value[0] for how, value in some} for what, some in found.bars}


def test_vertical(bench):
    pytest.importorskip("numba")
    found = gains(bench.vertical(rates=(100,), algorithms=("ring", "hierarchical")))["100 Gb/s"]
    assert found["all three"] >= max(found.values()) - 1e-12
    assert found["algorithm and buckets"] >= max(found["algorithm alone"], found["buckets alone"]) - 1e-12


def test_horizontal(bench):
    found = bench.horizontal(seeds=1, traces=(("shared-fabric", 1),), num_jobs=3)
    cuts = gains(found)["shared fabric, 1 kind"]
    assert set(cuts) == {*bench.POLICIES, "bound"} - {"fair-share"}
    assert cuts["bound"] >= max(cuts.values()) - 1e-12


def test_pieces_in_order_hide_links_inside_nodes_behind_nics(bench):
    """By hand: seven eighths of 1 GB at 300 GB/s twice, and 1.5 x 1/8 GB at 25 GB/s, apart from latency.

    While the three last rounds are on the NICs, 3 + 2 + 1 of the 28 steps inside follow what has arrived.
    """
    times = {how: seconds for _, how, seconds in bench.pieces(1e9)}
    inside_s, across_s = 7 / 8 * 1e9 / 300e9, 1.5 * 1e9 / 8 / 25e9
    assert times["whole"] == pytest.approx((1 + 22 / 28) * inside_s + across_s, rel=0.01)
    assert times["8 pieces, alike"] == pytest.approx(times["whole"], rel=0.02)
    assert times["8 pieces, in order"] == pytest.approx(across_s + 2 * inside_s / 8, rel=0.06)


def test_shares_as_the_nics(bench):
    """By hand: a quarter over a NIC of 25 GB/s, or a sixth over it and a third over one of 50."""
    times = {how: seconds for _, how, seconds in bench.unequal_nics(1e9)}
    equal, fitting = times["equal shares"], times["shares as the NICs"]
    assert 1.0 - fitting / equal == pytest.approx(0.25, abs=0.05)


def test_rails_and_nics(bench):
    across, along = (seconds for _, _, seconds in bench.rails(1e8))
    assert along < across / 3
    times = [seconds for _, _, seconds in bench.shared_nics(1e8)]
    assert times == sorted(times, reverse=True)


def test_a_switch_wins_alone_and_loses_shared(bench):
    found = gains(bench.host_net(sizes=(2.0**24,), tenants=(1, 2), parts=16))
    alone, shared, inside = (row["switch"] for row in found.values())
    assert alone > 0.2 and inside > 0.2 and shared < 0.0


def test_links_of_the_chapter_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)\)", CHAPTER):
        assert (ROOT / "docs" / target).exists(), target


NEEDED = ("foreshard validate", "foreshard run", "--device cuda")
"""In commands that take published tables, real ranks that train (`tests/distributed`), or several GPUs."""
HEADER = "# all_reduce_perf\n" + "".join(
    f"#  Rank {rank:2} Group  0 Pid  34181 on  node0 device  {rank} [0x3d] NVIDIA H100 80GB HBM3\n"
    for rank in range(8)
)
COLUMNS = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
TIMES_US = {2**10: 24.1, 2**16: 28.1, 2**20: 46.2, 2**24: 150.0, 2**28: 1300.0, 2**30: 4980.0}
PLAN = {
    "global_batch": 16,
    "seq_len": 1024,
    "groups": [
        {
            "share": 16,
            "micro_batch": 1,
            "stages": [{"ranks": [*range(4), *range(8, 12)], "layers": [[0, 34]], "zero": 3}],
        }
    ],
}
JOBS = """cluster = "racks.toml"
[[jobs]]
name = "beside"
ranks = [4, 12]
iterations = 1
phases = [{compute = "10 ms", collective = "all-reduce", size = "100 MB"}]
"""


def write_files(folder, command):
    """Write what a command takes that another one, or its user, has written."""
    if any(name in command for name in ("sweep.log", "measured.toml", "nccl.toml")):
        rows = (
            f"{size} {size // 4} float sum -1 {time} 0 0 0 {time} 0 0 0\n" for size, time in TIMES_US.items()
        )
        (folder / "sweep.log").write_text(HEADER + COLUMNS + "".join(rows))
    if "racks.toml" in command:
        (folder / "racks.toml").write_text((ROOT / "tests" / "laws" / "two_racks.toml").read_text())
        (folder / "plan.json").write_text(json.dumps(PLAN))
        (folder / "jobs.toml").write_text(JOBS)


MADE_BY = {"schedule.": " synthesize ", "measured.toml": " --fit ", "nccl.toml": " --fit-nccl "}
"""The command that writes a file of which others of the chapter take the name."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_chapter_run(command, tmp_path, monkeypatch, capsys):
    from foreshard.cli.program import run

    if " measure " in command:
        pytest.importorskip("torch")
    needs = next((what for what in NEEDED if what in command), None)
    if needs:
        pytest.skip(f"needs what is not here: {needs}")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, command)
    for file, maker in MADE_BY.items():
        if file in command and maker not in command:
            first = next(line for line in COMMANDS if maker in line)
            assert run(shlex.split(first)[1:]) == 0
    assert run(shlex.split(command)[1:]) == 0, capsys.readouterr().err
