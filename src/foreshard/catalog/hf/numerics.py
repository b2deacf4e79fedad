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
    """Return rope_base, rope_percent, rope_scaling, norm_eps and scaled as far as a configuration says."""
    rope = config.get("rope_parameters")
    stated = {**(rope if isinstance(rope, Mapping) else {}), **config}
    scaling = config.get("rope_scaling") or rope
    found = {
        "rope_base": _number(stated, "rope_theta", "rotary_emb_base"),
        "rope_percent": _number(stated, *_PERCENTS),
        "norm_eps": _number(stated, *_EPSILONS),
        "rope_scaling": _scaling(scaling) if isinstance(scaling, Mapping) else None,
        "scaled": True if any(config.get(key) not in (None, 1, 1.0) for key in _FACTORS) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


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
