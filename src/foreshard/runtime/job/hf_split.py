"""Splits a language model of transformers into layers: embedding, blocks, head.

A block runs inside the model's own code (masks, rotary embeddings, sliding windows): in a copy of the inner
model that holds only this block. One after another the layers compute exactly what the whole model computes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.runtime.job.hf_tensor import plan_of_block
from foreshard.runtime.tensor.sequence import SequenceLayer, on_part
from foreshard.runtime.tensor.split import TensorPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Attribute names of the parts in models of one kind.

    `inner` is the model without its head. In it `words` is the token embedding, to which that of positions
    (`places`) is added, and `drop` the dropout after both.
    """

    inner: str
    words: str
    blocks: str
    norm: str
    places: str | None = None
    drop: str | None = None
    rotary: str | None = None
    head: str = "lm_head"

    def parts(self) -> set[str]:
        """Return the names of all parts of the inner model."""
        names = (self.words, self.blocks, self.norm, self.places, self.drop, self.rotary)
        return {name for name in names if name is not None}


_LLAMA = _Family(inner="model", words="embed_tokens", blocks="layers", norm="norm", rotary="rotary_emb")
_LIKE_LLAMA = ("mistral", "qwen2", "qwen3", "phi3", "olmo", "olmo2", "olmo3", "smollm3", "stablelm", "glm")
_FAMILIES = {
    **dict.fromkeys(("llama", *_LIKE_LLAMA), _LLAMA),
    "gpt2": _Family(inner="transformer", words="wte", places="wpe", drop="drop", blocks="h", norm="ln_f"),
    "gpt_neox": _Family(
        inner="gpt_neox",
        words="embed_in",
        drop="emb_dropout",
        blocks="layers",
        norm="final_layer_norm",
        rotary="rotary_emb",
    ),
}
KNOWN = tuple(sorted(_FAMILIES))
"""Model types that can be split."""


def split(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a causal language model of transformers: embedding, one per block, head.

    The first layer takes token ids, or ids and an attention mask of shape (samples, tokens); a mask passes
    through all layers. The last layer gives logits. Parameters are the model's own, tied ones too. Models of
    unknown types, or with parts that are not those of their type, are refused.
    """
    family = _family(model)
    inner = getattr(model, family.inner)
    blocks = getattr(inner, family.blocks)
    return [
        EmbeddingLayer(inner, family),
        *[BlockLayer(inner, family, number) for number in range(len(blocks))],
        HeadLayer(getattr(inner, family.norm), getattr(model, family.head)),
    ]


class EmbeddingLayer(SequenceLayer):
    """Token and position embeddings."""

    def __init__(self, inner: nn.Module, family: _Family):
        super().__init__()
        self.tensor_plan = TensorPlan(roles={"words": "words"}, draws_by_head=True)
        self.words = getattr(inner, family.words)
        self.places = getattr(inner, family.places) if family.places else None
        self.drop = getattr(inner, family.drop) if family.drop else None

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        """Return the vectors, and the mask if there is one."""
        lo, hi = (0, ids.shape[1]) if self.parts is None else self.parts.sequence_span(ids.shape[1])
        # a vocabulary cut over ranks needs all tokens on each; its sum scatters the sequence
        hidden = self.words(ids[:, lo:hi] if isinstance(self.words, nn.Embedding) else ids)
        if self.places is not None:
            hidden = hidden + self.places(torch.arange(lo, hi, device=ids.device).unsqueeze(0))
        if self.drop is not None:
            hidden = self.drop(hidden)
        return hidden if mask is None else (hidden, mask)


class BlockLayer(SequenceLayer):
    """One block of the model, inside the model's own code."""

    def __init__(self, inner: nn.Module, family: _Family, number: int):
        super().__init__()
        self.block = getattr(inner, family.blocks)[number]
        self.rotary = copy.deepcopy(getattr(inner, family.rotary)) if family.rotary else None
        config: Any = inner.config
        self.tensor_plan = plan_of_block(config.model_type, config)
        # not registered as a submodule: its parts are, under names that do not depend on the model's type
        self.__dict__["_around"] = _around(inner, family, number, self.block, self.rotary)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        """Return the vectors after the block, and the mask if there is one."""
        around = self.__dict__["_around"]
        if self.parts is None:
            hidden = around(inputs_embeds=hidden, attention_mask=mask, use_cache=False)[0]
        else:
            with on_part(self.block, self._products(), hidden, self.parts) as (placeholder, made):
                around(inputs_embeds=placeholder, attention_mask=mask, use_cache=False)
            (hidden,) = made
        return hidden if mask is None else (hidden, mask)

    def _products(self) -> list[nn.Module]:
        """Return the modules of the block that begin with cut products."""
        names = [name for name, role in self.tensor_plan.roles.items() if role.startswith("column")]
        return [self.get_submodule(owner) for owner in {name.rpartition(".")[0]: 0 for name in names}]


class HeadLayer(SequenceLayer):
    """Final norm and logits."""

    def __init__(self, norm: nn.Module, scores: nn.Module):
        super().__init__()
        self.tensor_plan = TensorPlan(roles={"scores": "gather"}, draws_by_head=True)
        self.norm, self.scores = norm, scores

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits."""
        hidden = self.norm(hidden)
        if self.parts is None:
            return self.scores(hidden)  # type: ignore[no-any-return]
        if isinstance(self.scores, nn.Linear):
            return self.parts.gather_sequence(self.scores(hidden))
        return self.scores(self.parts.gather_for_products(hidden))  # type: ignore[no-any-return]


class _NoPositions(nn.Module):
    """Replaces a position embedding that was already added."""

    def forward(self, places: Tensor) -> Tensor:
        return torch.zeros((), device=places.device, dtype=torch.int64)


def _around(
    inner: nn.Module, family: _Family, number: int, block: nn.Module, rotary: nn.Module | None
) -> nn.Module:
    """Return the inner model with one block, and identities before and after it."""
    around = copy.copy(inner)
    around._modules = dict(inner._modules)
    around._modules[family.words] = nn.Identity()
    around._modules[family.norm] = nn.Identity()
    around._modules[family.blocks] = nn.ModuleList([block])
    if family.places:
        around._modules[family.places] = _NoPositions()
    if family.drop:
        around._modules[family.drop] = nn.Identity()
    if family.rotary:
        around._modules[family.rotary] = rotary
    config: Any = copy.deepcopy(inner.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number]]
    around.config = config
    return around


def _family(model: nn.Module) -> _Family:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _FAMILIES:
        what = f"a model of type {kind}" if kind else f"a {type(model).__name__} that is no nn.Sequential"
        raise SpecError(
            f"{what} cannot be split by itself",
            key="model",
            value=kind,
            rule=f"Types of transformers that are known: {', '.join(KNOWN)}",
            fix="Return a list of layers or an nn.Sequential from model()",
        )
    family = _FAMILIES[kind]
    _check_parts(model, {family.inner, family.head}, kind)
    _check_parts(getattr(model, family.inner), family.parts(), kind)
    _check_config(model.config, kind)
    return family


def _check_parts(module: nn.Module, expected: set[str], kind: str) -> None:
    """Refuse parts that no layer would hold, and missing parts."""
    odd = sorted(set(module._modules) ^ expected)
    if odd:
        raise SpecError(
            f"{type(module).__name__} has other parts than a {kind} with a language head: {', '.join(odd)}",
            key="model",
            value=kind,
            rule=f"It holds {', '.join(sorted(expected))}",
            fix="Use the model's class for causal language modelling, without adapters",
        )


def _check_config(config: Any, kind: str) -> None:
    if getattr(config, "add_cross_attention", False):
        raise SpecError(
            "a model with cross attention cannot be split",
            key="add_cross_attention",
            value=True,
            rule=f"Blocks of a {kind} take one sequence",
        )
    drops = max(getattr(config, name, 0.0) or 0.0 for name in ("attention_dropout", "attn_pdrop"))
    used = getattr(config, "_attn_implementation", None) or "eager"
    if drops > 0 and used not in ("eager", "sdpa"):
        raise SpecError(
            f"dropout of attention under {used} is not drawn by sample",
            key="model.config",
            value=used,
            rule="Known implementations of attention with dropout: eager, sdpa",
            fix="Set attention dropout to 0 or attn_implementation='sdpa'",
        )
