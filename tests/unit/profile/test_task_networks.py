"""Networks that find objects and make speech: multiply-adds by hand, cells of decoders, images of volumes."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foreshard.profile.networks.catalog import near_networks, network, network_name, sample_of
from foreshard.profile.networks.detection.mask_rcnn import mask_rcnn
from foreshard.profile.networks.detection.retinanet import retinanet
from foreshard.profile.networks.segmentation.unet3d import unet3d
from foreshard.profile.networks.speech.tacotron2 import tacotron2
from foreshard.profile.networks.speech.waveglow import WaveGlow, waveglow
from foreshard.profile.tracing.trace import trace_module


def traced(made, precision="fp32"):
    module, example = made
    return trace_module(module, example, precision=precision, autocast=precision == "fp16")


def multiplied(made):
    """Return the multiply-adds of a forward, as torch counts them."""
    (module, example), counted = made, FlopCounterMode(display=False)
    with counted, torch.device("meta"), torch.no_grad():
        module.eval()(*example)
    return counted.get_total_flops() / 2


def forward_of(module, samples=1):
    return sum(op.flops.at(samples) for layer in module.layers for op in layer.forward) / 2


def on_meta(make, *sizes):
    with torch.device("meta"):
        return make(*sizes)


def test_ssd_multiplies_as_its_layers_say():
    """A ResNet-50 with maps 75 and 38 wide, smaller ones, and heads of 85 numbers for a box."""
    stem = 150**2 * 49 * 3 * 64
    first = 75**2 * (64 * 256 + 3 * (9 * 64 * 64 + 64 * 256) + 64 * 64 + 2 * 256 * 64)
    second = 75**2 * 256 * 128 + 38**2 * (256 * 512 + 4 * (9 * 128 * 128 + 128 * 512) + 3 * 512 * 128)
    third = 38**2 * (512 * 256 + 512 * 1024 + 6 * (9 * 256 * 256 + 256 * 1024) + 5 * 1024 * 256)
    wide = ((38, 1024, 4), (19, 512, 6), (10, 512, 6), (5, 256, 6), (3, 256, 4), (1, 256, 4))
    narrow = (256, 256, 128, 128, 128)
    smaller = sum(
        side**2 * inside * between + next_side**2 * 9 * between * outside
        for (side, inside, _), (next_side, outside, _), between in zip(
            wide[:-1], wide[1:], narrow, strict=True
        )
    )
    heads = sum(side**2 * 9 * inside * boxes * 85 for side, inside, boxes in wide)
    assert multiplied(network("ssd300")) == stem + first + second + third + smaller + heads
    assert sum(side**2 * boxes for side, _, boxes in wide) == 8732


def test_waveglow_multiplies_as_its_layers_say():
    positions, halves = 10, (4,) * 4 + (3,) * 4 + (2,) * 4
    of_layer = 1024 * (3 * 512 + 640) + 512 * 1024
    of_flow = 8 * of_layer - 512 * 512
    ends = sum(half * 512 + 512 * 2 * half + (2 * half) ** 2 for half in halves)
    frames = 80 // 256 + 1
    assert (
        multiplied(on_meta(waveglow, 8 * positions))
        == positions * (12 * of_flow + ends) + frames * 80 * 80 * 1024
    )


def test_waveglow_of_half_the_width_has_the_parameters_that_nvidia_states():
    module = on_meta(WaveGlow, 256)
    assert sum(parameter.numel() for parameter in module.parameters()) == 87_879_272


def test_a_frame_of_tacotron_multiplies_as_its_layers_say():
    """Two cells, the attention over all characters, a frame of the spectrum; and the layers around."""
    characters = 12
    cells = 4096 * (768 + 1024) + 4096 * (1536 + 1024)
    attention = 1024 * 128 + characters * (31 * 2 * 32 + 32 * 128 + 128 + 512)
    around = 80 * 256 + 256 * 256 + 1536 * 81 + 5 * (2 * 80 * 512 + 3 * 512 * 512)
    few, many = (forward_of(traced(on_meta(tacotron2, frames, characters))) for frames in (2, 4))
    assert many - few == 2 * (cells + attention + around)


def test_mask_rcnn_takes_regions_of_four_levels_and_trains_no_frozen_layer():
    made = traced(on_meta(mask_rcnn, 128, 160), "fp16")
    operations = [op for layer in made.layers for op in layer.forward]
    assert sum(op.name == "grid_sampler_2d" for op in operations) == 2 * 4
    frozen = 64 * 3 * 49 + 64 * 256 + 64 * 64 + 2 * 256 * 64 + 3 * (9 * 64 * 64 + 64 * 256)
    assert sum(layer.frozen for layer in made.layers) == frozen
    # boxes: 512 regions of 7 x 7 x 256; masks: 128 of 14 x 14, by four convolutions and one to twice the side
    boxes = 512 * (49 * 256 * 1024 + 1024 * 1024 + 1024 * 81 * 5)
    masks = 128 * 196 * (4 * 9 * 256 * 256 + 4 * 256 * 256 + 4 * 256 * 81)
    larger = forward_of(made, 2) - forward_of(made, 1)
    assert larger > boxes + masks
    heads = [op for op in operations if op.kind == "product"]
    assert sum(op.flops.each for op in heads) / 2 == boxes


def test_retinanet_multiplies_as_its_layers_say():
    """A ResNeXt-50 with the stride in its grouped filters, a pyramid of five maps, two heads over each."""
    side, classes = 64, 5
    stages = ((64, 3, 64, 16, 16), (128, 4, 256, 16, 8), (256, 6, 512, 8, 4), (512, 3, 1024, 4, 2))
    backbone = 32**2 * 49 * 3 * 64
    for width, count, inside, before, after in stages:
        out, grouped = 4 * width, 9 * (2 * width) ** 2 // 32
        backbone += before**2 * inside * 2 * width + after**2 * (grouped + 2 * width * out + inside * out)
        backbone += (count - 1) * after**2 * (2 * out * 2 * width + grouped)
    maps = (8, 4, 2, 1, 1)
    pyramid = sum(s**2 * (c * 256 + 9 * 256**2) for s, c in zip(maps, (512, 1024, 2048), strict=False))
    pyramid += sum(s**2 for s in maps[3:]) * 9 * 256**2
    heads = sum(s**2 for s in maps) * 9 * 256 * (8 * 256 + 9 * (classes + 4))
    assert multiplied(on_meta(retinanet, side, classes)) == backbone + pyramid + heads


def test_efficientdet_has_the_parameters_of_its_parts():
    """3.88 M as published: a trunk, the pyramid's weights, and two heads of three convolutions each.

    With a bias for each of the 36 convolutions before norms, as in the first code, it has 3,880,067.
    """
    separable, norm = 9 * 64 + 64 * 64, 2 * 64
    classifier, last = 1280 * 1000 + 1000, 320 * 1280 + 2 * 1280
    trunk = 5_288_548 - classifier - last
    narrowed = sum(64 * inside + norm for inside in (320, 40, 112, 320, 112, 320))
    nodes = 3 * 8 * (separable + norm)
    weights = 3 * sum((2, 2, 2, 2, 3, 3, 3, 2))
    heads = sum(3 * (separable + 5 * norm) + 9 * 64 + 64 * out + out for out in (9 * 90, 9 * 4))
    module, _ = network("efficientdet_d0")
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == trunk + narrowed + nodes + weights + heads == 3_880_067 - 36 * 64


def test_efficientdet_multiplies_as_its_parts_say():
    """2.5 billion as published, without what the classifier of the trunk multiplies."""
    positions = [(512 // stride) ** 2 for stride in (8, 16, 32, 64, 128)]
    of_position = 9 * 64 + 64 * 64
    heads = sum(positions) * (2 * 3 * of_position + 2 * 9 * 64 + 64 * 9 * 94)
    nodes = 3 * of_position * sum(positions[level] for level in (3, 2, 1, 0, 1, 2, 3, 4))
    p3, p4, p5 = positions[:3]
    narrowed = 64 * (320 * p5 + 40 * p3 + 2 * 112 * p4 + 2 * 320 * p5)
    module, example = network("efficientnet_b0", side=512)
    trunk = multiplied((module, (example,))) - p5 * 320 * 1280 - 1280 * 1000
    found = multiplied(network("efficientdet_d0"))
    assert found == trunk + narrowed + nodes + heads == pytest.approx(2.5e9, rel=0.03)


def test_retinanet_on_a_resnet_has_the_parameters_that_torchvision_states():
    module, _ = on_meta(lambda: retinanet(64, 91, groups=1, group_width=64))
    assert sum(parameter.numel() for parameter in module.parameters()) == 34_014_999


def test_the_volumes_of_a_3d_unet_multiply_as_its_layers_say():
    """Two filters of 27 positions at each of six resolutions on the way down, and at five on the way up."""
    side, channels = 64, (32, 64, 128, 256, 320, 320)
    sides = [side >> level for level in range(6)]
    counted = side**3 * 27 * (1 + 32) * 32 + side**3 * 32 * 3
    for fine, coarse, s in zip(channels[:-1], channels[1:], sides, strict=False):
        counted += (s // 2) ** 3 * (27 * (fine + coarse) * coarse + 8 * coarse * fine)
        counted += s**3 * 27 * 3 * fine * fine
    assert multiplied(on_meta(unet3d, side)) == counted
    assert multiplied(on_meta(unet3d, 2 * side)) == 8 * counted


def test_norms_of_a_3d_unet_are_of_each_volume():
    """An instance norm is a batch norm over as many channels as all samples have."""
    made = traced(on_meta(unet3d, 64), "fp16")
    norms = [op for layer in made.layers for op in layer.forward if op.name == "native_batch_norm"]
    assert len(norms) == 2 * (6 + 5)
    assert all(norm.kind == "batch_norm" for norm in norms)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("ssd", "ssd300"),
        ("RetinaNet", "retinanet"),
        ("efficientdet-d0", "efficientdet_d0"),
        ("3D U-Net", "unet3d"),
        ("SSD300", "ssd300"),
        ("mask-rcnn", "mask_rcnn"),
        ("Mask R-CNN", "mask_rcnn"),
        ("maskrcnn_resnet50_fpn", "mask_rcnn"),
        ("Tacotron 2", "tacotron2"),
        ("WaveGlow", "waveglow"),
    ],
)
def test_networks_are_known_by_what_a_user_types(typed, name):
    assert network_name(typed) == name
    assert sample_of(name)
    assert near_networks(f"{name}x") == [name]


class Stepped(nn.Module):
    def __init__(self, kind, bias):
        super().__init__()
        self.cell = kind(6, 8, bias=bias)

    def forward(self, x):
        state = self.cell(x)
        state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_is_two_products_and_one_kernel(kind, gates, bias):
    """As torch runs it on accelerators: aten/src/ATen/native/cuda/RNN.cu."""
    made = trace_module(Stepped(kind, bias), torch.empty(1, 6), precision="fp32")
    forward, backward = ([op.name for layer in made.layers for op in part(layer)] for part in PARTS)
    assert [name for name in forward if name in ("mm", "cell")] == 2 * ["mm", "mm", "cell"]
    assert backward.count("cell_backward") == 2
    # gradients of both weights at each step, of the state at the second; of the input nobody asks
    assert backward.count("mm") == 2 * 2 + 1
    # an LSTM's gates sum both products, so that the sum over samples serves both biases
    assert backward.count("sum") == bias * 2 * (1 if gates == 4 else 2)
    assert forward_of(made, 3) == 2 * 3 * gates * 8 * (6 + 8)


PARTS = (lambda layer: layer.forward, lambda layer: layer.backward)


def test_cells_keep_states_and_gates_but_no_products():
    """An LSTM: gates of 4 x 8 and states of both steps, the first ones as well, and the input, in 32 bit."""
    made = trace_module(Stepped(nn.LSTMCell, True), torch.empty(1, 6), precision="fp32")
    of_step = 4 * 8 + 8
    hidden_between, first_states = 8, 8
    assert made.saved_bytes(1) == 4 * (2 * of_step + hidden_between + first_states + 6)


@pytest.mark.parametrize("last", [False, True])
def test_volumes_may_lie_channels_last(last):
    layers = [nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 16, 3)]
    module = nn.Sequential(*layers)
    if last:
        module = module.to(memory_format=torch.channels_last_3d)
    made = trace_module(module, torch.empty(1, 8, 8, 8, 8), precision="fp16", autocast=True)
    kinds = {op.kind for layer in made.layers for op in (*layer.forward, *layer.backward)}
    assert ({"layout", "batch_norm"} <= kinds) != last
