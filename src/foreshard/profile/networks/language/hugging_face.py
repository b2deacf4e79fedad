"""Networks of words that NeuSight times, as Hugging Face's transformers make them, with eager attention.

Source
------
sitar-lab/NeuSight, neusight/Tracing/trace.py and its model configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from foreshard.errors import ExtraMissingError, SpecError
from foreshard.spec.traced_module import TracedModule

# GPT-3 XL has 24 heads of 128 (Brown et al. 2020, table 2.1), in Hugging Face's GPT-2 a width of 3,072. The
# 2,048 of that table does not divide by 24, and has half the FLOPs that the measured time implies.
_GPT2: Mapping[str, dict[str, Any]] = {
    "gpt2_large": {"n_embd": 1280, "n_head": 20, "n_layer": 36, "n_positions": 1024},
    "gpt3_xl": {"n_embd": 3072, "n_head": 24, "n_layer": 24, "n_positions": 2048},
    "gpt3_27": {"n_embd": 2560, "n_head": 32, "n_layer": 32, "n_positions": 2048},
}
DEPTHS: dict[str, int] = {"bert_large": 24, "opt_13": 24} | {
    name: sizes["n_layer"] for name, sizes in _GPT2.items()
}
"""Layers of each network."""
_MOST_WORDS = 1_000_000  # of a text


def hugging_face_network(
    name: str, *, training: bool, layers: int | None = None, dropped: float = 0.1
) -> Any:
    """Return a network on the meta device.

    Parameters
    ----------
    name : str
        Of `DEPTHS`.
    training : bool
        Whether a head for its training is on it, where there are two.
    layers : int, optional
        In place of its own.
    dropped : float
        Share of values that a training drops.
    """
    import torch

    hf: Any = import_module("transformers")

    depth = DEPTHS[name] if layers is None else layers
    sizes: dict[str, Any]
    drops: dict[str, Any]
    config: Any
    with torch.device("meta"):
        if name == "bert_large":
            sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
            drops = {"hidden_dropout_prob": dropped, "attention_probs_dropout_prob": dropped}
            config = hf.BertConfig(**sizes, **drops, num_hidden_layers=depth, attn_implementation="eager")
            return hf.BertForPreTraining(config) if training else hf.BertForSequenceClassification(config)
        if name == "opt_13":
            sizes = {"hidden_size": 2048, "num_attention_heads": 32, "ffn_dim": 8192}
            config = hf.OPTConfig(
                **sizes, num_hidden_layers=depth, dropout=dropped, attn_implementation="eager"
            )
            return hf.OPTForCausalLM(config)
        sizes = _GPT2[name] | {"n_layer": depth}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropped)
        config = hf.GPT2Config(**sizes, **drops, attn_implementation="eager", use_cache=False)
        return hf.GPT2LMHeadModel(config)


def hugging_face_inputs(name: str, seq_len: int) -> dict[str, Any]:
    """Return one text, without values; a mask of scores keeps libraries from branching on one of tokens."""
    import torch

    if not 0 < seq_len <= _MOST_WORDS:
        rule = f"A text has 1 to {_MOST_WORDS:,} words"
        raise SpecError(f"a text of {seq_len} words", key="seq_len", value=seq_len, rule=rule)
    words = torch.empty((1, seq_len), dtype=torch.int64, device="meta")
    mask = torch.empty((1, 1, seq_len, seq_len), device="meta")
    inputs = {"input_ids": words, "attention_mask": mask}
    return inputs | ({"position_ids": words} if name == "opt_13" else {})


def logits_of(out: Any) -> Any:
    """Return what a network says of every word, or of a text."""
    return out["prediction_logits"] if "prediction_logits" in out else out["logits"]


def trace_hugging_face(
    name: str, seq_len: int, *, training: bool, degrees: Sequence[int] = ()
) -> TracedModule:
    """Return a network in 32 bit as a chain of layers; one that is not trained drops no values.

    Raises
    ------
    ExtraMissingError
        Without torch or transformers.
    """
    try:
        module = hugging_face_network(name, training=training, dropped=0.1 if training else 0.0)
    except ModuleNotFoundError as error:
        what = f"networks of Hugging Face are traced, which needs {error.name}"
        raise ExtraMissingError(what, fix="pip install 'foreshard[run,models]'") from error
    from foreshard.profile.tracing.trace import trace_module

    return trace_module(
        module,
        hugging_face_inputs(name, seq_len),
        loss=lambda out: logits_of(out).sum(),
        precision="fp32",
        degrees=degrees,
        name=name,
    )
