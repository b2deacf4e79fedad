"""Random modules out of blocks that people write, and torch's own counts of what they do."""

from contextlib import contextmanager
from math import prod
from random import Random

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        return gradient * (gate + x * gate * (1 - gate))


class Of(nn.Module):
    """A module out of a function and the parts that it calls."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def _heads(module, x):
    query, key, value = module.inside(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return x + module.out(mixed.transpose(1, 2).flatten(2))


def _unfused_heads(module, x):
    query, key, value = module.inside(x).chunk(3, -1)
    scores = torch.einsum("bqd,bkd->bqk", query, key) / query.shape[-1] ** 0.5
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return x + module.out(scores.masked_fill(mask, -1e9).softmax(-1) @ value)


def _in_place(module, x):
    y = functional.relu(module.a(x), inplace=True)
    z = module.b(y)
    z += x
    return z.mul_(0.5)


def _views(module, x):
    first, second = module.a(x).chunk(2, -1)
    out = torch.cat([second, first], -1).transpose(1, 2).contiguous().transpose(1, 2)
    return out.reshape(x.shape) + x.expand_as(x)


def _listed(module, x):
    seen = []
    for part in module.parts:
        x = part(x)
        seen.append(x)
    return torch.stack(seen).mean(0)


def _experts(module, x):
    weights = module.router(x).softmax(-1)
    return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(module.parts))


def _buffered(module, x):
    module.seen += 1
    return x * module.scale + module.shift


def _as_images(block):
    """Run a block of images on sequences of 16 positions."""
    return Of(
        lambda m, x: m.block(x.transpose(1, 2).unflatten(2, (4, 4))).flatten(2).transpose(1, 2), block=block
    )


def blocks(width):
    """Return what makes each block; all map (samples, 16, width) to the same."""
    linear = lambda more=1: nn.Linear(width, more * width)  # noqa: E731
    again = lambda reentrant: Of(  # noqa: E731
        lambda m, x: checkpoint(m.part, x, use_reentrant=reentrant), part=mlp()
    )
    mlp = lambda: nn.Sequential(linear(2), nn.GELU(), nn.Linear(2 * width, width))  # noqa: E731
    recurrent = lambda kind, **asked: Of(  # noqa: E731
        lambda m, x: m.cell(x)[0], cell=kind(width, width, batch_first=True, **asked)
    )

    def buffered():
        made = Of(_buffered, scale=nn.Parameter(torch.ones(width)))
        made.register_buffer("shift", torch.zeros(16, width))
        made.register_buffer("seen", torch.zeros(()))
        return made

    def residual(module, x):
        return x + module.part(module.norm(x))

    def shared(module, x):
        return module.part(module.part(x))

    image = {
        "convolution": lambda: nn.Conv2d(width, width, 3, padding=1),
        "grouped": lambda: nn.Conv2d(width, width, 3, padding=1, groups=4),
        "depthwise": lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
        "down and up": lambda: nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.SiLU(), nn.ConvTranspose2d(2 * width, width, 2, 2)
        ),
        "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        "group norm": lambda: nn.GroupNorm(4, width),
        "pooled": lambda: Of(
            lambda m, x: x + nn.functional.interpolate(nn.functional.avg_pool2d(x, 2), scale_factor=2)
        ),
    }
    return {name: lambda make=make: _as_images(make()) for name, make in image.items()} | {
        "mlp": mlp,
        "residual": lambda: Of(residual, norm=nn.LayerNorm(width), part=mlp()),
        "heads": lambda: Of(_heads, inside=linear(3), out=linear()),
        "unfused heads": lambda: Of(_unfused_heads, inside=linear(3), out=linear()),
        "attention": lambda: Of(
            lambda m, x: m.mix(x, x, x, need_weights=False)[0],
            mix=nn.MultiheadAttention(width, 4, batch_first=True),
        ),
        "encoder": lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True),
        "lstm": lambda: recurrent(nn.LSTM),
        "gru": lambda: recurrent(nn.GRU, num_layers=2, dropout=0.1),
        "shared": lambda: Of(shared, part=mlp()),
        "recomputed": lambda: again(False),
        "recomputed, reentrant": lambda: Of(
            lambda m, x: checkpoint(m.part, x, use_reentrant=True), part=mlp()
        ),
        "in place": lambda: Of(_in_place, a=linear(), b=linear()),
        "views": lambda: Of(_views, a=linear()),
        "list": lambda: Of(_listed, parts=nn.ModuleList(linear() for _ in range(3))),
        "experts": lambda: Of(
            _experts, router=nn.Linear(width, 3), parts=nn.ModuleList(mlp() for _ in range(3))
        ),
        "function": lambda: Of(lambda m, x: Gate.apply(m.a(x)), a=linear()),
        "mapped": lambda: Of(lambda m, x: torch.func.vmap(torch.tanh)(m.a(x)), a=linear()),
        "dropout": lambda: nn.Dropout(0.1),
        "buffers": buffered,
        "frozen": lambda: linear().requires_grad_(False),
        "normed weight": lambda: nn.utils.parametrizations.weight_norm(linear()),
        "bilinear": lambda: Of(
            lambda m, x: torch.einsum("bsi,ij,btj->bst", x, m.mix, x) @ x,
            mix=nn.Parameter(torch.ones(width, width)),
        ),
    }


def random_module(seed):
    """Return (module, example inputs, names of its blocks): words or values, blocks, a head, maybe tied."""
    random = Random(seed)
    width = random.choice((16, 32))
    made = blocks(width)
    names = random.choices(sorted(made), k=random.randint(2, 6))
    body = nn.Sequential(*(made[name]() for name in names))
    if random.random() < 0.5:
        return nn.Sequential(nn.Linear(width, width), body), torch.empty(1, 16, width), names
    words = nn.Embedding(50, width)
    head = nn.Linear(width, 50, bias=False)
    if random.random() < 0.5:
        head.weight = words.weight
    return nn.Sequential(words, body, head), torch.zeros(1, 16).long(), [*names, "words"]


@contextmanager
def attention_of_torch():
    """Run attention as torch's own flash kernel, whose sizes and FLOPs torch knows on the meta device."""
    kept = functional.scaled_dot_product_attention

    def fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = kept


def _convolution_backward(gradient, data, weight, bias, stride, padding, dilation, transposed, *rest, **_):
    """Return as many FLOPs as the forward has for each gradient; torch's formula forgets the groups."""
    mask = rest[2]
    positions = data[0] * prod((data if transposed else gradient)[2:])
    return 2 * positions * prod(weight) * (bool(mask[0]) + bool(mask[1]))


def counted_flops(module, inputs):
    """Return the FLOPs that torch counts in forward and backward."""
    counter = FlopCounterMode(
        display=False, custom_mapping={aten.convolution_backward: _convolution_backward}
    )
    with attention_of_torch(), counter, torch.device("meta"):
        module(inputs).sum().backward()
    return counter.get_total_flops()


def tracked_bytes(module, inputs):
    """Return the bytes of activations that torch's tracker holds after a forward whose outputs are gone."""
    tracker = MemTracker()
    tracker.track_external(module, inputs)
    with attention_of_torch(), tracker, torch.device("meta"):
        score = module(inputs).sum()
        held = tracker.get_tracker_snapshot("current")
    del score
    kinds = [
        (str(getattr(kind, "value", kind)), size) for found in held.values() for kind, size in found.items()
    ]
    return sum(size for kind, size in kinds if kind == "Activation")
