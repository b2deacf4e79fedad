"""Splits a language model of transformers into layers: embedding, blocks, head.

A layer runs inside the model's own code (masks, rotary embeddings, sliding windows, scales and caps): in a
shell of the model in which other parts do nothing. One after another the layers compute exactly what the
whole model computes. Which models are such is found by their structure, see `hf_structure`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.runtime.job.hf_structure import BlockStub, HeadStub, Parts, Unused, around, parts_of, tokens
from foreshard.runtime.job.hf_tensor import plan_of_block
from foreshard.runtime.tensor.sequence import SequenceLayer, gathering
from foreshard.runtime.tensor.split import TensorPlan

_PART = 2
"""Tokens of each part of a sequence on which layers are tried."""


def split(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a causal language model of transformers: embedding, one per block, head.

    The first layer takes token ids, or ids and an attention mask of shape (samples, tokens); a mask passes
    through all layers. The last layer gives logits. Parameters are the model's own, tied ones too. Models
    whose blocks are no plain stack are refused.
    """
    _check_config(getattr(model, "config", None))
    parts = parts_of(model)
    number = len(getattr(parts.inner(model), parts.blocks))
    blocks = [BlockLayer(model, parts, at) for at in range(number)]
    return [EmbeddingLayer(model, parts), *blocks, HeadLayer(model, parts)]


class _ModelLayer(SequenceLayer):
    """A layer that runs in a shell of the model: `own` are the names of its parts in it."""

    def __init__(self, model: nn.Module, parts: Parts, own: dict[str, str]):
        super().__init__()
        inner: Any = parts.inner(model)
        for name, attribute in own.items():
            setattr(self, attribute, getattr(inner, name))
        self.fixed = nn.ModuleDict({name: copy.deepcopy(getattr(inner, name)) for name in parts.fixed})
        stubs = [BlockStub(block, parts.in_tuple) for block in getattr(inner, parts.blocks)]
        # not registered as submodules: the layer's own parts are, under names of their own
        self.__dict__["_shell"] = around(model, parts, stubs, {}), parts, own

    def _run(
        self, at: int, call: Any, ids: Any = None, stream: Any = None, mask: Any = None, head: Any = None
    ) -> Any:
        """Run the model's code with a call in the place of block `at`; with a head, return the scores."""
        (whole, inner), parts, own = self.__dict__["_shell"]
        holding = inner._modules
        for name, attribute in own.items():
            holding[name] = getattr(self, attribute)  # of which tensor-parallel ranks hold parts
        holding.update(self.fixed.items())
        stub = holding[parts.blocks][at]
        whole.training = inner.training = self.training
        model = inner if head is None else whole
        if head is not None:
            whole._modules[parts.head] = head
        stub.call = call
        try:
            return model(input_ids=ids, inputs_embeds=stream, attention_mask=mask, use_cache=False)
        finally:
            stub.call = None
            holding.update(dict.fromkeys(own, _UNUSED))
            whole._modules[parts.head] = _UNUSED


_UNUSED = Unused()


class EmbeddingLayer(_ModelLayer):
    """Token and position embeddings, and what else comes before the blocks."""

    words: nn.Module
    places: nn.Module

    def __init__(self, model: nn.Module, parts: Parts):
        inner: Any = parts.inner(model)
        others = [name for name in parts.before if name != parts.words]
        places = [name for name in others if type(getattr(inner, name)) is nn.Embedding]
        own = {name: name for name in others} | {parts.words: "words"}
        if len(places) == 1:
            own[places[0]] = "places"
        super().__init__(model, parts, own)
        self.__dict__["_places"] = places[0] if len(places) == 1 else None
        plain = type(self.words) is nn.Embedding
        self.tensor_plan = TensorPlan(roles={"words": "words"} if plain else {}, draws_by_head=True)
        ids = tokens(self.words, (1, 2 * _PART))
        self.by_token = _is_by_token(
            self, lambda lo, hi: self._on_part(ids[:, lo:hi], lo, hi), lambda: self._through(ids=ids)
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        """Return the vectors, and the mask if there is one."""
        if self.parts is None:
            hidden = self._through(ids=ids, mask=mask)
        else:
            lo, hi = self.parts.sequence_span(ids.shape[1])
            # a vocabulary cut over ranks needs all tokens on each; its sum scatters the sequence
            hidden = self._on_part(ids[:, lo:hi] if isinstance(self.words, nn.Embedding) else ids, lo, hi)
        return hidden if mask is None else (hidden, mask)

    def _through(self, ids: Any = None, stream: Any = None, mask: Any = None) -> Tensor:
        """Return the input of the first block."""
        made: list[Tensor] = []

        def taken(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made.append(hidden)
            return hidden

        self._run(0, taken, ids, stream, mask)
        return made[0]

    def _on_part(self, ids: Tensor, lo: int, hi: int) -> Tensor:
        """Return the vectors of the tokens `lo` to `hi`."""
        hidden = self.words(ids)
        if self.__dict__["_places"] is not None:
            hidden = hidden + self.places(torch.arange(lo, hi, device=ids.device).unsqueeze(0))
        shells, parts, own = self.__dict__["_shell"]
        done = (parts.words, self.__dict__["_places"])
        left = {name: attribute for name, attribute in own.items() if name not in done}
        self.__dict__["_shell"] = shells, parts, left
        try:
            return self._through(stream=hidden)
        finally:
            self.__dict__["_shell"] = shells, parts, own


class BlockLayer(_ModelLayer):
    """One block of the model, inside the model's own code."""

    def __init__(self, model: nn.Module, parts: Parts, number: int):
        super().__init__(model, parts, {})
        self.block = getattr(parts.inner(model), parts.blocks)[number]
        self.number = number
        self.tensor_plan = plan_of_block(self.block, model.config)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        """Return the vectors after the block, and the mask if there is one."""
        made: list[Tensor] = []
        ranks = self.parts
        samples, length, channels = hidden.shape
        length *= 1 if ranks is None else ranks.degree
        # the code around sees the whole length, without data
        placeholder = hidden.detach().new_zeros(()).expand(samples, length, channels)

        def run(stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = self.block(hidden, *args, **kwargs)
            made.append(output[0] if isinstance(output, tuple) else output)
            return stream

        with gathering(self._products() if ranks is not None else (), ranks):
            self._run(self.number, run, stream=placeholder, mask=mask)
        return made[0] if mask is None else (made[0], mask)

    def _products(self) -> list[nn.Module]:
        """Return the modules of the block that begin with cut products."""
        names = [name for name, role in self.tensor_plan.roles.items() if role.startswith("column")]
        return [self.get_submodule(owner) for owner in {name.rpartition(".")[0]: 0 for name in names}]


class HeadLayer(_ModelLayer):
    """Final norm and logits, and what else comes after the blocks."""

    def __init__(self, model: nn.Module, parts: Parts):
        own = {name: name for name in parts.after}
        super().__init__(model, parts, {parts.after[0]: "norm"} if len(parts.after) == 1 else own)
        self.scores = getattr(model, parts.head)
        self.last = len(getattr(parts.inner(model), parts.blocks)) - 1
        plain = type(self.scores) is nn.Linear
        self.tensor_plan = TensorPlan(roles={"scores": "gather"} if plain else {}, draws_by_head=True)
        weight = next(self.scores.parameters())
        hidden = torch.linspace(-1, 1, 2 * _PART * parts.channels, device=weight.device, dtype=weight.dtype)
        hidden = hidden.reshape(1, 2 * _PART, parts.channels)
        self.by_token = _is_by_token(self, lambda lo, hi: self(hidden[:, lo:hi]), lambda: self(hidden))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits."""
        ranks = self.parts

        def scores(given: Tensor) -> Tensor:
            if ranks is None:
                return self.scores(given)  # type: ignore[no-any-return]
            if isinstance(self.scores, nn.Linear):
                return ranks.gather_sequence(self.scores(given))
            return self.scores(ranks.gather_for_products(given))  # type: ignore[no-any-return]

        placeholder = hidden.detach().new_zeros(()).expand(hidden.shape)
        found = self._run(
            self.last, lambda *args, **kwargs: hidden, stream=placeholder, head=HeadStub(self.scores, scores)
        )
        return found.logits  # type: ignore[no-any-return]


def _is_by_token(
    layer: nn.Module, on_part: Callable[[int, int], Tensor], whole: Callable[[], Tensor]
) -> bool:
    """Return whether two parts of a short sequence give the parts of what the whole gives.

    Of a layer without values (on the meta device) that is not known: it takes whole sequences.
    """
    if any(parameter.is_meta for parameter in layer.parameters()):
        return False
    was = {part: part.training for part in layer.modules()}  # parts may differ: they are the model's own
    layer.eval()
    try:
        with torch.no_grad():
            halves = [on_part(0, _PART), on_part(_PART, 2 * _PART)]
            return torch.allclose(torch.cat(halves, 1), whole(), rtol=1e-2, atol=1e-3)  # of any precision
    except (RuntimeError, TypeError, ValueError):  # its code needs whole sequences
        return False
    finally:
        for part, training in was.items():
            part.training = training


def _check_config(config: Any) -> None:
    if config is None:
        return
    if getattr(config, "add_cross_attention", False):
        what, rule = "a model with cross attention cannot be split", "Its blocks take one sequence"
        raise SpecError(what, key="add_cross_attention", value=True, rule=rule)
    if getattr(config, "layerdrop", 0.0):
        raise SpecError(
            "a model that leaves out whole blocks at random cannot be split",
            key="layerdrop",
            value=config.layerdrop,
            rule="Every rank runs its blocks in every step",
            fix="Set layerdrop to 0",
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
