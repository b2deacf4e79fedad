"""The table of training frameworks by release, read from `data/frameworks.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import cache
from typing import Any

from foreshard.catalog.shipped import inherited, shipped, shipped_text
from foreshard.errors import SpecError, unknown
from foreshard.spec.codec import invalid
from foreshard.spec.framework import Framework
from foreshard.spec.plan import ATTENTIONS, DISPATCHERS

CHOICES = {
    "attention": (*ATTENTIONS, "sdpa"),
    "softmax": ("fused", "wide"),
    "elementwise": ("eager", "jit", "fused", "compiled"),
    "nccl": ("old", "2.1x", "2.2x"),
    "fsdp": ("none", "fsdp1", "fsdp2", "megatron-fsdp", "zero3"),
    "cuda_graphs": ("none", "partial", "full"),
    "dispatcher": DISPATCHERS,
    "fp8_recipe": ("fused", "current", "tensorwise", "rowwise", "blockwise"),
    "cross_entropy": ("unfused", "native", "te", "eager", "torch", "chunked"),
}

_SEE = "See 'foreshard schema frameworks'"


def parse_frameworks(text: str) -> tuple[Framework, ...]:
    """Return the frameworks that a TOML text describes, in its order."""
    names, file = {field.name for field in fields(Framework)}, "frameworks.toml"
    known: dict[str, dict[str, Any]] = {}
    table = []
    for entry in tomllib.loads(text).get("framework", []):
        label = f"{entry.get('name')}@{entry['release']}" if entry.get("release") else str(entry.get("name"))
        unknown = sorted(set(entry) - names - {"base"})
        if unknown or not entry.get("source"):
            what = f"unknown key {unknown[0]!r}" if unknown else "no source"
            rule = "An entry has the fields of Framework, base, and a source"
            raise SpecError(what, file=file, key=label, rule=rule)
        if entry.get("base", label) not in {*known, label}:
            raise SpecError(
                f"unknown base {entry['base']!r}", file=file, key=label, rule="A base comes before"
            )
        full = inherited(label, known | {label: entry}, "name", "release", "source")
        for key, choices in CHOICES.items():
            if key in full and full[key] not in choices:
                rule = f"One of {', '.join(choices)}"
                raise SpecError(f"{full[key]!r} is not valid", file=file, key=f"{label}.{key}", rule=rule)
        known[label] = full
        table.append(Framework(**full))
    return tuple(table)


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return every framework and release of the catalog, oldest release of a name first."""
    return parse_frameworks(shipped_text("frameworks.toml"))


def alias_of(name: str) -> tuple[str, str]:
    """Return the catalog's name of a framework that another name means, and when it means another one.

    Names that are no alias are returned as they are.

    Examples
    --------
    >>> alias_of("megatron"), alias_of("torchtune")
    (('megatron-core', ''), ('torchtitan', 'FSDP2 too'))
    """
    table, key = shipped("framework_hints.toml"), name.lower().replace("_", "-")
    ours, unless = table["taken"].get(key, (table["alias"].get(key, name), ""))
    return ours, unless


@cache
def load_framework(label: str) -> Framework:
    """Return the framework that `name` or `name@release` stands for; a blank release is the newest.

    Raises
    ------
    SpecError
        For a name or release the catalog does not hold, with a suggestion.

    Examples
    --------
    >>> load_framework("megatron-bridge@26.06").grouped_gemm
    False
    """
    if not isinstance(label, str):
        raise invalid(label, "Must be a name or name@release", key="framework", name="framework")
    name, _, release = label.partition("@")
    name, _ = alias_of(name)
    releases = {entry.release: entry for entry in frameworks() if entry.name == name}
    if not releases:
        names = list(dict.fromkeys(entry.name for entry in frameworks()))
        meant = shipped("framework_hints.toml")["hint"].get(name.lower().replace("_", "-"))
        error = unknown("framework", name, names, key="framework", rule="Known frameworks:", otherwise=_SEE)
        error.fix = f"Did you mean {meant}?" if meant else error.fix
        raise error
    if not release:
        return list(releases.values())[-1]
    if release not in releases:
        known = [entry.label for entry in releases.values() if entry.release]
        rule, use = "Known releases:", f"Use {name}"
        known = known or ["none, give the name alone"]
        raise unknown("release", label, known, key="framework", rule=rule, otherwise=use)
    return releases[release]
