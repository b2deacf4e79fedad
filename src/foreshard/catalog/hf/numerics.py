"""What a configuration says beyond sizes: rotary positions, the epsilon of norms, fixed factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EPSILONS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
)
_PERCENTS = ("partial_rotary_factor", "rotary_pct")
_MSCALES = ("mscale", "mscale_all_dim")
_FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
)


def numerics_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_base, rope_scaling, norm_eps and scaled as far as a configuration says."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    found = {
        "rope_base": _number(_with_rope(config), "rope_theta", "rotary_emb_base"),
        "norm_eps": _number(config, *_EPSILONS),
        "rope_scaling": _scaling(scaling) if isinstance(scaling, Mapping) else None,
        "scaled": True if any(config.get(key) not in (None, 1, 1.0) for key in _FACTORS) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def enlarges(scaling: tuple[Any, ...] | None) -> bool:
    """Return whether a scaling of rotary positions multiplies sines and cosines: YaRN, unless told not to.

    Source
    ------
    Megatron-LM core_v0.18.2 yarn_rotary_pos_embedding.py _yarn_get_concentration_factor.
    """
    if scaling is None or scaling[0] != "yarn":
        return False
    _, factor, here, everywhere = scaling
    return bool(factor > 1.0 and (not here or not everywhere or here != everywhere))


def rotary_of(config: Mapping[str, Any], usual: float, head_dim: int) -> float:
    """Return the share of a head's channels that turn: `usual` of the architecture, else what is stated."""
    stated, channels = _number(_with_rope(config), *_PERCENTS), _number(config, "rotary_dim")
    if stated is None and channels is not None:
        stated = channels / head_dim
    return usual if stated is None or not usual else min(max(stated, 0.0), 1.0)


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters")
    return {**(rope if isinstance(rope, Mapping) else {}), **config}


def _number(config: Mapping[str, Any], *keys: str) -> float | None:
    values = [config.get(key) for key in keys]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return numbers[0] if numbers else None


def _scaling(scaling: Mapping[str, Any]) -> tuple[float | str, ...] | None:
    """Return kind and factor of a scaling, None of plain rotary positions."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    factor = _number(scaling, "factor") or 1.0
    if kind != "yarn":
        return str(kind), factor
    return "yarn", factor, *(_number(scaling, key) or 0.0 for key in _MSCALES)
