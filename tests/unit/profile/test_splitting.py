"""Tensor parallelism of traced modules: against torch's DTensor, language models, and by construction."""

import sys
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_modules import random_module
from torch import nn

from foreshard.api import load_cluster, predict_traced
from foreshard.catalog.models import load_model
from foreshard.comm.collectives import all_reduce_s
from foreshard.comm.fabric import fabric_between
from foreshard.errors import SpecError
from foreshard.profile.tracing import trace
from foreshard.profile.tracing.operations import storage_of
from foreshard.profile.tracing.rank_part import part_of
from foreshard.profile.tracing.split_dims import FinerError, SplitDim, UnsplitError, viewed
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(made.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def flops_of(layers):
    return sum(op.flops.at(3) for layer in layers for op in (*layer.forward, *layer.backward))


def sums_of(layers, name):
    return Counter(size.at(2) for layer in layers for size in getattr(layer, name))


def test_elements_and_sums_are_those_of_torchs_tensor_parallelism():
    """`parallelize_module` by hand on a fake group: elements of a rank, and its all-reduces."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    degree, blocks = 2, 3
    part = trace_module(
        nn.Sequential(*(Block() for _ in range(blocks))),
        torch.empty(1, 16, 32),
        precision="fp32",
        degrees=(degree,),
    ).parts[degree]
    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (degree,))
        module = nn.Sequential(*(Block() for _ in range(blocks)))
        whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        named = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"up": ColwiseParallel()}
        named |= {"attention.o": RowwiseParallel(), "down": RowwiseParallel(), "attention": whole}
        for block in module:
            parallelize_module(block, mesh, named)
        counted = CommDebugMode()
        with counted:
            made = module(torch.zeros(2, 16, 32, requires_grad=True))
            forward = sum(counted.get_comm_counts().values())
            made.sum().backward()
        both = sum(counted.get_comm_counts().values())
        elements = sum(
            getattr(parameter, "to_local", lambda p=parameter: p)().numel()
            for parameter in module.parameters()
        )
    finally:
        dist.destroy_process_group()
    assert sum(layer.parameters for layer in part.layers) == elements
    size = 4.0 * 2 * 16 * 32
    assert sums_of(part.layers, "sums_forward") == {size: forward}
    assert sums_of(part.layers, "sums_backward") == {size: both - forward}


def classes_loss(out):
    logits = out.logits
    right = torch.zeros(logits.shape[:2].numel(), dtype=torch.long, device=logits.device)
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), right)


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=1024,
            max_position_embeddings=128,
        )
        return config, transformers.LlamaForCausalLM
    config = transformers.GPT2Config(
        n_embd=256, n_head=8, n_layer=3, vocab_size=1024, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return config, transformers.GPT2LMHeadModel


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_model_is_split_as_the_model_of_its_configuration(kind, tmp_path):
    """Elements, FLOPs and sums of a rank are those of Megatron's tensor parallelism of the same model."""
    tp, length, (config, cls) = 4, 128, hugging_face(kind)
    with torch.device("meta"):
        module = cls(config)
    traced = trace_module(
        module, torch.zeros(1, length, dtype=torch.long), loss=classes_loss, degrees=(tp,), name=kind
    )
    part = traced.parts[tp]
    assert not part.whole
    config.architectures = [cls.__name__]
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path / "config.json"))
    # whole on every rank: norms, positions, biases of the products that are split by rows
    vectors = sum(p.numel() for n, p in module.named_parameters() if "norm" in n or "ln_" in n or "wpe" in n)
    rows = sum(p.numel() for n, p in module.named_parameters() if n.endswith("c_proj.bias"))
    kept = vectors + rows
    again = sum((len(layers) - 1) * elements for layers, elements in part.tied)
    held = sum(layer.parameters for layer in part.layers) - again
    assert held == kept + (model.num_params - kept) / tp
    assert flops_of(part.layers) * tp == pytest.approx(flops_of(traced.layers), rel=1e-12)
    # four sums of activations a layer, one after the table, one before the head; three numbers of each token
    # make the loss of a head that is split
    size = 2.0 * length * config.hidden_size
    sums = sums_of(part.layers, "sums_forward") + sums_of(part.layers, "sums_backward")
    assert sums == {2 * size: 4 * model.num_layers + 2, 2 * 4.0 * length: 3}
    cluster = load_cluster(f"1x{tp}xh100-sxm")
    fabric = fabric_between(cluster, range(tp))
    each_s, of_loss_s = (all_reduce_s(num_bytes, tp, 1, fabric) for num_bytes in (size, 4.0 * length))
    plan = plan_from_degrees(
        len(traced.layers) - 2, tp, tp=tp, seq_len=1, sp=False, zero=0, global_batch=1, framework="ddp"
    )
    step = predict_traced(traced, cluster, plan)
    assert step.time_breakdown_s["tensor_comm"] == pytest.approx(
        (4 * model.num_layers + 2) * each_s + 3 * of_loss_s, rel=1e-9
    )
    assert step.memory.breakdown_bytes["optimizer"] == 8 * held


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 8, 1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 10),
    )


def test_channels_of_convolutions_are_split():
    traced = trace_module(convolutions(), torch.empty(1, 3, 16, 16), degrees=(2,))
    part = traced.parts[2]
    split = set(part.split)
    assert split == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4.weight"} | {
        "7.weight",
        "7.bias",
    }
    assert flops_of(part.layers) * 2 == flops_of(traced.layers)
    assert sums_of(part.layers, "sums_forward") == {2.0 * 2 * 8 * 16 * 16: 1, 2.0: 1}


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_split_weights_are_split_alike(seed, monkeypatch):
    """Of random modules; no rank does more than the whole, nor all ranks together less."""

    def checked(recorder, weights, degree):
        part = part_of(recorder, weights, degree)
        for weight in weights:
            split = part.splitting.splits.get(storage_of(weight))
            if split and weight.requires_grad:
                made = part.splitting.state(recorder.gradients[storage_of(weight)])
                assert isinstance(made, SplitDim)
                assert (made.dim, made.outer) == (split.dim, split.outer)
        return part

    monkeypatch.setattr(trace, "part_of", checked)
    module, inputs = random_module(seed)[:2]
    traced = trace_module(module, inputs, degrees=(2,), autocast=seed % 2 == 0)
    assert traced.layers == trace_module(module, inputs, autocast=seed % 2 == 0).layers
    part = traced.parts[2]
    for whole, mine in (
        (flops_of(traced.layers), flops_of(part.layers)),
        (traced.saved_bytes(3), sum(layer.saved_bytes.at(3) for layer in part.layers)),
        (sum(x.parameters for x in traced.layers), sum(x.parameters for x in part.layers)),
    ):
        assert whole / 2 * (1 - 1e-9) <= mine <= whole * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_view_of_a_split_tensor_has_the_elements_of_each_rank(data):
    """Which rank has an element does not change by looking at it in another shape."""
    factors = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=6))
    old, new = (grouped(factors, data.draw(st.sets(st.integers(1, len(factors) - 1)))) for _ in range(2))
    dim = data.draw(st.integers(0, len(old) - 1))
    outer = data.draw(st.sampled_from([d for d in range(1, old[dim] + 1) if old[dim] % d == 0]))
    assume((old[dim] // outer) % 2 == 0)
    split = SplitDim(dim=dim, outer=outer, size=old[dim] // outer, starts=frozenset())
    try:
        found = viewed(split, old, new, 2)
    except (FinerError, UnsplitError):
        return  # no view of this kind is split
    assert np.array_equal(ranks_of(split, old).reshape(new), ranks_of(found, new))


def grouped(factors, cuts):
    """Return the shape whose dimensions are products of neighbouring factors."""
    ends = [0, *sorted(cuts), len(factors)]
    return tuple(prod(factors[lo:hi]) for lo, hi in pairwise(ends))


def ranks_of(split, shape):
    """Return the rank of two that has each element."""
    block = shape[split.dim] // split.outer
    along = (np.arange(shape[split.dim]) % block) // (block // 2)
    others = [1] * len(shape)
    others[split.dim] = -1
    return np.broadcast_to(along.reshape(others), shape)


def test_what_cannot_be_split_is_said():
    module = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
    traced = trace_module(module, torch.empty(1, 9), degrees=(2,), name="odd", where="odd.py:odd")
    plan = plan_from_degrees(len(traced.layers) - 2, 2, tp=2, seq_len=1, sp=False, framework="ddp")
    with pytest.raises(SpecError, match=r"tp 2 splits nothing.*0.weight \(9 is no multiple of 2\)"):
        predict_traced(traced, load_cluster("1x2xh100-sxm"), plan)
    with pytest.raises(SpecError, match="was traced without tp 4"):
        four = plan_from_degrees(len(traced.layers) - 2, 4, tp=4, seq_len=1, sp=False, framework="ddp")
        predict_traced(traced, load_cluster("1x4xh100-sxm"), four)
    # heads that do not divide leave attention whole, beside a split MLP
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    part = trace_module(layer, torch.empty(1, 8, 64), degrees=(4,)).parts[4]
    assert {name.partition(".")[0] for name in part.split} == {"linear1", "linear2"}
    assert "self_attn.in_proj_weight" in part.whole


class PerHead(nn.Module):
    """A recurrent layer over each head of what a product makes."""

    def __init__(self, heads):
        super().__init__()
        self.inner, self.outer, self.heads = nn.Linear(32, 32), nn.Linear(32, 32), heads
        self.layer = nn.GRU(32 // heads, 32 // heads, batch_first=True)

    def forward(self, x):
        b, t, d = x.shape
        y = self.inner(x).view(b, t, self.heads, -1).transpose(1, 2).reshape(b * self.heads, t, -1)
        y = self.layer(y)[0].view(b, self.heads, t, -1)
        return self.outer(y.transpose(1, 2).reshape(b, t, d))


@pytest.mark.parametrize("heads", [1, 4])
def test_a_recurrent_layer_needs_what_it_reads_whole(heads):
    part = trace_module(PerHead(heads), torch.empty(1, 3, 32), degrees=(2,)).parts[2]
    assert not {name for name in part.split if not name.startswith("outer")}
    assert part.whole["inner.weight"] == "recurrent layer: it needs the tensor whole"


def test_slices_of_one_product_are_split_as_its_chunks():
    """Each slice asks for the weight to be cut within the same parts."""

    class Gated(nn.Module):
        def __init__(self, sliced):
            super().__init__()
            self.up, self.down, self.sliced = nn.Linear(16, 64), nn.Linear(32, 16), sliced

        def forward(self, x):
            y = self.up(x)
            value, gate = (y[..., :32], y[..., 32:]) if self.sliced else y.chunk(2, -1)
            return self.down(value * torch.sigmoid(gate))

    sliced, chunks = (
        trace_module(Gated(way), torch.empty(1, 3, 16), degrees=(2,)).parts[2] for way in (True, False)
    )
    assert sliced.split == chunks.split == ("up.weight", "up.bias", "down.weight")
    assert not sliced.whole
    assert flops_of(sliced.layers) == flops_of(chunks.layers)
    for name in ("sums_forward", "sums_backward"):
        assert sums_of(sliced.layers, name) == sums_of(chunks.layers, name)


class Stepwise(nn.Module):
    """A cell that a module calls by itself, in a loop."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.first, self.last = kind(8, 16), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x, state = self.last(self.first(x).relu()), None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_that_a_module_calls_stay_whole_beside_what_is_split(kind):
    """The kernel of a cell has no rule of torch's own: it was an internal fault."""
    module = trace_module(Stepwise(kind), torch.empty(1, 3, 8), degrees=(2,))
    part = module.parts[2]
    assert set(part.split) == {"first.weight", "first.bias", "last.weight"}
    assert {"cell.weight_ih", "cell.weight_hh"} <= part.whole.keys()
