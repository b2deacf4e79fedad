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
_PAPERS = (
    ("korthikanti", "korthikanti"),
    ("sc21", "sc21"),
    ("h100", "megatron_h100"),
    ("2020", "megatron_2020"),
)


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

    def names(self, raw: Mapping[str, str]) -> bool:
        """Whether the recipe is the one of this row."""
        return all(re.search(text, raw.get(column, ""), re.IGNORECASE) for column, text in self.where.items())


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
        text = source.lower()
        family = next((name for word, name in _PAPERS if word in text), family)
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


_MEGATRON_LM = {"korthikanti": "2022", "sc21": "2021", "megatron_2020": "2020", "megatron_h100": "2024"}
_PARENTS = (
    "accelerate|transformers|hugging ?face|trl|axolotl|llama-?factory|unsloth|pytorch|torch|apex|habana"
)


def _framework_names(section: str) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = shipped("framework_names.toml", "foreshard.validation")[section]
    return names


def framework_of(family: str, raw: Mapping[str, str], precision: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework and release a row was run with, before its in_* facts, and what was assumed."""
    text, source = raw["framework"].lower(), raw["source"]
    number = re.search(r"\d\d\.\d\d(?:\.\d+)?", text)
    if "megatron-bridge" in text:
        return _at_release("megatron-bridge", number[0] if number else "")
    if "megatron-deepspeed" in text:
        return load_framework(f"megatron-deepspeed@{'2022' if precision == 'bf16' else '2021'}"), ()
    if family in _MEGATRON_LM or "megatron-lm" in text:
        return load_framework(f"megatron-lm@{_MEGATRON_LM.get(family, '2024')}"), ()
    if family == "mlperf" and not re.search("maxtext|pax", text):
        return _mlperf(raw)
    if "nemo" in text:
        tag = re.search(r"\bv?(\d\d\.\d\d(?:\.\d+)?)\b", source)
        release = number[0] if number else tag[1] if tag else ""
        return _at_release("nemo", release.removesuffix(".1") if release.startswith("24.11") else release)
    for named in _framework_names("known"):
        if any(word in text for word in named["words"]):
            return _stated_release(named["entry"], text)
    return _alike(raw)


def _stated_release(label: str, text: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the entry of this label, at the release the text names where the table has several."""
    name, _, release = label.partition("@")
    said = re.search(rf"{name} ?@?v?(\d+\.\d+)", text)
    if said and name == "torchtitan" and said[1] != release:
        return _at_release(name, said[1])
    return load_framework(label), ()


def _alike(raw: Mapping[str, str]) -> tuple[Framework, tuple[str, ...]]:
    """Return the entry that runs most like a framework the table does not hold.

    PyTorch as such is what the row says of its sharding; nothing at all is Megatron-Core where the model is
    cut and FSDP where it is not.
    """
    text, sharding = raw["framework"].lower(), raw["zero_stage_or_fsdp"].lower()
    shown = repr(raw["framework"][:60]) if text else "not stated"
    for where in (text, sharding if not text or re.search(_PARENTS, text) else ""):
        for named in _framework_names("alike"):
            if any(word in where for word in named["words"]):
                entry = load_framework(named["entry"])
                return entry, (f"framework {shown} read as {entry.label}: {named['why']}",)
    uncut = all(raw[name] in ("", "1", "1.0") for name in ("tp", "pp"))
    if re.search(_PARENTS, text) and uncut:
        entry = load_framework("ddp" if re.search("none|ddp", sharding) else "composer")
        return entry, (f"framework {shown} read as {entry.label}: PyTorch of an uncut model",)
    return load_framework("megatron-core"), (f"framework {shown} read as megatron-core",)


def with_recipe(
    family: Family, framework: Framework, raw: Mapping[str, str]
) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework as the source's own code sets it for this row, and the lines that say so."""
    used = [recipe for recipe in family.recipes if recipe.names(raw)]
    for recipe in used:
        framework = replace(framework, **recipe.sets)
    return framework, tuple(recipe.why for recipe in used)


def _mlperf(raw: Mapping[str, str]) -> tuple[Framework, tuple[str, ...]]:
    """Return NVIDIA's reference code of the round; other vendors run a port of it."""
    number = re.search(r"MLPerf Training v(\d+\.\d+)", raw["source"])
    entry, notes = _at_release("mlperf-nemo", number[1] if number else "")
    if re.search("gaudi|amd|mi3", raw["gpu"].lower()):
        ported = replace(entry, attention="fa2", elementwise="eager")
        return ported, (
            *notes,
            "not NVIDIA: read as a port of the NVIDIA code with flash attention 2, eager norms",
        )
    degrees_blank = not (raw["tp"] or raw["cp"] or raw["in_cuda_graph"])
    batch, devices = raw["global_batch"], raw["gpus"]
    shared = batch.isdecimal() and devices.isdecimal() and int(batch) < int(devices)
    if degrees_blank and shared and "lora" in raw["model"].lower() and _release_key(entry.release) >= (4, 1):
        return replace(entry, cuda_graphs="full"), (
            *notes,
            "CUDA graphs not stated: of whole layers, as in submissions whose ranks share a sample (cp > 1)",
        )
    return entry, notes
