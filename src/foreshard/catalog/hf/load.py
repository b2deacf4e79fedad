"""Hugging Face ``config.json`` to `Model`, by model_type; counts equal those of transformers."""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreshard.catalog.hf import decoders, encoders, gpt, moe, open_decoders
from foreshard.catalog.hf.reader import Reader
from foreshard.errors import SpecError, did_you_mean
from foreshard.spec.codec import read_text
from foreshard.spec.model import Model

FAMILIES: dict[str, Callable[[Reader], Model]] = {
    "bert": encoders.bert,
    "bloom": gpt.bloom,
    "deepseek_v2": moe.deepseek,
    "deepseek_v3": moe.deepseek,
    "falcon": gpt.falcon,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma2,
    "gemma3_text": decoders.gemma3,
    "glm": open_decoders.glm,
    "gpt2": gpt.gpt2,
    "gpt_neo": gpt.gpt_neo,
    "gpt_neox": gpt.gpt_neox,
    "gpt_oss": moe.gpt_oss,
    "kimi_k2": moe.deepseek,
    "llama": decoders.llama,
    "llama4_text": moe.llama4,
    "mistral": decoders.mistral,
    "mixtral": moe.mixtral,
    "mpt": gpt.mpt,
    "nemotron": decoders.nemotron,
    "olmo": open_decoders.olmo,
    "olmo2": open_decoders.olmo2,
    "olmo3": open_decoders.olmo3,
    "opt": gpt.opt,
    "phi3": decoders.phi3,
    "qwen2": decoders.qwen2,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3": decoders.qwen3,
    "qwen3_moe": moe.qwen3_moe,
    "smollm3": open_decoders.smollm3,
    "stablelm": open_decoders.stablelm,
    "t5": encoders.t5,
    "vit": encoders.vit,
}
NOT_MODELLED = {
    "gemma3": "a vision tower beside the text model; give its text_config with model_type gemma3_text",
    "jamba": "a hybrid of Mamba and attention",
    "llama4": "a vision tower beside the text model; give its text_config with model_type llama4_text",
    "mamba": "a state-space model",
    "mamba2": "a state-space model",
    "nemotron_h": "a hybrid of Mamba and attention",
    "qwen3_next": "a hybrid of linear and full attention",
}
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
    return FAMILIES[model_type](reader)


def _unknown(reader: Reader, model_type: str) -> SpecError:
    """Return the error of a model_type that has no family here, with what comes nearest."""
    if model_type in NOT_MODELLED:
        rule = f"It is {NOT_MODELLED[model_type]}"
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
