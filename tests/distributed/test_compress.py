"""Training with compressed sums: by the runtime, by DistributedDataParallel's hooks, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from command import events, replicas, run
from rehearsal import plan_of, rehearse, values
from small_plans import PLANS

from foreshard.errors import SpecError
from foreshard.runtime.gradient_sums import GradientSums, check_sums, check_warm_up
from foreshard.runtime.job.job import Job, load_job
from foreshard.runtime.trainer import Options
from foreshard.spec.plan import Plan
from foreshard.transport.compression.registry import ddp_hook

METHODS = ("powersgd:2", "topk:0.1", "onebit", "int8", "fp8")
LONG = ("topk:0.1", "onebit", "int8")
STEPS, LAST = 160, 40
WITHIN = 0.01
"""Of the uncompressed loss, the mean of the last steps after as many steps."""
JOB = """
import torch
from torch import nn
made = torch.Generator().manual_seed(7)
X = torch.randn(480, 32, generator=made)
Y = torch.tanh(X @ torch.randn(32, 8, generator=made) / 4) + 0.5 * torch.randn(480, 8, generator=made)

def model(): return [lambda: nn.Linear(32, 48), nn.Tanh, lambda: nn.Linear(48, 8)]
def dataset(): return list(zip(X, Y))
def inputs(batch): return batch[0]
def loss(output, batch): return (output - batch[1]).square().sum(), batch[1].numel()
def optimizer(params): return torch.optim.SGD(params, lr=0.02, momentum=0.9)
"""
"""Noise that no model explains: the loss falls to its level, and stays there whatever the sums."""
DIES = {
    "loss": "def loss(output, batch):\n"
    "    started = Path('run/metrics.jsonl').exists() and not Path('died').exists()\n"
    "    if started and os.environ['FORESHARD_RANK'] == '2':\n"
    "        Path('died').touch(); os._exit(9)\n"
    "    return output.square().sum(), len(output)"
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return load_job(str(path))


def shared(*shares: int) -> Plan:
    return plan_of(
        [{"share": s, "micro_batch": s, "stages": [([r], [[0, 3]])]} for r, s in enumerate(shares)],
        global_batch=sum(shares),
    )


def trained(job: Job, plan: Plan, **options: Any) -> tuple[float, dict[int, Any]]:
    """Mean loss of the last steps, and what every rank holds."""
    found = rehearse(job, plan, steps=STEPS, after=values, options=Options(**options))
    return mean(found[0][0][-LAST:]), found


@pytest.fixture(scope="module")
def plain(job: Job) -> float:
    """The loss of one process."""
    return trained(job, shared(24))[0]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in METHODS]
)
def test_losses_are_those_of_whole_gradients(job: Job, plain: float, method: str) -> None:
    """Three uneven replicas; they hold the same bits in the end."""
    loss, found = trained(job, shared(12, 8, 4), compress=method, bucket_bytes=2048)
    assert abs(loss / plain - 1.0) <= WITHIN
    for key, first in found[0][1].items():
        assert all(torch.equal(first, tensors[key]) for _, tensors in found.values())


def test_low_rank_sums_go_by_a_named_algorithm_too(job: Job, plain: float) -> None:
    loss, _ = trained(job, shared(8, 8, 8), compress="powersgd:2", collectives="halving-doubling")
    assert abs(loss / plain - 1.0) <= WITHIN


def test_a_warm_up_without_compression_is_refused() -> None:
    check_warm_up(GradientSums(compress="int8"), 5)
    with pytest.raises(SpecError, match="no compression"):
        check_warm_up(GradientSums(), 5)


def test_adam_keeps_the_second_moments_of_the_warm_up(tmp_path: Path) -> None:
    """The first steps take whole gradients; what compression changes after them leaves the moments alone."""
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("SGD(params, lr=0.02, momentum=0.9)", "AdamW(params, lr=0.01)"))
    adam = load_job(str(path))

    def moments(trainer: Any) -> list[Any]:
        return [state["exp_avg_sq"].clone() for state in trainer.state.optimizer.state.values()]

    def after(steps: int, **options: Any) -> dict[int, Any]:
        plan, given = shared(12, 8), Options(**options)
        return rehearse(adam, plan, steps=steps, after=moments, options=given)

    whole = after(4)
    for compressed in (
        after(4, compress="onebit", compress_after=4),
        after(7, compress="onebit", compress_after=4),
    ):
        for rank, (losses, expected) in whole.items():
            assert compressed[rank][0][:4] == pytest.approx(losses, rel=1e-5)
            assert all(torch.allclose(a, b) for a, b in zip(compressed[rank][1], expected, strict=True))
    assert not torch.allclose(after(7, compress="onebit")[0][1][0], whole[0][1][0], rtol=1e-3)


class GradientBucket:
    """What DDP hands a hook."""

    def __init__(self, flat: Any, parameters: list[Any]):
        self._flat, self._parameters = flat, parameters

    def buffer(self) -> Any:
        return self._flat

    def parameters(self) -> list[Any]:
        return self._parameters

    def index(self) -> int:
        return 0


def hooked(job: Job, method: str | None) -> float:
    """Mean loss of the last steps of two ranks whose mean gradients a hook makes, as DDP has it do."""
    store, data = dist.HashStore(), job.dataset

    def train(rank: int) -> list[float]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        model = torch.nn.Sequential(*[job.layer(i) for i in range(3)])
        parameters = list(model.parameters())
        state, hook = ddp_hook(method or "int8", group)
        optimizer, losses = torch.optim.SGD(parameters, lr=0.02, momentum=0.9), []
        for step in range(STEPS):
            at = [(step * 24 + rank * 12 + i) % len(data) for i in range(12)]
            x, y = (torch.stack([data[i][side] for i in at]) for side in (0, 1))
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.reshape(-1) for p in parameters])
            if method is None:
                group.allreduce([flat]).wait()
                flat /= 2
            else:
                flat = hook(state, GradientBucket(flat, parameters)).wait()
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = part.view_as(p)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(train, range(2)))
    return mean(mean(pair) for pair in list(zip(*both, strict=True))[-LAST:])


def test_hooks_of_distributed_data_parallel(job: Job) -> None:
    _, hook = ddp_hook("int8", None)
    torch.nn.parallel.DistributedDataParallel._check_comm_hook(None, hook)  # its own check of a signature
    whole = hooked(job, None)
    for method in METHODS:
        assert abs(hooked(job, method) / whole - 1.0) <= WITHIN, method


def refused(plan: Plan, compress: str, collectives: str | None = None, **more: Any) -> str:
    with pytest.raises(SpecError) as caught:
        check_sums(plan, GradientSums(compress=compress, collectives=collectives), **more)
    return str(caught.value)


def test_what_is_not_compressed_is_refused_by_name() -> None:
    plan = shared(2, 2)
    assert "powersgd, topk" in refused(plan, "zip")
    assert "whole rank" in refused(plan, "powersgd") and "whole rank" in refused(plan, "powersgd:1.5")
    assert "part of the entries" in refused(plan, "topk:2")
    assert "'int8:4'" in refused(plan, "int8:4")
    assert "fp16" in refused(replace(plan, precision="fp16"), "int8")
    assert "resume" in refused(plan, "onebit", resumes=True)
    assert "virtual time" in refused(plan, "onebit", virtual=True)
    assert "gathers" in refused(plan, "topk:0.1", collectives="ring")
    assert "zero 2 or 3" in refused(PLANS["uneven data in both stages, zero 2"], "int8")


@pytest.mark.slow
def test_the_command_says_what_a_loss_drops(tmp_path: Path) -> None:
    found = run(tmp_path, DIES, replicas(3, batch=6), "--compress", "int8", "--steps", "5", local=3)
    assert found.code == 0, found.stderr
    said = [line["text"] for line in events(found, ["compression"])]
    assert any("what was left out of their gradients is dropped" in text for text in said)
    again = run(tmp_path, {}, replicas(3, batch=6), "--compress", "int8", "--steps", "9", "--resume", local=3)
    assert again.code == 2 and "--compress" in again.stderr
