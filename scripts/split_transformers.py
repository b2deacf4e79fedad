"""Splits every causal language model that the installed transformers has, and compares with the whole model.

    python scripts/split_transformers.py [TYPE ...]

For each type a model of four small blocks is built. One that `hf_split` accepts must give the scores of the
whole model to the last bit, with a padding mask and without, and its gradients to 1e-10 in double precision;
one whose blocks can be cut must give them to 1e-6 on two tensor-parallel ranks too, with whole sequences and
with cut ones: some norms compute in single precision whatever the model's.
Exit code 1 if one does not.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.gradient_check import gradient_error
from foreshard.runtime.job.hf_split import split
from foreshard.runtime.job.job import Job
from foreshard.spec.plan_file import parse_plan

WORDS, BLOCKS, LENGTH = 64, 4, 11
MOST_PARAMETERS = 5_000_000
LIMIT = 1e-10
PLAN_LIMIT = 1e-6
SMALL = {
    **{"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
}
DROPS = ("dropout", "pdrop", "jitter_noise", "layerdrop", "dropout_prob")
PLANS = {
    "tp": [{"share": 6, "micro_batch": 2, "stages": [{"ranks": [0, 1], "layers": [[0, 6]], "tp": 2}]}],
    "sp": [
        {"share": 6, "micro_batch": 2, "sp": True, "stages": [{"ranks": [0, 1], "layers": [[0, 6]], "tp": 2}]}
    ],
}


@dataclass(frozen=True)
class Found:
    """What became of a type."""

    text: str
    is_wrong: bool = False


class Lines:
    """Random words."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.randint(3, WORDS, (9,), generator=torch.Generator().manual_seed(index))


def built(kind: str) -> Any:
    """Return a small model of a type in double precision, without dropout."""
    made = CONFIG_MAPPING[kind]
    whole = made().to_dict()
    names = {*whole, *getattr(made, "attribute_map", {}), *inspect.signature(made.__init__).parameters}
    more = {name: value for name, value in SMALL.items() if name in names}
    more |= {name: 0.0 for name in names if name.endswith(DROPS) and isinstance(whole.get(name), float)}
    for name in ("layer_types", "mlp_layer_types"):
        if whole.get(name):
            types = list(dict.fromkeys(whole[name]))
            more[name] = [types[number % len(types)] for number in range(BLOCKS)]
    config = made(**more)
    with torch.device("meta"):
        blank = transformers.AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in blank.parameters()) > MOST_PARAMETERS:
        raise ValueError("it is large in spite of a small configuration")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model.train()


def through(layers: list[Any], *values: Any) -> Any:
    for layer in layers:
        values = layer(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values[0]


def worst_of_layers(model: Any, mask: Any) -> float:
    """Return the largest relative difference of a gradient; infinite if a score differs at all."""
    ids = torch.randint(3, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    origins = split(model)
    layers = [copy.deepcopy(layer) for layer in origins]
    scores = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = through(layers, ids) if mask is None else through(layers, ids, mask)
    if not torch.equal(found.nan_to_num(7.0), scores.nan_to_num(7.0)):
        return float("inf")
    model.zero_grad()
    for values in (scores, found):
        (values * ids.unsqueeze(-1)).sum().backward()
    sums: dict[int, Any] = {}
    for layer, origin in zip(layers, origins, strict=True):
        for own, theirs in zip(layer.parameters(), origin.parameters(), strict=True):
            if own.grad is not None:
                sums[id(theirs)] = sums.get(id(theirs), 0.0) + own.grad
    worst = 0.0
    for parameter in model.parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        own = sums.get(id(parameter), torch.zeros_like(parameter))
        worst = max(
            worst, float((own - wanted).abs().nan_to_num().max() / wanted.abs().max().clamp_min(1e-30))
        )
    return worst


def loss(output: Any, batch: Any) -> Any:
    target = batch[:, 1:]
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def worst_of_plan(model: Any, groups: Any) -> float:
    plan = parse_plan({"global_batch": 6, "seq_len": 8, "precision": "fp32", "groups": groups})
    job = Job.of(
        model,
        Lines(),
        loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        inputs=lambda batch: batch[:, :-1],
    )
    return gradient_error(job, plan)


def checked(kind: str) -> Found:
    """Return what becomes of a type."""
    try:
        model = built(kind)
    except Exception as error:  # of code of any kind; the type is left out and named
        return Found(f"not built: {str(error).splitlines()[0][:80] if str(error) else type(error).__name__}")
    try:
        layers = split(model)
    except SpecError as error:
        return Found(f"refused: {error.what.partition(': ')[2]}")
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    mask[1, 8:], mask[2, 5:] = 0, 0
    try:
        model(input_ids=mask, use_cache=False)
    except Exception as error:
        return Found(f"not built: the whole model fails ({str(error)[:60]})")
    errors = {"whole lines": worst_of_layers(model, None), "padded lines": worst_of_layers(model, mask)}
    refused = next(
        (plan for plan in (layer.tensor_plan.refused for layer in layers) if plan is not None), None
    )
    ended: list[str] = []
    if refused is None:
        for name, groups in PLANS.items():
            try:
                errors[name] = worst_of_plan(model, groups)
            except (ForeshardError, RuntimeError) as error:  # refused, or ended by the model's own code
                ended.append(f"{name} ends: {str(error)[:150]}")
    wrong = any(error > (PLAN_LIMIT if name in PLANS else LIMIT) for name, error in errors.items())
    text = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    more = "".join(f"; {one}" for one in (*ended, *([f"no tp: {refused}"] if refused else [])))
    return Found(f"split: {text}{more}", is_wrong=wrong)


def main(kinds: list[str]) -> int:
    """Check types and print what became of each; return the exit code."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wrong = 0
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = checked(kind)
        wrong += found.is_wrong
        print(f"{'WRONG ' if found.is_wrong else ''}{kind}: {found.text}", flush=True)
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
