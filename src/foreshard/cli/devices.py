"""`foreshard devices`: the devices that are known, or one of them in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import click

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.report.screen import Screen, listing, table
from foreshard.spec.device import Device


@verb_command("devices")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List every known device, or show the one that NAME means."""
    from foreshard.catalog.devices import devices, resolve_device

    found = [resolve_device(name)] if name else list(devices().values())
    data = {"schema_version": 1, "devices": [asdict(device) for device in found]}
    give(data, lambda: _detail(found[0]) if name else _list(found))


def _tera(value: float | None) -> str | None:
    return quantity.digits(value / 1e12) if value else None


_COLUMNS: dict[str, Callable[[Device], object]] = {
    "device": lambda device: device.name,
    "arch": lambda device: device.arch,
    ">year": lambda device: device.year,
    ">GiB": lambda device: f"{device.memory_bytes / 2**30:g}",
    ">TB/s": lambda device: _tera(device.memory_bytes_per_s),
    ">16-bit": lambda device: _tera(
        device.peak_flops_per_s.get("bf16") or device.peak_flops_per_s.get("fp16")
    ),
    ">fp8": lambda device: _tera(device.peak_flops_per_s.get("fp8")),
    "link": lambda device: device.link or None,
    ">W": lambda device: f"{device.tdp_w:,.0f}" if device.tdp_w else None,
    "": lambda device: "" if device.verified else "unchecked",
}


def _list(found: list[Device]) -> Screen:
    title = f"{len(found)} devices; dense peaks in TFLOP/s. 'foreshard devices NAME' shows one."
    return Screen(tables=(listing(title, found, _COLUMNS, spare=("link", ">W", ">year", "", ">fp8")),))


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
