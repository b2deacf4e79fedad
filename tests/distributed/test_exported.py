"""What a run has trained goes to other programs: safetensors, transformers, and torch's own converters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from command import JOB, run
from rehearsal import plan_of
from torch import nn

HF = """
def model():
    from transformers import {name}, {config}
    return {name}({config}({sizes}))
def dataset(): return (torch.arange(640).view(40, 16) * 7) % 64
def inputs(batch): return batch[:, :-1]
def loss(out, batch):
    words = batch[:, 1:].flatten()
    return nn.functional.cross_entropy(out.flatten(0, 1), words, reduction="sum"), len(words)
def optimizer(params): return torch.optim.AdamW(params, lr=1e-2)
"""
LLAMA = dict(
    name="LlamaForCausalLM",
    config="LlamaConfig",
    sizes="vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, "
    "max_position_embeddings=32",
)
GPT2 = dict(
    name="GPT2LMHeadModel",
    config="GPT2Config",
    sizes="vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, "
    "resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0",
)
TP = plan_of(
    [{"share": 4, "micro_batch": 2, "stages": [([0, 1], [[0, 2]], {"tp": 2}), ([2], [[2, 4]])]}],
    global_batch=4,
)


def export(folder: Path, target: str, out: str) -> None:
    words = [sys.executable, "-m", "foreshard", "export", "run", "--to", target, "-o", out]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LLAMA, GPT2], ids=["llama", "gpt2, tied"])
def test_transformers_loads_a_model_that_was_trained_in_parts(tmp_path: Path, kind: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    parts = {**dict.fromkeys(JOB, ""), "model": HF.format(**kind)}
    found = run(tmp_path, parts, TP, "--steps", "4", "--dtype", "fp64", local=3)
    assert found.code == 0, found.stderr
    export(tmp_path, "safetensors", "exported")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True, dtype=torch.float64
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    scope: dict = {"torch": torch, "nn": nn}
    exec(HF.format(**kind), scope)
    from foreshard.runtime.job.data import Feed

    feed = Feed(scope["dataset"](), torch.utils.data.default_collate, global_batch=4, prefetch=0)
    total, count = scope["loss"](loaded(feed.batch(range(16, 20))[:, :-1]).logits, feed.batch(range(16, 20)))
    further = run(tmp_path, parts, TP, "--steps", "5", "--dtype", "fp64", "--resume", local=3)
    assert float(total.detach()) / count == pytest.approx(further.losses[4], rel=1e-9)


def test_layers_of_a_job_are_those_of_a_sequential_and_torch_converts_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    plan = plan_of(
        [{"share": 4, "micro_batch": 2, "stages": [([0], [[0, 2]]), ([1], [[2, 4]])]}], global_batch=4
    )
    adam = "def optimizer(params): return torch.optim.Adam(params, lr=1e-2)"
    found = run(tmp_path, {"optimizer": adam}, plan, "--steps", "3")
    assert found.code == 0, found.stderr
    export(tmp_path, "safetensors", "exported")
    export(tmp_path, "dcp", "dcp")
    assert (tmp_path / "dcp" / ".metadata").exists()
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    model.load_state_dict(whole["model"], strict=True)
    safetensors = pytest.importorskip("safetensors.torch")
    same = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(same[name], value) for name, value in whole["model"].items())
    assert float(whole["optimizer"]["3.weight"]["step"]) == 3.0
    assert json.loads((found.out / "ckpt" / "step-0000000003" / "meta.json").read_text())["samples"] == 100
