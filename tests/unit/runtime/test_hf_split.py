"""A split model of transformers computes what the whole model computes: scores to the last bit, gradients."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from foreshard.errors import SpecError
from foreshard.runtime.engine.randomness import sample_randomness
from foreshard.runtime.job.hf_split import split
from foreshard.runtime.job.layer_builders import tied_parameters

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = (
    "gemma2",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "stablelm",
)
"""One of each structure; `scripts/split_transformers.py` tries all types that transformers has."""
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {**SMALL, "sliding_window": 5, "head_dim": 8},
    "qwen2": {**SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 2.0},
    "granite": {**SMALL, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}
IDS = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(3, 11, dtype=torch.int64)
PADDED[1, 8:], PADDED[2, :3] = 0, 0
RIGHT = torch.ones(3, 11, dtype=torch.int64)
RIGHT[1, 8:] = 0  # some code gives NaN for tokens that see none


def made(kind: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **{**MORE.get(kind, SMALL), **changes})
    torch.manual_seed(0)
    # experts in one product have no double precision
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.double().train()


def through(layers: list, *values: Any) -> Any:
    for layer in layers:
        values = layer(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values[0]


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole lines", "padded lines"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_what_the_model_computes(kind: str, mask: Any) -> None:
    model = made(kind)
    mask = RIGHT if kind == "gemma2" and mask is not None else mask
    layers = [copy.deepcopy(layer) for layer in split(model)]
    assert len(layers) == 6
    scores = model(input_ids=IDS, attention_mask=mask, use_cache=False).logits
    found = through(layers, IDS) if mask is None else through(layers, IDS, mask)
    assert torch.equal(found, scores)
    (scores * IDS.unsqueeze(-1)).sum().backward()
    (found * IDS.unsqueeze(-1)).sum().backward()
    found_grads: dict[int, Any] = {}
    for layer, origin in zip(layers, split(model), strict=True):
        for own, theirs in zip(layer.parameters(), origin.parameters(), strict=True):
            found_grads[id(theirs)] = found_grads.get(id(theirs), 0.0) + own.grad
    for parameter in model.parameters():
        assert torch.allclose(found_grads[id(parameter)], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_a_layer_once(kind: str) -> None:
    model = made(kind)
    held = [id(p) for layer in split(model) for p in layer.parameters()]
    tied = sum(len(group) - 1 for group in tied_parameters(split(model)))
    assert set(held) == {id(p) for p in model.parameters()}
    assert len(held) == len(set(held)) + tied


def test_tied_words_and_scores_are_told() -> None:
    tied = split(made("llama", tie_word_embeddings=True))
    assert tied_parameters(tied) == (((0, "words.weight"), (5, "scores.weight")),)
    assert tied_parameters(split(made("llama", tie_word_embeddings=False))) == ()


def test_a_copy_shares_nothing_with_the_model() -> None:
    model = made("llama")
    layers = [copy.deepcopy(layer) for layer in split(model)]
    before = through(layers, IDS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(through(layers, IDS), before)


def test_a_layer_moves_with_everything_it_needs() -> None:
    """Rotary frequencies are buffers of the block: a change of precision reaches them."""
    model = made("llama").float()
    block = copy.deepcopy(split(model)[1])
    assert "fixed.rotary_emb.inv_freq" in dict(block.named_buffers())
    assert through([layer.float() for layer in split(model)], IDS).dtype is torch.float32


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_dropout_belongs_to_the_sample(kind: str) -> None:
    drops = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "llama": ("attention_dropout",),
        "gpt_neox": ("attention_dropout", "hidden_dropout"),
    }[kind]
    layers = split(made(kind, **dict.fromkeys(drops, 0.3)))

    def run(rows: list[int]) -> Any:
        values = IDS[rows]
        for number, layer in enumerate(layers):
            with sample_randomness(seed=0, step=0, layer=number, positions=rows):
                values = layer(values)
        return values

    whole = run([0, 1, 2])
    assert torch.allclose(whole, torch.cat([run([0, 1]), run([2])]), atol=1e-12)
    assert not torch.allclose(whole, through(split(made(kind)), IDS), atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_mode_of_every_part_of_the_model_stays(kind: str) -> None:
    """Also where some parts are frozen in eval and others train."""
    model = made(kind, **({"embd_pdrop": 0.5} if kind == "gpt2" else {})).eval()
    for mixed in (False, True):
        model.base_model.get_input_embeddings().train(mixed)
        before = {name: part.training for name, part in model.named_modules()}
        split(model)
        assert {name: part.training for name, part in model.named_modules()} == before


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "llama"])
def test_a_model_without_values_is_split_like_one_with_values(kind: str) -> None:
    """With `torch.device("meta")`, then filled layer by layer, it computes the same."""
    model = made(kind)
    with torch.device("meta"):
        empty = split(copy.deepcopy(model).to("meta"))
    full = split(model)
    assert [[*layer.state_dict()] for layer in empty] == [[*layer.state_dict()] for layer in full]
    assert all(parameter.is_meta for layer in empty for parameter in layer.parameters())
    for layer, source in zip(empty, full, strict=True):
        layer.to_empty(device="cpu").load_state_dict(source.state_dict())
        names = dict(layer.named_buffers())
        for name, buffer in source.named_buffers():
            names[name].copy_(buffer)  # of which some are not in the state
    assert torch.equal(through(empty, IDS), through(full, IDS))


def test_a_model_is_split_where_gradients_are_off() -> None:
    model = made("gpt2")
    with torch.no_grad():
        layers = split(model)
        assert torch.equal(through(layers, IDS), model(input_ids=IDS, use_cache=False).logits)
    with pytest.raises(SpecError, match="depend on more than the last block"), torch.no_grad():
        split(Stack("the first vectors are added at the end"))


@pytest.mark.parametrize("words", [1, 3, 4])
def test_a_model_of_few_words_is_split(words: int) -> None:
    model = made("llama", vocab_size=words, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    layers = split(model)
    assert layers[0].by_token
    assert torch.equal(through(layers, IDS % words), model(input_ids=IDS % words, use_cache=False).logits)


def test_what_is_not_known_is_refused_by_name() -> None:
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(SpecError, match=r"type bert cannot be split by itself: .*no head"):
        split(transformers.BertModel(config))


def test_other_parts_are_refused() -> None:
    """A head for classes, or an adapter, would be left out without a word."""
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    with pytest.raises(SpecError, match="no head"):
        split(transformers.LlamaForSequenceClassification(config))
    model = made("llama")
    model.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match="adapter"):
        split(model)
    model = made("llama")
    model.scorer = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match="other parts: scorer"):
        split(model)
    with pytest.raises(SpecError, match="cross attention"):
        split(made("gpt2", add_cross_attention=True))


def test_dropout_of_an_attention_that_draws_by_itself_is_refused() -> None:
    model = made("llama", attention_dropout=0.1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SpecError, match="flash_attention_2"):
        split(model)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, hidden_states: Any, *more: Any, **named: Any) -> Any:
        return hidden_states + self.mix(hidden_states)


class Inner(torch.nn.Module):
    """A stack of blocks with one oddity."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.words, self.norm = torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8)
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])
        self.odd = odd

    def forward(
        self,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
        use_cache: bool = False,
    ) -> Any:
        first = hidden = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        share: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            if self.odd == "a block is left out" and number == 1:
                continue
            if self.odd == "blocks share a table":
                before, hidden = hidden, layer(hidden, share)
            elif self.odd == "blocks need the first vectors":
                before, hidden = hidden, layer(hidden, first)
            elif self.odd == "blocks need the tokens":
                before, hidden = hidden, layer(hidden, input_ids)
            else:
                before, hidden = hidden, layer(hidden, attention_mask)
            if self.odd == "blocks are added":
                hidden = hidden + before
        return self.norm(hidden + first if self.odd == "the first vectors are added at the end" else hidden)


class Stack(torch.nn.Module):
    def __init__(self, odd: str) -> None:
        super().__init__()
        self.model, self.lm_head = Inner(odd), torch.nn.Linear(8, 16)
        self.config = SimpleNamespace(model_type="odd", num_hidden_layers=3, num_attention_heads=2)

    def get_input_embeddings(self) -> Any:
        return self.model.words

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, **given: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(**given)))


ODD = {
    "a block is left out": "2 of its 3 blocks are called",
    "blocks share a table": "share a dict",
    "blocks need the first vectors": "depends on parameters",
    "blocks need the tokens": "need the tokens",
    "blocks are added": "something else than what the one before it gives",
    "the first vectors are added at the end": "depend on more than the last block",
}


def test_any_plain_stack_is_split() -> None:
    model = Stack("")
    scores = model(input_ids=IDS % 16).logits
    assert torch.equal(through(split(model), IDS % 16), scores)


@pytest.mark.parametrize("odd", ODD)
def test_code_that_is_no_plain_stack_is_refused(odd: str) -> None:
    with pytest.raises(SpecError, match=f"cannot be split by itself: .*{ODD[odd]}"):
        split(Stack(odd))
