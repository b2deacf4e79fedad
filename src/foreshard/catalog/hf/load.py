"""Hugging Face ``config.json`` to `Model`, by model_type; counts equal those of transformers."""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foreshard.catalog.hf.decoders import decoder_of
from foreshard.catalog.hf.encoders import bart, bert, modernbert, t5, vit
from foreshard.catalog.hf.hybrids import mamba2, nemotron_h
from foreshard.catalog.hf.numerics import numerics_of
from foreshard.catalog.hf.reader import Reader
from foreshard.catalog.shipped import inherited, shipped
from foreshard.errors import SpecError, did_you_mean
from foreshard.spec.codec import read_text
from foreshard.spec.model import Model

_TABLE = shipped("architectures.toml")
_DECODERS: dict[str, Callable[[Reader], Model]] = {
    name: partial(decoder_of, entry=inherited(name, _TABLE["decoders"], "abstract"))
    for name, own in _TABLE["decoders"].items()
    if "abstract" not in own
}
_ROBERTA = partial(bert, spare_positions=2)
_OTHERS: dict[str, Callable[[Reader], Model]] = {
    "bart": bart,
    "bert": bert,
    "camembert": _ROBERTA,
    "distilbert": partial(bert, token_types=0, second_bias=False),
    "mamba2": mamba2,
    "modernbert": modernbert,
    "nemotron_h": nemotron_h,
    "roberta": _ROBERTA,
    "t5": t5,
    "vit": vit,
    "xlm-roberta": _ROBERTA,
}
FAMILIES = dict(sorted((_DECODERS | _OTHERS).items()))
"""The reader of a configuration, by model_type."""
MAX_CONFIG_BYTES = 4 * 2**20  # published files have some kilobytes; more is another file
_HINT = "Fetch the file again, or see 'foreshard models' for those that need none"


def model_from_config(config: Mapping[str, Any], *, name: str, file: str | None = None) -> Model:
    """Return the model of a Hugging Face configuration.

    Raises
    ------
    SpecError
        For an unknown model_type and for missing or impossible values.
    """
    reader = Reader(_mapping(config, name, file), name, file)
    model_type = reader.text("model_type")
    if model_type not in FAMILIES:
        raise _unknown(reader, model_type)
    if reader.config.get("quantization_config") is not None:
        reader.assumptions.append("quantization_config is not read: weights are in the precision of the run")
    return replace(
        FAMILIES[model_type](reader), **(_usual_base(model_type, file) | numerics_of(reader.config))
    )


def _usual_base(model_type: str, file: str | None) -> dict[str, Any]:
    """Return the rotary base that transformers takes for a file that states none.

    The catalog's own entries, which have no file, are excerpts: what they leave out is not known.
    """
    if file is None or model_type not in _DECODERS:
        return {}
    return {"rope_base": inherited(model_type, _TABLE["decoders"], "abstract")["rope_base"]}


def _unknown(reader: Reader, model_type: str) -> SpecError:
    """Return the error of a model_type that has no family here, with what comes nearest."""
    if model_type in _TABLE["not_modelled"]:
        rule = f"It is {_TABLE['not_modelled'][model_type]}"
        return reader.error("model_type", model_type, f"{model_type} is not modelled", rule)
    shown = model_type[:60]
    fix = did_you_mean(shown, FAMILIES)
    for key, part in reader.config.items():
        kind = part.get("model_type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in FAMILIES:
            fix = f"Its {key} is a {kind}: give that object as a config.json of its own"
    return reader.error(
        "model_type", shown, f"unknown model_type {shown!r}", f"Known: {', '.join(FAMILIES)}", fix
    )


def _mapping(config: Any, name: str, file: str | None) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    found = "null" if config is None else f"a {type(config).__name__}"
    what = f"{found} where an object was expected"
    raise SpecError(what, file=file or name, rule="A config.json is one JSON object")


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` at `path`."""
    path, rule = Path(path), "A config.json is one JSON object"
    if os.path.isdir(path):
        raise SpecError("is a directory", file=str(path), rule=rule, fix="Name the config.json in it")
    try:
        text = read_text(path, max_bytes=MAX_CONFIG_BYTES)
    except SpecError as error:
        error.rule = f"A model is a catalog name, a config.json or module.py:factory. {error.rule}"
        raise
    if not text.strip():
        raise SpecError("is empty", file=str(path), rule=rule, fix=_HINT)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"is not JSON ({error})", file=str(path), rule=rule, fix=_HINT) from None
    return dict(_mapping(config, path.name, str(path)))
