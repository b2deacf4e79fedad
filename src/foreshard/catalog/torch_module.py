"""A ``torch.nn.Module`` read as a `Model`: a stack of equal transformer blocks between two ends.

Widths come from the shapes of the weights, heads from the attributes modules commonly carry. A reading is
accepted only if the model it gives has exactly the parameters of the module; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from foreshard.catalog.model_dims import DEFAULT_SEQ_LEN
from foreshard.errors import SpecError
from foreshard.spec.block import heads_of
from foreshard.spec.model import Block, Model, decoder

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")
KV_HEADS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")
LENGTHS = ("max_seq_len", "max_seq_length", "block_size", "context_length", "seq_len")
RULE = "A module is read when it is a stack of equal attention and MLP blocks between an embedding and a head"
FIX = "Return (module, example inputs) from the factory to have it traced, or a Model or a config dict"


def model_from_module(module: Any, where: str = "module") -> Model:
    """Return the model of a decoder or encoder written in torch.

    Parameters
    ----------
    module : torch.nn.Module
        Token embedding (`nn.Embedding`), a `ModuleList` or `Sequential` of blocks of one class, a head
        (`nn.Linear`, may share the embedding's weight). Blocks keep attention and MLP in submodules, and
        attention carries its number of heads as an attribute. Parameters may live on the meta device.
    where : str
        Name for messages.

    Raises
    ------
    SpecError
        If the module is built otherwise: the parameters left over are counted in the message.
    """
    stack = _stack(module, where)
    inside = {id(parameter) for parameter in stack.parameters()}
    blocks = tuple(_block(child, where) for child in stack)
    outside = {id(p): (name, p) for name, p in module.named_parameters() if id(p) not in inside}
    model = _ends(module, outside, blocks, where)
    total = sum(parameter.numel() for parameter in module.parameters())
    if model.num_params != total:
        raise _refusal(where, f"{total - model.num_params} of {total} parameters are not recognised")
    return model


def _refusal(where: str, what: str) -> SpecError:
    return SpecError(what, file=where, key="model", rule=RULE, fix=FIX)


def _stack(module: Any, where: str) -> Any:
    """Return the list of equal blocks that holds most parameters."""
    import torch

    lists = [
        child
        for child in module.modules()
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential)
        and len(child) > 0
        and len({type(block) for block in child}) == 1
        and any(True for _ in _holders(child[0], HEADS))
    ]
    if not lists:
        raise _refusal(where, "no stack of blocks with attention heads found")
    return max(lists, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))


def _holders(module: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, int]]:
    """Yield the submodules that carry one of these attributes as a whole number, with its value."""
    for child in module.modules():
        for name in names:
            value = getattr(child, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield child, value
                break


def _block(module: Any, where: str) -> Block:
    """Return one block: attention is the innermost submodule with heads, the MLP all other matrices."""
    attention, heads = list(_holders(module, HEADS))[-1]
    inside = {id(parameter) for parameter in attention.parameters()}
    matrices = [p for p in module.parameters() if p.dim() == 2]
    projections = [p for p in matrices if id(p) in inside]
    mlp = [p for p in matrices if id(p) not in inside]
    if any(p.dim() > 2 for p in module.parameters()) or not projections or not mlp:
        raise _refusal(where, f"{type(module).__name__} is no block of attention and a dense MLP")
    hidden = projections[-1].shape[0]
    head_dim = getattr(attention, "head_dim", None) or hidden // heads
    block = Block(
        hidden=hidden,
        **heads_of(heads, head_dim, _kv_heads(attention, projections, hidden, heads, head_dim)),
        causal=getattr(attention, "is_causal", True) is not False,
        num_norms=0,
        **_mlp(module, mlp, hidden, where),
    )
    block = _with_vectors(module, attention, block)
    actual = sum(parameter.numel() for parameter in module.parameters())
    if block.num_params != actual:
        raise _refusal(
            where, f"{actual - block.num_params} of {actual} parameters of a block are not recognised"
        )
    return block


def _kv_heads(attention: Any, projections: list[Any], hidden: int, heads: int, head_dim: int) -> int:
    stated = [value for holder, value in _holders(attention, KV_HEADS) if holder is attention]
    if stated:
        return stated[0]
    width = sum(p.numel() for p in projections) // hidden - 2 * heads * head_dim
    return max(1, width // (2 * head_dim))


def _mlp(module: Any, matrices: list[Any], hidden: int, where: str) -> dict[str, Any]:
    """Return width and number of matrices; a fused gate counts as two."""
    down = [p for p in matrices if p.shape[0] == hidden]
    width = down[-1].shape[1] if down else 0
    count, rest = divmod(sum(p.numel() for p in matrices), max(1, hidden * width))
    if rest or count not in (2, 3):
        raise _refusal(where, f"the MLP of {type(module).__name__} has neither two nor three matrices")
    return {"ffn": width, "gated": count == 3}


def _with_vectors(module: Any, attention: Any, block: Block) -> Block:
    """Return the block with its norms and biases, distinguished by the module that holds them."""
    inside = {id(parameter) for parameter in attention.parameters()}
    flags: dict[str, Any] = {}
    norms = 0
    for child in module.modules():
        own = dict(child.named_parameters(recurse=False))
        vectors = [p for p in own.values() if p.dim() == 1]
        matrices = [p for p in own.values() if p.dim() == 2]
        if vectors and not matrices and vectors[0].numel() == block.hidden and id(vectors[0]) not in inside:
            norms += 1
            flags["norm_params"] = len(vectors)
        elif vectors and not matrices and vectors[0].numel() == block.head_dim:
            flags["qk_norm"] = True
        elif vectors and id(vectors[0]) not in inside:
            flags["mlp_bias"] = True
        elif vectors:
            square = matrices and matrices[0].shape[0] == block.hidden and child is not attention
            last = square and matrices[0] is [p for p in attention.parameters() if p.dim() == 2][-1]
            flags["proj_bias" if last else "qkv_bias"] = True
    # Of functions without parameters nothing is seen: rotary positions come with norms that only scale.
    flags["rotary"] = float(flags.get("norm_params", 1) == 1)
    return replace(block, num_norms=norms, **flags)


def _ends(module: Any, outside: dict[int, Any], blocks: tuple[Block, ...], where: str) -> Model:
    """Return the decoder around the blocks from what is outside of them."""
    import torch

    tables = [
        child
        for child in module.modules()
        if isinstance(child, torch.nn.Embedding) and id(child.weight) in outside
    ]
    if not tables or tables[0].embedding_dim != blocks[0].hidden:
        raise _refusal(where, "no token embedding (nn.Embedding) as wide as the blocks")
    tokens, *others = tables
    positions = sum(table.num_embeddings for table in others if table.embedding_dim == blocks[0].hidden)
    named = {name: p for name, p in outside.values()}
    positions += sum(p.numel() // p.shape[-1] for name, p in named.items() if _is_position(name, p, others))
    stated = [value for _, value in _holders(module, LENGTHS)]
    norm = any(p.dim() == 1 for p in named.values())
    linear = [c for c in module.modules() if isinstance(c, torch.nn.Linear)]
    head = [c for c in linear if c.out_features == tokens.num_embeddings]
    if not head:
        raise _refusal(where, "no head (nn.Linear) as wide as the token embedding")
    model = decoder(
        name=type(module).__name__,
        blocks=blocks,
        vocab=tokens.num_embeddings,
        tied_embeddings=head[-1].weight is tokens.weight,
        max_seq_len=positions or (stated[0] if stated else DEFAULT_SEQ_LEN),
        learned_positions=positions,
        final_norm=norm,
        source=where,
        assumptions=("read from the shapes of a torch module; attention taken as causal unless it says not",),
    )
    extra = head[-1].bias.numel() if head[-1].bias is not None else 0
    return replace(
        model,
        head_params=model.head_params + extra,
        final_norm_params=sum(p.numel() for p in named.values() if p.dim() == 1) - extra,
    )


def _is_position(name: str, parameter: Any, tables: list[Any]) -> bool:
    """Whether a bare parameter is a table of positions: ``pos`` in its name, not an nn.Embedding."""
    known = any(parameter is table.weight for table in tables)
    return "pos" in name.lower() and parameter.dim() > 1 and not known
