"""Ranks that stay away, come to the door in time, and die where the lab says so."""

import json
import os
import signal
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from foreshard.lab import lab_rank
from foreshard.lab.lab import Change, Lab

LAB = Lab(
    clock="table",
    slow=(1.0,) * 3,
    devices=("x",) * 3,
    bandwidth_bytes_per_s=1e9,
    latency_s=0.0,
    changes=(
        Change(at_step=0, rank=2, there=False),
        Change(at_step=5, rank=2, there=True),
        Change(at_step=7, rank=1, there=False),
    ),
)


def hardware(rank, lab=LAB):
    return lab_rank.LabHardware(lab, rank, "lab.toml")


class Door:
    """A membership that is asked so many times until somebody is at the door."""

    def __init__(self, after):
        self.after, self.asked = after, 0

    def wanted(self):
        self.asked += 1
        return self.asked > self.after


def told(tmp_path, steps):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "pad": "x" * 500}) + "\n" for step in range(steps)))
    return path


def test_the_steps_of_a_run_are_read_from_the_end_of_its_metrics(tmp_path):
    assert lab_rank.steps_told(tmp_path / "none.jsonl") == 0
    assert lab_rank.steps_told(told(tmp_path, 0)) == 0
    path = told(tmp_path, 400)
    assert lab_rank.steps_told(path) == 400
    with path.open("a") as file:
        file.write('{"step": 400, "pa')
    assert lab_rank.steps_told(path) == 400, "half a line is none"


def test_a_rank_waits_for_the_step_before_it_is_there(tmp_path, monkeypatch):
    path, slept = told(tmp_path, 2), []

    def sleep(seconds):
        slept.append(seconds)
        told(tmp_path, 2 + len(slept))

    monkeypatch.setattr(lab_rank.time, "sleep", sleep)
    hardware(2).await_turn(path, 50)
    assert lab_rank.steps_told(path) == 4, "step 4 runs, it is there from step 5 on"
    hardware(0).await_turn(path, 50)


def test_a_rank_that_never_comes_back_ends_with_the_run(tmp_path):
    with pytest.raises(SystemExit) as ended:
        hardware(1).await_turn(told(tmp_path, 20), 20)
    assert ended.value.code == 0


def test_a_step_waits_for_who_is_due_at_the_next(monkeypatch):
    monkeypatch.setattr(lab_rank.time, "sleep", lambda seconds: None)
    door = Door(after=3)
    assert hardware(0).before_step(4, door) and door.asked == 4
    for step, clock in ((3, "table"), (5, "table"), (4, "wall")):
        door = Door(after=3)
        assert hardware(0, replace(LAB, clock=clock)).before_step(step, door) and door.asked == 0
    monkeypatch.setattr(lab_rank, "PATIENCE_S", 0.0)
    assert not hardware(0).before_step(4, Door(after=10**9))


def test_a_rank_kills_itself_where_the_lab_says_so(monkeypatch):
    killed = []
    monkeypatch.setattr(lab_rank.os, "kill", lambda pid, how: killed.append((pid, how)))
    hardware(1).before_step(6, Door(0))
    assert killed == []
    hardware(1).before_step(7, Door(0))
    assert killed == [(os.getpid(), signal.SIGKILL)]
