"""The model of one row of a table of measurements, from its name, its dimensions and its notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from foreshard.catalog.models import find_model
from foreshard.spec.model import Model, lora
from foreshard.validation.facts import integer
from foreshard.validation.row_dimensions import dimensions_of, last_of_each, model_of_columns

LORA_RANK = 16  # MLPerf llama2_70b_lora reference and Megatron-Bridge llama3_70b_peft_config
LORA_TARGETS = ("q", "k", "v", "o")  # MLPerf reference
BRIDGE_LORA_TARGETS = ("q", "k", "v")  # Megatron-Bridge v0.5.0 scripts/performance llama3_llm_finetune.py


def resolve_row_model(row: Mapping[str, str]) -> Model:
    """Return the model of a table row.

    The catalog answers when it knows the name and agrees with every dimension the row states; fewer layers
    make a slice of it. Otherwise the model is built from the row's dimensions, blank ones as the catalog has
    them; a name that says only a size stands for a decoder of usual proportions.
    """
    stated = row.get("model", "").strip()
    known = find_model(stated) or find_model(_plain_name(stated)) or _spelled(stated)
    notes = f"{row.get('notes', '')} {row.get('in_other', '')}"
    seq_len = integer(row, "seq_len") or 0
    if known is not None and _agrees(known, row):
        model = _sliced(known, integer(row, "n_layers") or known.num_layers, notes)
        model = _with_positions(model, seq_len or model.max_seq_len)
    else:
        model = model_of_columns(row, stated, seq_len, known)
    model = _with_next_token(model, stated, notes)
    if not _is_lora(stated, notes):
        return model
    targets = BRIDGE_LORA_TARGETS if "Megatron-Bridge" in row.get("framework", "") else LORA_TARGETS
    rank = re.search(r"\br(\d+)\b", stated)
    return lora(model, int(rank[1]) if rank else LORA_RANK, targets)


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


def _agrees(model: Model, row: Mapping[str, str]) -> bool:
    """Whether the row states nothing else than the catalog, up to leaving layers out."""
    _, inner = last_of_each(model)
    wanted = dimensions_of(model) | {"n_experts": inner.num_experts or None, "topk": inner.top_k or None}
    wanted.pop("n_layers")
    same = all((stated := integer(row, column)) is None or stated == wanted[column] for column in wanted)
    return same and (integer(row, "n_layers") or 1) <= model.num_layers


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
        model, max_seq_len=seq_len, learned_positions=seq_len, embedding_params=model.embedding_params + more
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
