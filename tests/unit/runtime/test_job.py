"""A job is read from a file or given as objects; what is wrong with it is told with its line."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.errors import SpecError
from foreshard.runtime.job.job import Job, first_input, load_job

GOOD = """
import torch
from torch import nn

def model():
    return [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)]

def dataset():
    return [(torch.ones(3), torch.zeros(2))] * 5

def loss(output, batch):
    return (output - batch[1]).square().sum(), output.numel()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


def written(folder: Path, text: str, name: str = "job.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_is_a_job(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, GOOD))
    assert job.num_layers == 3
    output = torch.ones(5, 2)
    batch = job.collate([job.dataset[i] for i in range(5)])
    assert torch.equal(job.inputs(batch), torch.ones(5, 3))
    total, count = job.loss(output, batch)
    assert (float(total), count) == (10.0, 10)
    assert isinstance(job.optimizer(list(job.layer(0).parameters())), torch.optim.SGD)


def test_a_layer_is_the_same_every_time_and_each_a_copy(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    one, other = load_job(path, seed=3), load_job(path, seed=3)
    torch.rand(7)
    first, again = one.layer(0), other.layer(0)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, load_job(path, seed=4).layer(0).weight)
    with torch.no_grad():
        first.weight.zero_()
    assert torch.equal(one.layer(0).weight, again.weight), "layers handed out are copies"


def test_callables_build_one_layer_at_a_time() -> None:
    built: list[int] = []

    def layer(index: int):
        def build() -> nn.Module:
            built.append(index)
            return nn.Linear(2, 2)

        return build

    job = Job.of([layer(i) for i in range(4)], [1], None, None, seed=7)
    assert built == []
    before = torch.get_rng_state()
    third = job.layer(3)
    assert built == [3]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(job.layer(3).weight, third.weight)
    assert not torch.equal(job.layer(2).weight, third.weight)


def test_all_generators_are_seeded_for_the_data(tmp_path: Path) -> None:
    """An order shuffled when the dataset is made is the same on all ranks."""
    drawn = "import random, numpy; return [random.random(), numpy.random.rand(), float(torch.rand(()))] + "
    text = GOOD.replace("return [(torch", drawn + "[(torch")
    path = written(tmp_path, text)
    first = load_job(path, seed=2).dataset[:3]
    random.random(), np.random.rand(), torch.rand(5)
    assert load_job(path, seed=2).dataset[:3] == first
    assert load_job(path, seed=3).dataset[:3] != first


def test_modules_that_hold_one_parameter_are_tied() -> None:
    words, scores = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    scores.weight = words.weight
    job = Job.of(nn.Sequential(words, nn.ReLU(), nn.Sequential(scores)), [1], None, None)
    assert job.tied == (((0, "weight"), (2, "0.weight")),)


def test_callables_are_tied_by_name_and_start_alike() -> None:
    layers = [lambda: nn.Embedding(5, 3), nn.ReLU, lambda: nn.Linear(3, 5, bias=False)]
    tied = [[(0, "weight"), (2, "weight")]]
    job = Job.of(layers, [1], None, None, tied=tied)
    assert job.tied == (((0, "weight"), (2, "weight")),)
    assert torch.equal(job.layer(2).weight, job.layer(0).weight)
    with torch.device("meta"):
        assert job.layer(2).weight.is_meta


@pytest.mark.parametrize(
    ("tied", "text"),
    [
        ([[(0, "weight"), (9, "weight")]], "no layer 9"),
        ([[(0, "weight"), (2, "bias")]], "no parameter bias"),
        ([[(0, "weight"), (1, "weight")]], "cannot be one parameter"),
        ([[(0, "weight")]], "cannot be one parameter"),
        ([[(0, "weight"), (2, "weight")]] * 2, "cannot be one parameter"),
    ],
)
def test_ties_that_cannot_be_are_refused(tied: list, text: str) -> None:
    layers = [lambda: nn.Embedding(5, 3), lambda: nn.Linear(5, 3), lambda: nn.Linear(3, 5, bias=False)]
    with pytest.raises(SpecError, match=text):
        Job.of(layers, [1], None, None, tied=tied)


def test_modules_are_not_tied_by_name() -> None:
    with pytest.raises(SpecError, match="holding one parameter"):
        Job.of([nn.Linear(2, 2), nn.Linear(2, 2)], [1], None, None, tied=[[(0, "weight"), (1, "weight")]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((1, 2), 1), ([3, 4], 3), ({"y": 0, "input_ids": 5}, 5), ({"pixel_values": 6}, 6), (7, 7)],
)
def test_what_the_first_layer_takes(batch, expected: int) -> None:
    assert first_input(batch) == expected


def test_a_batch_without_a_known_input_asks_for_inputs() -> None:
    with pytest.raises(SpecError, match=r"Define inputs\(batch\)"):
        first_input({"y": 0})


FAULTS = {
    "no such file": (None, "no such file", "JOB"),
    "syntax": ("def model(:\n", "SyntaxError in line 1", "import"),
    "missing library": ("import torch\nimport no_such_lib\n", "ModuleNotFoundError in line 2", "import"),
    "exit": ("import sys\nsys.exit('no GPU')\n", "SystemExit in line 2: no GPU", "import"),
    "a function lacks": (GOOD.replace("def loss", "def lost"), r"no loss\(\)\. .*loss\(output, bat", "loss"),
    "two lack": (GOOD.replace("def loss", "def a").replace("def opt", "def b"), r"no loss\(\), opti", "loss"),
    "model fails": (GOOD.replace("nn.ReLU()", "nn.RelU()"), "AttributeError in line 6", "model"),
    "dataset fails": (GOOD.replace("* 5", "/ 5"), "TypeError in line 9", "dataset"),
    "no layers": (GOOD.replace("return [nn", "return []; [nn"), "no layers", "model"),
    "mixed": (GOOD.replace("nn.ReLU()", "lambda: nn.ReLU()"), "modules and callables mixed", "model"),
    "no model": (GOOD.replace("return [nn", "return 3; [nn"), "gave int", "model"),
    "whole module": (
        GOOD.replace("return [nn", "return nn.TransformerEncoderLayer(4, 2); [nn"),
        "cannot be split by itself: it is not of transformers",
        "model",
    ),
    "no dataset": (GOOD.replace("return [(", "return 3; [("), "gave int", "dataset"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_told(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path relative to where the command runs, too."""
    text, told, key = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    path = "absent.py" if text is None else Path(written(tmp_path, text)).name
    with pytest.raises(SpecError, match=told) as caught:
        load_job(path)
    assert (caught.value.file, caught.value.key) == (path, key)


def test_a_fault_in_a_library_of_the_job_names_both(tmp_path: Path) -> None:
    written(tmp_path, "def build():\n    return [][1]\n", "my_layers_for_a_test.py")
    text = GOOD.replace("return [nn", "m.build(); [nn")
    path = written(tmp_path, f"import my_layers_for_a_test as m\n{text}")
    with pytest.raises(SpecError, match="IndexError in line 7"):
        load_job(path)


LOSSES = {
    "mean only": ("output.sum()", "loss gave Tensor"),
    "three": ("(output.sum(), 1, 2)", "loss gave tuple"),
    "not summed": ("(output, 2)", r"a sum of shape \[5, 2\]"),
    "a number": ("(1.0, 2)", "a sum float"),
    "fails": ("(output @ output, 2)", "RuntimeError in line 12"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_does_not_add_up_is_refused(tmp_path: Path, case: str) -> None:
    body, told = LOSSES[case]
    text = GOOD.replace("(output - batch[1]).square().sum(), output.numel()", body)
    with pytest.raises(SpecError, match=told):
        load_job(written(tmp_path, text)).loss(torch.ones(5, 2), None)


def test_a_layer_that_cannot_be_built_is_told() -> None:
    job = Job.of([lambda: nn.Linear(2), lambda: 3], [1], None, None)
    with pytest.raises(SpecError, match="TypeError in line") as caught:
        job.layer(0)
    assert caught.value.key == "layer 0"
    with pytest.raises(SpecError, match="layer 1 gave int"):
        job.layer(1)


def test_batch_statistics_are_warned_of() -> None:
    job = Job.of([nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.GroupNorm(1, 3)], [1], None, None)
    with pytest.warns(UserWarning, match="depends on the plan"):
        job.layer(0)
    job.layer(1)
    job.layer(2)


@pytest.mark.parametrize("name", ["gpt_job", "cnn_job"])
def test_examples_train_a_step(name: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "jobs" / f"{name}.py"
    job = load_job(str(path))
    batch = job.collate([job.dataset[i] for i in range(2)])
    values = job.inputs(batch)
    for layer in range(job.num_layers):
        values = job.layer(layer)(values)
    total, count = job.loss(values, batch)
    assert torch.isfinite(total)
    assert count > 0
