"""The data files that ship with the package, parsed once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


def shipped_text(name: str, package: str = "foreshard.catalog") -> str:
    """Return the text of a file in the folder ``data`` of a package."""
    return files(package).joinpath("data", name).read_text(encoding="utf-8")


def inherited(name: str, table: Mapping[str, Mapping[str, Any]], *own: str) -> dict[str, Any]:
    """Return an entry of a table over that of its ``base``; keys in `own` are not inherited."""
    entry = dict(table[name])
    base = entry.pop("base", None)
    above = inherited(base, table, *own) if base else {}
    return {key: value for key, value in above.items() if key not in own} | entry


@cache
def shipped(name: str, package: str = "foreshard.catalog") -> Any:
    """Return what a ``.json`` or ``.toml`` file of that folder holds; callers do not change it."""
    text = shipped_text(name, package)
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)
