"""Decoders of Hugging Face, read as ``data/architectures.toml`` says for each model_type.

The table names keys, defaults and constants; the rules below compute what depends on several keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from foreshard.catalog.hf.numerics import enlarges, numerics_of, rotary_of
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.block import heads_of
from foreshard.spec.model import Block, Model, decoder

Entry = Mapping[str, Any]
_SIZES = {"hidden", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "ffn"}
_FIELDS = {field.name for field in fields(Block)} - _SIZES
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def decoder_of(reader: Reader, entry: Entry) -> Model:
    """Return the decoder of a configuration; `entry` is that of its model_type in the table."""
    reader = reader.with_defaults(**entry.get("defaults", {}))
    layers = reader.layers(*entry["layers"])
    own = {name: reader.value(reading) for name, reading in entry.items() if name in _FIELDS}
    block = attention_sizes(reader, entry) | own
    block["ffn"] = _ffn(reader, entry, block["hidden"])
    block["rotary"] = rotary_of(reader.config, block.get("rotary", 1.0), block["head_dim"])
    block["rotary_scaled"] = enlarges(numerics_of(reader.config).get("rope_scaling"))
    if "block_rule" in entry:
        block |= _BLOCK_RULES[entry["block_rule"]](reader, block)
    routed, sparse = [False] * layers, block
    if "experts" in entry:
        routed, sparse = _expert_layers(reader, entry["experts"], layers), block | experts_of(reader, entry)
    windows = _windows(reader, entry["sliding"], layers) if "sliding" in entry else [0] * layers
    turned = _turned(reader, entry, windows)
    layout = list(zip(routed, windows, turned, strict=True))
    kinds = {
        (routes, window, turns): Block(
            **(sparse if routes else block)
            | {"window": window, "rotary": (sparse if routes else block)["rotary"] * turns}
        )
        for routes, window, turns in set(layout)
    }
    ends = _END_RULES[entry["end_rule"]](reader, block) if entry.get("end_rule") else {}
    positions = reader.positions(*entry["positions"], default=entry["positions_default"] or None)
    if entry.get("scaled"):
        ends["scaled"] = True
    ends["activation"] = reader.text(*_ACTIVATIONS, default=entry.get("activation", ""))
    ends["rope_interleaved"] = entry.get("interleaved", False)
    if "experts" in entry:
        ends["router"] = _router(reader, entry)
    if "learned_positions" in entry:
        ends["learned_positions"] = positions + entry["learned_positions"]
    return decoder(
        name=reader.name,
        blocks=tuple(kinds[kind] for kind in layout),
        vocab=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", entry["tied"]),
        max_seq_len=positions,
        source=reader.file or "",
        assumptions=tuple(reader.assumptions),
        **ends,
    )


def attention_sizes(reader: Reader, entry: Entry) -> dict[str, Any]:
    """Return hidden, heads, key/value heads and head size of a block."""
    if entry.get("latent"):
        return _latent_attention(reader)
    hidden = reader.size(*entry["hidden"])
    keys, usual = entry.get("head_dim_keys", ()), entry.get("head_dim")
    free = usual or any(reader.config.get(key) is not None for key in keys)
    heads = reader.size(*entry["num_heads"]) if free else reader.heads(hidden, *entry["num_heads"])
    kv_heads = reader.kv_heads(heads, *entry["num_kv_heads"]) if "num_kv_heads" in entry else heads
    width = usual or hidden // heads
    if keys:
        width = reader.size(*keys, default=width)
    return {"hidden": hidden, **heads_of(heads, width, kv_heads)}


def _latent_attention(reader: Reader) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    heads = reader.size("num_attention_heads")
    rope = reader.size("qk_rope_head_dim")
    return {
        "hidden": reader.size("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": reader.size("qk_nope_head_dim") + rope,
        "value_head_dim": reader.size("v_head_dim"),
        "q_lora": reader.size("q_lora_rank", default=0, minimum=0),
        "kv_lora": reader.size("kv_lora_rank"),
        "rope_head_dim": rope,
        "rotary": rope / (reader.size("qk_nope_head_dim") + rope),
    }


def _ffn(reader: Reader, entry: Entry, hidden: int) -> int:
    """Return the width of the dense MLP, 0 of a model that has experts only."""
    factor, keys = entry.get("ffn_over_hidden"), entry.get("ffn", ())
    if factor:
        return reader.size(*keys, default=factor * hidden) if keys else factor * hidden
    return reader.size(*keys) if keys else 0


def _windows(reader: Reader, sliding: Entry, layers: int) -> Sequence[int]:
    """Return the reach of attention in every layer, 0 where it is full."""
    rule = sliding["layers"]
    full = not reader.flag(sliding["switch"], False) if "switch" in sliding else False
    null = sliding.get("null_is_full") and sliding["key"] in reader.config
    least = sliding.get("minimum", 0)
    default = 0 if null else sliding["default"]
    window = 0 if full else reader.size(sliding["key"], default=default, minimum=least, maximum=2**31)
    stated = None if rule in ("all", "listed") else reader.layer_windows(layers, window)
    if stated is not None:
        return stated  # its period may then be spelled as letters
    return [
        window * slides for slides in _SLIDING[rule](reader, layers, reader.value(sliding.get("every", 0)))
    ]


def _turned(reader: Reader, entry: Entry, windows: Sequence[int]) -> list[bool]:
    """Return whether each layer has rotary positions: all, those that the file lists, or those that slide."""
    rule = entry.get("unrotated")
    if rule == "listed":
        return [not bare for bare in _without_rotary(reader, len(windows), 0)]
    bare = rule == "full" or (rule == "full_of_mixed" and any(windows))
    return [not bare or window > 0 for window in windows]


def _late(reader: Reader, layers: int, _: int) -> list[bool]:
    first = reader.layers("max_window_layers", default=28, minimum=0)
    return [layer >= first for layer in range(layers)]


def _without_rotary(reader: Reader, layers: int, _: int) -> list[bool]:
    """Return whether each layer leaves queries and keys unturned: every fourth, if the file does not say."""
    every = reader.layers("no_rope_layer_interval", default=4)
    stated = reader.list("no_rope_layers")
    if stated is None:
        return [(layer + 1) % every == 0 for layer in range(layers)]
    if len(stated) != layers or any(entry not in (0, 1) for entry in stated):
        rule = f"no_rope_layers has 0 or 1 for each of the {layers} layers"
        raise reader.error("no_rope_layers", str(stated)[:60], f"{len(stated)} entries", rule)
    return [not entry for entry in stated]


def _listed(reader: Reader, layers: int, _: int) -> list[bool]:
    """Return whether each layer is local from ``[[["global", "local"], 12]]``."""
    groups = reader.list("attention_types") or [[["global", "local"], (layers + 1) // 2]]
    kinds: list[str] = []
    for group in groups:
        names, repeats = group if isinstance(group, list) and len(group) == 2 else ([], 0)
        if not isinstance(names, list) or not isinstance(repeats, int):
            break
        for _repeat in range(min(repeats, layers)):
            kinds.extend(names[:layers])
            if len(kinds) >= layers:
                break
    if len(kinds) < layers or any(kind not in ("global", "local") for kind in kinds):
        rule = f"attention_types lists global or local for {layers} layers"
        raise reader.error("attention_types", str(groups)[:60], f"{len(kinds)} layers listed", rule)
    return [kind == "local" for kind in kinds[:layers]]


_SLIDING: Mapping[str, Callable[[Reader, int, int], list[bool]]] = {
    "all": lambda reader, layers, every: [True] * layers,
    "all_unless_named": lambda reader, layers, every: [True] * layers,
    "behind_full": lambda reader, layers, every: [layer % every > 0 for layer in range(layers)],
    "late": _late,
    "listed": _listed,
    "pattern": lambda reader, layers, every: [(layer + 1) % every > 0 for layer in range(layers)],
    "without_rotary": _without_rotary,
}
"""Which layers slide, by the name of the rule; the last argument is the period that the entry states."""


def experts_of(reader: Reader, entry: Entry) -> dict[str, Any]:
    """Return what a block with experts has instead of its dense MLP."""
    experts = entry["experts"]
    num_experts = reader.size(*experts["count"])
    used = experts.get("used", ("num_experts_per_tok",))
    top_k = reader.uniform_size(*used)
    if top_k > num_experts:
        raise reader.error(used[0], top_k, f"{top_k} experts per token", f"There are {num_experts} experts")
    width = reader.size(experts["width"])
    found = {"ffn": 0, "num_experts": num_experts, "top_k": top_k, "expert_ffn": width}
    if "num_shared" in experts:
        found["shared_ffn"] = reader.value(experts["num_shared"]) * width
    return found | {name: reader.value(experts[name]) for name in _FIELDS & experts.keys()}


def _router(reader: Reader, entry: Entry) -> tuple[str, float] | None:
    """Return what weighs experts, and the factor on it; None where no rule of `ROUTERS` does."""
    kind = entry.get("router")
    summed = reader.flag("norm_topk_prob", kind != "softmax_all")  # the weights of the chosen sum to 1
    if kind == "softmax_all" and summed:
        kind = "softmax"
    if kind is None or (kind == "sigmoid" and not summed):
        return None
    return kind, reader.number("routed_scaling_factor", default=entry.get("router_scaling", 1.0))


def _expert_layers(reader: Reader, experts: Entry, layers: int) -> list[bool]:
    """Return whether each layer has experts, by the rule of the entry."""
    match experts["layers"]:
        case "qwen":
            step = reader.layers("decoder_sparse_step", default=1)
            only = reader.list("mlp_only_layers") or []
            return [layer not in only and (layer + 1) % step == 0 for layer in range(layers)]
        case "after_dense":
            dense = reader.layers("first_k_dense_replace", default=0, minimum=0)
            if dense > layers:
                rule = f"There are {layers} layers"
                raise reader.error("first_k_dense_replace", dense, f"{dense} dense layers", rule)
            return [layer >= dense for layer in range(layers)]
        case "interleaved":
            step = reader.layers("interleave_moe_layer_step", default=1)
            stated = reader.list("moe_layers") or range(step - 1, layers, step)
            return [layer in stated for layer in range(layers)]
        case "ranged":
            return _ranged(reader, layers)
        case "typed":
            return _typed(reader, layers)
    return [True] * layers


def _ranged(reader: Reader, layers: int) -> list[bool]:
    """Return whether each layer has experts: every n-th from one layer to another, the last if it is -1."""
    step = reader.layers("moe_layer_interval", default=1)
    first = reader.layers("moe_layer_start_index", default=1, minimum=0)
    last = reader.layers("moe_layer_end_index", default=-1, minimum=-1)
    last = layers - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers)]


def _typed(reader: Reader, layers: int) -> list[bool]:
    """Return whether each layer is named sparse, without names all but the first dense ones."""
    types = reader.list("mlp_layer_types")
    if types is None:
        dense = reader.layers("first_k_dense_replace", default=1, minimum=0)
        return [layer >= dense for layer in range(layers)]
    if len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        rule = f"Each of the {layers} layers is dense or sparse"
        raise reader.error("mlp_layer_types", str(types)[:60], f"{len(types)} entries", rule)
    return [kind == "sparse" for kind in types]


def _whole_norms(reader: Reader, block: Entry) -> dict[str, Any]:
    """Norms of all channels of queries and keys; a block counts one head of each."""
    heads = block["num_heads"] + block["num_kv_heads"] - 2
    return {"other_params": block["qk_norm"] * heads * block["head_dim"]}


def _xielu(reader: Reader, block: Entry) -> dict[str, Any]:
    """Two learned numbers of the activation (arXiv 2411.13010)."""
    own = reader.text(*_ACTIVATIONS, default="xielu") == "xielu"
    return {"other_params": 2 * own, "spelled_activation": "xielu" if own else ""}


def _square_output(reader: Reader, block: Entry) -> dict[str, Any]:
    width = block["num_heads"] * block["head_dim"]
    if width != block["hidden"]:
        what = f"{block['num_heads']} heads of {block['head_dim']} channels"
        rule = f"They fill the hidden size {block['hidden']}: the product behind attention is square"
        raise reader.error("num_attention_heads", block["num_heads"], what, rule)
    return {}


def _stablelm(reader: Reader, block: Entry) -> dict[str, Any]:
    """One norm where both parts read it; the norms of heads have scales without biases."""
    scales = block["num_heads"] + block["num_kv_heads"] - 4  # a block counts two with biases
    more = block["qk_norm"] * scales * block["head_dim"]
    return {"num_norms": 1 if block["parallel"] else 2, "other_params": more}


def _falcon(reader: Reader, block: Entry) -> dict[str, Any]:
    grouped, parallel = reader.flag("new_decoder_architecture", False), reader.flag("parallel_attn", True)
    norms = reader.size("num_ln_in_parallel_attn", default=2, maximum=2) if grouped else 1
    kv_heads, shared = block["num_heads"], not grouped and reader.flag("multi_query", True)
    if grouped:
        kv_heads = reader.kv_heads(kv_heads, "num_kv_heads", "n_head_kv")
    elif shared:
        kv_heads = 1
    norms = norms if parallel else 2
    rotary = 0.0 if reader.flag("alibi", False) else block["rotary"]
    found = {"parallel": parallel or grouped, "num_norms": norms, "num_kv_heads": kv_heads}
    # One head of keys is broadcast over the queries, which no fused kernel of torch takes.
    return found | {"rotary": rotary, "attention_code": "math" if shared else ""}


def _multi_query(reader: Reader, block: Entry) -> dict[str, Any]:
    return {"num_kv_heads": 1 if reader.flag("multi_query", True) else block["num_heads"]}


def _mpt(reader: Reader, block: Entry) -> dict[str, Any]:
    if not reader.flag("no_bias", True):
        rule = "Published MPT models have none"
        raise reader.error("no_bias", False, "MPT with biases is not modelled", rule)
    ratio = reader.size("expansion_ratio", default=4)
    if ratio != 4:
        rule = "The MLP of every MPT is four times as wide as the model in transformers"
        raise reader.error("expansion_ratio", ratio, f"an MLP {ratio} times as wide is not modelled", rule)
    return {}


def _no_biases(reader: Reader, block: Entry) -> dict[str, Any]:
    if reader.flag("use_bias", False):
        rule = "Its routed experts have none, and published models have none at all"
        raise reader.error("use_bias", True, "ERNIE 4.5 MoE with biases is not modelled", rule)
    return {}


_BLOCK_RULES: Mapping[str, Callable[[Reader, Entry], dict[str, Any]]] = {
    "falcon": _falcon,
    "mpt": _mpt,
    "multi_query": _multi_query,
    "no_biases": _no_biases,
    "post_norms": lambda reader, block: {"num_norms": 2 + 2 * reader.flag("use_post_norm", True)},
    "square_output": _square_output,
    "sinks": lambda reader, block: {"other_params": block["num_heads"]},
    "stablelm": _stablelm,
    "whole_norms": _whole_norms,
    "xielu": _xielu,
}
"""Fields of a block that follow from several keys, by the name that an entry gives the rule."""


def _opt(reader: Reader, block: Entry) -> dict[str, Any]:
    before = reader.flag("do_layer_norm_before", True)
    width = reader.size("word_embed_proj_dim", default=block["hidden"])
    return {
        "embedding_dim": 0 if width == block["hidden"] else width,
        "final_norm": before and not reader.flag("_remove_final_layer_norm", False),
    }


def _next_token(reader: Reader, block: Entry) -> dict[str, Any]:
    extra = reader.layers("num_nextn_predict_layers", default=0, minimum=0)
    if extra:
        reader.assumptions.append(
            f"{extra} next-token module(s) trained; not in num_params, as in transformers"
        )
    return {"num_next_token": extra}


def _chunks(reader: Reader, block: Entry) -> dict[str, Any]:
    if reader.config.get("attention_chunk_size") is not None:
        chunk = reader.size("attention_chunk_size", maximum=2**31)
        reader.assumptions.append(f"attention chunks of {chunk} counted as full attention")
    return {}


_END_RULES: Mapping[str, Callable[[Reader, Entry], dict[str, Any]]] = {
    "bloom": lambda reader, block: {"embedding_norm": True},
    "chunks": _chunks,
    "head_bias": lambda reader, block: {"head_bias": True},
    "next_token": _next_token,
    "opt": _opt,
    "stated_head_bias": lambda reader, block: {"head_bias": reader.flag("lm_head_bias", False)},
}
"""Arguments of `decoder` beside the blocks, by the name that an entry gives the rule."""
