"""Weights, gradients and optimizer states against the estimators that frameworks ship, in our own words.

Like terms only. Megatron's report has no biases of layers and its activations are of one rule; DeepSpeed's
counts the fp32 gradients of the step, which are temporary here, and at level 3 one layer whole; Accelerate's
counts the 16-bit copies of a step with the gradients. No estimator has communication buffers, workspaces or
what the allocator keeps.

Source
------
NVIDIA/Megatron-LM d98e8a6 megatron/training/theoretical_memory_usage.py; deepspeedai/DeepSpeed edaa722
runtime/zero/stage_1_and_2.py and stage3.py (estimate_zero2_ and estimate_zero3_model_states_mem_needs);
huggingface/accelerate 16cb6eb8 commands/estimate.py (estimate_training_usage).
"""

from __future__ import annotations

import pytest

import foreshard
from foreshard import api

STATES = ("parameters", "gradients", "optimizer")


def states(model: str, cluster: str, **choices) -> dict[str, float]:
    found = foreshard.predict(model, cluster, **choices).memory
    assert found.peak_rank == 0  # the estimators are of the first stage
    return {name: found.breakdown_bytes[name] for name in STATES}


def megatron_bytes(dims: dict, *, tp: int, pp: int, ep: int, ranks: int, sharded: bool) -> float:
    """Bytes of weights, fp32 gradients and Adam on the rank with the most parameters."""
    hidden, layers, gated, norm = dims["hidden"], dims["layers"], 1.5 * dims["gated"] or 1.0, dims["norm"]
    attention = 2 * hidden * hidden * (1 + dims["kv_heads"] / dims["heads"])
    experts = dims.get("experts", 0)
    mlp = 2 * hidden * dims["ffn"] * gated
    split = (attention + (0 if experts else mlp)) * layers / pp + hidden * dims["vocab"] * (
        2 if pp == 1 else 1
    )
    copied = (2 * hidden * norm + hidden * experts) * layers / pp + norm * hidden / pp
    routed = mlp * experts * layers / pp / ep if experts else 0.0

    def each(replicas: float) -> float:
        return 6 + 12 / replicas if sharded else 18

    return (split / tp + copied) * each(ranks / (tp * pp)) + routed * each(ranks / (pp * ep))


LLAMA_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
LLAMA_70B = {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256}
MIXTRAL = {
    "hidden": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 32000,
    "experts": 8,
}
MEGATRON = {
    "dense, tp": ("llama3-8b", LLAMA_8B, "1x8xh100-sxm", {"tp": 2, "zero": 1}),
    "dense, no distributed optimizer": ("llama3-8b", LLAMA_8B, "1x8xh100-sxm", {"tp": 4, "zero": 0}),
    "dense, tp and pp": ("llama3-70b", LLAMA_70B, "8x8xh100-sxm", {"tp": 8, "pp": 4, "zero": 1}),
    "experts": ("mixtral-8x7b", MIXTRAL, "4x8xh100-sxm", {"tp": 1, "pp": 2, "ep": 8, "zero": 1}),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_states_are_those_of_megatron(name):
    model, dims, cluster, degrees = MEGATRON[name]
    found = sum(states(model, cluster, global_batch=64, seq_len=4096, **degrees).values())
    degrees = {"tp": 1, "pp": 1, "ep": 1, **degrees}
    sharded = degrees.pop("zero") > 0
    ranks = api.load_cluster(cluster).num_devices
    dims = {**dims, "gated": True, "norm": 1}
    assert found == pytest.approx(megatron_bytes(dims, **degrees, ranks=ranks, sharded=sharded), rel=0.01)


@pytest.mark.parametrize("model", ["llama3-8b", "llama2-7b", "qwen2.5-7b"])
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("zero", [2, 3])
def test_states_are_those_of_deepspeed(model, devices, zero):
    found = states(
        model, f"1x{devices}xh100-sxm", framework="deepspeed", zero=zero, global_batch=8, seq_len=512
    )
    params = api.load_model(model).num_params
    # Four of its 18 bytes a parameter are the fp32 gradients of the step; at level 2 weights are whole.
    expected = 2 * params + 14 * params / devices if zero == 2 else 16 * params / devices
    assert sum(found.values()) == pytest.approx(expected, rel=0.01)
    weights = 2 * params if zero == 2 else 2 * params / devices
    assert found["parameters"] == pytest.approx(weights, rel=0.01)
    assert found["optimizer"] == pytest.approx(12 * params / devices, rel=0.01)


@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl", "llama3.2-1b"])
def test_states_are_those_of_accelerate(model):
    params = api.load_model(model).num_params
    full = states(model, "1x1xh100-sxm", framework="hf", dtype="fp32", global_batch=8, seq=512)
    assert full["parameters"] == pytest.approx(4 * params, rel=0.01)
    assert full["gradients"] == pytest.approx(4 * params, rel=0.01)
    assert full["optimizer"] == pytest.approx(8 * params, rel=0.01)
    mixed = states(model, "1x1xh100-sxm", framework="hf", dtype="bf16", global_batch=8, seq=512)
    # Autocast: weights and gradients in fp32; the 16-bit copies of a step are temporary.
    assert sum(mixed.values()) == pytest.approx(16 * params, rel=0.01)
