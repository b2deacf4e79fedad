"""Checkpoints that are written while training goes on: of the step they name, and complete or not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import Options, rehearse
from small_jobs import gpt
from small_plans import PLANS

from foreshard.runtime.checkpoint import format
from foreshard.runtime.checkpoint.folders import steps_in
from foreshard.runtime.trainer import Trainer

WRITE = format._write_part


def train(
    folder: Path, name: str, *, steps: int, every: int, behind: bool = True, last: bool = True, **more: Any
) -> Any:
    options = Options(checkpoint_every=every, save_at=steps if last else None, keep=9, save_async=behind)
    return rehearse(
        gpt(torch.float64),
        PLANS[name],
        steps=steps,
        ranks=range(4),
        options=options,
        checkpoints=folder,
        **more,
    )


def finished(trainer: Trainer) -> int:
    trainer.save_last()
    return trainer.step


def slow_disk(monkeypatch: pytest.MonkeyPatch, wait: Callable[[str], None]) -> None:
    def write(part: Path, name: str, tensors: Any) -> None:
        wait(name)
        WRITE(part, name, tensors)

    monkeypatch.setattr(format, "_write_part", write)


@pytest.mark.parametrize("name", ["two uneven pipelines", "uneven data in both stages, zero 2"])
def test_checkpoints_on_a_slow_disk_hold_the_step_they_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on while ranks write at different speeds, and the last checkpoint is waited for."""
    train(tmp_path / "sync", name, steps=7, every=3, behind=False, after=finished)
    seen: dict[int, list[int]] = {}
    slow_disk(monkeypatch, lambda part: time.sleep(0.05 + 0.3 * int(part[-1])))
    train(
        tmp_path / "behind",
        name,
        steps=7,
        every=3,
        after=finished,
        on_step=lambda: lambda done: seen.setdefault(done.step, steps_in(tmp_path / "behind")),
    )
    assert seen[3] == [], "step 3 is trained before the checkpoint of step 3 is written"
    assert steps_in(tmp_path / "behind") == steps_in(tmp_path / "sync") == [7, 6, 3]
    for step in (3, 6, 7):
        one, other = (format.load(tmp_path / folder, step) for folder in ("sync", "behind"))
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], rtol=1e-9, atol=1e-12) for key in one)


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, dead, writes = "two uneven pipelines", threading.Event(), []

    def die_at_the_second(part: str) -> None:
        writes.append(part)
        if writes.count(part) > 1 and part == "rank-2":
            dead.wait()  # never ends: what a kill leaves

    slow_disk(monkeypatch, die_at_the_second)
    train(tmp_path, name, steps=8, every=3, last=False)
    assert steps_in(tmp_path) == [3]
    monkeypatch.setattr(format, "_write_part", WRITE)
    again = train(
        tmp_path, name, steps=2, every=3, last=False, resume=True, after=lambda trainer: trainer.step
    )
    assert {step for _, step in again.values()} == {5}
    assert steps_in(tmp_path)[0] == 3


def test_a_failed_write_behind_is_said_and_the_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    failed: list[str] = []

    def full(part: str) -> None:
        if part == "rank-1" and not failed:
            failed.append(part)
            raise OSError(28, "No space left on device")

    slow_disk(monkeypatch, full)
    event = lambda kind, text, **facts: told.append((kind, facts.get("step", -1)))  # noqa: E731
    train(tmp_path, "two uneven pipelines", steps=7, every=3, on_event=lambda: event, after=finished)
    assert ("checkpoint failed", 3) in told and ("checkpoint", 6) in told
    assert steps_in(tmp_path) == [7, 6]
