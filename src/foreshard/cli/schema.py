"""`foreshard schema [NAME]`: the file formats, key by key."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import click

from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.verbs import commands
from foreshard.errors import unknown
from foreshard.report.screen import Screen, table

_PLACES = {
    "cluster": "foreshard.catalog",
    "prices": "foreshard.catalog",
    "target": "foreshard.catalog",
    "plan": "foreshard.report",
    "lab": "foreshard.report",
    "prediction": "foreshard.report",
    "scenario": "foreshard.report",
    "measured": "foreshard.report",
    "topology": "foreshard.comm",
    "schedule": "foreshard.comm",
    "jobs": "foreshard.comm",
}
NAMES = (*_PLACES, "config", "frameworks")
_SOURCES = "Flags win over FORESHARD_* environment variables, these over --config, this over defaults."


@verb_command("schema")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Describe a file format (plan, cluster, schedule, topology, config ...), or list the frameworks."""
    if name is None:
        formats = [(known, read(known)["title"]) for known in NAMES]
        data = {"schema_version": 1, "formats": dict(formats)}
        give(
            data,
            lambda: Screen(
                tables=(table("'foreshard schema NAME' shows one.", ("name", "format"), formats),)
            ),
        )
        return
    if name not in NAMES:
        raise unknown("format", name, NAMES, key="name", rule="Names are", otherwise="See 'foreshard schema'")
    found = read(name)
    give({"schema_version": 1, "name": name} | found, lambda: _screen(found))


@cache
def read(name: str) -> dict[str, Any]:
    """Return a format: title, doc, and `keys` by section."""
    if name == "config":
        return _config()
    if name == "frameworks":
        return _frameworks()
    text = files(_PLACES[name]).joinpath("schema", f"{name}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    sections = {key: value for key, value in data.items() if isinstance(value, dict)}
    return {"title": data["title"], "doc": data["doc"].strip(), "keys": sections}


def _config() -> dict[str, Any]:
    """Return the options of each verb as the keys of a config file."""
    sections: dict[str, dict[str, Any]] = {}
    for name, command_of in commands():
        options = [
            option for option in command_of.params if isinstance(option, click.Option) and not option.is_eager
        ]
        sections[name.replace(" ", ".")] = {
            max(option.opts, key=len).lstrip("-"): {
                "type": option.type.name.lower(),
                "doc": option.help or "",
            }
            for option in options
        }
    doc = f"Options by the names of their flags, for all verbs or in a table of one verb. {_SOURCES}"
    return {"title": "Config file (TOML, --config)", "doc": doc, "keys": sections}


def _frameworks() -> dict[str, Any]:
    """Return what --framework takes: every name with its releases, oldest first."""
    from foreshard.catalog.frameworks import frameworks
    from foreshard.catalog.offers import offers_of

    keys = {}
    for framework in frameworks():
        releases = [other.release for other in frameworks() if other.name == framework.name and other.release]
        newest = next(other for other in reversed(frameworks()) if other.name == framework.name)
        zero = "/".join(map(str, offers_of(newest).zero))
        keys[framework.name] = {
            "type": "framework",
            "default": f"zero {newest.default_zero}",
            "doc": f"{', '.join(releases) or 'one entry'}; zero {zero}{_FSDP.get(newest.fsdp, '')}",
        }
    doc = "--framework NAME[@RELEASE]; without a release the newest. Sources: catalog/data/frameworks.toml."
    return {"title": "Frameworks and releases, oldest first", "doc": doc, "keys": {"framework": keys}}


_FSDP = {
    "fsdp1": "; PyTorch FSDP1",
    "fsdp2": "; PyTorch FSDP2 or the like",
    "megatron-fsdp": "; Megatron-FSDP",
    "zero3": "; DeepSpeed ZeRO-3",
}


def _row(key: str, about: dict[str, Any]) -> tuple[str, ...]:
    default = "required" if about.get("required") else about.get("default", "")
    return key, about["type"], about.get("unit", ""), default, " ".join(about["doc"].split())


def _screen(found: dict[str, Any]) -> Screen:
    tables = []
    for section, keys in found["keys"].items():
        rows = [_row(key, about) for key, about in keys.items()]
        tables.append(table(section, ("key", "type", "unit", "default", "meaning"), rows))
    return Screen(header=(found["title"], *found["doc"].splitlines()), tables=tuple(tables))
