"""A run's lines: their names, what they count, and a disk that is full."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from foreshard.errors import ExtraMissingError
from foreshard.runtime.records import metrics as module
from foreshard.runtime.records import trackers
from foreshard.runtime.records.metrics import Metrics

TORCHTITAN = {
    "loss_metrics/global_avg_loss",
    "grad_norm",
    "throughput(tps)",
    "time_metrics/end_to_end(s)",
    "memory/max_reserved(GiB)",
    "n_tokens_seen",
}


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def write(metrics, step, **more):
    metrics.step(
        **{
            "step": step,
            "loss": 2.5,
            "count": 600.0,
            "gradient_norm": 0.5,
            "time_s": 1.5,
            "clock": "cpu",
            "devices": 4,
            "samples": 10,
            **more,
        }
    )


def test_a_line_has_torchtitan_s_names_and_tokens_per_second_and_device(tmp_path):
    write(Metrics(tmp_path, 0), 0, generation=1)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert set(line) > TORCHTITAN
    assert line["throughput(tps)"] == pytest.approx(600 / 1.5 / 4)
    assert (line["loss_metrics/global_avg_loss"], line["time_metrics/end_to_end(s)"]) == (2.5, 1.5)
    assert 0.01 < line["memory/max_reserved(GiB)"] < 1000
    assert (line["n_samples"], line["generation"], line["clock"]) == (10, 1, "cpu")


def test_a_step_that_was_cut_in_two_has_no_time_and_no_rate(tmp_path):
    write(Metrics(tmp_path, 0), 0, time_s=None)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["throughput(tps)"] is None and line["time_metrics/end_to_end(s)"] is None


def test_tokens_are_counted_through_another_writer_a_restart_and_a_step_done_again(tmp_path):
    """Rank 0 leads, rank 1 leads after its death and goes back one step, then a new rank 0 leads."""
    first, second = Metrics(tmp_path, 0), Metrics(tmp_path, 1)
    for step in range(3):
        write(first, step, count=10.0 + step)
    write(second, 2, count=20.0)
    write(second, 3, count=30.0)
    write(first, 4, count=40.0)
    write(Metrics(tmp_path, 0), 5, count=50.0)
    seen = [(line["step"], line["n_tokens_seen"]) for line in lines(tmp_path / "metrics.jsonl")]
    assert seen == [(0, 10), (1, 21), (2, 33), (2, 41), (3, 71), (4, 111), (5, 161)]


def test_events_say_who_and_what(tmp_path):
    Metrics(tmp_path, 3).event("peer gone", "connection reset", step=7)
    (line,) = lines(tmp_path / "events.jsonl")
    assert line.pop("time") > 1e9
    assert line == {"rank": 3, "kind": "peer gone", "text": "connection reset", "step": 7}


def test_a_full_disk_delays_lines_and_the_log_says_since_when(tmp_path, disk):
    disk.room, metrics = 10, Metrics(tmp_path, 0)
    for step in range(3):
        write(metrics, step, count=10.0)
    metrics.event("checkpoint failed", "no room")
    assert lines(tmp_path / "metrics.jsonl") == lines(tmp_path / "events.jsonl") == []
    disk.room = None
    metrics.flush()
    write(metrics, 3, count=10.0)
    told = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["n_tokens_seen"]) for line in told] == [(0, 10), (1, 20), (2, 30), (3, 40)]
    events = lines(tmp_path / "events.jsonl")
    assert [line["kind"] for line in events] == [
        "write blocked",
        "write blocked",
        "checkpoint failed",
        "write resumed",
        "write resumed",
    ]
    assert {Path(line["file"]).name for line in events if "file" in line} == {"metrics.jsonl", "events.jsonl"}
    assert "No space left" in events[0]["text"] and events[-1]["after_s"] >= 0


def test_numbers_never_stop_a_run_the_oldest_are_given_up_and_counted(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 2000)
    disk.room, metrics = 10, Metrics(tmp_path, 0)
    for step in range(20):
        write(metrics, step)
    disk.room = None
    metrics.event("checkpoint", "after step 19")
    metrics.flush()
    kept = [line["step"] for line in lines(tmp_path / "metrics.jsonl")]
    assert 0 < len(kept) < 20 and kept == list(range(20 - len(kept), 20))
    told = [line for line in lines(tmp_path / "events.jsonl") if line["kind"] == "checkpoint"]
    assert told[0]["missed_lines"] == 20 - len(kept)


def test_tensorboard_gets_the_numbers_of_the_rank_that_leads(tmp_path, monkeypatch):
    told, made = [], []

    class Board:
        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def flush(self):
            told.append("flush")

        def close(self):
            told.append("close")

    opened = SimpleNamespace(SummaryWriter=lambda folder: made.append(folder) or Board())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", opened)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    leads = Metrics(tmp_path, 0, trackers=["tensorboard"])
    Metrics(tmp_path, 1, trackers=["tensorboard"])
    assert made == []
    write(leads, 4)
    assert len(made) == 1
    assert ("loss_metrics/global_avg_loss", 2.5, 4) in told and told[-1] == "flush"
    assert not [item for item in told if item[0] in ("clock", "time", "step")]
    leads.close()
    assert told[-1] == "close"


def test_weights_and_biases_gets_the_steps_of_the_leaders_before(tmp_path, monkeypatch):
    """A leader that is killed loses what the package held; steps that are done again go back."""
    logged = []

    class Run:
        def define_metric(self, name, step_metric):
            logged.append((name, step_metric))

        def log(self, values):
            logged.append((values["step"], values.get("loss"), values.get("eval/loss")))

        def finish(self):
            logged.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: Run()))
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    lines = [{"step": step, "loss": 5.0 - step, "count": 3, "time": 1.0} for step in (0, 1, 2, 3, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evaluations.jsonl").write_text('{"step": 2, "eval/loss": 7.0, "time": 1.0}\n')
    board = trackers.WeightsAndBiases(tmp_path)
    board.log(3, {"loss": 9.0})
    board.log(2, {"loss": 8.0})
    before = [(0, 5.0, None), (1, 4.0, None), (2, 3.0, None), (2, None, 7.0)]
    assert logged == [("*", "step"), *before, (3, 9.0, None), (2, 8.0, None)]


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed here")
def test_tensorboard_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(ExtraMissingError, match="pip install tensorboard"):
        Metrics(tmp_path, 0, trackers=["tensorboard"])


def test_a_loss_that_is_no_number_is_null_in_json_and_one_event_each_time(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step, loss in enumerate((2.5, float("nan"), float("inf"), 2.0, float("nan"))):
        write(metrics, step, loss=loss, gradient_norm=loss)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    kept = lines(tmp_path / "metrics.jsonl")
    assert [line["loss_metrics/global_avg_loss"] for line in kept] == [2.5, None, None, 2.0, None]
    assert [line["grad_norm"] for line in kept] == [2.5, None, None, 2.0, None]
    assert [(one["kind"], one["step"]) for one in lines(tmp_path / "events.jsonl")] == [
        ("loss not finite", 1),
        ("loss not finite", 4),
    ]
