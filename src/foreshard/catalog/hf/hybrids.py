"""Hybrids of Mamba-2, attention and MLP or experts (Nemotron-H): every layer has one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreshard.catalog.hf.reader import Reader
from foreshard.errors import SpecError
from foreshard.spec.block import heads_of
from foreshard.spec.model import Block, Model, decoder


def hybrid_model(
    name: str,
    *,
    pattern: str,
    hidden: int,
    vocab: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scan_heads: int,
    scan_head_dim: int,
    scan_state: int,
    scan_groups: int = 8,
    ffn: int = 0,
    experts: int = 0,
    top_k: int = 0,
    expert_ffn: int = 0,
    shared_ffn: int = 0,
    expert_hidden: int = 0,
    num_next_token: int = 0,
    tied: bool = False,
    router_bias: bool = True,
    **fields: Any,
) -> Model:
    """Return a hybrid decoder: M is a scan, * attention, - an MLP of two matrices, E experts.

    A scan is a gated MLP whose inner channels pass a convolution and the scan: its input matrix makes
    channels and gate, and beside them what `Block.scan_matmul_params` counts. `fields` are others of `Model`.

    Source
    ------
    Nemotron-H (arXiv 2504.03624); Megatron-Bridge models/nemotronh/nemotron_h_provider.py.
    """
    only_norm: dict[str, Any] = {"hidden": hidden, "num_norms": 1}
    no_attention: dict[str, Any] = heads_of(0, 0)
    blocks = {
        "M": Block(
            **only_norm,
            **no_attention,
            ffn=scan_heads * scan_head_dim,
            gated=True,
            scan_heads=scan_heads,
            scan_state=scan_state,
            scan_groups=scan_groups,
        ),
        "*": Block(
            **only_norm,
            **heads_of(heads, head_dim, kv_heads),
            rotary=0.0,
            ffn=0,
            gated=False,
        ),
        "-": Block(**only_norm, **no_attention, ffn=ffn, gated=False),
        "E": Block(
            **only_norm,
            **no_attention,
            ffn=0,
            gated=False,
            num_experts=experts,
            top_k=top_k,
            expert_ffn=expert_ffn,
            shared_ffn=shared_ffn,
            expert_hidden=expert_hidden,
            router_bias=router_bias,
        ),
    }
    unknown = sorted(set(pattern) - set(blocks))
    if unknown or not pattern:
        what = f"{name}: layer {unknown[0]!r}" if unknown else f"{name}: no layers"
        rule = "M is a scan, * attention, - an MLP, E experts"
        raise SpecError(what, key="pattern", value=pattern[:60], rule=rule)
    return decoder(
        name=name,
        blocks=tuple(blocks[kind] for kind in pattern),
        vocab=vocab,
        tied_embeddings=tied,
        max_seq_len=seq_len,
        num_next_token=num_next_token,
        **fields,
    )


_SCAN_TIME = "no kernel of a state-space scan was measured: its time is an estimate"
_LETTERS: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "linear_attention", "M"), "M"),
    **dict.fromkeys(("attention", "full_attention", "*"), "*"),
    **dict.fromkeys(("mlp", "-"), "-"),
    **dict.fromkeys(("moe", "E"), "E"),
}
"""Letter of a layer by the names that configurations give it."""


def mamba2(reader: Reader) -> Model:
    """Mamba-2: scans only."""
    hidden, layers = reader.size("hidden_size"), reader.layers("num_hidden_layers")
    heads, width = reader.size("num_heads"), reader.size("head_dim")
    channels = reader.size("expand", default=2) * hidden
    if heads * width != channels:
        rule = f"Heads times head_dim are expand times hidden_size, {channels}"
        raise reader.error("num_heads", heads, f"{heads} heads of {width}", rule)
    _plain_scan(reader, "use_bias")
    return hybrid_model(
        reader.name,
        pattern="M" * layers,
        hidden=hidden,
        vocab=reader.size("vocab_size"),
        seq_len=reader.positions("max_position_embeddings", default=2048),
        heads=0,
        kv_heads=0,
        head_dim=0,
        scan_heads=heads,
        scan_head_dim=width,
        scan_state=reader.size("state_size", default=128),
        scan_groups=reader.size("n_groups", default=8),
        tied=reader.flag("tie_word_embeddings", False),
        **_said(reader),
    )


def nemotron_h(reader: Reader) -> Model:
    """Nemotron-H: every layer is a scan, attention, an MLP or experts, by name or by letter."""
    pattern = _pattern(reader)
    _plain_scan(reader, "mamba_proj_bias", "use_bias", "attention_bias", "mlp_bias")
    routed = "E" in pattern
    experts = {
        "experts": reader.size("n_routed_experts", default=8),
        "top_k": reader.size("num_experts_per_tok", default=2),
        "expert_ffn": reader.size("moe_intermediate_size", default=7688),
        "shared_ffn": reader.size("moe_shared_expert_intermediate_size", default=7688),
        "expert_hidden": reader.size("moe_latent_size", default=0, minimum=0),
    }
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    if reader.flag("tie_word_embeddings", False):
        reader.assumptions.append(
            "embedding and head are not tied, as transformers 5 does with every Nemotron-H"
        )
    return hybrid_model(
        reader.name,
        pattern=pattern,
        hidden=hidden,
        vocab=reader.size("vocab_size"),
        seq_len=reader.positions("max_position_embeddings", default=4096),
        heads=heads,
        kv_heads=reader.kv_heads(heads, "num_key_value_heads"),
        head_dim=reader.size("head_dim", "attention_head_dim", default=128),
        scan_heads=reader.size("mamba_num_heads"),
        scan_head_dim=reader.size("mamba_head_dim"),
        scan_state=reader.size("ssm_state_size", default=128),
        scan_groups=reader.size("n_groups", "mamba_n_groups", default=8),
        ffn=reader.size("intermediate_size") if "-" in pattern else 0,
        num_next_token=reader.layers("num_nextn_predict_layers", default=0, minimum=0),
        tied=False,
        router_bias=False,
        **(experts if routed else {}),
        **_said(reader),
    )


def _said(reader: Reader) -> dict[str, Any]:
    return {"source": reader.file or "", "assumptions": (*reader.assumptions, _SCAN_TIME)}


def _pattern(reader: Reader) -> str:
    """Return the letter of each layer."""
    named = reader.list("layers_block_type") or reader.list("layer_types")
    kinds = named or list(reader.text("hybrid_override_pattern"))
    for kind in kinds:
        if kind not in _LETTERS:
            rule = "A layer is mamba, attention, mlp or moe (M * - E in a pattern)"
            raise reader.error("layers_block_type", str(kind)[:60], f"layer {str(kind)[:60]!r}", rule)
    return "".join(_LETTERS[kind] for kind in kinds)


def _plain_scan(reader: Reader, *biases: str) -> None:
    """Refuse what no published model has: biases of projections, another convolution."""
    for key in biases:
        if reader.flag(key, False):
            raise reader.error(key, True, f"{key} is not modelled", "Published models have none")
    kernel = reader.size("conv_kernel", "mamba_d_conv", default=4)
    if kernel != 4 or not reader.flag("use_conv_bias", True):
        rule = "The convolution of a scan spans 4 positions and has a bias"
        raise reader.error("conv_kernel", kernel, f"a convolution of {kernel} is not modelled", rule)
