"""The models of the catalog, by name and alias."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from types import MappingProxyType
from typing import Any

from foreshard.catalog.hf.load import model_from_config
from foreshard.catalog.hybrids import hybrid_model
from foreshard.catalog.model_dims import model_from_dims
from foreshard.errors import SpecError
from foreshard.spec.model import Model


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("foreshard.catalog").joinpath("data/models.json").read_text("utf-8")
    return json.loads(text)


def _key(name: str) -> str:
    """Return the name without case, spaces and dashes, so that spellings of one model coincide."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@functools.cache
def _names() -> dict[str, str]:
    """Return the catalog name of every normalised name and alias."""
    table: dict[str, str] = {}
    for name, entry in _data()["models"].items():
        for spelling in (name, *entry["aliases"]):
            table[_key(spelling)] = name
    return table


@functools.cache
def _not_modelled() -> dict[str, str]:
    return {_key(name): why for name, why in _data()["not_modelled"].items()}


def find_model(name: str) -> Model | None:
    """Return the catalog model of this name or alias, or None.

    Raises
    ------
    SpecError
        For a model that is known and not modelled.
    """
    why = _not_modelled().get(_key(name))
    if why:
        raise SpecError(f"{name!r} is not modelled", key="model", value=name, rule=f"It is {why}")
    canonical = _names().get(_key(name))
    return _entry(canonical) if canonical else None


@functools.cache
def _entry(name: str) -> Model:
    entry = _data()["models"][name]
    if "dims" in entry:
        model = model_from_dims(name, **entry["dims"])
    elif "hybrid" in entry:
        model = hybrid_model(name, **entry["hybrid"])
    else:
        model = model_from_config(entry["config"], name=name)
    return replace(
        model,
        source=entry["source"],
        max_seq_len=entry.get("seq_len", model.max_seq_len),
        assumptions=(*model.assumptions, *entry.get("assumptions", ())),
    )


def models() -> Mapping[str, Model]:
    """Return every catalog model by its canonical name."""
    return MappingProxyType({name: _entry(name) for name in _data()["models"]})
