"""The sizes of a model as Megatron-LM flags, and what of a model these flags cannot say."""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.spec.block import Block
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model

Flag = tuple[str, ...]

_PLAIN_ACTIVATIONS: dict[str, tuple[Flag, ...]] = {
    **dict.fromkeys(("", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ()),
    "relu2": (("--squared-relu",),),
}
"""Flags of what MLPs without a gate apply; those with one apply SiLU, by --swiglu."""
_GATES = ("", "silu", "swish")
_ROUTERS: dict[str, tuple[Flag, ...]] = {
    "softmax": (),
    "softmax_all": (("--moe-router-pre-softmax",),),
    "sigmoid": (("--moe-router-score-function", "sigmoid"), ("--moe-router-enable-expert-bias",)),
}
"""Flags of what weighs experts: core/transformer/moe/moe_utils.py, topk_routing_with_score_function."""


def model_gaps(model: Model) -> Iterator[str]:
    """Yield what of the model no flag of ``pretrain_gpt.py`` builds."""
    if model.kind != "decoder":
        yield f"{model.name} is no decoder ({model.kind})"
    kinds = [block for block, _ in model.block_kinds()]
    if any(block.lora_rank or block.frozen for block in kinds):
        yield "adapters and frozen layers"
    yield from _position_gaps(model, kinds)
    if any(block.parallel for block in kinds):
        yield "attention and MLP that read the same input"
    if any(block.window for block in kinds):
        yield "windowed attention"
    if model.scaled:
        yield "fixed factors on embeddings, residuals, attention or logits"
    if model.head_params > model.head_matmul_params:
        yield "a bias of the head"
    if any(block.scan_state for block in kinds):
        yield "state-space scans"
    if model.embedding_dim not in (0, model.hidden):
        yield "a token table narrower than the model"
    if any(block.num_norms != 2 for block in kinds):
        yield "more or fewer than two norms in a block"
    if any(block.norm_place for block in kinds):
        yield "norms behind attention and MLP, or of queries and keys that are turned"
    if any(block.norm_params == 0 for block in kinds):
        yield "norms without parameters"
    if any(block.other_params for block in kinds):
        yield "norms of each head or of all heads together, sinks, learned numbers beside products"
    if len({_attention(block) for block in kinds}) > 1:
        yield "attention that differs between layers"
    if any(model.activation not in (_GATES if block.gated else _PLAIN_ACTIVATIONS) for block in kinds):
        yield f"the activation {model.activation}"
    yield from _router_gaps(model, kinds)
    for part in ("dense", "expert"):
        if len({_mlp(block) for block in kinds if bool(block.num_experts) == (part == "expert")}) > 1:
            yield f"{part} MLPs that differ between layers"


def _position_gaps(model: Model, kinds: list[Block]) -> Iterator[str]:
    """Yield what is not known of rotary positions, or what no flag says of them."""
    if model.learned_positions or not model.num_layers:
        return
    if not any(block.rotary and block.num_heads for block in kinds):
        yield "positions that are neither rotary nor learned (ALiBi, relative ones, or none)"
        return
    if len({block.rotary for block in kinds if block.num_heads}) > 1:
        yield "rotary positions that differ between layers"
    if model.rope_base is None:
        yield f"the base of rotary positions, not known of {model.name} (rope_theta of its config.json)"
    latent = any(block.kv_lora for block in kinds)
    kind = model.rope_scaling[0] if model.rope_scaling else "llama3"
    if kind not in (("yarn",) if latent and model.rope_scaling else ("llama3",)):
        yield f"rotary positions scaled as {kind}"


def _router_gaps(model: Model, kinds: list[Block]) -> Iterator[str]:
    """Yield what is not known of how experts are weighed, or what no flag says of it."""
    if not any(block.num_experts for block in kinds):
        return
    if model.router is None:
        yield f"what weighs the experts of {model.name}, which is not known"
    elif model.router[0] != "sigmoid" and any(block.expert_groups > 1 for block in kinds):
        yield "groups of experts that are chosen by their best expert (it sums several)"


def _attention(block: Block) -> tuple[object, ...]:
    names = (
        "hidden",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "value_head_dim",
        "q_lora",
        "kv_lora",
        "qk_norm",
        "qkv_bias",
        "norm_params",
    )
    return tuple(getattr(block, name) for name in names)


def _mlp(block: Block) -> tuple[object, ...]:
    names = ("ffn", "gated", "num_experts", "top_k", "expert_ffn", "shared_ffn", "mlp_bias")
    return tuple(getattr(block, name) for name in names)


def model_flags(model: Model, framework: Framework) -> list[Flag]:
    """Return the flags of the model's sizes."""
    block = model.blocks[0]
    dense = next((kind for kind in model.blocks if kind.ffn and not kind.num_experts), None)
    expert = next((kind for kind in model.blocks if kind.num_experts), None)
    ffn = (dense or block).ffn or block.expert_ffn
    flags: list[Flag] = [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(ffn)),
        ("--num-attention-heads", str(block.num_heads)),
        ("--max-position-embeddings", str(model.max_seq_len)),
        ("--vocab-size", str(model.vocab)),
        ("--normalization", "RMSNorm" if block.norm_params == 1 else "LayerNorm"),
        ("--position-embedding-type", "learned_absolute" if model.learned_positions else "rope"),
        ("--attention-dropout", f"{block.dropout:g}"),
        ("--hidden-dropout", f"{block.dropout:g}"),
    ]
    flags += _numerics(model)
    flags += _latent(block) if block.kv_lora else _plain(block)
    switches = {
        "--swiglu": block.gated,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--disable-bias-linear": not (block.mlp_bias or block.proj_bias),
        "--add-qkv-bias": block.qkv_bias and not (block.mlp_bias or block.proj_bias),
        "--qk-layernorm": block.qk_norm or block.kv_lora > 0,  # of latent attention: norms of the latents
    }
    flags += [(name,) for name, on in switches.items() if on]
    flags += () if block.gated else _PLAIN_ACTIVATIONS[model.activation]
    if expert is not None:
        flags += _experts(model, expert, framework)
    if model.num_next_token:
        flags.append(("--mtp-num-layers", str(model.num_next_token)))
    return flags


def _numerics(model: Model) -> list[Flag]:
    """Return the flags of rotary positions and of the epsilon of norms, as far as the model states them."""
    flags: list[Flag] = []
    if model.norm_eps is not None:
        flags.append(("--norm-epsilon", f"{model.norm_eps:g}"))
    if model.learned_positions or model.rope_base is None:
        return flags
    flags.append(("--rotary-base", f"{model.rope_base:.0f}"))
    if model.rope_percent != 1.0:
        flags.append(("--rotary-percent", f"{model.rope_percent:g}"))
    if model.rope_interleaved:
        flags.append(("--rotary-interleaved",))
    if model.rope_scaling and model.rope_scaling[0] == "llama3":
        flags += [("--use-rope-scaling",), ("--rope-scaling-factor", f"{model.rope_scaling[1]:g}")]
    elif model.rope_scaling:
        names = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
        flags += [(name, f"{value:g}") for name, value in zip(names, model.rope_scaling[1:], strict=True)]
    return flags


def _plain(block: Block) -> list[Flag]:
    flags: list[Flag] = [("--kv-channels", str(block.head_dim))]
    if block.num_kv_heads != block.num_heads:
        flags += [("--group-query-attention",), ("--num-query-groups", str(block.num_kv_heads))]
    return flags


def _latent(block: Block) -> list[Flag]:
    flags: list[Flag] = [
        ("--multi-latent-attention",),
        ("--kv-lora-rank", str(block.kv_lora)),
        ("--qk-head-dim", str(block.head_dim - block.rope_head_dim)),
        ("--qk-pos-emb-head-dim", str(block.rope_head_dim)),
        ("--v-head-dim", str(block.value_head_dim)),
    ]
    return flags + ([("--q-lora-rank", str(block.q_lora))] if block.q_lora else [])


def _dispatcher(name: str) -> list[Flag]:
    if name in ("alltoall", "allgather"):
        return [("--moe-token-dispatcher-type", name)]
    return [("--moe-token-dispatcher-type", "flex"), ("--moe-flex-dispatcher-backend", name)]


def _experts(model: Model, expert: Block, framework: Framework) -> list[Flag]:
    flags: list[Flag] = [
        ("--num-experts", str(expert.num_experts)),
        ("--moe-router-topk", str(expert.top_k)),
        ("--moe-ffn-hidden-size", str(expert.expert_ffn)),
        *_dispatcher(framework.dispatcher),
    ]
    if framework.grouped_gemm:
        flags.append(("--moe-grouped-gemm",))
    if expert.shared_ffn:
        flags.append(("--moe-shared-expert-intermediate-size", str(expert.shared_ffn)))
    if expert.shared_gate:
        flags.append(("--moe-shared-expert-gate",))
    flags += _router(model, expert)
    pattern = [int(block.num_experts > 0) for block in model.blocks]
    if not all(pattern):
        flags.append(("--moe-layer-freq", f"[{','.join(map(str, pattern))}]"))
    return flags


def _router(model: Model, expert: Block) -> list[Flag]:
    """Return the flags of what weighs and chooses experts."""
    if model.router is None:
        return []
    kind, factor = model.router
    flags = list(_ROUTERS[kind])
    if factor != 1:
        flags.append(("--moe-router-topk-scaling-factor", f"{factor:g}"))
    if expert.expert_groups > 1:
        flags += [
            ("--moe-router-num-groups", str(expert.expert_groups)),
            ("--moe-router-group-topk", str(expert.top_groups)),
        ]
    return flags
