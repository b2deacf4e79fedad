"""Which attention kernels and frameworks run on a device, and what runs instead of one that does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from foreshard.catalog.memory_profiles import memory_profile
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import ATTENTIONS

_OWN = "nvidia"
"""The vendor whose kernels are named one by one; others bring fused kernels of their own."""
_MEGATRON = ("megatron-core", "megatron-lm", "nemo", "megatron-bridge", "mlperf-nemo")
"""Frameworks of one family: they train by Megatron-Core, or by what it grew from."""
_INSTEAD = {"ampere": "fa2", "ada": "fa2", "hopper": "cudnn", "blackwell": "cudnn", "rubin": "cudnn"}
"""What runs instead of a flash kernel that an architecture has not."""


_CUDNN_FIRST = ("hopper", "blackwell", "rubin")
"""Where torch prefers cuDNN: 9.0 and 10.x, which consumer Blackwell is not."""


def attention_constants(framework: Framework, device: Device) -> str:
    """Return whose constants (`catalog.kernels`) price the attention of a framework on a device.

    Of flash kernels: unfused products have a formula of their own, which takes none of them, and the
    memory-efficient kernel runs as the first flash kernel. torch's cuDNN is newer than published runs'.
    """
    kernel = attention_on(framework, device)
    if kernel == "cudnn" and framework.sdpa:
        return "sdpa"
    return {"unfused": "fa2", "efficient": "fa1"}.get(kernel, kernel)


def _named(framework: Framework, device: Device) -> str:
    """Return the kernel that a framework asks for on a device; torch's own order decides where it says sdpa.

    Source
    ------
    torch 2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: check_prefer_cudnn_attention.
    """
    if framework.attention != "sdpa":
        return framework.attention
    first = device.vendor == _OWN and device.arch in _CUDNN_FIRST and not device.name.startswith("rtx")
    return "cudnn" if first else "fa2"


def _vendor_of(device: Device) -> Mapping[str, Any] | None:
    """Return the entry of the devices whose vendor brings its own software."""
    for entry in shipped("stacks.toml")["devices"]:
        if entry["vendor"] == device.vendor and entry.get("arch", device.arch) == device.arch:
            found: Mapping[str, Any] = entry
            return found
    return None


def kernels_on(device: Device) -> tuple[str, ...]:
    """Return the attention kernels that run on a device and may be chosen.

    Examples
    --------
    >>> from foreshard.catalog.devices import resolve_device
    >>> kernels_on(resolve_device("v100-sxm-16gb")), kernels_on(resolve_device("tpu-v5p"))
    (('unfused', 'efficient'), ('unfused',))
    """
    vendor = _vendor_of(device)
    if vendor is not None:
        return tuple(vendor["kernels"])
    table = shipped("stacks.toml")["kernels"]
    return tuple(name for name in ATTENTIONS if {"any", device.arch} & set(table[name]["on"]))


@cache
def attention_on(framework: Framework, device: Device) -> str:
    """Return the attention kernel that a framework runs on a device.

    Where its own does not exist: another flash kernel from Ampere on; before, PyTorch's memory-efficient one
    under frameworks that call its ``scaled_dot_product_attention``, else separate products. Devices of other
    vendors run a fused kernel of their own at the rates of the framework's.
    """
    wanted = _named(framework, device)
    known = kernels_on(device)
    if wanted in known or (device.vendor != _OWN and wanted != "efficient"):
        return wanted
    return _INSTEAD.get(device.arch) or (
        "efficient" if framework.sdpa and "efficient" in known else "unfused"
    )


def of_model(framework: Framework, model: Model) -> Framework:
    """Return a framework with the attention that it has for a model.

    Model code of transformers asks torch for a fused kernel (``sdpa``) where the model's class allows it, and
    keeps the scores of the others. That kernel knows causal attention, no window: that is a mask.

    Source
    ------
    transformers 5.24 masking_utils.py _ignore_causal_mask_sdpa, integrations/sdpa_attention.py.
    """
    if framework.attention != "sdpa" or not memory_profile(framework.memory).eager_norm:
        return framework
    if any(block.attention_code for block, _ in model.block_kinds()):
        return replace(framework, attention="unfused")
    return replace(framework, masked=True)


def with_attention(framework: Framework, kernel: str) -> Framework:
    """Return a framework with a kernel that was chosen for it; flash attention's own knows windows.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> with_attention(load_framework("hf"), "fa2").masked
    False
    """
    masked = framework.masked and kernel not in ("fa1", "fa2", "fa3")
    return replace(framework, attention=kernel, masked=masked)


def running(framework: Framework, devices: Iterable[Device]) -> Framework:
    """Return a framework as it runs on devices: with the attention kernel that they have.

    Where they run several, each device has its own (`attention_on`).
    """
    found = {attention_on(framework, device) for device in devices}
    return replace(framework, attention=found.pop()) if len(found) == 1 else framework


def check_attention(
    kernel: str, devices: Iterable[Device], *, key: str = "--attention", file: str | None = None
) -> None:
    """Raise for a kernel that was chosen and does not run on every device.

    Raises
    ------
    SpecError
    """
    for device in devices:
        known = kernels_on(device)
        if kernel not in known:
            vendor = _vendor_of(device)
            own = f"; without the option it is {vendor['attention']}" if vendor else ""
            where = f"compute on {device.name} ({device.vendor} {device.arch})"
            raise SpecError(
                f"{kernel} has no code to {where}",
                file=file,
                key=key,
                value=kernel,
                rule=f"Kernels there are {', '.join(known)}{own}",
                fix=f"Use one of {', '.join(known)}, or leave it out",
            )


def stack_warnings(framework: Framework, devices: Iterable[Device]) -> tuple[str, ...]:
    """Return a sentence for each device that a framework does not run on, with the stack that does."""
    found = []
    for device in dict.fromkeys(devices):
        vendor = _vendor_of(device)
        if vendor is not None and framework.name not in vendor["runs"]:
            found.append(
                f"{framework.label} does not run on {device.name} ({vendor['name']}): what runs there is "
                f"{vendor['stack']}; the numbers are those of {framework.label} on such a device"
            )
    return tuple(found)


def not_measured(framework: Framework, devices: Iterable[Device]) -> str | None:
    """Return what of a framework on devices was in no run that constants were fitted on; None where all was.

    Releases, and what is built on Megatron-Core, are one family.

    Examples
    --------
    >>> from foreshard.catalog.devices import resolve_device
    >>> from foreshard.catalog.frameworks import load_framework
    >>> not_measured(load_framework("torchtitan"), [resolve_device("h100-sxm")])
    'framework not measured'
    >>> not_measured(load_framework("megatron-core"), [resolve_device("t4")])
    'architecture not measured'
    """
    table: dict[str, list[str]] = shipped("measured_stacks.toml")
    family = _MEGATRON if framework.name in _MEGATRON else (framework.name,)
    measured = {arch for name in family for arch in table.get(name, ())}
    used = {device.arch for device in devices}
    if not measured:
        return "framework not measured"
    if used <= measured:
        return None
    elsewhere = {arch for archs in table.values() for arch in archs}
    return "framework not measured there" if used <= elsewhere else "architecture not measured"


def attention_assumptions(framework: Framework, devices: Iterable[Device]) -> tuple[str, ...]:
    """Return what attention runs as where it is not the kernel that the framework names."""
    found = []
    for device in dict.fromkeys(devices):
        kernel, vendor = attention_on(framework, device), _vendor_of(device)
        if kernel == "efficient":
            found.append(
                f"attention on {device.name}: PyTorch's memory-efficient kernel, at the rates of fa1 "
                "(no measurement shipped)"
            )
        elif kernel != (wanted := _named(framework, device)):
            found.append(f"attention on {device.name}: {kernel}, as it has no {wanted}")
        elif vendor is not None and kernel != "unfused":
            found.append(f"attention on {device.name}: {vendor['attention']}, at the rates of {kernel}")
    return tuple(found)
