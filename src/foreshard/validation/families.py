"""What each source of published training runs leaves unsaid, and what is read in its place.

A family is the part of a row's id before its last '-'. ``data/families.toml`` says what its blanks mean;
every rule that filled a blank is listed in the assumptions of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from foreshard.catalog.frameworks import frameworks, load_framework
from foreshard.catalog.shipped import shipped
from foreshard.spec.framework import Framework

GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the code of a source sets away from its framework entry, for the rows it names.

    where : patterns by column, all of which a row's cells contain (case does not matter)
    sets : fields of the framework
    why : the file that sets them
    """

    where: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Readings of one source, as ``data/families.toml`` explains them; blank is the framework's default."""

    dtype: str = "bf16"
    dtype_why: str = "the default of its framework"
    recompute: str = "none"
    seq_len: int = 0
    seq_why: str = ""
    zero: int | None = None
    zero_why: str = "the default of its framework"
    nic: str = ""
    nic_why: str = ""
    flops: str = "full"
    gigabyte: float = GIB
    memory: str = ""
    memory_why: str = ""
    recipes: tuple[Recipe, ...] = ()


@cache
def families() -> Mapping[str, Family]:
    """Return the readings of every known source, by family."""
    made = {}
    for name, entry in shipped("families.toml", "foreshard.validation").items():
        recipes = tuple(Recipe(**recipe) for recipe in entry.get("recipes", ()))
        made[name] = Family(**{**entry, "recipes": recipes})
    return made


def family_of(row_id: str, source: str) -> str:
    """Return the family of a training row: its id up to the last '-', megatron_papers by paper.

    Examples
    --------
    >>> family_of("megatron_papers-0032", "Korthikanti et al. 2022 Table 5 (via Calculon)")
    'korthikanti'
    """
    family = row_id.rpartition("-")[0] or row_id
    if family == "megatron_papers":
        papers = _rules()["papers"]
        family = next((name for word, name in papers.items() if word in source.lower()), family)
    return family


def _release_key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _at_release(name: str, release: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework at this release, or at the newest known one before it."""
    known = [entry for entry in frameworks() if entry.name == name]
    exact = [entry for entry in known if entry.release == release]
    if exact:
        return exact[0], ()
    if not release:
        return known[-1], (f"framework release not stated: {known[-1].label}",)
    before = [entry for entry in known if _release_key(entry.release) <= _release_key(release)]
    chosen = before[-1] if before else known[0]
    return chosen, (f"{name} {release} is not in the framework table: read as {chosen.label}",)


def _rules() -> Mapping[str, Any]:
    rules: Mapping[str, Any] = shipped("framework_rules.toml", "foreshard.validation")
    return rules


def _names(where: Mapping[str, str], cells: Mapping[str, str]) -> bool:
    """Return whether the cells contain all patterns."""
    return all(re.search(text, cells.get(column, ""), re.IGNORECASE) for column, text in where.items())


def framework_of(family: str, raw: Mapping[str, str], precision: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework and release a row was run with, before its in_* facts, and what was assumed."""
    cells = {**raw, "family": family, "precision": precision}
    rule = next((rule for rule in _rules()["rules"] if _names(rule["where"], cells)), None)
    if rule is None:
        return _alike(raw)
    if "release" not in rule:
        return load_framework(rule["entry"]), ()
    said = (re.search(text, cells[column], re.IGNORECASE) for column, text in rule["release"])
    return _at_release(rule["entry"], next((found[1] for found in said if found), ""))


def _alike(raw: Mapping[str, str]) -> tuple[Framework, tuple[str, ...]]:
    """Return the entry that runs most like a framework the table does not hold.

    PyTorch as such is what the row says of its sharding; nothing at all is Megatron-Core where the model is
    cut and FSDP where it is not.
    """
    text, sharding = raw["framework"].lower(), raw["zero_stage_or_fsdp"].lower()
    shown = repr(raw["framework"][:60]) if text else "not stated"
    pytorch = re.search(_rules()["pytorch"]["words"], text)
    for where in (text, sharding if not text or pytorch else ""):
        for named in _rules()["alike"]:
            if re.search(named["words"], where):
                entry = load_framework(named["entry"])
                return entry, (f"framework {shown} read as {entry.label}: {named['why']}",)
    if pytorch and all(raw[name] in ("", "1", "1.0") for name in ("tp", "pp")):
        entry = load_framework("ddp" if re.search("none|ddp", sharding) else "composer")
        return entry, (f"framework {shown} read as {entry.label}: {_rules()['pytorch']['why']}",)
    return load_framework("megatron-core"), (f"framework {shown} read as megatron-core",)


def with_recipe(
    family: Family, framework: Framework, raw: Mapping[str, str]
) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework as the source's own code sets it for this row, and the lines that say so."""
    batch, devices = raw["global_batch"], raw["gpus"]
    shared = batch.isdecimal() and devices.isdecimal() and int(batch) < int(devices)
    cells = {**raw, "samples": "fewer than devices" if shared else ""}
    used = [recipe for recipe in family.recipes if _names(recipe.where, cells)]
    for recipe in used:
        framework = replace(framework, **recipe.sets)
    return framework, tuple(recipe.why for recipe in used)
