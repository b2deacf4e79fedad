"""The devices foreshard knows, and the one each name in a table or on a command line means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from foreshard.catalog.shipped import shipped, shipped_text
from foreshard.errors import SpecError
from foreshard.spec.device import Device

# Words that tables add to a device name without changing which device is meant: makers, systems, marketing.
_NOISE = re.compile(
    "nvidia|amd|intel|google|aws|habana|huawei|dell|smc|1cc|lambdacloud|nv|instinct|tesla|geforce|radeon|"
    "blackwell|hopper|ampere|graphics|edition|gpus?|chip|per|node|accelerator|cloud|hgx|dgx|generation|"
    "gen[45]|ac|cts|dlc"
)
_FORMS = {
    "pcie": "pcie",
    "sxm": "sxm",
    "sxm2": "sxm",
    "sxm3": "sxm3",
    "sxm4": "sxm",
    "sxm5": "sxm",
    "sxm6": "sxm",
}
_FORMS |= {"oam": "oam"}
_MEMORY = re.compile(r"([0-9]{1,4})(?:g|gb|gib)")
_BARE_MEMORY = re.compile(r"(?:12|16|24|32|40|48|64|80|94|96|128|141|144|180|186|192)")
_MEMORY_TYPE = re.compile(r"hbm[0-9]?e?|gddr[0-9]x?")
# Parts in brackets that name a system or a power limit: "(DGX A100)", "(400W)", "(lower TDP)" stays.
_BRACKETS = re.compile(r"\((?:[^()]*\b(?:dgx|hgx|aws|azure|gcp)\b[^()]*|[0-9]+\s*w)\)")
_MAX_CHARS = 200  # of a name; longer text is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """What a name may say about a device: its family, form, memory sizes (GB) and memory type."""

    family: str
    form: str
    sizes_gb: frozenset[int]
    memory_type: str


@cache
def devices() -> Mapping[str, Device]:
    """Return every known device by canonical name."""
    names = [field.name for field in fields(Device)]
    rows = shipped("devices.json")
    return MappingProxyType({row["name"]: Device(**{name: row[name] for name in names}) for row in rows})


@cache
def _labels() -> Mapping[str, _Label]:
    return {
        row["name"]: _Label(
            family=row["family"],
            form=row["form"],
            sizes_gb=frozenset(row["sizes_gb"]),
            memory_type=row["memory_type"],
        )
        for row in shipped("devices.json")
    }


def memory_type(device: Device) -> str:
    """Return the memory of a catalog device in lower case, as hbm2e or gddr6; empty where it is not known."""
    label = _labels().get(device.name)
    return "" if label is None else label.memory_type


@cache
def catalog_version() -> str:
    """Return a short digest of the shipped devices, links and instances; predictions echo it."""
    names = ("devices.json", "interconnects.json", "instances.json", "device_aliases.toml")
    return sha256("".join(map(shipped_text, names)).encode()).hexdigest()[:12]


def _aliases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = shipped("device_aliases.toml")
    return found


def normalise(name: str) -> str:
    """Return a name in lower case with words joined by one hyphen, without trade marks and systems.

    Examples
    --------
    >>> normalise("NVIDIA A100-SXM4-80GB (400W)")
    'nvidia-a100-sxm4-80gb'
    >>> normalise("RTX4090 24 GB")
    'rtx-4090-24gb'
    """
    text = re.sub(r"\((?:r|tm)\)", " ", name.lower())
    text = re.sub(r"(?<=\d) (?=gi?b\b)", "", text)
    text = re.sub(r"\b(rtx|gtx|tpu)(?=v?\d)", r"\1-", text)
    text = re.sub(r"(?<=\d)(?=(?:sxm|pcie|nvl)\d*\b)", "-", text)
    return "-".join(word for word in re.split(r"[\s_,/-]+", _BRACKETS.sub(" ", text)) if word)


def _words(key: str) -> tuple[str, str | None, int | None, str | None]:
    """Split a normalised name into (family words, form, memory GB, memory type)."""
    family: list[str] = []
    form, memory, memory_type = None, None, None
    for word in re.split(r"[-()]+", key):
        if not word or _NOISE.fullmatch(word):
            continue
        sized = _MEMORY.fullmatch(word)
        if word in _FORMS and form is None:
            form = _FORMS[word]
        elif sized and memory is None:
            memory = int(sized[1])
        elif _BARE_MEMORY.fullmatch(word) and family and memory is None:
            memory = int(word)
        elif _MEMORY_TYPE.fullmatch(word):
            memory_type = word
        else:
            family.append(word)
    return "-".join(family), form, memory, memory_type


def _matches(key: str) -> list[str]:
    """Return the devices whose family, form, memory and memory type agree with all that the name says."""
    family, form, memory, memory_type = _words(key)
    return [
        name
        for name, label in _labels().items()
        if family in (label.family, name)
        and form in (None, label.form)
        and (memory is None or memory in label.sizes_gb)
        and memory_type in (None, label.memory_type)
    ]


def _short(key: str) -> str:
    """Return the name rewritten as family-form-memory, the spelling that the alias table uses."""
    family, form, memory, _ = _words(key)
    return "-".join(part for part in (family, form, memory and f"{memory}gb") if part)


@cache
def _find(name: str) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return (canonical name, what it assumes, candidates when there is no one device)."""
    if len(name) > _MAX_CHARS or name in _aliases()["unresolvable"]:
        return None, None, ()
    key = normalise(name)
    exact, assumed = _aliases()["exact"], _aliases()["assumed"]
    for spelling in (key, _short(key)):
        if spelling in exact:
            return exact[spelling], None, ()
    found = _matches(key)
    if len(found) == 1:
        return found[0], None, ()
    if _short(key) in found:
        return _short(key), None, ()
    for spelling in (key, _short(key)):
        if spelling in assumed and (not found or assumed[spelling][0] in found):
            return assumed[spelling][0], f"device '{name}': {assumed[spelling][1]}", ()
    return None, None, tuple(found)


def resolve_device(name: str) -> Device:
    """Return the one device a name means.

    Canonical names are lower case (``h100-sxm``, ``a100-sxm-40gb``); names as tables and drivers write them
    (``NVIDIA A100-SXM4-80GB``, ``Dell H200 NVL``) resolve too. A name that leaves form or memory open
    resolves only where the alias table says to what; `device_assumption` then returns that sentence.

    Raises
    ------
    SpecError
        If no device or several have that name; the fix names candidates.

    Examples
    --------
    >>> resolve_device("NVIDIA H100 80GB HBM3").name
    'h100-sxm'
    """
    if name in devices():
        return devices()[name]
    canonical, _, candidates = _find(name)
    if canonical is None and not candidates and name[-1:] in ("s", "S"):  # "8 H100s"
        canonical = _find(name[:-1])[0]
    if canonical is None:
        raise _unknown(name, candidates)
    return devices()[canonical]


def device_assumption(name: str) -> str | None:
    """Return what resolving this name assumes, or None when the name says all."""
    if name in devices():
        return None
    canonical, said, _ = _find(name)
    return said if canonical or name[-1:] not in ("s", "S") else _find(name[:-1])[1]


def near_devices(name: str) -> list[str]:
    """Return the names nearest in spelling: begun so, of the same line of devices, or a slip of a letter."""
    key = _short(normalise(name[:_MAX_CHARS]))
    line = re.match("[a-z]*", key)
    known = [*devices(), *_aliases()["exact"]]
    begun = [name for name in devices() if name.startswith(key)] if any(map(str.isdecimal, key)) else []
    if begun:
        return sorted(begun, key=lambda name: "-sxm" not in name)[:3]  # what most servers have comes first
    same = [name for name in known if (other := re.match("[a-z]*", name)) and line and other[0] == line[0]]
    near = get_close_matches(key, same, n=3, cutoff=0.6)
    return near or get_close_matches(key, known, n=3, cutoff=0.8)


def why_unresolvable(name: str) -> str | None:
    """Return what a known name is that means no device of the catalog; None for every other name."""
    plain, families = (
        normalise(name[:_MAX_CHARS]).removeprefix("nvidia-"),
        _aliases()["unresolvable_families"],
    )
    known: str | None = _aliases()["unresolvable"].get(name) or families.get(plain)
    return known or families.get(plain.partition("-")[0])


def _unknown(name: str, candidates: tuple[str, ...]) -> SpecError:
    shown = name if len(name) <= _MAX_CHARS else name[:_MAX_CHARS] + "..."
    near = list(candidates) or near_devices(name)
    why = why_unresolvable(name)
    listed = " or ".join(repr(name) for name in near)
    hint = f"{'Write ' + listed + '.' if candidates else 'Did you mean ' + listed + '?'} " if near else ""
    what = f"device name '{shown}' fits several devices" if candidates else f"unknown device '{shown}'"
    rule = f"It is {why}" if why else "A device name means one device of the catalog"
    fix = f"{hint}See 'foreshard devices'"
    if why and not near:
        fix = "See 'foreshard devices', or describe it under [[devices]] of a cluster file"
    return SpecError(what, key="device", value=shown, rule=rule, fix=fix)
