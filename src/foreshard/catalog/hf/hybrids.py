"""Hybrids of Mamba-2, attention and MLP or experts (Nemotron-H): every layer has one of them."""

from __future__ import annotations

from typing import Any

from foreshard.errors import SpecError
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
) -> Model:
    """Return a hybrid decoder: M is a scan, * attention, - an MLP of two matrices, E experts.

    A scan is a gated MLP whose inner channels pass a convolution and the scan: its input matrix makes
    channels and gate, and beside them what `Block.scan_matmul_params` counts.

    Source
    ------
    Nemotron-H (arXiv 2504.03624); Megatron-Bridge models/nemotronh/nemotron_h_provider.py.
    """
    only_norm: dict[str, Any] = {"hidden": hidden, "num_norms": 1}
    no_attention: dict[str, Any] = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "value_head_dim": 0}
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
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
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
            router_bias=True,
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
        tied_embeddings=False,
        max_seq_len=seq_len,
        num_next_token=num_next_token,
    )
