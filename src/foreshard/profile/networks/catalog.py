"""The networks by name; torch is loaded when one is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from foreshard.profile.networks.timm_models import PREFIX, timm_name, timm_network

_FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
_BY_FUNCTION: dict[str, dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]]] = {
    "resnet": {
        "resnet18": (((2, 2, 2, 2),), {"basic": True}),
        "resnet34": (((3, 4, 6, 3),), {"basic": True}),
        "resnet50": (((3, 4, 6, 3),), {}),
        "resnet101": (((3, 4, 23, 3),), {}),
        "resnet152": (((3, 8, 36, 3),), {}),
        "resnext50_32x4d": (((3, 4, 6, 3),), {"groups": 32, "group_width": 4}),
        "resnext101_32x4d": (((3, 4, 23, 3),), {"groups": 32, "group_width": 4}),
        "resnext101_32x8d": (((3, 4, 23, 3),), {"groups": 32, "group_width": 8}),
        "resnext101_64x4d": (((3, 4, 23, 3),), {"groups": 64, "group_width": 4}),
        "wide_resnet50_2": (((3, 4, 6, 3),), {"group_width": 128}),
        "wide_resnet101_2": (((3, 4, 23, 3),), {"group_width": 128}),
    },
    "vgg": {
        "vgg11": (((1, 1, 2, 2, 2),), {}),
        "vgg13": (((2, 2, 2, 2, 2),), {}),
        "vgg16": (((2, 2, 3, 3, 3),), {}),
        "vgg19": (((2, 2, 4, 4, 4),), {}),
        "vgg11_bn": (((1, 1, 2, 2, 2),), {"batch_norm": True}),
        "vgg13_bn": (((2, 2, 2, 2, 2),), {"batch_norm": True}),
        "vgg16_bn": (((2, 2, 3, 3, 3),), {"batch_norm": True}),
        "vgg19_bn": (((2, 2, 4, 4, 4),), {"batch_norm": True}),
    },
    "densenet": {
        "densenet121": (((6, 12, 24, 16),), {}),
        "densenet161": (((6, 12, 36, 24),), {"growth": 48, "stem": 96}),
        "densenet169": (((6, 12, 32, 32),), {}),
        "densenet201": (((6, 12, 48, 32),), {}),
    },
    "alexnet": {"alexnet": ((), {})},
    "googlenet": {"googlenet": ((), {})},
    "inception_v3": {"inception_v3": ((), {})},
    "squeezenet": {
        "squeezenet1_0": ((96, 7, (_FIRES[:3], _FIRES[3:7], _FIRES[7:])), {}),
        "squeezenet1_1": ((64, 3, (_FIRES[:2], _FIRES[2:4], _FIRES[4:])), {}),
    },
    "shufflenet": {
        "shufflenet_v2_x0_5": (((48, 96, 192, 1024),), {}),
        "shufflenet_v2_x1_0": (((116, 232, 464, 1024),), {}),
        "shufflenet_v2_x1_5": (((176, 352, 704, 1024),), {}),
        "shufflenet_v2_x2_0": (((244, 488, 976, 2048),), {}),
    },
    "mobilenet_v2": {"mobilenet_v2": ((), {})},
    "mobilenet_v3": {
        "mobilenet_v3_large": ((), {"large": True}),
        "mobilenet_v3_small": ((), {"large": False}),
    },
    "mnasnet": {"mnasnet1_0": ((), {})},
    "efficientnet": {
        "efficientnet_b0": ((), {}),
        "efficientnet_b1": ((), {"depth": 1.1}),
        "efficientnet_b2": ((), {"width": 1.1, "depth": 1.2}),
        "efficientnet_b3": ((), {"width": 1.2, "depth": 1.4}),
        "efficientnet_b4": ((), {"width": 1.4, "depth": 1.8}),
        "efficientnet_b5": ((), {"width": 1.6, "depth": 2.2}),
        "efficientnet_b6": ((), {"width": 1.8, "depth": 2.6}),
        "efficientnet_b7": ((), {"width": 2.0, "depth": 3.1}),
        "efficientnet_widese_b0": ((), {"wide_squeeze": True}),
        "efficientnet_widese_b4": ((), {"width": 1.4, "depth": 1.8, "wide_squeeze": True}),
    },
    "efficientnet_v2": {f"efficientnet_v2_{size}": ((size,), {}) for size in "sml"},
    "regnet": {
        "regnet_x_400mf": ((22, 24, 24.48, 2.54, 16), {}),
        "regnet_x_800mf": ((16, 56, 35.73, 2.28, 16), {}),
        "regnet_x_1_6gf": ((18, 80, 34.01, 2.25, 24), {}),
        "regnet_x_3_2gf": ((25, 88, 26.31, 2.25, 48), {}),
        "regnet_x_8gf": ((23, 80, 49.56, 2.88, 120), {}),
        "regnet_x_16gf": ((22, 216, 55.59, 2.1, 128), {}),
        "regnet_x_32gf": ((23, 320, 69.86, 2.0, 168), {}),
        "regnet_y_400mf": ((16, 48, 27.89, 2.09, 8), {"squeezed": True}),
        "regnet_y_800mf": ((14, 56, 38.84, 2.4, 16), {"squeezed": True}),
        "regnet_y_1_6gf": ((27, 48, 20.71, 2.65, 24), {"squeezed": True}),
        "regnet_y_3_2gf": ((21, 80, 42.63, 2.66, 24), {"squeezed": True}),
        "regnet_y_8gf": ((17, 192, 76.82, 2.19, 56), {"squeezed": True}),
        "regnet_y_16gf": ((18, 200, 106.23, 2.48, 112), {"squeezed": True}),
        "regnet_y_32gf": ((20, 232, 115.89, 2.53, 232), {"squeezed": True}),
    },
    "convnext": {
        "convnext_tiny": ((96, (3, 3, 9, 3)), {}),
        "convnext_small": ((96, (3, 3, 27, 3)), {}),
        "convnext_base": ((128, (3, 3, 27, 3)), {}),
        "convnext_large": ((192, (3, 3, 27, 3)), {}),
    },
    "gpunet": {f"gpunet_{size}": ((size,), {}) for size in range(3)},
    "swin": {
        "swin_t": ((96, (2, 2, 6, 2), (3, 6, 12, 24)), {}),
        "swin_s": ((96, (2, 2, 18, 2), (3, 6, 12, 24)), {}),
        "swin_b": ((128, (2, 2, 18, 2), (4, 8, 16, 32)), {}),
    },
}
"""Arguments of each network by the function that makes it."""
_XL_BASE, _XL_LARGE = {"words": 192, "dropped": 0.1}, {"words": 384, "dropped": 0.2}
_WITH_INPUTS: dict[str, dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]]] = {
    "bert_squad": {"bert_base_squad": ((768, 12), {}), "bert_large_squad": ((1024, 24), {})},
    "bert_pretraining": {
        "bert_base_phase1": ((768, 12), {"words": 128, "masked": 20}),
        "bert_base_phase2": ((768, 12), {"words": 512, "masked": 80}),
        "bert_large_phase1": ((1024, 24), {"words": 128, "masked": 20}),
        "bert_large_phase2": ((1024, 24), {"words": 512, "masked": 80}),
    },
    "transformer_xl": {
        "transformer_xl_base": ((512, 16), _XL_BASE),
        "transformer_xl_large": ((1024, 18), {**_XL_LARGE, "dropped_scores": 0.2, "narrower": 4}),
    },
    "transformer": {
        "transformer_base": ((512, 8, 2048, 6), {}),
        "transformer_big": ((1024, 16, 4096, 6), {}),
    },
    "gnmt": {"gnmt": ((1024, 4), {})},
    "ncf": {"ncf": ((64, (256, 256, 128, 64)), {})},
    "ssd300": {"ssd300": ((), {})},
    "efficientdet_d0": {"efficientdet_d0": ((), {})},
    "mask_rcnn": {"mask_rcnn": ((), {})},
    "retinanet": {"retinanet": ((), {})},
    "unet3d": {"unet3d": ((), {})},
    "tacotron2": {"tacotron2": ((), {})},
    "waveglow": {"waveglow": ((), {})},
}
"""Arguments of networks whose functions also make inputs: objects, sound, text, a user and an item."""
_SAMPLES = {
    "bert_squad": "384 words",
    "transformer": "two sentences of 32 pieces of words",
    "gnmt": "two sentences of 30 pieces of words",
    "ncf": "user and item",
    "ssd300": "image of 300 x 300",
    "efficientdet_d0": "image of 512 x 512",
    "mask_rcnn": "image of 800 x 1,088",
    "retinanet": "image of 800 x 800",
    "unet3d": "volume of 128 x 128 x 128",
    "tacotron2": "180 characters and 870 frames",
    "waveglow": "8,000 samples of sound",
}
"""Samples of networks that are not given a number of words."""
_WHOLE_IN_16_BIT = ("bert_squad", "bert_pretraining", "transformer_xl", "transformer", "gnmt", "ncf")
"""Functions of networks that are trained in 16 bit as a whole beside values in 32 bit (Apex, level O2)."""
_MODULES = {
    **dict.fromkeys(("bert_squad", "bert_pretraining"), "language.bert"),
    "transformer_xl": "language.transformer_xl",
    "transformer": "language.transformer",
    "gnmt": "language.gnmt",
    "ncf": "recommendation.ncf",
    "ssd300": "detection.ssd",
    "efficientdet_d0": "detection.efficientdet",
    "mask_rcnn": "detection.mask_rcnn",
    "retinanet": "detection.retinanet",
    "unet3d": "segmentation.unet3d",
    "tacotron2": "speech.tacotron2",
    "waveglow": "speech.waveglow",
    **dict.fromkeys(("googlenet", "inception_v3"), "inception"),
    **dict.fromkeys(("mobilenet_v2", "mobilenet_v3", "mnasnet"), "mobilenet"),
    **dict.fromkeys(("efficientnet", "efficientnet_v2"), "mobilenet"),
}
"""The module of a function where it is not of its name."""
CLASSIFIERS = tuple(name for family in _BY_FUNCTION.values() for name in family)
"""Names of networks for images of three channels and 1,000 classes."""
OTHER_NETWORKS = tuple(name for family in _WITH_INPUTS.values() for name in family)
"""Names of networks that read anything else; each returns its loss."""
NETWORKS = (*CLASSIFIERS, *OTHER_NETWORKS)
"""Names of all networks."""
_SIDES = {
    "inception_v3": 299,
    "efficientnet_b1": 240,
    "efficientnet_b2": 288,
    "efficientnet_b3": 300,
    "efficientnet_b4": 380,
    "efficientnet_b5": 456,
    "efficientnet_b6": 528,
    "efficientnet_b7": 600,
    "efficientnet_widese_b4": 380,
    "efficientnet_v2_s": 384,
    "efficientnet_v2_m": 480,
    "efficientnet_v2_l": 480,
    "gpunet_0": 320,
    "gpunet_1": 288,
    "gpunet_2": 384,
}
"""Pixels of the side of an image where they are not 224."""
_NAMES = {
    "mobilenetv2_100": "mobilenet_v2",
    "mobilenetv3_large_100": "mobilenet_v3_large",
    "mobilenetv3_small_100": "mobilenet_v3_small",
    "mobilenet_v3": "mobilenet_v3_large",
    "mnasnet_100": "mnasnet1_0",
    "efficientnetv2_s": "efficientnet_v2_s",
    "efficientnetv2_m": "efficientnet_v2_m",
    "efficientnetv2_l": "efficientnet_v2_l",
    "regnetx_004": "regnet_x_400mf",
    "regnetx_008": "regnet_x_800mf",
    "regnetx_016": "regnet_x_1_6gf",
    "regnetx_032": "regnet_x_3_2gf",
    "regnetx_080": "regnet_x_8gf",
    "regnetx_160": "regnet_x_16gf",
    "regnetx_320": "regnet_x_32gf",
    "regnety_004": "regnet_y_400mf",
    "regnety_008": "regnet_y_800mf",
    "regnety_016": "regnet_y_1_6gf",
    "regnety_032": "regnet_y_3_2gf",
    "regnety_080": "regnet_y_8gf",
    "regnety_160": "regnet_y_16gf",
    "regnety_320": "regnet_y_32gf",
    "resnet50v1.5": "resnet50",
    "ssd": "ssd300",
    "ssd300_resnet50": "ssd300",
    "nvidia_ssd": "ssd300",
    "maskrcnn_resnet50_fpn": "mask_rcnn",
    "retinanet_resnext50": "retinanet",
    "3d_unet": "unet3d",
    "unet_3d": "unet3d",
    "nvidia_tacotron2": "tacotron2",
    "nvidia_waveglow": "waveglow",
    "squeezenet": "squeezenet1_0",
    "swin_tiny_patch4_window7_224": "swin_t",
    "swin_small_patch4_window7_224": "swin_s",
    "swin_base_patch4_window7_224": "swin_b",
    "inceptionv3": "inception_v3",
    "bert_squad": "bert_large_squad",
    "bert_pretraining": "bert_large_phase1",
    "bert_large_pretraining": "bert_large_phase1",
    "bert_base_pretraining": "bert_base_phase1",
    "transformer_xl": "transformer_xl_base",
    "transformer": "transformer_big",
    "transformer_wmt": "transformer_big",
    "gnmt_v2": "gnmt",
    "neumf": "ncf",
}
"""Networks by the names of timm and of papers."""


def network_name(text: str) -> str | None:
    """Return the name of a network as `NETWORKS` spells it, or as ``timm/NAME``; None for what is none.

    Examples
    --------
    >>> network_name("ResNet-50"), network_name("mobilenetv3_large_100"), network_name("llama3-8b")
    ('resnet50', 'mobilenet_v3_large', None)
    >>> network_name("microsoft/resnet-50"), network_name("timm/mobilenetv3_large_100.ra_in1k")
    ('resnet50', 'mobilenet_v3_large')
    >>> network_name("timm:vit_tiny_patch16_224")
    'timm/vit_tiny_patch16_224'
    """
    of_timm = timm_name(text)
    low = (of_timm or text.lower()).removeprefix(PREFIX)
    low = low.partition(".")[0] if of_timm else low  # weights behind the point
    low = re.sub(r"^(microsoft|pytorch|torchvision|google)/", "", low)  # as the Hub has them
    spelled = {re.sub(r"[^a-z0-9.]", "", name): name for name in NETWORKS}
    known = {re.sub(r"[^a-z0-9.]", "", name): meant for name, meant in _NAMES.items()}
    key = re.sub(r"[^a-z0-9.]", "", low)
    return low if low in NETWORKS else (spelled | known).get(key, of_timm)


def is_traced(model: str) -> bool:
    """Return whether what a user names may be traced: a network, or a factory in a file.

    Examples
    --------
    >>> is_traced("net.py:net"), is_traced("ResNet-50"), is_traced("llama3-8b")
    (True, True, False)
    """
    return network_name(model) is not None or model.rpartition(":")[0].endswith(".py")


def near_networks(text: str) -> list[str]:
    """Return networks of the family that a name begins with, or of nearly the same name.

    Examples
    --------
    >>> near_networks("convnext_huge")[0], near_networks("gnmtt"), near_networks("llama3")
    ('convnext_tiny', ['gnmt'], [])
    """
    found = re.match(r"[a-z]{4,}", text.lower())
    family = [name for name in NETWORKS if found and name.startswith(found[0])]
    return (family or get_close_matches(text.lower(), NETWORKS, cutoff=0.8))[:8]


def sample_of(name: str) -> str:
    """Return what one sample of a network is.

    Examples
    --------
    >>> sample_of("resnet50"), sample_of("transformer_xl_base"), sample_of("waveglow")
    ('image of 224 x 224', '192 words', '8,000 samples of sound')
    """
    if name in CLASSIFIERS:
        side = _SIDES.get(name, 224)
        return f"image of {side} x {side}"
    function = _function_of(name)
    words = _WITH_INPUTS[function][name][1].get("words")
    return f"{words} words" if words else _SAMPLES[function]


def is_mixed(name: str) -> bool:
    """Return whether the published runs of a network in 16 bit keep some operations in 32 bit (autocast)."""
    return name.startswith(PREFIX) or _function_of(name) not in _WHOLE_IN_16_BIT


def _function_of(name: str) -> str:
    families = _BY_FUNCTION | _WITH_INPUTS
    return next(function for function, known in families.items() if name in known)


def network(name: str, *, side: int | None = None, device: str = "meta", **changed: Any) -> tuple[Any, Any]:
    """Return a network and its example inputs, of one sample; images have channels first.

    Parameters
    ----------
    name : str
        As `network_name` returns it.
    side : int, optional
        Of a classifier's image, pixels; by default what the network is trained or evaluated with.
    device : str
        Where it lies; on the meta device it has no values, and those of timm lie there.
    **changed
        Arguments of the function that makes it, in place of the network's own: `words` of a text;
        `fused_attention` of networks of timm.

    Examples
    --------
    >>> module, image = network("resnet18")
    >>> sum(parameter.numel() for parameter in module.parameters())
    11689512
    >>> module, inputs = network("bert_base_squad", words=128)
    >>> [tuple(tensor.shape) for tensor in inputs]
    [(1, 128), (1, 128), (1, 128), (1, 2)]
    """
    import torch

    if name.startswith(PREFIX):
        return timm_network(name, side=side, **changed)
    function = _function_of(name)
    positional, named = (_BY_FUNCTION | _WITH_INPUTS)[function][name]
    module = _MODULES.get(function, function)
    make = getattr(import_module(f"foreshard.profile.networks.{module}"), function)
    with torch.device(device):
        made = make(*positional, **{**named, **changed})
        if function in _WITH_INPUTS:
            network_and_inputs: tuple[Any, Any] = made
            return network_and_inputs
        side = side or _SIDES.get(name, 224)
        return made, torch.empty(1, 3, side, side)
