"""Which traced operations issue more instructions than their bytes take."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from foreshard.profile.tracing.trace import trace_module


class Of(nn.Module):
    """A function after a weight, so that there is something to train."""

    def __init__(self, function, shape):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(shape[-1])), function

    def forward(self, x):
        return self.function(x * self.weight)


def issued(function, shape, name, *, samples=4, **asked):
    """Return the instructions for each sample of the operations of a name in the forward."""
    traced = trace_module(Of(function, shape), torch.empty(1, *shape), **asked)
    found = [o for layer in traced.layers for o in layer.forward if o.name == name]
    assert found, [o.name for layer in traced.layers for o in layer.forward]
    return sum(o.issued.at(samples) for o in found) / samples


def test_a_norm_issues_by_rows_however_few_their_columns():
    narrow, wide = (
        issued(lambda x: nn.functional.layer_norm(x, x.shape[-1:]), (49, width), "native_layer_norm")
        for width in (8, 512)
    )
    assert narrow == wide > 0
    more = issued(lambda x: nn.functional.layer_norm(x, x.shape[-1:]), (98, 8), "native_layer_norm")
    assert more == 2 * narrow


@pytest.mark.parametrize(
    ("function", "name", "binds"),
    [
        (lambda x: x.transpose(-1, -2).contiguous(), "clone", True),
        (lambda x: x.transpose(-1, -2).clone(memory_format=torch.preserve_format), "clone", False),
        (lambda x: x + x.relu(), "add", False),
        (lambda x: x + x.mT, "add", True),
        (lambda x: x - x.amax(-1, keepdim=True), "sub", True),
        (lambda x: x / x.new_ones(()), "div", False),
        (nn.functional.gelu, "gelu", False),
        (lambda x: x.sum(1), "sum", True),
        (lambda x: x.sum(2), "sum", False),
    ],
)
def test_what_lies_otherwise_in_memory_is_computed_place_by_place(function, name, binds):
    assert (issued(function, (32, 32), name) > 0) is binds


def test_a_roll_is_a_kernel_for_every_dimension():
    one, two = (
        issued(lambda x, n=n: x.roll((1,) * n, tuple(range(1, n + 1))), (8, 8, 4), "roll") for n in (1, 2)
    )
    assert two == 2 * one > 0


def test_images_whose_channels_are_last_do_not_lie_otherwise():
    """Convolutions on the meta device forget the layout, so that only what is no image is looked at."""
    block = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            x = self.block[:2](x)
            return x + self.block[2](x)

    for layout in (torch.contiguous_format, torch.channels_last):
        traced = trace_module(Added().to(memory_format=layout), torch.empty(1, 4, 8, 8))
        adds = [o for layer in traced.layers for o in layer.forward if o.name == "add"]
        assert adds and not any(o.issued.at(8) for o in adds)


@pytest.mark.parametrize(("tokens", "binds"), [(49, True), (64, False)])
def test_many_products_of_odd_sizes_load_single_elements(tokens, binds):
    found = issued(lambda x: x @ x.mT @ x, (3, tokens, 32), "bmm", precision="bf16")
    assert (found > 0) is binds
    assert issued(lambda x: x @ x.mT @ x, (3, tokens, 32), "bmm", precision="fp32") == 0.0


@pytest.mark.parametrize(
    ("layout", "filter_side", "stride", "dtype", "each"),
    [
        (torch.channels_last, 7, 1, "fp16", [49 * 6, 49 * 12, 49 * 4.5]),
        (torch.contiguous_format, 3, 1, "fp16", [0, 0, 0]),  # cuDNN's
        (torch.contiguous_format, 3, 1, "bf16", [205 + 9 * 16, 470 + 9 * 10.5, 9 * 56]),  # torch's own
        (torch.contiguous_format, 7, 1, "fp16", [205 + 49 * 16, 470 + 49 * 10.5, 49 * 56]),
        (torch.contiguous_format, 3, 2, "fp16", [205 + 9 * 16, 4 * 470 + 9 * 10.5, 9 * 56]),
    ],
)
def test_single_channels_issue_by_what_the_kernel_of_their_layout_computes(
    layout, filter_side, stride, dtype, each
):
    last = nn.Conv2d(32, 32, filter_side, stride, padding=filter_side // 2, groups=32)
    network = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), last).to(memory_format=layout)
    traced = trace_module(network, torch.empty(1, 4, 16, 16), precision=dtype)
    found = [
        (o.issued.at(8), o.flops.at(8))
        for layer in traced.layers
        for o in (*layer.forward, *layer.backward)
        if o.kind == "depthwise"
    ]
    made = 8 * 32 * (16 // stride) ** 2
    assert [flops for _, flops in found] == [2.0 * made * filter_side**2] * 3
    forward, *backward = [issued for issued, _ in found]
    assert forward == pytest.approx(made * each[0])
    assert sorted(backward) == pytest.approx(sorted(made * value for value in each[1:]), rel=0.1)


def test_the_side_of_the_samples_is_not_looked_at():
    """The gradient of a weight is a product over the rows of all samples, odd or not."""
    traced = trace_module(nn.Linear(8, 8), torch.empty(1, 7, 8), precision="bf16")
    products = [
        o for layer in traced.layers for o in (*layer.forward, *layer.backward) if o.kind == "product"
    ]
    assert len(products) >= 2 and not any(o.issued.at(5) for o in products)


@pytest.mark.parametrize(
    ("layout", "precision", "binds"),
    [("last", "bf16", True), ("last", "fp16", False), ("first", "bf16", False)],
)
def test_batch_norms_that_the_library_does_not_take_issue_by_elements(layout, precision, binds):
    network = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
    if layout == "last":
        network = network.to(memory_format=torch.channels_last)
    traced = trace_module(network, torch.empty(1, 4, 8, 8), precision=precision, autocast=True)
    norms = [
        o
        for layer in traced.layers
        for o in (*layer.forward, *layer.backward)
        if o.name.startswith("native_batch_norm")
    ]
    assert len(norms) == 2
    assert [o.issued.at(8) > 0 for o in norms] == [binds, binds]


def operations_of(network, image, **asked):
    traced = trace_module(network, image, **{"precision": "fp16", "autocast": True} | asked)
    return [o for layer in traced.layers for o in (*layer.forward, *layer.backward)]


@pytest.mark.parametrize("lies_last", ["weights", "image", "inside"])
def test_images_that_lie_last_stay_so_behind_a_convolution(lies_last):
    class Inside(nn.Module):
        def forward(self, x):
            return x.contiguous(memory_format=torch.channels_last)

    first = Inside() if lies_last == "inside" else nn.Identity()
    network = nn.Sequential(first, nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    image = torch.empty(1, 4, 8, 8)
    if lies_last == "weights":
        network = network.to(memory_format=torch.channels_last)
    if lies_last == "image":
        image = image.to(memory_format=torch.channels_last)
    found = {o.kind for o in operations_of(network, image)}
    assert not found & {"layout", "batch_norm"}
    first_kinds = {
        o.kind
        for o in operations_of(
            nn.Sequential(*network[1:]).to(memory_format=torch.contiguous_format), torch.empty(1, 4, 8, 8)
        )
    }
    assert first_kinds >= {"layout", "batch_norm"}


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({}, 0.0),
        ({"autocast": False}, 1.0),  # weights in fp16
        ({"precision": "bf16"}, 1.0),
        ({"precision": "fp32", "autocast": False}, 0.0),
    ],
)
def test_cudnn_takes_batch_norms_with_weights_in_fp32(change, own):
    network = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
    norms = [o for o in operations_of(network, torch.empty(1, 4, 8, 8), **change) if o.kind == "batch_norm"]
    assert [o.sizes[4].fixed for o in norms] == [own] * 2


def test_batch_norms_by_fixed_statistics_stream():
    class Fixed(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    network = nn.Sequential(nn.Conv2d(4, 8, 3), Fixed(8))
    network[1].eval()
    found = operations_of(network, torch.empty(1, 4, 8, 8))
    norms = {o.kind for o in found if "batch_norm" in o.name}
    assert norms == {"stream"}


def test_a_bias_of_a_convolution_is_a_kernel():
    image = torch.empty(1, 4, 8, 8)
    for bias in (True, False):
        found = [
            o for o in operations_of(nn.Sequential(nn.Conv2d(4, 8, 3, bias=bias)), image) if o.name == "bias"
        ]
        assert [o.issued.at(5) for o in found] == [90.0 * 5 * 8 * 36] * bias


@pytest.mark.parametrize(
    ("pool", "places"), [(nn.MaxPool2d(2), 4), (nn.MaxPool2d((3,), 1), 9), (nn.MaxPool2d((1, 2)), 2)]
)
def test_pooling_issues_by_its_window(pool, places):
    found = [
        o
        for o in operations_of(nn.Sequential(nn.Conv2d(4, 8, 3), pool), torch.empty(1, 4, 8, 8))
        if "pool" in o.name
    ]
    made = pool(torch.empty(1, 8, 6, 6)).numel()
    assert [o.issued.at(1) for o in found] == [(300 + 27 * places) * made, (280 + 10 * places) * 8 * 36]


@pytest.mark.parametrize("words", [1000, 1001])
def test_a_product_of_odd_rows_loads_single_elements_for_every_tile(words):
    """Of a head over an odd number of words, both gradients read rows that do not begin at 4 bytes."""
    head = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Linear(512, words, bias=False), nn.GELU())
    traced = trace_module(head, torch.empty(1, 256, 64), precision="fp16")
    found = [o for layer in reversed(traced.layers) for o in layer.backward if o.kind == "product"]
    forward = [o for layer in traced.layers for o in layer.forward if o.kind == "product"]
    scores = 64 * 256 * words
    loaded = 50.0 * scores * 512 / 128
    assert forward[1].issued.at(64) == pytest.approx(50.0 * scores * (words % 2))
    assert [o.issued.at(64) for o in found] == pytest.approx([loaded * (words % 2)] * 2 + [0.0])


def test_a_softmax_reads_rows_again_that_no_cache_holds():
    """Forward for maximum, sum and result, backward twice of the gradients; short rows wait in the cache."""
    moved = {}
    for words in (65_536, 262_144):
        score = nn.Sequential(nn.Linear(8, words, bias=False), nn.LogSoftmax(-1), nn.GELU())
        traced = trace_module(score, torch.empty(1, 4, 8), precision="fp16")
        found = [o for layer in traced.layers for o in (*layer.forward, *layer.backward)]
        moved[words] = sorted(o.bytes.at(2) / (2 * 4 * words * 2) for o in found if "softmax" in o.name)
    assert moved[65_536] == pytest.approx([2, 3], rel=1e-3)
    assert moved[262_144] == pytest.approx([4, 4], rel=1e-3)


def test_what_picks_elements_of_a_tensor_reads_no_others():
    """A row of a table, the score of the right word, and back: as many bytes as are picked, or made."""

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4096, 16)

        def forward(self, words):
            scores = self.table(words).flatten(1)
            return scores.gather(1, words) + nn.functional.cross_entropy(scores, words[:, 0])

    found = operations_of(Picks(), torch.zeros(1, 8, dtype=torch.long), precision="fp32")
    moved = {o.name: o.bytes.at(10) / 10 for o in found}
    rows, picked = 4 * 8 * 16, 4 * 8
    assert moved["embedding"] == pytest.approx(2 * rows + 2 * picked)
    assert moved["gather"] == pytest.approx(2 * picked + 2 * picked)
    assert moved["scatter_add"] == pytest.approx(2 * picked + 3 * picked)
    assert moved["nll_loss_backward"] == pytest.approx(rows + 8, rel=0.02)
    assert moved["nll_loss_forward"] < 0.1 * rows
