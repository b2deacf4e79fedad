"""Job files drawn at random: each trains or is refused by name, none fails otherwise or is half read."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.runtime.job.job import load_job
from foreshard.runtime.trainer import Options, Trainer
from foreshard.spec.plan_file import parse_plan

BASE = """
import functools
import torch
from torch import nn
from torch.nn.functional import cross_entropy
SAMPLES = [(torch.arange(4.0) + i, torch.tensor(i % 2)) for i in range(16)]
"""
SUM = 'cross_entropy(output, batch[1], reduction="sum")'
USUAL = {
    "model": "[nn.Linear(4, 4), nn.Linear(4, 2)]",
    "dataset": "SAMPLES",
    "loss": f"({SUM}, len(batch[1]))",
    "optimizer": "torch.optim.SGD(params, lr=0.1)",
}
ARGUMENTS = {"model": "", "dataset": "", "loss": "output, batch", "optimizer": "params"}
TRAINS = {
    "model": ["nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))", "iter([nn.Linear(4, 4), nn.Linear(4, 2)])"],
    "dataset": ["torch.utils.data.Subset(SAMPLES, range(4))", "[(torch.randn(4), 0)] * 16"],
    "loss": [f"[{SUM}, torch.tensor(2.0)]"],
    "optimizer": ["torch.optim.AdamW(params)", "torch.optim.SGD([{'params': p} for p in params], lr=0.1)"],
}
REFUSED = {
    "model": [
        "nn.Linear(4, 2)",
        "[]",
        "None",
        "{'a': nn.Linear(4, 2)}",
        "'gpt2'",
        "[nn.Linear]",
        "[torch.relu]",
    ],
    "dataset": [
        "[]",
        "None",
        "'data.txt'",
        "iter(SAMPLES)",
        "{'train': SAMPLES}",
        "torch.utils.data.DataLoader(SAMPLES, batch_size=4)",
    ],
    "loss": [
        "cross_entropy(output, batch[1])",
        f"({SUM}, None)",
        f"({SUM}, -1)",
        "(1.0, 2)",
        f"({SUM}.detach(), 2)",
    ],
    "optimizer": [
        "None",
        "(torch.optim.SGD(params, lr=0.1), None)",
        "torch.optim.SGD",
        "torch.optim.LBFGS(params)",
        "torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)",
    ],
}
PARTS_THAT_TRAIN = [
    "lr = None",
    "lr = lambda step: torch.tensor(0.5)",
    "collate = None",
    "tied = None",
    "tied = ()",
    "tensor_plan = None",
    "fixed_shapes = False",
    "optimizer = functools.partial(torch.optim.SGD, lr=0.1)",
    "def evaluate(model, step): return {'sum': model(torch.ones(2, 4)).sum(), 1: 2}",
    "def tensor_plan(): return {'0': 'column'} if False else {}",
]
PARTS_REFUSED = [
    "lr = 0.1",
    "def lr(): return 1.0",
    "def lr(step): return float('nan')",
    "collate = 'default'",
    "inputs = 'x'",
    "def inputs(batch): return None",
    "fixed_shapes = 'no'",
    "def fixed_shapes(): return False",
    "tied = 3",
    "tied = [(0, 'weight'), (1, 'weight')]",
    "tied = {0: 1}",
    "tensor_plan = ['column']",
    "tensor_plan = {'x': 'diagonal'}",
    "tensor_plan = {'query': 'column'}",
    "on_step = 1",
    "def on_step(step): pass",
    "evaluate = 1",
    "def evaluate(model, step): return 1.0",
    "def evaluate(model, step): return {'loss': 'low'}",
    "def evaluate(model, step): return {'outputs': model(torch.ones(2, 4))}",
]
CASES = 120


def job_of(folder: Path, **parts: str) -> Path:
    """Write a job; `rest` is written as it is, other parts are what its functions return."""
    rest = parts.pop("rest", "")
    lines = [f"def {name}({ARGUMENTS[name]}): return {text}" for name, text in (USUAL | parts).items()]
    file = folder / "job.py"
    file.write_text("\n".join([BASE, *lines, rest]))
    return file


def train(file: Path) -> list[float]:
    job = load_job(str(file))
    stages = [{"ranks": [0], "layers": [[0, job.num_layers]]}]
    groups = [{"share": 4, "micro_batch": 2, "stages": stages}]
    plan = {"global_batch": 4, "seq_len": 1, "precision": "fp32", "groups": groups}
    options = Options(eval_every=1 if job.evaluate is not None else 0, track_norm=True)

    def on_step(done: Any) -> None:
        if job.on_step is not None:
            job.on_step(done.step, {})

    trainer = Trainer(job, parse_plan(plan), options=options, on_step=on_step)
    done = [trainer.train_step() for _ in range(2)]
    assert all(step.gradient_norm for step in done), "nothing was trained"
    return [step.loss for step in done]


def drawn(draw: random.Random) -> tuple[dict[str, str], bool]:
    """Return the parts of a job, and whether one of them is wrong."""
    parts = {name: draw.choice([USUAL[name], *texts]) for name, texts in TRAINS.items()}
    wrong = draw.random() < 0.6
    parts["rest"] = draw.choice(["", *PARTS_THAT_TRAIN])
    if wrong and draw.random() < 0.5:
        parts["rest"] = draw.choice(PARTS_REFUSED)
    elif wrong:
        name = draw.choice(list(REFUSED))
        parts[name] = draw.choice(REFUSED[name])
        if "optimizer" in parts["rest"]:
            parts["rest"] = ""
    return parts, wrong


def test_any_job_trains_or_is_refused_by_name(tmp_path: Path) -> None:
    for seed in range(CASES):
        parts, wrong = drawn(random.Random(seed))
        # A file of its own: Python takes one of the same size and second for the same.
        folder = tmp_path / str(seed)
        folder.mkdir()
        file = job_of(folder, **parts)
        said = json.dumps(parts)
        if not wrong:
            assert len(train(file)) == 2, said
            continue
        with pytest.raises(SpecError) as refused:
            train(file)
            pytest.fail(f"trained: {said}")
        assert refused.value.file == str(file) and refused.value.rule, said


@pytest.mark.parametrize(
    ("written", "meant"),
    [("evalute", "evaluate"), ("collate_fn", "collate"), ("lr_schedule", "lr"), ("on_steps", "on_step")],
)
def test_a_function_that_nothing_reads_is_said(tmp_path: Path, written: str, meant: str) -> None:
    file = job_of(tmp_path, rest=f"def {written}(*given): return 1.0")
    with pytest.warns(UserWarning, match=f"{written}, which is not read. Did you mean '{meant}'"):
        load_job(str(file))
    (tmp_path / "both").mkdir()
    both = job_of(tmp_path / "both", rest=f"def {written}(*given): return 1.0\n{meant} = {written}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_job(str(both))


def test_a_plan_in_tf32_multiplies_in_it(tmp_path: Path) -> None:
    stages = [{"ranks": [0], "layers": [[0, 2]]}]
    groups = [{"share": 4, "micro_batch": 2, "stages": stages}]
    plan = {"global_batch": 4, "seq_len": 1, "precision": "tf32", "groups": groups}
    before = torch.get_float32_matmul_precision()
    try:
        Trainer(load_job(str(job_of(tmp_path))), parse_plan(plan)).train_step()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
