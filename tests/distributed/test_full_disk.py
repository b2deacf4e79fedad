"""A disk that is full under the ledger and the metrics: no sample is lost, or the run says what is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rehearsal import plan_of

from foreshard.errors import ForeshardError
from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.secret import make_secret
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.outcome import outcome_of
from foreshard.runtime.run_settings import RunSettings

STEPS = 24
JOB = """
import resource, torch
from torch import nn
FULL = range({first}, {last})
seen = []

def model(): return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]
def dataset(): return torch.arange(400.0).view(100, 4)
def inputs(batch): return batch
def optimizer(params): return torch.optim.SGD(params, lr=1e-6)

def loss(output, batch):
    seen.append(1)
    room = 700 if len(seen) in FULL else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))  # no file grows beyond it
    return output.square().sum(), len(output)
"""
PLAN = plan_of(
    [{"share": 2, "micro_batch": 2, "stages": [([rank], [[0, 3]])]} for rank in range(2)], global_batch=4
)


def agent_of(out: Path, full: range, **more) -> Agent:
    out.mkdir()
    job = out / "job.py"
    job.write_text(JOB.format(first=full.start, last=full.stop))
    work = RunSettings(
        job=str(job),
        out=str(out),
        steps=STEPS,
        checkpoint_every=10,
        detect_s=20.0,
        interface="127.0.0.1",
        **more,
    )
    return Agent(
        out=out,
        plan=PLAN,
        work=work,
        ranks=range(2),
        expected=range(2),
        secret_file=make_secret(out / "secret"),
    )


def test_lines_wait_and_reach_the_disk_in_the_end(tmp_path):
    out = tmp_path / "run"
    restarts = agent_of(out, range(9, 16)).run()
    found = outcome_of(out, global_batch=4, steps=STEPS, restarts=restarts)
    assert (found.steps, found.lost, found.repeated, found.misread, restarts) == (STEPS, 0, 0, 0, 0)
    told = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(STEPS))
    events = whole_lines(out / "events.jsonl")  # it is full for them too, and may cut one
    kinds = [line["kind"] for line in events if line["rank"] == 0]
    assert {"write blocked", "write resumed"} <= set(kinds)
    failed = next(line for line in events if line["kind"] == "checkpoint failed")
    assert failed["step"] == 10 and "File too large" in failed["text"]
    assert "checkpoint" in kinds[kinds.index("write resumed") :]


def test_a_disk_that_stays_full_ends_the_run_and_says_what_is_not_written(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ForeshardError) as found:
        agent_of(out, range(9, 1000), kept_bytes=800).run()
    said = str(found.value)
    assert found.value.exit_code == 1
    assert "ledger/rank-" in said and "File too large" in said and "of steps" in said and "--resume" in said
