"""A lab from the command line to its files: the table's clock, a change on the way, the ranks' trace."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_files import TWO_RANKS

JOB = Path(__file__).parents[2] / "examples" / "jobs" / "gpt_job.py"
SLOWER = """
[[change]]
at_step = 2
rank = 1
slow = 4
"""
GROUPS = [
    {"share": share, "stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank, share in enumerate((2, 1))
]
PLAN = {"global_batch": 3, "seq_len": 64, "precision": "fp32", "groups": GROUPS}


def trained(folder, lab, *words):
    """Run foreshard in a folder with the lab and the plan in it."""
    (folder / "lab.toml").write_text(lab)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    env = os.environ | {"GPT_WIDTH": "16", "GPT_BLOCKS": "2"}
    return subprocess.run(
        [sys.executable, "-m", "foreshard", *words, "--out", "out", "--json"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_lab_of_two_ranks(tmp_path):
    """Four layers: 3 ms a sample and layer, 1 ms a layer for the optimizer, which the slower rank ends last.

    Both ranks compute 24 ms in the first two steps and the slower one updates in 8 ms; from step 2 on it
    computes 48 ms and updates in 16 ms. Sums and the vote add less than a millisecond on these links.
    """
    done = trained(
        tmp_path,
        TWO_RANKS + SLOWER,
        "lab",
        "lab.toml",
        "--plan",
        "plan.json",
        "--steps",
        "4",
        "--trace",
        "trace.json.gz",
        str(JOB),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["clock"], answer["steps"], answer["lost"], answer["repeated"]) == ("table", 4, 0, 0)
    lines = [json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    times = [line["time_metrics/end_to_end(s)"] for line in lines]
    assert times == pytest.approx([0.032, 0.032, 0.064, 0.064], abs=1e-3)
    assert times[0] == pytest.approx(times[1], rel=1e-9) and times[2] == pytest.approx(times[3], rel=1e-9)
    _check_trace(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())))


@pytest.mark.parametrize("memory", [pytest.param("100 KiB", marks=pytest.mark.slow), "200 KiB"])
def test_a_rank_that_holds_more_than_the_lab_states_ends_the_run_by_name(tmp_path, memory):
    """Parameters and gradients take 124 KiB, more than the lower limit; backwards need another 210 KiB."""
    lab = TWO_RANKS.replace("slow = 2", f'slow = 2\nmemory = "{memory}"')
    done = trained(tmp_path, lab, "lab", "lab.toml", "--plan", "plan.json", "--steps", "4", str(JOB))
    assert done.returncode == 3
    said = done.stderr.splitlines()[-1]
    assert "ranks.memory: rank 1 holds " in said and "saved for backwards" in said
    assert "The device of rank 1 has" in said and "fewer layers" in said


COMINGS = """
[[change]]
at_step = 2
rank = 0
there = false
[[change]]
at_step = 4
rank = 0
there = true
"""


@pytest.mark.slow
def test_a_rank_is_killed_and_joins_at_the_steps_that_the_lab_says(tmp_path):
    """Rank 1 trains two steps alone: three samples of four layers at 6 ms, and 8 ms for the optimizer."""
    done = trained(
        tmp_path,
        TWO_RANKS + COMINGS,
        "run",
        str(JOB),
        "--plan",
        "plan.json",
        "--local",
        "2",
        "--lab",
        "lab.toml",
        "--steps",
        "6",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["lost"], answer["repeated"], answer["restarts"], answer["steps"]) == (0, 0, 1, 6)
    lines = [json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in reversed(lines)}  # who is left tells the step before once more
    assert [found[step]["generation"] for step in range(6)] == [0, 0, 1, 1, 2, 2]
    times = [found[step]["time_metrics/end_to_end(s)"] for step in range(6)]
    assert times == pytest.approx([0.032, 0.032, 0.080, 0.080, 0.032, 0.032], abs=2e-3)
    ends = [found[step]["clock_s"] for step in range(6)]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(sum(times) + 0.024, abs=0.012), "one step was begun twice"


def _check_trace(trace):
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) == 4 * (2 + 1) * 2  # steps, micro-batches of both ranks, forward and backward
    slow = [event["dur"] for event in kernels if event["pid"] == 1 and event["name"] == "backward"]
    assert slow == pytest.approx([16e3, 16e3, 32e3, 32e3])
    steps = [e for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#") and e["pid"] == 0]
    assert [e["name"] for e in steps] == [f"ProfilerStep#{step}" for step in range(4)]
    assert trace["otherData"]["clock"] == "table"
