"""The model of one row of a table of measurements, from its name, its dimensions and its notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from foreshard.catalog.model_dims import DEFAULT_SEQ_LEN, model_from_dims
from foreshard.catalog.model_names import find_model
from foreshard.errors import SpecError
from foreshard.spec.model import Block, Model, lora

DIMENSIONS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab")
ROW_SOURCE = "dimensions in the row"
LORA_RANK = 16  # MLPerf llama2_70b_lora reference and Megatron-Bridge llama3_70b_peft_config
LORA_TARGETS = ("q", "k", "v", "o")  # MLPerf reference
BRIDGE_LORA_TARGETS = ("q", "k", "v")  # Megatron-Bridge v0.5.0 scripts/performance llama3_llm_finetune.py


def resolve_row_model(row: Mapping[str, str]) -> Model:
    """Return the model of a table row.

    The catalog answers when it knows the name and agrees with every dimension the row states; fewer layers
    make a slice of it. Otherwise the model is built from the row's dimensions, blank ones as the catalog has
    them; a name that says only a size stands for a decoder of usual proportions.

    Parameters
    ----------
    row : mapping
        Columns model, n_layers, hidden, ffn_hidden, n_heads, n_kv_heads, vocab, seq_len, n_experts, topk,
        gated_mlp, notes, in_other; blank where the source is silent.

    Raises
    ------
    SpecError
        If the model is not modelled, or neither the catalog nor the row gives its dimensions.
    """
    stated = row.get("model", "").strip()
    known = find_model(stated) or find_model(_plain_name(stated)) or _spelled(stated)
    notes = f"{row.get('notes', '')} {row.get('in_other', '')}"
    seq_len = _whole(row, "seq_len") or 0
    if known is not None and _agrees(known, row):
        model = _sliced(known, _whole(row, "n_layers") or known.num_layers, notes)
        model = _with_positions(model, seq_len or model.max_seq_len)
    else:
        model = _from_columns(row, stated, seq_len, known)
    model = _with_next_token(model, stated, notes)
    if not _is_lora(stated, notes):
        return model
    targets = BRIDGE_LORA_TARGETS if "Megatron-Bridge" in row.get("framework", "") else LORA_TARGETS
    return lora(model, _lora_rank(stated), targets)


def _plain_name(stated: str) -> str:
    """Return the name without remarks in brackets, adapters and cuts."""
    plain = re.sub(r"\([^)]*\)", "", stated)
    return re.sub(r"\bLoRA\b.*", "", plain, flags=re.IGNORECASE).strip()


_PUBLISHERS = "meta|nvidia|google|mistralai|openai|deepseek-ai|databricks|tiiuae|microsoft"
_VARIANTS = (
    "hf|instruct|chat|base|it|pt|pretrain|pretraining|pre-training|training|sft|finetune|finetuning|"
    "fine-tuning|text|model|full|dense|v0\\.[1-9]"
)


def _spelled(stated: str) -> Model | None:
    """Return the catalog model of a name with its publisher, its variant or its size in brackets."""
    bare = stated.rpartition("/")[2].strip().lower()
    opened = re.sub(r"[()\[\]]", " ", bare)
    for text in (bare, _plain_name(bare), opened):
        words = re.split(r"[\s_-]+", text.strip())
        while len(words) > 1 and re.fullmatch(_PUBLISHERS, words[0]):
            words = words[1:]
        while len(words) > 1 and re.fullmatch(_VARIANTS, words[-1]):
            words = words[:-1]
        found = find_model("-".join(words))
        if found is not None:
            return found
    return None


def _whole(row: Mapping[str, str], column: str) -> int | None:
    """Return a whole number, or None where the cell is blank."""
    cell = (row.get(column) or "").strip()
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e9 or value != int(value):
        raise SpecError(
            f"{cell[:40]!r} is no dimension",
            file=row.get("id"),
            key=column,
            value=cell[:40],
            rule="Whole, positive",
        )
    return int(value)


def _agrees(model: Model, row: Mapping[str, str]) -> bool:
    """Whether the row states nothing else than the catalog, up to leaving layers out."""
    _, inner = _last_of_each(model)
    wanted = _of_model(model) | {"n_experts": inner.num_experts or None, "topk": inner.top_k or None}
    wanted.pop("n_layers")
    same = all((stated := _whole(row, column)) is None or stated == wanted[column] for column in wanted)
    return same and (_whole(row, "n_layers") or 1) <= model.num_layers


def _sliced(model: Model, num_layers: int, notes: str) -> Model:
    """Return the model cut to `num_layers`, with as many leading dense layers as the notes say."""
    if num_layers == model.num_layers:
        return model
    dense = sum(block.num_experts == 0 for block in model.blocks[:num_layers])
    said = re.search(r"(\d+) dense layer", notes)
    if said and model.blocks[-1].num_experts:
        dense = min(int(said.group(1)), dense)
    leading = model.blocks[:dense] if model.blocks[-1].num_experts else ()
    rest = num_layers - len(leading)
    tail = model.blocks[-rest:] if rest else ()
    return replace(
        model,
        name=f"{model.name} ({num_layers} layers)",
        blocks=leading + tail,
        num_next_token=0,
        assumptions=(*model.assumptions, f"{num_layers} of {model.num_layers} layers"),
    )


def _with_positions(model: Model, seq_len: int) -> Model:
    """Return the model for this sequence; a table of learned positions has one row per position."""
    if not model.learned_positions or model.learned_positions >= seq_len:
        return replace(model, max_seq_len=seq_len)
    more = (seq_len - model.learned_positions) * model.hidden
    return replace(
        model,
        max_seq_len=seq_len,
        learned_positions=seq_len,
        embedding_params=model.embedding_params + more,
    )


def _from_columns(row: Mapping[str, str], stated: str, seq_len: int, known: Model | None = None) -> Model:
    sizes = {column: _whole(row, column) for column in DIMENSIONS}
    blank = [column for column, value in sizes.items() if value is None]
    if known is not None and any(block.scan_state for block in known.blocks):
        raise SpecError(
            f"{stated!r} is a hybrid with other dimensions in the catalog",
            file=row.get("id"),
            key="model",
            value=stated,
            rule="Dimensions alone do not make a hybrid",
        )
    if blank == ["n_kv_heads"] and known is None:
        sizes["n_kv_heads"] = sizes["n_heads"]
        blank = []
    gated = {"true": True, "false": False}.get(row.get("gated_mlp", "").strip().lower())
    notes: tuple[str, ...] = ()
    if blank and known is not None:
        gated = known.blocks[-1].gated if gated is None else gated
        notes = (f"{', '.join(blank)} not stated: those of {known.name}",)
        sizes = _of_model(known) | {column: value for column, value in sizes.items() if value is not None}
    elif blank:
        sizes, notes = _usual(sizes, stated, gated, row)
    if gated is None:
        gated = int(sizes["ffn_hidden"] or 0) != 4 * int(sizes["hidden"] or 0)
        notes = (*notes, f"kind of MLP not stated: {'gated' if gated else 'plain'}, after its width")
    said_head = re.search(r"\bhead_dim (\d+)(?!/)\b", row.get("notes", ""))
    head_dim = int(said_head.group(1)) if said_head else None
    n_layers, hidden, ffn, n_heads, n_kv_heads, vocab = (int(sizes[column] or 0) for column in DIMENSIONS)
    if head_dim is None and known is not None and hidden == known.hidden:
        block = known.blocks[-1]
        head_dim = block.head_dim if n_heads == block.num_heads and not block.kv_lora else None
    experts = _whole(row, "n_experts") or (known.blocks[-1].num_experts if known is not None else 0)
    top_k = _whole(row, "topk") or (known.blocks[-1].top_k if known is not None else min(experts, 2))
    return model_from_dims(
        stated, n_layers, hidden, ffn, n_heads, n_kv_heads, vocab,
        gated=gated,
        n_experts=experts,
        topk=min(top_k, experts),
        head_dim=head_dim,
        source=ROW_SOURCE,
        assumptions=(*notes, "norms, biases and tying follow from the kind of MLP"),
        seq_len=seq_len or DEFAULT_SEQ_LEN,
    )  # fmt: skip


def _of_model(known: Model) -> dict[str, int | None]:
    """Return the dimensions of a catalog model, by column."""
    block, inner = _last_of_each(known)
    return {
        "n_layers": known.num_layers,
        "hidden": known.hidden,
        "ffn_hidden": inner.expert_ffn or inner.ffn,
        "n_heads": block.num_heads,
        "n_kv_heads": block.num_kv_heads,
        "vocab": known.vocab,
    }


def _last_of_each(model: Model) -> tuple[Block, Block]:
    """Return the last block with attention and the last with an MLP or experts: one block but in hybrids."""
    attention = next(block for block in reversed(model.blocks) if block.num_heads)
    inner = next(b for b in reversed(model.blocks) if (b.ffn or b.num_experts) and not b.scan_state)
    return attention, inner


def _usual(
    sizes: dict[str, int | None], stated: str, gated: bool | None, row: Mapping[str, str]
) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Return the dimensions of a decoder of usual proportions: stated ones, else after layers or size.

    GPT-3's proportions (arXiv 2005.14165, table 2.1): hidden = 128 layers, heads of 128, 12 L h^2 parameters;
    a gated MLP of three matrices has 8/3 of the width instead of 4.
    """
    named = re.search(r"(\d+(?:\.\d+)?) ?([mbt])\b", stated.lower())
    hidden, layers = sizes["hidden"], sizes["n_layers"]
    if not (hidden and layers) and (named is None or _whole(row, "n_experts")):
        missing = ", ".join(column for column, value in sizes.items() if value is None)
        raise SpecError(
            f"{stated!r} is not in the catalog with these dimensions and the row leaves some blank",
            file=row.get("id"),
            key=next(column for column, value in sizes.items() if value is None),
            value="",
            rule=f"Blank: {missing}",
        )
    if not hidden:
        count = float(named[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[named[2]]  # type: ignore[index]
        layers = layers or max(2, round((count / (12 * 128**2)) ** (1 / 3)))
        width = (count / (12 * layers)) ** 0.5
        step = 512 if width > 2048 else 128  # heads that plain tensor degrees divide
        hidden = max(128, round(width / step) * step)
    elif not layers:
        count = float(named[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[named[2]]  # type: ignore[index]
        layers = max(2, round(count / (12 * hidden**2)))
    width = 64 if hidden <= 1024 else 128
    heads = sizes["n_heads"] or max(1, hidden // width)
    if hidden % heads:
        heads = next(n for n in range(heads, 0, -1) if hidden % n == 0)
    filled = {
        "n_layers": layers,
        "hidden": hidden,
        "ffn_hidden": 4 * hidden if not gated else 128 * round(8 * hidden / 3 / 128),
        "n_heads": heads,
        "n_kv_heads": heads,
        "vocab": 51200,
    }
    blank = [column for column, value in sizes.items() if value is None]
    listed = ", ".join(f"{column} {filled[column]}" for column in blank)
    return filled | {column: value for column, value in sizes.items() if value is not None}, (
        f"{stated} is not in the catalog; read as a decoder of usual proportions: {listed}",
    )


def _with_next_token(model: Model, stated: str, notes: str) -> Model:
    """Return the model with the next-token modules the row states, else those its configuration trains."""
    said = re.search(r"mtp_num_layers=(\d+)", notes)
    if "w/o MTP" in stated:
        return replace(model, num_next_token=0)
    return replace(model, num_next_token=int(said.group(1))) if said else model


def _is_lora(stated: str, notes: str) -> bool:
    return (
        bool(re.search(r"\blora\b", stated, re.IGNORECASE))
        or notes.lstrip().startswith("LoRA")
        or "; LoRA" in notes
    )


def _lora_rank(stated: str) -> int:
    said = re.search(r"\br(\d+)\b", stated)
    return int(said.group(1)) if said else LORA_RANK
