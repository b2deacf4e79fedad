"""Tensor plans of transformers blocks by model type: attention is cut at heads, MLPs at channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreshard.runtime.tensor.split import TensorPlan

_ATTENTION = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
}
_GATED = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
_FUSED_GATE = {"mlp.gate_up_proj": "column:2", "mlp.down_proj": "row"}
_HEAD_NORMS = {"self_attn.q_norm": "shared", "self_attn.k_norm": "shared"}


def plan_of_block(kind: str, config: Any) -> TensorPlan:
    """Return the plan of a block; refused for model types whose ranks would need each other's heads."""
    if kind not in _PLANS:
        return TensorPlan(refused=f"the norms of a {kind} go over the queries of all heads")
    return _PLANS[kind](config)


def _heads(config: Any) -> dict[str, int]:
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {"attention heads": config.num_attention_heads, "key-value heads": keys}


def _plan(roles: dict[str, str]) -> Callable[[Any], TensorPlan]:
    named = {f"block.{name}": role for name, role in roles.items()}
    return lambda config: TensorPlan(roles=named, units=_heads(config), draws_by_head=True)


def _stablelm(config: Any) -> TensorPlan:
    if getattr(config, "qk_layernorm", False):
        return TensorPlan(refused="every head of a stablelm with qk_layernorm has a norm of its own")
    numbers = tuple(("block.self_attn", name) for name in ("num_heads", "num_key_value_heads"))
    plan = _plan(_ATTENTION | _GATED)(config)
    return TensorPlan(roles=plan.roles, units=plan.units, divided=numbers, draws_by_head=True)


def _olmo(config: Any) -> TensorPlan:
    if getattr(config, "clip_qkv", None) is not None:
        return TensorPlan(refused="an olmo with clip_qkv changes queries, keys and values in place")
    return _plan(_ATTENTION | _GATED)(config)


def _phi3(config: Any) -> TensorPlan:
    heads = _heads(config)
    fused = ",".join(str(heads[name]) for name in ("attention heads", *["key-value heads"] * 2))
    roles = {"self_attn.qkv_proj": f"column:{fused}", "self_attn.o_proj": "row", **_FUSED_GATE}
    numbers = ("num_key_value_heads", "config.num_attention_heads")
    return TensorPlan(
        roles={f"block.{name}": role for name, role in roles.items()},
        units=heads,
        draws_by_head=True,
        divided=tuple(("block.self_attn", name) for name in numbers),
    )


def _gpt2(config: Any) -> TensorPlan:
    roles = {"attn.c_attn": "column:3", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
    plan = _plan(roles)(config)
    numbers = (("block.attn", "split_size"), ("block.attn", "num_heads"))
    return TensorPlan(roles=plan.roles, units=plan.units, divided=numbers, draws_by_head=True)


_LLAMA = _plan(_ATTENTION | _GATED)
_PLANS: dict[str, Callable[[Any], TensorPlan]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _plan(_ATTENTION | _HEAD_NORMS | _GATED),
    "smollm3": _LLAMA,
    "olmo": _olmo,
    "stablelm": _stablelm,
    "glm": _plan(_ATTENTION | _FUSED_GATE),
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _plan(
        {
            "attention.query_key_value": "column",
            "attention.dense": "row",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
        }
    ),
}
CUT = tuple(sorted(_PLANS))
"""Model types whose blocks can be cut."""
