"""Operations seen before: what a trace takes from memory is what torch would have made."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from foreshard.profile.networks.catalog import network
from foreshard.profile.tracing.repeats import Repeats
from foreshard.profile.tracing.trace import trace_module


class Recurrent(nn.Module):
    """Views, operations in place, several results, numbers of several types, a shared weight."""

    def __init__(self):
        super().__init__()
        self.cell, self.table = nn.LSTMCell(8, 8), nn.Embedding(16, 8)

    def forward(self, tokens):
        steps = self.table(tokens).unbind(1)
        state = (steps[0] * 0, torch.zeros_like(steps[0]))
        for step in steps:
            state = self.cell(step + 1, state)
            state[0].mul_(1.0).clamp_(min=-1)
        values, places = state[0].topk(2)
        return (values.sum() + places.float().mean() + state[0].flip(0).cumsum(1).sum()) / True


MODULES = {
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
        torch.empty(1, 7, 16),
    ),
    "recurrent": lambda: (Recurrent(), torch.zeros(1, 5, dtype=torch.long)),
    "images": lambda: (
        network("resnet18")[0].to(memory_format=torch.channels_last),
        torch.empty(1, 3, 64, 64),
    ),
}


@pytest.mark.parametrize(
    ("name", "autocast"), [("encoder", False), ("encoder", True), ("recurrent", False), ("images", True)]
)
def test_a_trace_is_the_same_without_memory(name, autocast, monkeypatch):
    module, inputs = MODULES[name]()
    with_memory = trace_module(module, inputs, autocast=autocast)
    monkeypatch.setattr(Repeats, "again", lambda *_: None)
    assert trace_module(module, inputs, autocast=autocast) == with_memory


def test_repeated_blocks_are_worked_out_once(monkeypatch):
    """However many blocks: forward and backward of one, at both sizes; views cost nothing."""
    run, add = [], Repeats.add

    def counted(self, key, *made):
        # a view although its schema says none
        run.append(key is not None and key[0] is not torch.ops.aten._unsafe_view.default)
        add(self, key, *made)

    monkeypatch.setattr(Repeats, "add", counted)
    counts = []
    for blocks in (2, 8):
        run.clear()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        made = trace_module(nn.TransformerEncoder(layer, blocks), torch.empty(1, 7, 16))
        counts.append(sum(run))
        operations = sum(len(layer.forward) + len(layer.backward) for layer in made.layers)
    assert 0 < counts[0] == counts[1] < operations


@pytest.mark.parametrize(
    ("one", "other"), [((1,), (1.0,)), ((1,), (True,)), (((1, 2),), ((1, 2.0),)), ((None,), (0,))]
)
def test_numbers_of_other_types_are_other_keys(one, other):
    add, x = torch.ops.aten.add.Tensor, torch.empty(3, dtype=torch.int64, device="meta")
    repeats = Repeats()
    assert repeats.key(add, (x, *one), {}) != repeats.key(add, (x, *other), {})


def test_what_writes_or_returns_views_is_never_taken_from_memory():
    x, repeats = torch.empty(4, 4, device="meta"), Repeats()
    aten = torch.ops.aten
    for func, args in ((aten.add_.Tensor, (x, x)), (aten.t.default, (x,)), (aten.view.default, (x, (16,)))):
        assert repeats.key(func, args, {}) is None
    key = repeats.key(aten._unsafe_view.default, (x, (16,)), {})
    repeats.add(key, (x,), aten._unsafe_view.default(x, (16,)), [])  # a view although its schema says none
    assert repeats.again(key) is None
