"""What a sample draws in a layer belongs to the sample: not to its batch, its rank, its repeats."""

from __future__ import annotations

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foreshard.errors import SpecError
from foreshard.runtime.engine import counter_rng
from foreshard.runtime.engine.counter_rng import at_least, bits, key_of, normal, uniform
from foreshard.runtime.engine.randomness import sample_randomness


def draw(body, positions, *, seed: int = 0, step: int = 0, layer: int = 0):
    with sample_randomness(seed=seed, step=step, layer=layer, positions=positions):
        return body(len(positions))


ROW = 12
BODIES = {
    "dropout": lambda n: functional.dropout(torch.ones(n, ROW), 0.5),
    "module": lambda n: nn.Dropout(0.5)(torch.ones(n, ROW)),
    "inplace": lambda n: functional.dropout(torch.ones(n, ROW), 0.5, inplace=True),
    "torch.dropout": lambda n: torch.dropout(torch.ones(n, ROW), 0.5, True),
    "dropout2d": lambda n: functional.dropout2d(torch.ones(n, ROW, 2, 3), 0.5),
    "attention": lambda n: functional.scaled_dot_product_attention(
        *torch.eye(ROW).expand(3, n, 2, ROW, ROW), dropout_p=0.5, is_causal=True
    ),
    "grouped attention": lambda n: functional.scaled_dot_product_attention(
        torch.ones(n, 4, 3, 8), *torch.eye(3, 8).expand(2, n, 2, 3, 8), dropout_p=0.5, enable_gqa=True
    ),
    "rand": lambda n: torch.rand(n, ROW),
    "rand of a tuple": lambda n: torch.rand((n, ROW), dtype=torch.float64),
    "randn": lambda n: torch.randn(n, ROW),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, ROW)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, ROW)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, ROW), 0.5)),
    "bernoulli_": lambda n: torch.empty(n, ROW).bernoulli_(0.5),
    "stochastic depth": lambda n: torch.ones(n, 64, 1).new_empty(n, 64, 1).bernoulli_(0.5),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_batch_cut_anywhere_draws_the_same(body) -> None:
    whole = draw(body, [4, 5, 9, 2])
    parts = torch.cat([draw(body, [4]), draw(body, [5, 9]), draw(body, [2])])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_seed_step_layer_position_and_call_all_matter(body) -> None:
    found = [
        draw(body, [0]),
        draw(body, [1]),
        draw(body, [0], step=1),
        draw(body, [0], layer=1),
        draw(body, [0], seed=1),
        draw(lambda n: (body(n), body(n))[1], [0]),
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_the_process_s_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for body in BODIES.values():
        draw(body, [1, 2])
    assert torch.equal(torch.get_rng_state(), before)


def test_computing_again_for_the_backward_draws_the_same() -> None:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)), torch.randn(3, 8)

    def run(values):
        with sample_randomness(seed=1, step=2, layer=3, positions=[7, 8, 9]):
            return layer(values)

    gradients = []
    for again in (False, True):
        layer.zero_grad()
        out = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False) if again else run(x)
        out.sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("weights", [False, True])
def test_attention_of_torch_draws_by_sample(weights: bool) -> None:
    """Its parts draw inside a function of torch, where a mode is off by default."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def run(n: int):
        x = torch.linspace(0, 1, 40).view(1, 5, 8).expand(n, 5, 8)
        return attention(x, x, x, need_weights=weights)[0]

    before = torch.get_rng_state()
    whole = draw(run, [0, 1, 2])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(whole, torch.cat([draw(run, [0]), draw(run, [1, 2])]), atol=1e-6)
    assert not torch.allclose(whole[0], whole[1])
    attention.eval()
    assert torch.allclose(draw(run, [0])[0], run(1)[0], atol=1e-6)


def test_dropped_attention_is_attention_with_some_weights_gone() -> None:
    """Means over many samples are those without dropout; without dropout torch's own kernel is used."""
    made = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=made).expand(3, 3000, 2, 6, 4)
    mask = torch.rand(6, 6, generator=made) > 0.3
    mask.fill_diagonal_(True)
    for more in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float().log()}, {"scale": 0.2}):
        plain = functional.scaled_dot_product_attention(q[:1], k[:1], v[:1], **more)
        body = functools.partial(functional.scaled_dot_product_attention, q, k, v, dropout_p=0.2, **more)
        dropped = draw(lambda n, body=body: body(), range(3000))
        assert (dropped.mean(0) - plain[0]).abs().max() < 0.1
        assert (dropped - plain).abs().max() > 0.1


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_that_is_dropped_and_the_scale(p: float) -> None:
    found = draw(lambda n: functional.dropout(torch.ones(n, 1000), p), range(100))
    assert abs(float((found == 0).double().mean()) - p) < 5 * (p * (1 - p) / 1e5) ** 0.5 + 1e-12
    if p < 1:
        assert torch.all((found == 0) | (found - 1 / (1 - p)).abs().lt(1e-6))


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(draw(lambda n: functional.dropout(x, 0.5, training=False), range(3)), x)
    assert torch.equal(draw(lambda n: nn.Dropout(0.5).eval()(x), range(3)), x)


LSTM = nn.LSTM(3, 3, 2, dropout=0.5, batch_first=True)
REFUSED = {
    "randint": lambda x: torch.randint(0, 3, (2, 2)),
    "randperm": lambda x: x[torch.randperm(2)],
    "multinomial": lambda x: torch.multinomial(x.exp(), 1),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(),
    "alpha_dropout": lambda x: nn.AlphaDropout(0.5)(x),
    "feature_alpha_dropout": lambda x: nn.FeatureAlphaDropout(0.5)(x[..., None]),
    "rrelu": lambda x: nn.RReLU()(x),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
    "lstm": lambda x: LSTM(x[:, None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_by_sample_is_refused_by_name(name: str) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(SpecError, match=name), sample_randomness(seed=0, step=0, layer=0, positions=[0, 1]):
        REFUSED[name](x)


@pytest.mark.parametrize("module", [nn.AlphaDropout(0.5), nn.RReLU(), nn.LSTM(3, 3, 2, dropout=0.5)])
def test_what_does_not_draw_is_let_through(module) -> None:
    x = torch.zeros(2, 3)
    module.eval()
    with sample_randomness(seed=0, step=0, layer=0, positions=[0, 1]):
        module(x)


def test_rows_that_are_not_samples_are_refused() -> None:
    with pytest.raises(SpecError, match="6 rows and 2 samples"):
        draw(lambda n: functional.dropout(torch.ones(6, 4), 0.5), [0, 1])


def test_a_fault_in_a_layer_names_the_layer_and_is_no_peer_s() -> None:
    with pytest.raises(SpecError, match="RuntimeError in line") as caught:
        draw(lambda n: torch.ones(2, 3) @ torch.ones(2, 3), [0, 1], layer=5)
    assert (caught.value.key, caught.value.file) == ("layer 5", __file__)


def test_bits_are_those_of_splitmix64() -> None:
    """Against whole numbers of Python, one by one."""
    mask = (1 << 64) - 1

    def one(key: int, place: int) -> int:
        value = (key + place * 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    keys = [0, 1, key_of(3, 1, 4), mask]
    found = bits(keys, (2, 50))
    assert [[v & mask for v in row] for row in found.flatten(1).tolist()] == [
        [one(key, place) for place in range(100)] for key in keys
    ]


def test_devices_and_the_host_finish_bits_alike() -> None:
    drawn = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    on_host = drawn.clone()
    counter_rng._finish(drawn)
    counter_rng._finish_on_host(on_host)
    assert torch.equal(drawn, on_host)


def test_large_rows_are_the_same_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bits([1, 2, 3], (7, 5))
    monkeypatch.setattr("foreshard.runtime.engine.counter_rng._BATCHED", 8)
    assert torch.equal(bits([1, 2, 3], (7, 5)), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uniform_numbers_are_uniform(dtype) -> None:
    """Kolmogorov and Smirnov: 20000 numbers stay within 2.2 / sqrt(n) with all but 1e-4 of fair draws."""
    found = uniform(bits(range(20), (1000,)).flatten(), dtype).double().sort().values
    assert found[0] >= 0.0
    assert found[-1] < 1.0
    steps = torch.arange(1, 20001) / 20000
    coarse = 2**-8 if dtype is torch.bfloat16 else 0.0
    assert float((found - steps).abs().max()) < 2.2 / 20000**0.5 + coarse


def test_normal_numbers_are_normal() -> None:
    drawn, second = bits(range(20), (1000,)), bits(range(20, 40), (1000,))
    found = normal(drawn, second, torch.float64).flatten().sort().values
    steps = torch.arange(1, 20001) / 20000
    assert float((0.5 * (1 + torch.erf(found / math.sqrt(2))) - steps).abs().max()) < 2.2 / 20000**0.5


def test_chance_at_the_ends() -> None:
    drawn = bits([5], (1000,))
    assert at_least(drawn, 0.0).all()
    assert not at_least(drawn, 1.0).any()
    assert at_least(drawn, 0.25).double().mean() == pytest.approx(0.75, abs=0.06)


def test_draws_of_neighbours_have_nothing_in_common() -> None:
    """Correlation of 40 neighbouring rows of 4000; 5 sigma."""
    rows = uniform(bits([key_of(0, 0, 0, p, 1) for p in range(40)], (4000,)), torch.float64) - 0.5
    products = (rows @ rows.T) / 4000 * 12
    assert float((products - torch.eye(40)).abs().fill_diagonal_(0).max()) < 5 / 4000**0.5
