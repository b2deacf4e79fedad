"""Traces of torch modules: FLOPs, parameters and saved bytes against torch's own counters, and the chain."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from random_modules import counted_flops, random_module, tracked_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from foreshard.cost.recurrences import RecurrentKernels, recurrence_kernels
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import CLASSIFIERS, network, network_name
from foreshard.profile.tracing.trace import trace_module

# torchvision's and timm's published parameter counts
# channels of the 3D U-Net at two resolutions, the finer one first
FINER = ((32, 64), (64, 128), (128, 256), (256, 320), (320, 320))
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
    "alexnet": 61_100_840,
    "googlenet": 6_624_904,
    "inception_v3": 23_834_568,
    "squeezenet1_0": 1_248_424,
    "squeezenet1_1": 1_235_496,
    "shufflenet_v2_x0_5": 1_366_792,
    "shufflenet_v2_x1_0": 2_278_604,
    "shufflenet_v2_x1_5": 3_503_624,
    "shufflenet_v2_x2_0": 7_393_996,
    "mobilenet_v3_large": 5_483_032,
    "mobilenet_v3_small": 2_542_856,
    "mnasnet1_0": 4_383_312,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    # counted of the modules that DeepLearningExamples makes (models/efficientnet.py, 729963dd)
    "efficientnet_widese_b0": 8_423_848,
    "efficientnet_widese_b4": 34_927_246,
    "efficientnet_v2_s": 21_458_488,
    "efficientnet_v2_m": 54_139_356,
    "efficientnet_v2_l": 118_515_272,
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "convnext_base": 88_591_464,
    "convnext_large": 197_767_336,
    # published rounded: 11.9 M, 12.7 M and 25.8 M
    "gpunet_0": 11_885_432,
    "gpunet_1": 12_704_192,
    "gpunet_2": 25_798_704,
    "regnet_x_400mf": 5_495_976,
    "regnet_x_800mf": 7_259_656,
    "regnet_x_1_6gf": 9_190_136,
    "regnet_x_3_2gf": 15_296_552,
    "regnet_x_8gf": 39_572_648,
    "regnet_x_16gf": 54_278_536,
    "regnet_x_32gf": 107_811_560,
    "regnet_y_400mf": 4_344_144,
    "regnet_y_800mf": 6_432_512,
    "regnet_y_1_6gf": 11_202_430,
    "regnet_y_3_2gf": 19_436_338,
    "regnet_y_8gf": 39_381_472,
    "regnet_y_16gf": 83_590_140,
    "regnet_y_32gf": 145_046_770,
    "swin_t": 28_288_354,
    "swin_s": 49_606_258,
    "swin_b": 87_768_224,
    "resnext101_64x4d": 83_455_272,
    "vgg13_bn": 133_053_736,
    # of torchvision's, 44,401,393 with 91 classes, less ten classes of boxes and masks
    "mask_rcnn": 44_401_393 - 10 * (5 * 1025 + 257),
    # of torchvision's, 34,014,999 on a ResNet-50 with 91 classes: 173 classes more, grouped filters
    "retinanet": 34_014_999
    + 173 * 9 * (9 * 256 + 1)
    + sum(
        -9 * width**2 + 9 * (2 * width) ** 2 // 32 + width * (inside + 4 * width)
        for width, count, before in ((64, 3, 64), (128, 4, 256), (256, 6, 512), (512, 3, 1024))
        for inside in (before, *(count - 1) * (4 * width,))
    ),
    # two filters of 27 positions at each of six resolutions and again at five, with a norm each, and what is
    # twice as fine by filters of 8 positions
    "unet3d": 27 * (32 + 32 * 32)
    + sum(27 * (a * b + b * b) + 27 * (2 * a * a + a * a) + 8 * a * b + a for a, b in FINER)
    + 2 * (2 * 32 + 2 * sum(a + b for a, b in FINER))
    + 3 * (32 + 1),
    "tacotron2": 28_193_153,  # NVIDIA's
    # a ResNet-50 without its last stage and its head, smaller maps, and 3 x 3 filters for every box
    "ssd300": 25_557_032
    - 14_964_736
    - 2_049_000
    + (1024 + 512) * 256
    + 512 * 128
    + 2 * 256 * 128
    + 9 * (256 * (512 + 512) + 128 * (256 + 256 + 256))
    + 2 * (2 * 256 + 3 * 128 + 2 * 512 + 3 * 256)
    + 85 * (9 * (4 * 1024 + 6 * (512 + 512 + 256) + 4 * (256 + 256)) + 30),
    # convolutions of a step of flow, each output with a bias and the magnitude of its weight
    "waveglow": 12 * 8 * 1024 * (3 * 512 + 640 + 2 * 2)
    + 12 * 7 * 1024 * (512 + 2)
    + 12 * 512 * (512 + 2)
    + sum(half * 512 + 512 * 2 + 2 * half * 513 + 4 * half**2 for half in (4,) * 4 + (3,) * 4 + (2,) * 4)
    + 80 * (80 * 1024 + 1),
}
# torchvision's published multiply-adds of one image, in billions, at the side that the network has by default
MULTIPLY_ADDS = {
    "alexnet": 0.714,
    "googlenet": 1.498,
    "inception_v3": 5.713,
    "squeezenet1_1": 0.349,
    "shufflenet_v2_x1_0": 0.145,
    "mobilenet_v3_large": 0.217,
    "efficientnet_b0": 0.386,
    "regnet_y_400mf": 0.402,
    "convnext_tiny": 4.456,
    "swin_t": 4.491,
}


class OneLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


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


def scored(out):
    return nn.functional.cross_entropy(out, torch.zeros(out.shape[0], dtype=torch.long, device=out.device))


@pytest.mark.parametrize("name", ["head", "mlp", "cnn", "two inputs"])
def test_the_peak_of_a_backward_is_what_the_tracker_of_torch_reports(name):
    """Behind a head the gradients of the loss and of its softmax are beside the softmax that was kept."""
    from torch.distributed._tools.mem_tracker import MemTracker

    is_head = name == "head"
    module, inputs = (nn.Linear(64, 5000, bias=False), torch.zeros(1, 64)) if is_head else CASES[name]()
    traced = trace_module(module, inputs, precision="fp32", loss=scored if is_head else None)
    meta, given = on_meta(module, inputs, 32)
    tracker = MemTracker()
    tracker.track_external(meta, *given)
    with torch.device("meta"), tracker:
        score = scored(meta(*given)) if is_head else meta(*given).sum()
        score.backward()
    (held,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {str(getattr(kind, "value", kind)): size for kind, size in held.items()}
    expected = sizes["Total"] - sizes["Parameter"] - sizes.get("Buffer", 0) - sizes.get("Gradient", 0)
    later, beside = 0.0, 0.0
    for layer in reversed(traced.layers):
        beside = max(beside, layer.beside_bytes.at(32) - later)
        later += layer.saved_bytes.at(32)
    assert later + beside == pytest.approx(expected, rel=0.005)


def test_a_forward_alone_is_what_torch_runs_in_evaluation():
    """No backward, no dropout, no statistics of the batch; the peak is what torch's tracker reports."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def net():
        part = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        return nn.Sequential(nn.Conv2d(3, 8, 3), part, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 9))

    traced = trace_module(net(), torch.empty(1, 3, 32, 32), precision="fp32", training=False)
    (layer,) = traced.layers
    meta, given = net().to("meta").eval(), torch.empty(16, 3, 32, 32, device="meta")
    counted, tracker = FlopCounterMode(display=False), MemTracker()
    tracker.track_external(meta, given)
    with torch.no_grad(), torch.device("meta"), counted, tracker:
        meta(given)
    (held,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {str(getattr(kind, "value", kind)): size for kind, size in held.items()}
    beside = sizes["Total"] - sizes["Parameter"] - sizes["Buffer"] - given.numel() * 4
    assert (layer.backward, layer.parameters, layer.saved_bytes.at(16)) == ((), 0, 0.0)
    assert layer.frozen == traced.num_params == sum(parameter.numel() for parameter in net().parameters())
    assert traced.flops(16) == counted.get_total_flops()
    assert layer.beside_bytes.at(16) == pytest.approx(beside, rel=0.02)
    (norm,) = [op for op in layer.forward if op.name == "native_batch_norm"]
    assert norm.bytes.each == 2 * 8 * 30 * 30 * 4, "the image read and written, once"
    assert not [op for op in layer.forward if "dropout" in op.name]
    halves = trace_module(net(), torch.empty(1, 3, 32, 32), precision="fp16", training=False)
    assert (halves.weight_bytes, halves.casts_weights) == (2, False)


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


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_networks_have_the_published_multiply_adds(name):
    module, image = network(name)
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        module.eval()(image)
    assert counted.get_total_flops() / 2e9 == pytest.approx(MULTIPLY_ADDS[name], abs=0.003, rel=0.002)


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t", "shufflenet_v2_x0_5"])
def test_newer_networks_are_traced_whole(name):
    """Three times the forward, less the gradient of the image (torch counts groups forward only)."""
    module, image = network(name, side=96)
    traced = trace_module(module, image, precision="fp32")
    meta, given = on_meta(module, image, 3)
    stem = next(part for part in meta.modules() if isinstance(part, nn.Conv2d))
    flops = []
    for part in (meta, stem):
        counted = FlopCounterMode(display=False)
        with counted, torch.no_grad():
            part(*given)
        flops.append(counted.get_total_flops())
    assert traced.flops(3) == 3 * flops[0] - flops[1]
    assert sum(layer.parameters > 0 for layer in traced.layers) >= 10  # cut into its blocks


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("ResNet-50", "resnet50"),
        ("EfficientNet-B0", "efficientnet_b0"),
        ("mobilenetv3_large_100", "mobilenet_v3_large"),
        ("regnety_032", "regnet_y_3_2gf"),
        ("swin_tiny_patch4_window7_224", "swin_t"),
        ("InceptionV3", "inception_v3"),
        ("ConvNeXt-Base", "convnext_base"),
        ("GPUNet-2", "gpunet_2"),
        ("llama3-8b", None),
        ("resnet", None),
    ],
)
def test_networks_are_known_by_names_of_other_places(typed, name):
    assert network_name(typed) == name


def test_every_network_has_a_published_count():
    assert set(CLASSIFIERS) - PARAMETERS.keys() <= {
        "resnext101_32x4d",
        "wide_resnet101_2",
        "vgg13",
        "vgg11_bn",
        "vgg19_bn",
    }


OF_EACH_KIND = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "vgg11",
    "vgg16_bn",
    "densenet121",
)


@pytest.mark.parametrize(
    "name", [*OF_EACH_KIND, "mobilenet_v2", "mobilenet_v3_small", "mnasnet1_0", *MULTIPLY_ADDS]
)
def test_networks_can_be_cut_and_end_in_classes(name):
    module, image = network(name, side=96)
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


class Branches(OneLinear):
    def forward(self, x):
        out = self.linear(x)
        return out if out.sum() > 0 else -out


class Grows(OneLinear):
    def forward(self, x):
        for _ in range(len(x)):
            x = self.linear(x)
        return x


class Turns(Grows):
    """As many operations for any number of samples, but not the same."""

    def forward(self, x):
        x = self.linear(x)
        return x.relu() if len(x) % 2 else x.tanh()


class Remembers(Grows):
    def forward(self, x):
        x = self.linear(x)
        x = x + self.last if hasattr(self, "last") else x
        self.last = x.detach().mean(0)
        return x


class Constant(nn.Module):
    def forward(self, x):
        return torch.ones(3)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Branches(), "does not run without values"),
        (Grows(), "different operations: sum and addmm in the forward after 'linear'"),
        (Turns(), "different operations: tanh and relu in the forward after 'linear'"),
        (Remembers(), "different operations: mean and add in the forward after 'linear'"),
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


def calls(module, shape, **asked):
    traced = trace_module(module, torch.empty(1, *shape), **asked)
    return traced, [o for layer in traced.layers for o in (*layer.forward, *layer.backward)]


def test_mixed_precision_casts_as_cuda_does():
    """By hand: products read and write 16 bit, the norm 32 bit, and so does what adds to its output."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
    traced, found = calls(module, (8,), precision="fp16", autocast=True)
    _, narrow = calls(module, (8,), precision="fp16")
    each = {o.name: o.bytes.each for o in found if "norm" in o.name and "backward" not in o.name}
    products = [o for o in found if o.kind == "product"]
    assert [o.flops for o in products] == [o.flops for o in narrow if o.kind == "product"]
    assert [o.bytes.at(4) for o in products[:2]] == [2 * (4 * 8 + 8 * 8 + 4 * 8)] * 2
    # input and output in 32 bit, and mean and reciprocal deviation of each sample
    assert each == {"native_layer_norm": 4 * (8 + 8 + 2)}
    assert not traced.casts_weights


def test_mixed_precision_casts_a_weight_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.mix(self.mix(x))

    traced, found = calls(Twice(), (64,), precision="bf16", autocast=True)
    # there in the forward, and back for the sum of both gradients
    casts = [o.bytes.fixed for o in found if o.name == "_to_copy"]
    assert [size for size in casts if size >= 64 * 64] == [6 * 64 * 64] * 2
    assert traced.saved_bytes(0) == 2 * 64 * 64  # its copy, until the backward is over


@pytest.mark.parametrize(
    ("channels", "groups", "kind"),
    [
        (128, 1, "convolution"),
        (128, 32, "convolution"),
        (160, 10, "grouped"),
        (2048, 32, "grouped"),
        (160, 160, "depthwise"),
    ],
)
def test_groups_choose_the_kernel(channels, groups, kind):
    module = nn.Sequential(nn.Conv2d(channels, channels, 3, groups=groups))
    traced, found = calls(module, (channels, 8, 8), precision="fp16")
    # forward and the gradient of the weights
    assert [o.kind for o in found if o.flops.each] == [kind] * 2
    assert traced.flops(1) == pytest.approx(2 * 2 * 36 * channels * channels / groups * 9)


@pytest.mark.parametrize("seed", range(10))
def test_random_modules_are_counted_as_torch_counts_them(seed):
    module, inputs, names = random_module(seed)
    trained = sum(parameter.numel() for parameter in module.parameters())
    traced = trace_module(module, inputs, precision="fp32")
    (meta, (given,)) = on_meta(module, inputs, 12)
    assert traced.num_params == trained
    assert traced.flops(12) == pytest.approx(counted_flops(meta, given), rel=1e-12), names
    # The tracker takes none of the first two, and sees every step of the others apart.
    if {"frozen", "mapped", "lstm", "gru"}.isdisjoint(names):
        held, own = tracked_bytes(meta, given), given.numel() * given.element_size()
        # an input that is kept is no activation to the tracker
        assert any(traced.saved_bytes(12) == pytest.approx(size, rel=0.02) for size in (held, held + own)), (
            names
        )


class Regions(nn.Module):
    """Products in 16 bit, a region in it that is not, and a head outside."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.a(x)
            with torch.autocast("cuda", enabled=False):
                x = self.b(x.float())
        return self.head(x)


def test_a_modules_own_autocast_says_what_is_cast():
    traced, found = calls(Regions(), (8,), precision="bf16")
    forward = [o for layer in traced.layers for o in layer.forward if o.kind == "product"]
    sizes = [element * (4 * 8 + 8 * 8 + 4 * 8) for element in (2, 4, 4)]
    assert [o.bytes.at(4) for o in forward] == sizes
    assert [o.wide for o in forward] == [False, True, True]
    assert sum(o.wide for o in found if o.kind == "product") == 2 + 4  # twice as many backward
    assert not traced.casts_weights


def test_autocast_of_another_precision_is_refused_with_the_one_to_ask_for():
    for precision in ("fp32", "fp16"):
        with pytest.raises(SpecError, match="computes in bf16") as caught:
            trace_module(Regions(), torch.empty(1, 8), precision=precision)
        assert caught.value.key == "--dtype" and "bf16" in caught.value.fix


def test_attention_inside_of_torchs_own_layers_is_one_kernel_and_cast():
    module = nn.MultiheadAttention(32, 4, batch_first=True)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = module

        def forward(self, x):
            return self.mix(x, x, x, need_weights=False)[0]

    traced = trace_module(Mixed(), torch.empty(1, 6, 32), precision="bf16", autocast=True)
    found = [o for layer in traced.layers for o in layer.forward]
    (fused,) = [o for o in found if o.kind == "attention"]
    assert fused.bytes.each == 2 * 4 * 6 * 32  # queries, keys, values and output in 16 bit
    assert not any(o.wide for o in found if o.kind == "product")


class Asks(nn.Module):
    """Asks for values: of its own positions, which are known, or of what it was given."""

    def __init__(self, *, given):
        super().__init__()
        self.linear, self.given = nn.Linear(4, 4), given

    def forward(self, x):
        places = torch.arange(x.shape[-1])
        places[1:] += 0
        asked = x.mean() if self.given else (places.diff() - 1).sum()
        return self.linear(x) if asked.item() == 0 else x


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_are_a_product_of_all_inputs_and_the_steps(kind, gates, both):
    steps, wide, hidden = 6, 8, 16
    layer = kind(wide, hidden, num_layers=2, bidirectional=both, batch_first=True)

    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear((1 + both) * hidden, 2)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    module = Picked()
    traced = trace_module(module, torch.empty(1, steps, wide), precision="fp32")
    forward = [operation for part in traced.layers for operation in part.forward]
    recurrences = [operation for operation in forward if operation.kind == "recurrence"]
    products = [operation for operation in forward if operation.name.startswith("recurrent")]
    assert len(recurrences) == 2 * (1 + both)
    assert len(products) == 2 * len(recurrences)
    library = RecurrentKernels()
    assert {recurrence_kernels(operation, 3, library) for operation in recurrences} == {2 * steps}
    samples, inner = 3.0, (wide, (1 + both) * hidden)
    expected = [2 * samples * steps * gates * hidden * (width + hidden) for width in inner]
    assert sum(operation.flops.at(samples) for operation in products) == (1 + both) * sum(expected)


def test_values_that_follow_from_nothing_given_are_known():
    traced = trace_module(Asks(given=False), torch.empty(1, 4), precision="fp32")
    assert traced.flops(1) == 2 * 2 * 16
    with pytest.raises(SpecError, match=r"test_tracing\.py:\d+: return self\.linear") as caught:
        trace_module(Asks(given=True), torch.empty(1, 4), precision="fp32")
    assert "branches" in caught.value.fix


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: torch.isfinite(x).all(),
        lambda x: not (torch.isnan(x) | torch.isinf(x)).any(),
        lambda x: (x == x).all(),
        lambda x: not (x.abs() == float("inf")).any(),
        lambda x: (torch.isnan(x) * 1.0).shape[0] >= 0 and torch.isfinite(x).all(),
    ],
)
def test_values_are_taken_for_finite_and_the_prediction_says_so(asks):
    class Careful(OneLinear):
        def forward(self, x):
            x = self.linear(x)
            if not asks(x):
                raise ValueError("not finite")
            return x

    traced = trace_module(Careful(), torch.empty(1, 4), precision="fp32")
    assert any("finite" in said for said in traced.assumptions)
    plain = trace_module(nn.Linear(4, 4), torch.empty(1, 4), precision="fp32")
    assert traced.flops(3) == plain.flops(3) and not any("finite" in said for said in plain.assumptions)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: (x > 0).all(),
        lambda x: (x == x.abs()).all(),
        lambda x: x.clone().relu_().isnan().any() + x[0, 0],
    ],
)
def test_other_questions_after_values_are_refused(asks):
    class Curious(OneLinear):
        def forward(self, x):
            x = self.linear(x)
            return x if asks(x) else -x

    with pytest.raises(SpecError, match="without values"):
        trace_module(Curious(), torch.empty(1, 4), precision="fp32")


def test_what_is_overwritten_by_something_given_is_not_known():
    class Overwritten(OneLinear):
        def forward(self, x):
            made = torch.zeros(4)
            view = made[:2]
            view += x.sum()
            return self.linear(x) * made.max().item()

    with pytest.raises(SpecError, match="does not run without values"):
        trace_module(Overwritten(), torch.empty(1, 4), precision="fp32")


def test_samples_that_are_compared_with_each_other_count_as_pairs():
    """A contrastive loss; and a sequence in the place of samples, whose attention makes no such tensor."""

    class Contrasts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x) @ self.b(x).T

    module = Contrasts()
    traced = trace_module(module, torch.empty(1, 8), precision="fp32")
    meta, (given,) = on_meta(module, torch.empty(1, 8), 50)
    assert traced.flops(50) == pytest.approx(counted_flops(meta, given), rel=1e-12)
    assert any(o.bytes.square for layer in traced.layers for o in layer.forward)
    layers = nn.TransformerEncoderLayer(32, 4, 64)
    traced = trace_module(layers, torch.empty(1, 2, 32), precision="fp32")
    meta, (given,) = on_meta(layers, torch.empty(1, 2, 32), 50)
    assert traced.flops(50) == pytest.approx(counted_flops(meta, given), rel=1e-12)


def test_outputs_may_be_nested_and_gradients_sparse():
    class Detects(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.heads = (
                nn.Embedding(30, 8, sparse=True),
                nn.ModuleList(nn.Linear(8, n) for n in (2, 4)),
            )

        def forward(self, x):
            seen = self.words(x)
            return {"boxes": [head(seen) for head in self.heads], "names": "two"}

    traced = trace_module(Detects(), torch.zeros(1, 5).long(), precision="fp32")
    assert traced.flops(1) == 3 * 2 * 5 * 8 * 6
    assert any("sparse" in said for said in traced.assumptions)


def test_norms_over_all_replicas_are_said_to_be_priced_without_their_sums():
    image, said = torch.empty(1, 3, 16, 16), []
    for norm in (nn.BatchNorm2d, nn.SyncBatchNorm):
        module = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 8, 3), norm(8))
        said.append(trace_module(module, image, precision="fp32").assumptions)
    assert any("2 norms over all replicas" in line for line in said[1])
    assert not any("replicas" in line for line in said[0])


def test_a_recomputed_block_keeps_its_input_only():
    class Recomputed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.part = (
                nn.Linear(8, 8),
                nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)),
            )
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)

    for reentrant in (False, True):
        traced = trace_module(Recomputed(reentrant), torch.empty(1, 8), precision="fp32")
        assert traced.saved_bytes(1) == 2 * 4 * 8  # of the first layer, and of the block


def test_a_recomputed_block_is_cast_as_its_forward_was():
    """Products of the block: one forward, one again, two gradients, all in 16 bit."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            part = nn.Sequential(self.second, nn.Softmax(-1))
            return checkpoint(part, self.first(x), use_reentrant=False)

    _, found = calls(Recomputed(), (8,), precision="bf16", autocast=True)
    products = [o for o in found if o.kind == "product"]
    # of the first layer one forward and one gradient, as nobody asks for that of the input
    assert len(products) == 2 + 4 and not any(o.wide for o in products)


def test_attention_of_a_recomputed_block_is_one_kernel_each_time():
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(32, 32), Attention()

        def forward(self, x):
            return checkpoint(self.part, self.first(x), use_reentrant=False)

    _, found = calls(Recomputed(), (6, 32), precision="bf16")
    names = [o.name for o in found if o.kind == "attention"]
    assert sorted(names) == ["attention", "attention", "attention_backward"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), "sizes"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), "before torch.jit.script"),
        (lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU())), "before torch.jit.script"),
    ],
)
def test_modules_that_hide_what_they_are_get_a_way_out(make, fix):
    with pytest.raises(SpecError) as caught:
        trace_module(make(), torch.empty(1, 4), precision="fp32")
    assert fix in caught.value.fix


def test_experts_products_are_counted():
    """Grouped products, which torch's counter leaves out: three of every expert's rows."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.zeros(4, 16, 8, dtype=torch.bfloat16))
            self.register_buffer("ends", torch.tensor([4, 8, 12, 16], dtype=torch.int32))

        def forward(self, x):
            return torch._grouped_mm(x.flatten(0, 1), self.mix, offs=self.ends).relu()

    traced = trace_module(Experts(), torch.empty(1, 16, 16), precision="bf16")
    assert traced.flops(3) == 2 * 2 * 3 * 16 * 16 * 8  # forward and the gradient of the weights


def test_packed_sequences_are_left_to_torch():
    """Four layers of two directions have as many weights as their arguments, misread, ask for."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(4, 4, 4, batch_first=True, bidirectional=True)

        def forward(self, x):
            lengths = torch.full((x.shape[0],), x.shape[1], device="cpu")
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.layer(packed)[0].data

    traced = trace_module(Packed(), torch.empty(1, 8, 4), precision="fp32")
    forward = [operation for layer in traced.layers for operation in layer.forward]
    assert not any(operation.name.startswith("recurrent") for operation in forward)
    rows, gates = 3 * 8, 3 * 4
    expected = sum(2 * 2 * rows * gates * (wide + 4) for wide in (4, 8, 8, 8))
    assert sum(operation.flops.at(3) for operation in forward) == expected


@pytest.mark.parametrize("frozen", ["", "weight_hh", "weight bias"])
def test_frozen_recurrent_weights_get_no_gradient_unless_others_do(frozen):
    """`_cudnn_rnn_backward` of torch asks cuDNN for gradients of all weights or of none."""
    steps, wide, hidden, gates = 6, 8, 16, 3

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = nn.Linear(wide, wide), nn.GRU(wide, hidden, batch_first=True)
            for name, parameter in self.layer.named_parameters():
                parameter.requires_grad_(not name.startswith(tuple(frozen.split())))

        def forward(self, x):
            return self.layer(self.inner(x))[0]

    traced = trace_module(Chain(), torch.empty(1, steps, wide), precision="fp32")
    products = [o for layer in traced.layers for o in layer.backward if o.name.startswith("recurrent")]
    each = 2 * 3 * gates * hidden
    of_inputs = each * ((steps - 1) * hidden + steps * wide)
    of_weights = each * steps * (hidden + wide)
    expected = of_inputs + (0 if frozen == "weight bias" else of_weights)
    assert sum(operation.flops.at(3) for operation in products) == expected


class Spectrum(nn.Module):
    """A complex filter, which stays complex in whatever precision the rest is."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.empty(17, dtype=torch.complex64))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        seen = torch.fft.rfft(x.float()) * self.filter
        return self.head(torch.fft.irfft(seen, n=32).to(x.dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_module_is_traced_in_the_precision_asked_for_whatever_its_own_is(precision):
    """A half module was traced in fp32 with parameters of 16 bit; a complex filter became real."""

    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    kept = trace_module(make(), torch.empty(1, 3, 8, 8), precision=precision)
    half = trace_module(make().half(), torch.empty(1, 3, 8, 8, dtype=torch.half), precision=precision)
    assert half.saved_bytes(2) == kept.saved_bytes(2) and half.layers == kept.layers
    spectrum = trace_module(Spectrum(), torch.empty(1, 32), precision=precision)
    assert sum(layer.parameters for layer in spectrum.layers) == 17 + 32 * 4 + 4


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_traced_as_it_is_written():
    """Dynamo compiled the tracer along with the module, which took a minute."""

    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    compiled = trace_module(torch.compile(make(), backend="eager"), torch.empty(1, 8))
    written = trace_module(make(), torch.empty(1, 8))
    assert [(layer.forward, layer.backward) for layer in compiled.layers] == [
        (layer.forward, layer.backward) for layer in written.layers
    ]


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: Fourier(), "--dtype fp32"),
        (lambda: Alignment(), "loss"),
    ],
)
def test_what_torch_cannot_run_without_values_has_a_way_out_of_its_own(make, fix):
    with pytest.raises(SpecError) as caught:
        trace_module(make(), torch.empty(1, 8))
    assert fix in caught.value.fix and "branches on values" not in caught.value.fix


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.fft.rfft(self.layer(x)).abs()


class Alignment(Fourier):
    def forward(self, x):
        scores = self.layer(x).unsqueeze(0).log_softmax(-1)
        lengths = torch.full((len(x),), 1)
        return nn.functional.ctc_loss(scores, lengths[:, None], lengths, lengths)
