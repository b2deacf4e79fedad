"""The networks by name; torch is loaded when one is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_BY_FAMILY: dict[str, dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]]] = {
    "resnet": {
        "resnet18": (((2, 2, 2, 2),), {"basic": True}),
        "resnet34": (((3, 4, 6, 3),), {"basic": True}),
        "resnet50": (((3, 4, 6, 3),), {}),
        "resnet101": (((3, 4, 23, 3),), {}),
        "resnet152": (((3, 8, 36, 3),), {}),
        "resnext50_32x4d": (((3, 4, 6, 3),), {"groups": 32, "group_width": 4}),
        "resnext101_32x4d": (((3, 4, 23, 3),), {"groups": 32, "group_width": 4}),
        "resnext101_32x8d": (((3, 4, 23, 3),), {"groups": 32, "group_width": 8}),
        "wide_resnet50_2": (((3, 4, 6, 3),), {"group_width": 128}),
        "wide_resnet101_2": (((3, 4, 23, 3),), {"group_width": 128}),
    },
    "vgg": {
        "vgg11": (((1, 1, 2, 2, 2),), {}),
        "vgg13": (((2, 2, 2, 2, 2),), {}),
        "vgg16": (((2, 2, 3, 3, 3),), {}),
        "vgg19": (((2, 2, 4, 4, 4),), {}),
        "vgg11_bn": (((1, 1, 2, 2, 2),), {"batch_norm": True}),
        "vgg16_bn": (((2, 2, 3, 3, 3),), {"batch_norm": True}),
        "vgg19_bn": (((2, 2, 4, 4, 4),), {"batch_norm": True}),
    },
    "mobilenet": {"mobilenet_v2": ((), {})},
    "densenet": {
        "densenet121": (((6, 12, 24, 16),), {}),
        "densenet161": (((6, 12, 36, 24),), {"growth": 48, "stem": 96}),
        "densenet169": (((6, 12, 32, 32),), {}),
        "densenet201": (((6, 12, 48, 32),), {}),
    },
}
NETWORKS = tuple(name for family in _BY_FAMILY.values() for name in family)
"""Names of networks for images of three channels and 1,000 classes."""


def network(name: str, *, side: int = 224) -> tuple[Any, Any]:
    """Return a network on the meta device and one example image, with channels first.

    Parameters
    ----------
    name : str
        One of `NETWORKS`.
    side : int
        Of the image, pixels.

    Examples
    --------
    >>> module, image = network("resnet18")
    >>> sum(parameter.numel() for parameter in module.parameters())
    11689512
    """
    import torch

    family = next(family for family, known in _BY_FAMILY.items() if name in known)
    positional, named = _BY_FAMILY[family][name]
    make = getattr(import_module(f"foreshard.profile.networks.{family}"), _FUNCTION.get(family, family))
    with torch.device("meta"):
        return make(*positional, **named), torch.empty(1, 3, side, side)


_FUNCTION = {"mobilenet": "mobilenet_v2"}
