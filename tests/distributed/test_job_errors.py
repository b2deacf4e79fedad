"""An error of the job ends the run by name, whatever its type and text; it is not the loss of a peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command import RANK, events, pipeline, replicas, run

RAISES = """
calls = []
def loss(output, batch):
    calls.append(1)
    if len(calls) == 3: {0}
    return output.square().sum(), len(output)
"""
STEPS = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        {0}
def optimizer(params): return Own(params, lr=1e-2)
"""
BACKWARD = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, grad): {0}
class Layer(nn.Linear):
    def forward(self, x): return Own.apply(super().forward(x))
def model(): return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Layer(4, 1)]
"""
OOM = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')"
GLOO = "raise RuntimeError('Connection closed by peer [gloo]: timed out')"
BARRIER = "import torch.distributed as dist; dist.barrier()"
OWN_GROUP = """
import torch.distributed as dist
def loss(output, batch):
    store = dist.HashStore()
    if not dist.is_initialized(): dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_subgroups(group_size=7)
    return output.square().sum(), len(output)
"""
FAULTS = {
    "out of memory in the loss": ("loss", RAISES.format(OOM), "OutOfMemoryError"),
    "words of gloo in the loss": ("loss", RAISES.format(GLOO), "closed by peer [gloo]"),
    "a barrier of the job's own": ("loss", RAISES.format(BARRIER), "process group"),
    "a group of the job's own": ("loss", OWN_GROUP, "group_size"),
    "out of memory in the update": ("optimizer", STEPS.format(OOM), "OutOfMemoryError"),
    "an error in the update": (
        "optimizer",
        STEPS.format("raise RuntimeError('no such state')"),
        "no such state",
    ),
    "words of gloo in the backward": ("model", BACKWARD.format(GLOO), "closed by peer [gloo]"),
}


SLOW = (
    "a barrier of the job's own",
    "a group of the job's own",
    "an error in the update",
    "out of memory in the loss",
    "out of memory in the update",
    "words of gloo in the loss",
)
"""Of those that are told from a lost peer where others are too."""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAULTS]
)
def test_the_run_ends_with_the_error_and_its_place(tmp_path: Path, fault: str) -> None:
    """Replicas and a pipeline take turns: a run takes seconds."""
    part, text, says = FAULTS[fault]
    plan = (replicas(2), pipeline())[list(FAULTS).index(fault) % 2]
    found = run(tmp_path, {part: text}, plan, "--steps", "8", within_s=120.0)
    assert found.code == 2, found.stderr
    assert says in found.stderr and "job.py" in found.stderr and "line" in found.stderr


@pytest.mark.slow
def test_several_readers_train_the_same_and_a_killed_one_is_named(tmp_path: Path) -> None:
    slow = """
import signal
class Data:
    def __len__(self): return 100
    def __getitem__(self, index):
        if {0}: os.kill(os.getpid(), signal.SIGKILL)
        return (torch.arange(4.0) + 4 * index) / 400 + torch.rand(4)
def dataset(): return Data()
"""
    plain = run(tmp_path, {"dataset": slow.format("False")}, replicas(2), "--steps", "12", out="plain")
    dies = f"{RANK} == 1 and index % 7 == 0 and not (Path('died').exists() or Path('died').touch())"
    flags = ["--steps", "12", "--readers", "3", "--json"]
    found = run(tmp_path, {"dataset": slow.format(dies)}, replicas(2), *flags)
    assert plain.code == found.code == 0, found.stderr
    assert (tmp_path / "died").exists()
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    (lost,) = events(found, ["reader lost"])
    assert "reader" in lost["text"] and "signal 9" in lost["text"]
    assert "a process that read its samples died" in found.stderr
    outcome = json.loads(found.stdout)
    assert outcome["lost"] == outcome["repeated"] == outcome["misread"] == 0
