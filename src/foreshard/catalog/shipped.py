"""The data files that ship with the package, parsed once."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


def shipped_text(name: str, package: str = "foreshard.catalog") -> str:
    """Return the text of a file in the folder ``data`` of a package."""
    return files(package).joinpath("data", name).read_text(encoding="utf-8")


@cache
def shipped(name: str, package: str = "foreshard.catalog") -> Any:
    """Return what a ``.json`` or ``.toml`` file of that folder holds; callers do not change it."""
    text = shipped_text(name, package)
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)
