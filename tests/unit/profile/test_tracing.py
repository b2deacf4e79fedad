"""Traces of torch modules: FLOPs, parameters and saved bytes against torch's own counters, and the chain."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import NETWORKS, network
from foreshard.profile.tracing.trace import trace_module

# torchvision's and timm's published parameter counts
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "wide_resnet50_2": 68_883_240,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
}


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.inside(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.mix = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))

    def forward(self, words, places):
        return self.mix(self.words(words) + self.places(places))


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 4, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


CASES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)), torch.empty(1, 12)),
    "cnn": lambda: (small_cnn(), torch.empty(1, 3, 16, 16)),
    "attention": lambda: (nn.Sequential(*(Attention() for _ in range(3))), torch.empty(1, 6, 32)),
    "encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        ),
        torch.empty(1, 6, 32),
    ),
    "two inputs": lambda: (TwoInputs(), (torch.zeros(1, 8).long(), torch.zeros(1, 8).long())),
    "resnet18": lambda: network("resnet18", side=64),
}


def on_meta(module, inputs, samples):
    def blank(tensor):
        return torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    made = tuple(map(blank, inputs)) if isinstance(inputs, tuple) else (blank(inputs),)
    return module.to("meta").train(), made


@pytest.mark.parametrize("name", CASES)
def test_flops_and_parameters_are_those_that_torch_counts(name):
    module, inputs = CASES[name]()
    traced = trace_module(module, inputs, precision="fp32")
    meta, given = on_meta(module, inputs, 7)
    counted = FlopCounterMode(display=False)
    with counted:
        meta(*given).sum().backward()
    # Attention runs as one kernel here and as products there: five products backward, four there.
    slack = 0.3 if name in ("attention", "encoder") else 0.0
    assert traced.flops(7) == pytest.approx(counted.get_total_flops(), rel=slack or 1e-12)
    assert traced.num_params == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["mlp", "cnn", "two inputs", "resnet18"])
def test_saved_bytes_are_what_the_tracker_of_torch_reports(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    module, inputs = CASES[name]()
    traced = trace_module(module, inputs, precision="fp32")
    with FakeTensorMode():
        made = CASES[name]()[0] if name != "resnet18" else None
        if made is None:
            with torch.device("cpu"):
                from foreshard.profile.networks.resnet import resnet

                made = resnet((2, 2, 2, 2), basic=True)
        samples = 16
        shapes = inputs if isinstance(inputs, tuple) else (inputs,)
        given = tuple(torch.zeros((samples, *t.shape[1:]), dtype=t.dtype, device="cpu") for t in shapes)
        tracker = MemTracker()
        tracker.track_external(made, *given)
        with tracker:
            out = made(*given)
            held = tracker.get_tracker_snapshot("current")
            del out
    act = sum(
        size
        for device, kinds in held.items()
        for kind, size in kinds.items()
        if getattr(kind, "value", str(kind)) == "Activation"
    )
    inputs_bytes = sum(t.numel() * t.element_size() for t in given)
    expected = traced.saved_bytes(samples)
    # The tracker counts inputs apart, and the output, which nothing keeps, as an activation.
    assert expected == pytest.approx(act + inputs_bytes, rel=0.02, abs=16 * 1024)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_any_micro_batch_follow_from_two(name, monkeypatch):
    module, inputs = CASES[name]()
    traced = trace_module(module, inputs, precision="fp32")
    monkeypatch.setattr("foreshard.profile.tracing.trace.SAMPLES", (9, 10))
    again = trace_module(module, inputs, precision="fp32")
    assert traced.flops(9) == pytest.approx(again.flops(9), rel=1e-9)
    assert traced.saved_bytes(9) == pytest.approx(again.saved_bytes(9), rel=1e-9)
    assert [layer.name for layer in traced.layers] == [layer.name for layer in again.layers]


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_published_parameters(name):
    module, _ = network(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_can_be_cut_and_end_in_classes(name):
    module, image = network(name, side=64)
    assert module(image.to("meta").expand(2, -1, -1, -1)).shape == (2, 1000)


def test_a_chain_is_cut_where_one_tensor_leads_on():
    module, image = network("resnet18", side=64)
    traced = trace_module(module, image, precision="fp32")
    residual = [layer for layer in traced.layers if layer.name.endswith(".out")]
    assert len(residual) == 8  # one a block, none inside
    assert all(layer.parameters > 0 for layer in residual)
    widths = [layer.boundary_bytes.each / 4 for layer in residual]
    assert widths[0] == 64 * 16 * 16 and widths[-1] == 512 * 2 * 2


def test_a_mask_made_once_does_not_stop_the_cuts():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            mask = torch.ones_like(x).tril()
            for layer in self.layers:
                x = layer(x) * mask
            return x

    traced = trace_module(Masked(), torch.empty(1, 4), precision="fp32")
    assert sum(layer.parameters > 0 for layer in traced.layers) == 3


def test_a_shared_weight_is_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix = nn.Embedding(30, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.mix(self.words(x)) @ self.words.weight.T

    traced = trace_module(Tied(), torch.zeros(1, 5).long(), precision="fp32")
    assert traced.num_params == 30 * 8 + 72
    assert [elements for _, elements in traced.tied] == [240]


def test_backward_work_is_in_the_layer_of_its_forward():
    module, inputs = CASES["mlp"]()
    traced = trace_module(module, inputs, precision="fp32")
    by_name = {layer.name: sum(op.flops.each for op in layer.backward) for layer in traced.layers}
    assert by_name["0"] == 2 * 12 * 20  # the gradient of the weights; nobody asks for that of the input
    assert by_name["2"] == 2 * 2 * 20 * 3


def test_the_gradient_of_grouped_weights_takes_as_much_as_the_forward():
    """Torch's own counter forgets the groups there."""
    module = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 16, 3, groups=4))
    traced = trace_module(module, torch.empty(1, 4, 8, 8), precision="fp32")
    grouped = traced.layers[1]
    forward = sum(op.flops.each for op in grouped.forward)
    assert forward == 2 * 16 * 36 * 2 * 9
    assert sum(op.flops.each for op in grouped.backward) == 2 * forward


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        out = self.linear(x)
        return out if out.sum() > 0 else -out


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(len(x)):
            x = self.linear(x)
        return x


class Constant(nn.Module):
    def forward(self, x):
        return torch.ones(3)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Branches(), "does not run without values"),
        (Grows(), "different operations"),
        (Constant(), "no tensor"),
    ],
)
def test_what_cannot_be_traced_is_explained(module, words):
    with pytest.raises(SpecError, match=words) as caught:
        trace_module(module, torch.empty(1, 4), precision="fp32", where="net.py:make")
    assert caught.value.key == "model"


def test_precisions_that_are_not_traced_are_named():
    with pytest.raises(SpecError, match="no trace in fp8"):
        trace_module(nn.Linear(4, 4), torch.empty(1, 4), precision="fp8")
