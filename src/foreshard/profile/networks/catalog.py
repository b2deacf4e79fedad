"""The networks by name, as ``data/networks.toml`` has them; torch is loaded when one is made."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.profile.networks.timm_models import PREFIX, timm_name, timm_network

_TABLE = shipped("networks.toml", "foreshard.profile.networks")
_BESIDE = ("side", "sample", "names")
"""Keys of a network that are no arguments of the function that makes it."""
_WHOLE_IN_16_BIT = ("language.", "recommendation.")
"""Modules of networks that are trained in 16 bit as a whole beside values in 32 bit (Apex, level O2)."""
CLASSIFIERS = tuple(name for family in _TABLE["classifiers"].values() for name in family)
"""Names of networks for images of three channels and 1,000 classes."""
OTHER_NETWORKS = tuple(name for family in _TABLE["others"].values() for name in family)
"""Names of networks that read anything else; each returns its loss."""
NETWORKS = (*CLASSIFIERS, *OTHER_NETWORKS)
"""Names of all networks."""
_ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (function, entry)
    for kind in _TABLE.values()
    for function, family in kind.items()
    for name, entry in family.items()
}
"""The function that makes each network, and what the table says of it."""


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
    spelled = {_key(name): name for name in NETWORKS}
    known = {_key(other): name for name, (_, entry) in _ENTRIES.items() for other in entry.get("names", ())}
    return low if low in NETWORKS else (spelled | known).get(_key(low), of_timm)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


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
    _, entry = _ENTRIES[name]
    if name in CLASSIFIERS:
        side = entry.get("side", 224)
        return f"image of {side} x {side}"
    return str(entry.get("sample") or f"{entry['words']} words")


def is_mixed(name: str) -> bool:
    """Return whether the published runs of a network in 16 bit keep some operations in 32 bit (autocast)."""
    return name.startswith(PREFIX) or not _ENTRIES[name][0].startswith(_WHOLE_IN_16_BIT)


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
    (function, entry), classifies = _ENTRIES[name], name in CLASSIFIERS
    module, _, made_by = function.rpartition(".")
    make = getattr(import_module(f"foreshard.profile.networks.{module}"), made_by)
    arguments = {key: value for key, value in entry.items() if key not in _BESIDE}
    with torch.device(device):
        made = make(**arguments | changed)
        side = side or entry.get("side", 224)
        network_and_inputs: tuple[Any, Any] = (made, torch.empty(1, 3, side, side)) if classifies else made
        return network_and_inputs
