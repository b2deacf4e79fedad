"""Whatever is wrong with a job, the error names the file, what part of it, the rule, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.runtime.job.job import load_job
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan_file import parse_plan

WHOLE = {
    "model": "def model(): return [nn.Linear(4, 4), nn.Linear(4, 1)]",
    "dataset": "def dataset(): return torch.zeros(8, 4)",
    "inputs": "def inputs(batch): return batch",
    "loss": "def loss(output, batch): return output.sum(), len(output)",
    "optimizer": "def optimizer(params): return torch.optim.SGD(params, lr=0.1)",
}
LAYER = (
    "class Own(nn.Module):\n  def forward(self, x): return {0}\ndef model(): return [Own(), nn.Linear(4, 1)]"
)
LAST = "class Own(nn.Linear):\n  def forward(self, x): pass\ndef model(): return [nn.Linear(4, 4), Own(4, 1)]"
READS = "class Own:\n  def {0}\n  def {1}\ndef dataset(): return Own()"
FAULTS = {
    "no dataset": ("dataset", "def dataset(): return None"),
    "a file that is not there": ("dataset", "def dataset(): return open('/nowhere')"),
    "no samples": ("dataset", "def dataset(): return []"),
    "a generator": ("dataset", "def dataset(): return (i for i in range(3))"),
    "a sample": ("dataset", READS.format("__len__(self): return 8", "__getitem__(self, i): return 1 / 0")),
    "a length": ("dataset", READS.format("__len__(self): return 1 / 0", "__getitem__(self, i): return i")),
    "nothing yielded": ("dataset", READS.format("__iter__(self): return iter(())", "other(self): pass")),
    "the width of a sample": ("layer 0", "def dataset(): return torch.zeros(8, 5)"),
    "samples of no kind": ("collate", "def dataset(): return [object()] * 8"),
    "collate": ("collate", "def collate(samples): return samples[99]"),
    "a layer's width": ("layer 1", "def model(): return [nn.Linear(4, 4), nn.Linear(3, 1)]"),
    "a layer's output": ("layer 0", LAYER.format("{'x': x}")),
    "no output": ("layer 0", LAYER.format("None")),
    "a number beside a tensor": ("layer 0", LAYER.format("(x, 3)")),
    "a sum over the samples": ("layer 0", LAYER.format("(x, x.sum())")),
    "a table that is not of samples": ("layer 0", LAYER.format("(x, torch.ones(3, 4))")),
    "an empty tuple": ("layer 0", LAYER.format("()")),
    "a tensor of a kind that is not sent": ("layer 0", LAYER.format("x.to(torch.complex64)")),
    "a last layer that gives nothing": ("layer 1", LAST),
    "a layer's draws": ("model", LAYER.format("x + torch.randperm(4)")),
    "a callable of no layer": ("model", "def model(): return [lambda: None, lambda: nn.Linear(4, 1)]"),
    "a callable that raises": ("layer 0", "def model(): return [lambda: 1 / 0, lambda: nn.Linear(4, 1)]"),
    "layers of both kinds": ("model", "def model(): return [nn.Linear(4, 4), lambda: nn.Linear(4, 1)]"),
    "no layers": ("model", "def model(): return []"),
    "layers that raise": ("model", "def model(): return (1 / i for i in range(2))"),
    "a model of no kind": ("model", "def model(): return nn.Linear(4, 4)"),
    "inputs": ("layer 0", "def inputs(batch): return None"),
    "a loss alone": ("loss", "def loss(output, batch): return output.mean()"),
    "a count": ("loss", "def loss(output, batch): return output.sum(), 'eight'"),
    "no optimizer": ("optimizer", "def optimizer(params): return None"),
    "a learning rate": ("lr", "def lr(step): return 'warm'"),
}
PLAN = parse_plan(
    {
        "global_batch": 2,
        "seq_len": 1,
        "precision": "fp32",
        "groups": [{"share": 2, "micro_batch": 1, "stages": [{"ranks": [0], "layers": [[0, 2]]}]}],
    }
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_part_rule_and_fix(tmp_path: Path, fault: str) -> None:
    key, text = FAULTS[fault]
    part = text.rpartition("def ")[2].partition("(")[0]
    file = tmp_path / "job.py"
    file.write_text("import torch\nfrom torch import nn\n" + "\n".join({**WHOLE, part: text}.values()))
    with pytest.raises(SpecError) as caught:
        Trainer(load_job(str(file)), PLAN).train_step()
    error = caught.value
    assert (error.file, error.key) == (str(file), key), error
    assert error.what and error.rule and error.fix, error
