"""What was trained is kept: at the end, on SIGTERM, on a full disk, beside damaged files, and never twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from command import Command, Run, events, replicas, run

from foreshard.runtime.checkpoint.folders import steps_in
from foreshard.runtime.checkpoint.format import load

SLOW = "def loss(output, batch): time.sleep(0.15); return output.square().sum(), len(output)\n"
SLOW_SAVE = """
from foreshard.runtime.checkpoint import format
write = format._write_part
def slow(*given): write(*given); time.sleep(60)
format._write_part = slow
"""
FULL = """
import resource
calls = []
def loss(output, batch):
    calls.append(1)
    room = 12000 if {first} <= len(calls) < {last} else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    return output.square().sum(), len(output)
"""
BROKEN = """
calls = []
def loss(output, batch):
    calls.append(1)
    return output.square().sum() * (float("nan") if len(calls) >= {0} else 1.0), len(output)
"""


def saved(found: Run) -> list[int]:
    return steps_in(found.out / "ckpt")


def wait_for(command: Command, come: Callable[[], bool]) -> None:
    until = time.monotonic() + 90
    while not come():
        assert time.monotonic() < until and command.process.poll() is None
        time.sleep(0.05)


def wait_for_steps(command: Command, count: int) -> None:
    metrics = command.out / "metrics.jsonl"
    wait_for(command, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count)


def send_all(command: Command, number: int) -> None:
    """Send a signal to the launcher, its ranks and its supervisor."""
    for pid in family_of(command.process.pid):
        os.kill(pid, number)


def family_of(pid: int) -> list[int]:
    """Return a process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in family_of(int(child)))]


def test_a_checkpoint_is_there_at_the_end_and_resuming_trains_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, {}, replicas(2), "--steps", "5")
    assert found.code == 0 and saved(found) == [5]
    assert not events(found, ["restored"]) and "restarts" not in found.stderr, "a start is no restart"
    before = (found.out / "metrics.jsonl").read_bytes()
    again = run(tmp_path, {}, replicas(2), "--steps", "5", "--resume", within_s=30.0)
    assert again.code == 0 and (found.out / "metrics.jsonl").read_bytes() == before
    further = run(tmp_path, {}, replicas(2), "--steps", "8", "--resume", "--json")
    assert further.code == 0 and sorted(further.losses) == list(range(8)) and saved(further)[0] == 8
    restored = events(further, ["restored"])
    assert [line["step"] for line in restored] == [5], "one rank says it, once"
    assert json.loads(further.stdout)["samples"] == 8 * 4


@pytest.mark.slow
def test_none_is_written_if_none_is_wanted(tmp_path: Path) -> None:
    found = run(tmp_path, {}, replicas(2), "--steps", "3", "--no-save-last")
    assert found.code == 0 and not (found.out / "ckpt").exists()


@pytest.mark.slow
def test_sigterm_ends_a_run_at_once_where_no_checkpoint_is_wanted(tmp_path: Path) -> None:
    command = Command(tmp_path, {"loss": SLOW}, replicas(2), "--steps", "500", "--no-save-last")
    wait_for_steps(command, 2)
    command.process.send_signal(signal.SIGTERM)
    found = command.end(60.0)
    assert found.code == 128 + signal.SIGTERM and "terminated" in found.stderr, found.stderr
    assert not (found.out / "ckpt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_and_a_second_one_at_once(
    tmp_path: Path, number: int
) -> None:
    """Sent to all processes, as a terminal and a scheduler do; the second one in the middle of a save."""
    flags = ["--steps", "500"]
    command = Command(tmp_path, {"loss": SLOW}, replicas(1), *flags, local=1)
    wait_for_steps(command, 4)
    send_all(command, number)
    found = command.end(60.0)
    assert found.code == 128 + number and "after the present step" in found.stderr, found.stderr
    (step,) = saved(found)
    assert step == max(found.losses) + 1 >= 4
    assert f"checkpoint of step {step}" in found.stderr and "--resume" in found.stderr
    again = Command(tmp_path, {"loss": SLOW + SLOW_SAVE}, replicas(1), *flags, "--resume", local=1)
    wait_for_steps(again, step + 2)
    send_all(again, number)
    wait_for(again, lambda: any(again.out.glob("ckpt/*.part/*.sha256")))
    send_all(again, number)
    ended = again.end(20.0)  # a save takes longer
    assert ended.code == 128 + number and saved(ended) == [step], ended.stderr
    steps = max(ended.losses) + 2
    further = run(tmp_path, {}, replicas(1), "--steps", str(steps), "--resume", "--json", local=1)
    assert further.code == 0 and json.loads(further.stdout)["samples"] == 4 * steps
    same = pytest.approx({**ended.losses, steps - 1: further.losses[steps - 1]}, rel=1e-6)
    assert further.losses == same, "what was trained again is as it was"


@pytest.mark.parametrize(
    ("first", "last"),
    [pytest.param(6, 11, marks=pytest.mark.slow), pytest.param(11, 60, marks=pytest.mark.slow)],
    ids=["in between", "at the end"],
)
def test_a_checkpoint_that_fails_is_said_and_written_when_there_is_room(
    tmp_path: Path, first: int, last: int
) -> None:
    slow = FULL.format(first=first, last=last) + "from torch.utils.data import default_collate\n"
    slow += "from foreshard.runtime.checkpoint import saving\nsaving._LAST_S = 5.0\n"  # of a minute
    slow += "def collate(samples): time.sleep(0.3); return default_collate(samples)"
    wide = "def model(): return [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1)]"
    parts, flags = {"loss": slow, "model": wide}, ["--steps", "16", "--checkpoint-every", "8"]
    found = run(tmp_path, parts, replicas(2), *flags)
    failed = events(found, ["checkpoint failed"])
    assert failed and "File too large" in failed[0]["text"]
    assert "checkpoint failed" in found.stderr
    if last < 16:
        assert found.code == 0, found.stderr
        retried = [line["step"] for line in events(found, ["checkpoint saved at last"])]
        assert len(retried) == 1 and 8 < retried[0] < 16, "it is of a later step, and not only at the end"
    else:
        assert found.code == 1 and "the last checkpoint is not written" in found.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(tmp_path: Path) -> None:
    plan = replicas(2)
    found = run(tmp_path, {}, plan, "--steps", "9", "--checkpoint-every", "3", "--keep", "3")
    assert saved(found) == [9, 6, 3]
    for file in (found.out / "ckpt" / "step-0000000009").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    again = run(tmp_path, {}, plan, "--steps", "12", "--resume")
    assert again.code == 0, again.stderr
    assert events(again, ["restored"])[-1]["step"] == 6
    assert "SHA-256" in events(again, ["checkpoint damaged"])[0]["text"]
    whole = run(tmp_path, {}, plan, "--steps", "12", out="whole")
    assert again.losses == pytest.approx(whole.losses, rel=1e-6)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_samples(tmp_path: Path) -> None:
    run(tmp_path, {}, replicas(2), "--steps", "3")
    flags = ["--steps", "6", "--resume"]
    fewer = {"dataset": "def dataset(): return torch.zeros(99, 4)"}
    for found, says in (
        (run(tmp_path, {}, replicas(2, batch=8), *flags), "global batch 4"),
        (run(tmp_path, {}, replicas(2), *flags, "--seed", "1"), "seed 0"),
        (run(tmp_path, fewer, replicas(2), *flags, within_s=90.0), "dataset length 100"),
    ):
        assert found.code == 2 and says in found.stderr, found.stderr


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run_and_is_never_applied(tmp_path: Path) -> None:
    flags = ["--steps", "12", "--checkpoint-every", "2"]
    found = run(tmp_path, {"loss": BROKEN.format(6)}, replicas(2), *flags)
    assert found.code == 1 and "the gradient of step 5 is not finite" in found.stderr, found.stderr
    assert saved(found)[0] == 4 and max(found.losses) == 4
    on = run(tmp_path, {"loss": BROKEN.format(6)}, replicas(2), *flags, "--no-stop-on-nan", out="on")
    assert on.code == 0 and max(on.losses) == 11


@pytest.mark.slow
def test_half_precision_skips_infinite_gradients_and_ends_after_twenty_in_a_row(tmp_path: Path) -> None:
    """The gradient of steps 3 to 5 is infinite, then, from step 8 on, that of all."""
    broken = BROKEN.replace("len(calls) >= {0}", "3 <= len(calls) - 1 <= 5 or len(calls) > 8")
    plan = replace(replicas(2), precision="fp16")
    found = run(tmp_path, {"loss": broken}, plan, "--steps", "40", "--checkpoint-every", "4")
    assert found.code == 1 and "the gradient of step 27 is not finite" in found.stderr, found.stderr
    skipped = [line["step"] for line in events(found, ["overflow"])]
    assert skipped == [3, 4, 5, *range(8, 27)], "each of them updates nothing, and all is said"
    assert saved(found)[0] == 24
    on = run(tmp_path, {"loss": broken}, plan, "--steps", "40", "--no-stop-on-nan", out="on")
    assert on.code == 0 and sorted(on.losses) == list(range(40)), on.stderr
    assert len(events(on, ["overflow"])) == 3 + 32
    left = {step: load(found.out / "ckpt", step) for step in (20, 24)}
    assert all(torch.equal(left[20][key], left[24][key]) for key in left[20])
