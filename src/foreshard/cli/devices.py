"""`foreshard devices`: the devices that are known, or one of them in full."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import answering, give
from foreshard.cli.options.sources import configurable
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.spec.device import Device


@click.command("devices")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List every known device, or show the one that NAME means."""
    from foreshard.catalog.devices import devices, resolve_device

    found = [resolve_device(name)] if name else list(devices().values())
    data = {"schema_version": 1, "devices": [device_dict(device) for device in found]}
    give(data, lambda: _detail(found[0]) if name else _list(found))


def device_dict(device: Device) -> dict[str, Any]:
    """Return a device as its JSON object."""
    return {**asdict(_plain(device)), "peak_flops_per_s": dict(device.peak_flops_per_s)}


def _plain(device: Device) -> Device:
    """Return the device with a plain dict of peaks, which can be copied."""
    from dataclasses import replace

    return replace(device, peak_flops_per_s=dict(device.peak_flops_per_s))


def _tera(value: float | None) -> str | None:
    return quantity.digits(value / 1e12) if value else None


def _list(found: list[Device]) -> Screen:
    rows = [
        (
            one.name,
            one.arch,
            one.year,
            f"{one.memory_bytes / 2**30:g}",
            _tera(one.memory_bytes_per_s),
            _tera(one.peak_flops_per_s.get("bf16") or one.peak_flops_per_s.get("fp16")),
            _tera(one.peak_flops_per_s.get("fp8")),
            one.link or None,
            f"{one.tdp_w:,.0f}" if one.tdp_w else None,
            "" if one.verified else "unchecked",
        )
        for one in found
    ]
    columns = ("device", "arch", ">year", ">GiB", ">TB/s", ">16-bit", ">fp8", "link", ">W", "")
    title = f"{len(found)} devices; dense peaks in TFLOP/s. 'foreshard devices NAME' shows one."
    spare = ("link", ">W", ">year", "", ">fp8")
    return Screen(tables=(table(title, columns, rows, spare=spare),))


def _detail(device: Device) -> Screen:
    peaks = [(name, _tera(value)) for name, value in device.peak_flops_per_s.items()]
    facts = [
        ("vendor", device.vendor),
        ("architecture", f"{device.arch}, {device.form}, {device.year}"),
        ("memory", f"{quantity.gib(device.memory_bytes)} GiB at {_tera(device.memory_bytes_per_s)} TB/s"),
        ("usable memory", f"{quantity.gib(device.capacity_bytes)} GiB"),
        ("link", f"{device.link}, {device.link_bytes_per_s / 1e9:g} GB/s one way" if device.link else None),
        ("power", f"{device.tdp_w:g} W" if device.tdp_w else None),
        ("source", device.source + ("" if device.verified else " (unverified)")),
        ("notes", device.notes or None),
    ]
    tables = (table("", ("", ""), facts), table("Dense peaks", ("type", ">TFLOP/s"), peaks))
    return Screen(header=(device.name,), tables=tables)


command = configurable(answering(command))
