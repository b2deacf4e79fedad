"""The dimensions that a table row states of its model, and what stands for those it leaves blank."""

from __future__ import annotations

import re
from collections.abc import Mapping

from foreshard.catalog.model_dims import DEFAULT_SEQ_LEN, model_from_dims
from foreshard.errors import SpecError
from foreshard.spec.model import Block, Model
from foreshard.validation.facts import integer

DIMENSIONS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab")
ROW_SOURCE = "dimensions in the row"
_USUAL_VOCAB = 51200  # GPT-2's 50,257 words as Megatron pads them for eight ranks

Sizes = dict[str, int | None]


def dimensions_of(model: Model) -> Sizes:
    """Return the dimensions of a model, by column."""
    block, inner = last_of_each(model)
    return {
        "n_layers": model.num_layers,
        "hidden": model.hidden,
        "ffn_hidden": inner.expert_ffn or inner.ffn,
        "n_heads": block.num_heads,
        "n_kv_heads": block.num_kv_heads,
        "vocab": model.vocab,
    }


def last_of_each(model: Model) -> tuple[Block, Block]:
    """Return the last block with attention and the last with an MLP or experts: one block but in hybrids."""
    attention = next(block for block in reversed(model.blocks) if block.num_heads)
    inner = next(b for b in reversed(model.blocks) if (b.ffn or b.num_experts) and not b.scan_state)
    return attention, inner


def model_of_columns(row: Mapping[str, str], stated: str, seq_len: int, known: Model | None = None) -> Model:
    """Return the model of a row's dimensions; blank ones are the catalog's, else usual, and said.

    `stated` is the name in the row, `seq_len` 0 where it states none, `known` what the catalog has under the
    name with other dimensions. A hybrid, and too many blanks, are errors.
    """
    stated_sizes: Sizes = {column: integer(row, column) for column in DIMENSIONS}
    if known is not None and any(block.scan_state for block in known.blocks):
        what = f"{stated!r} is a hybrid with other dimensions in the catalog"
        rule = "Dimensions alone do not make a hybrid"
        raise SpecError(what, file=row.get("id"), key="model", value=stated, rule=rule)
    gated = {"true": True, "false": False}.get(row.get("gated_mlp", "").strip().lower())
    sizes, notes = _filled(stated_sizes, row, stated, gated, known)
    if gated is None and notes and known is not None:
        gated = known.blocks[-1].gated
    if gated is None:
        gated = int(sizes["ffn_hidden"] or 0) != 4 * int(sizes["hidden"] or 0)
        notes = (*notes, f"kind of MLP not stated: {'gated' if gated else 'plain'}, after its width")
    n_layers, hidden, ffn, n_heads, n_kv_heads, vocab = (int(sizes[column] or 0) for column in DIMENSIONS)
    experts = integer(row, "n_experts") or (known.blocks[-1].num_experts if known is not None else 0)
    top_k = integer(row, "topk") or (known.blocks[-1].top_k if known is not None else min(experts, 2))
    return model_from_dims(
        stated,
        n_layers,
        hidden,
        ffn,
        n_heads,
        n_kv_heads,
        vocab,
        gated=gated,
        n_experts=experts,
        topk=min(top_k, experts),
        head_dim=_head_dim(row, hidden, n_heads, known),
        source=ROW_SOURCE,
        assumptions=(*notes, "norms, biases and tying follow from the kind of MLP"),
        seq_len=seq_len or DEFAULT_SEQ_LEN,
    )


def _filled(
    sizes: Sizes, row: Mapping[str, str], stated: str, gated: bool | None, known: Model | None
) -> tuple[Sizes, tuple[str, ...]]:
    """Return all dimensions of a row, and what was put for blank ones."""
    blank = [column for column, value in sizes.items() if value is None]
    if not blank:
        return sizes, ()
    if known is not None:
        own = {column: value for column, value in sizes.items() if value is not None}
        return dimensions_of(known) | own, (f"{', '.join(blank)} not stated: those of {known.name}",)
    if blank == ["n_kv_heads"]:
        return sizes | {"n_kv_heads": sizes["n_heads"]}, ()
    return _usual(sizes, stated, gated, row)


def _head_dim(row: Mapping[str, str], hidden: int, n_heads: int, known: Model | None) -> int | None:
    """Return the width of a head that the notes or the catalog say, None for hidden over heads."""
    said = re.search(r"\bhead_dim (\d+)(?!/)\b", row.get("notes", ""))
    if said:
        return int(said.group(1))
    if known is None or hidden != known.hidden:
        return None
    block = known.blocks[-1]
    return block.head_dim if n_heads == block.num_heads and not block.kv_lora else None


def _usual(
    sizes: Sizes, stated: str, gated: bool | None, row: Mapping[str, str]
) -> tuple[Sizes, tuple[str, ...]]:
    """Return the dimensions of a decoder of usual proportions: stated ones, else after layers or size.

    GPT-3's proportions (arXiv 2005.14165, table 2.1): hidden = 128 layers, heads of 128 (64 up to a hidden
    size of 1024), 12 L h^2 parameters; a gated MLP of three matrices has 8/3 of the width instead of 4.
    """
    blank = [column for column, value in sizes.items() if value is None]
    count = _named_size(stated)
    hidden, layers = sizes["hidden"], sizes["n_layers"]
    if not (hidden and layers) and (count is None or integer(row, "n_experts")):
        what = f"{stated!r} is not in the catalog with these dimensions and the row leaves some blank"
        raise SpecError(what, file=row.get("id"), key=blank[0], value="", rule=f"Blank: {', '.join(blank)}")
    if not hidden:
        layers = layers or max(2, round(((count or 0.0) / (12 * 128**2)) ** (1 / 3)))
        width = ((count or 0.0) / (12 * layers)) ** 0.5
        step = 512 if width > 2048 else 128  # heads that plain tensor degrees divide
        hidden = max(128, round(width / step) * step)
    layers = layers or max(2, round((count or 0.0) / (12 * hidden**2)))
    heads = sizes["n_heads"] or max(1, hidden // (64 if hidden <= 1024 else 128))
    if hidden % heads:
        heads = next(n for n in range(heads, 0, -1) if hidden % n == 0)
    usual = {
        "n_layers": layers,
        "hidden": hidden,
        "ffn_hidden": 4 * hidden if not gated else 128 * round(8 * hidden / 3 / 128),
        "n_heads": heads,
        "n_kv_heads": heads,
        "vocab": _USUAL_VOCAB,
    }
    listed = ", ".join(f"{column} {usual[column]}" for column in blank)
    return usual | {column: value for column, value in sizes.items() if value is not None}, (
        f"{stated} is not in the catalog; read as a decoder of usual proportions: {listed}",
    )


def _named_size(stated: str) -> float | None:
    """Return the parameters that a name says: 8b, 1.3 B, 350m."""
    named = re.search(r"(\d+(?:\.\d+)?) ?([mbt])\b", stated.lower())
    return float(named[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[named[2]] if named else None
