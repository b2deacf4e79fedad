"""Adapters on a model, as a flag or a plan file states them: RANK[:TARGET(+TARGET)*]."""

from __future__ import annotations

import re

from foreshard.errors import SpecError
from foreshard.spec.codec import invalid
from foreshard.spec.model import LORA_TARGETS, Model, lora

_TARGETS = ("q", "k", "v", "o")
_MLP = ("gate", "up", "down")
_GROUPS = {
    **dict.fromkeys(("attn", "attention", "qkvo"), _TARGETS),
    "qkv": ("q", "k", "v"),
    **dict.fromkeys(("mlp", "ffn"), _MLP),
    **dict.fromkeys(("all", "all-linear", "all_linear", "linear"), (*_TARGETS, *_MLP)),
}
"""Words of other tools for several products."""


def adapters_of(text: str, *, key: str = "--lora", file: str | None = None) -> tuple[int, tuple[str, ...]]:
    """Return the rank and the targets that a text describes, each target once.

    Examples
    --------
    >>> adapters_of("16"), adapters_of("r=8:q_proj,v_proj")
    ((16, ('q', 'k', 'v', 'o')), (8, ('q', 'v')))

    Raises
    ------
    SpecError
    """
    if not isinstance(text, str):
        raise invalid(text, "Must be RANK[:TARGETS]", key=key, file=file, fix="Write it like 16 or 16:q+v")
    rank, colon, names = text.strip().lower().partition(":")
    rank = re.sub(r"^(?:rank|r)\s*=?\s*", "", rank)
    named = [word.strip().removesuffix("_proj") for word in re.split(r"[+,]", names)] if colon else _TARGETS
    targets = [target for word in named for target in _GROUPS.get(word, (word,))]
    wrong = [name for name in targets if name not in LORA_TARGETS]
    if wrong or not (rank.isascii() and rank.isdecimal() and 1 <= int(rank[:9]) <= 65536):
        what = f"unknown target {wrong[0][:40]!r}" if wrong else f"{rank[:40]!r} is not a rank"
        rule = f"RANK[:TARGETS], a rank from 1 and targets among {', '.join(LORA_TARGETS)} joined by '+'"
        fix = "Write it like 16 or 16:q+v"
        raise SpecError(what, file=file, key=key, value=text[:80], rule=rule, fix=fix)
    return int(rank), tuple(dict.fromkeys(targets))


def with_adapters(model: Model, text: str, *, key: str = "--lora", file: str | None = None) -> Model:
    """Return the model with the low-rank adapters that a text describes; its own weights are frozen.

    Raises
    ------
    SpecError
        For a text that is no rank with targets, and for a model that has no such products.
    """
    rank, targets = adapters_of(text, key=key, file=file)
    try:
        return lora(model, rank, targets)
    except SpecError as error:
        error.file, error.key, error.value = file, key, text[:80]
        error.fix = error.fix or f"Leave out {key}"
        raise
