"""Tensor plans of blocks of transformers: attention is cut at heads, MLPs at channels.

Plans follow from the structure of a block where every part of it is known: projections of queries, keys and
values of whole heads, norms of single heads, an MLP of plain products. Blocks with fused products, whose
order the names do not tell, have plans by model type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from foreshard.runtime.tensor.split import TensorPlan

_OUT = ("o_proj", "out_proj", "dense")
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_MLPS: tuple[tuple[str, ...], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
)
"""Linear modules of an MLP whose channels do not mix before the last of them."""
_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes under which attention may keep its number of heads."""


class _NoPlan(Exception):
    """The block cannot be cut, or a part of it is not known."""


def plan_of_block(block: nn.Module, config: Any) -> TensorPlan:
    """Return the plan of a block; refused for blocks whose ranks would need each other's heads."""
    try:
        if config.model_type in _PLANS:
            return _PLANS[config.model_type](config)
        return _plan_by_parts(block, config)
    except _NoPlan as error:
        return TensorPlan(refused=str(error))


def _plan_by_parts(block: nn.Module, config: Any) -> TensorPlan:
    if not getattr(config, "num_attention_heads", None):
        raise _NoPlan(f"a {config.model_type} has no heads")
    heads = _heads(config)
    roles: dict[str, str] = {}
    divided: list[tuple[str, str]] = []
    if any(value.dim() > 1 for value in block._parameters.values() if value is not None):
        raise _NoPlan(f"a {type(block).__name__} has weights of its own")
    for name, part in block.named_children():
        found = dict(part.named_modules())
        held = {
            key: child for key, child in found.items() if any(True for _ in child.parameters(recurse=False))
        }
        if {"q_proj", "k_proj", "v_proj"} <= held.keys():
            roles |= _attention(name, held, heads, config)
            numbers = [key for key in _COUNTS if isinstance(getattr(part, key, None), int)]
            divided += [(f"block.{name}", key) for key in numbers]
        elif match := [names for names in _MLPS if set(names) == held.keys()]:
            _check_linear(name, held)
            roles |= {f"{name}.{each}": "column" for each in match[0][:-1]}
            roles[f"{name}.{match[0][-1]}"] = "row"
        elif match := [names for names in _MLPS if names[-1] == name and {*names} <= {*block._modules}]:
            _check_linear("", {each: block._modules[each] for each in match[0]})
            roles |= {each: "column" for each in match[0][:-1]} | {match[0][-1]: "row"}
        elif any(name in names for names in _MLPS if {*names} <= {*block._modules}):
            pass  # beside the last of them, above
        elif any(value.dim() > 1 for value in part.parameters()):
            raise _NoPlan(f"{name} of a {type(block).__name__} is not known")
    if not any(role == "column" for role in roles.values()):
        raise _NoPlan(f"no part of a {type(block).__name__} is known")
    named = {f"block.{name}": role for name, role in roles.items()}
    return TensorPlan(roles=named, units=heads, divided=tuple(divided), draws_by_head=True)


def _attention(name: str, held: dict[str, Any], heads: dict[str, int], config: Any) -> dict[str, str]:
    """Return the roles of an attention's parts, if it has no others and its products are of whole heads."""
    outs = [each for each in _OUT if each in held]
    norms = [each for each in _NORMS if each in held]
    odd = sorted(held.keys() - {"q_proj", "k_proj", "v_proj", *outs, *norms})
    if odd or len(outs) != 1:
        raise _NoPlan(f"{name} has {', '.join(odd) or 'no output'}")
    _check_linear(name, {each: held[each] for each in ("q_proj", "k_proj", "v_proj", outs[0])})
    queries, keys = heads.values()
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    wanted = {"q_proj": queries * size, "k_proj": keys * size, "v_proj": keys * size}
    if any(held[each].out_features != number for each, number in wanted.items()):
        raise _NoPlan(f"{name} projects to other numbers than {queries} and {keys} heads of {size}")
    for each in norms:
        if any(tuple(value.shape) != (size,) for value in held[each].parameters()):
            raise _NoPlan(f"{each} of a {config.model_type} goes over the queries or keys of all heads")
    roles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column") | {outs[0]: "row"}
    return {f"{name}.{each}": role for each, role in (roles | dict.fromkeys(norms, "shared")).items()}


def _check_linear(name: str, parts: dict[str, Any]) -> None:
    odd = [each for each, part in parts.items() if type(part) is not nn.Linear]
    if odd:
        raise _NoPlan(f"{name}.{odd[0]} is a {type(parts[odd[0]]).__name__}")


_ATTENTION = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
}
_GATED = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
_FUSED_GATE = {"mlp.gate_up_proj": "column:2", "mlp.down_proj": "row"}


def _heads(config: Any) -> dict[str, int]:
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {"attention heads": config.num_attention_heads, "key-value heads": keys}


def _plan(roles: dict[str, str], *divided: tuple[str, str]) -> Callable[[Any], TensorPlan]:
    """Return what makes the plan of a model's blocks, of names in a block: roles, and numbers to divide."""
    named = {f"block.{name}": role for name, role in roles.items()}
    numbers = tuple((f"block.{name}", attribute) for name, attribute in divided)
    return lambda config: TensorPlan(roles=named, units=_heads(config), divided=numbers, draws_by_head=True)


def _stablelm(config: Any) -> TensorPlan:
    if getattr(config, "qk_layernorm", False):
        raise _NoPlan("every head of a stablelm with qk_layernorm has a norm of its own")
    numbers = ("self_attn", "num_heads"), ("self_attn", "num_key_value_heads")
    return _plan(_ATTENTION | _GATED, *numbers)(config)


def _olmo(config: Any) -> TensorPlan:
    if getattr(config, "clip_qkv", None) is not None:
        raise _NoPlan("an olmo with clip_qkv changes queries, keys and values in place")
    return _plan(_ATTENTION | _GATED)(config)


def _phi3(config: Any) -> TensorPlan:
    queries, keys = _heads(config).values()
    fused = {"self_attn.qkv_proj": f"column:{queries},{keys},{keys}", "self_attn.o_proj": "row"}
    numbers = ("self_attn", "num_key_value_heads"), ("self_attn", "config.num_attention_heads")
    return _plan(fused | _FUSED_GATE, *numbers)(config)


_PLANS: dict[str, Callable[[Any], TensorPlan]] = {
    "olmo": _olmo,
    "stablelm": _stablelm,
    "glm": _plan(_ATTENTION | _FUSED_GATE),
    "glm4": _plan(_ATTENTION | _FUSED_GATE),
    "phi3": _phi3,
    "gpt2": _plan(
        {"attn.c_attn": "column:3", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
        ("attn", "split_size"),
        ("attn", "num_heads"),
    ),
    "gpt_neox": _plan(
        {
            "attention.query_key_value": "column",
            "attention.dense": "row",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
        }
    ),
}
"""Plans of model types that their parts alone do not tell."""
