"""Models of transformers on ranks that compute a layer together: gradients of every type that can be cut."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from rehearsal import plan_of
from torch.nn.functional import cross_entropy

from foreshard.errors import SpecError
from foreshard.runtime.gradient_check import gradient_error
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.layer_builders import SEEDING

WORDS = 32
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": WORDS,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {**SMALL, "sliding_window": 5, "head_dim": 8},
    "glm": {**SMALL, "head_dim": 8},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
}
CUT = ("gpt2", "gpt_neox", "llama", "olmo", "phi3", "qwen3", "stablelm", "starcoder2")
"""One of each structure; `scripts/split_transformers.py` tries all types that transformers has."""
DROPS = {"gpt2": {}, "llama": {"attention_dropout": 0.2}, "gpt_neox": {"attention_dropout": 0.2}}


class Lines:
    """Random words."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.randint(3, WORDS, (9,), generator=torch.Generator().manual_seed(index))


def job(kind: str, dtype: Any = torch.float64, **changes: Any) -> Job:
    config = transformers.AutoConfig.for_model(kind, **{**MORE.get(kind, SMALL), **changes})
    with SEEDING:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()

    def loss(output: Any, batch: Any) -> Any:
        target = batch[:, 1:]
        return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()

    return Job.of(
        model,
        Lines(),
        loss,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        inputs=lambda batch: batch[:, :-1],
    )


TP2 = plan_of(
    [
        {"share": 4, "micro_batch": 2, "stages": [([0, 1], [[0, 2]], {"tp": 2}), ([2], [[2, 4]])]},
        {"share": 2, "micro_batch": 2, "stages": [([3], [[0, 4]])]},
    ],
    global_batch=6,
)
TP4 = plan_of(
    [{"share": 6, "micro_batch": 4, "stages": [([0, 1, 2, 3], [[0, 4]], {"tp": 4})]}], global_batch=6
)


@pytest.mark.parametrize("kind", CUT)
def test_every_type_that_can_be_cut_is_exact(kind: str) -> None:
    """Words of attention heads are dropped out where a type does by default."""
    assert gradient_error(job(kind, **DROPS.get(kind, {})), TP2) <= 1e-12


def test_four_ranks_in_single_precision() -> None:
    assert gradient_error(job("llama", torch.float32, tie_word_embeddings=True), TP4) <= 1e-6


def test_words_that_do_not_divide_stay_whole() -> None:
    """33 words on four ranks, and on two beside one."""
    assert gradient_error(job("gpt_neox", vocab_size=33), TP4) <= 1e-12
    assert gradient_error(job("llama", vocab_size=34), TP2) <= 1e-12


@pytest.mark.parametrize(
    ("kind", "why"), [("olmo2", "goes over the queries or keys of all heads"), ("mixtral", "mlp of")]
)
def test_other_blocks_are_refused_with_the_reason(kind: str, why: str) -> None:
    with pytest.raises((SpecError, RuntimeError), match=f"cannot be cut: .*{why}"):
        gradient_error(job(kind, torch.float32), TP4)  # experts in one product have no double precision


def test_degrees_divide_the_heads() -> None:
    with pytest.raises((SpecError, RuntimeError), match="tp 4 does not divide 2 key-value heads"):
        gradient_error(job("llama", num_key_value_heads=2), TP4)
