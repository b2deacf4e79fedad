"""The training steps that `bench_device.py` predicts and trains.

A step is by transformers under autocast (predicted as `ddp`) or under fully_shard (`hf`), by torchtitan's
model, recomputation, compile and fully_shard (`torchtitan`), by torchvision under autocast, a module of
`device_modules.py`, or a network of the catalog that makes its own loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step: a model by name or configuration, its batch, and how it is trained."""

    name: str
    kind: str  # dense, experts, network
    library: (
        str  # transformers, sharded (the same under fully_shard), torchtitan, torchvision, module, catalog
    )
    model: str | dict
    batch: int
    seq: int = 0
    dtype: str = "bf16"
    recompute: str = "none"
    compile: bool = False
    recipe: str = ""
    lora: int = 0  # rank of adapters on weights in bf16
    channels_first: bool = False  # how a network's images and weights lie
    flags: tuple[str, ...] = ()
    size: dict[str, Any] = field(default_factory=dict)  # torchtitan: changes to its flavor

    @property
    def framework(self) -> str:
        """The framework that it is predicted as, empty of a network."""
        named = {"transformers": "ddp", "sharded": "hf", "torchtitan": "torchtitan@0.2"}
        return named.get(self.library, "")

    def command(self, device: str, folder: Path) -> list[str]:
        """Return the words of `foreshard predict`."""
        model = self.model
        if isinstance(model, dict):
            path = folder / f"{self.name}.json"
            path.write_text(json.dumps(model))
            model = str(path)
        elif self.library == "torchvision":
            path = folder / f"{self.name.replace('-', '_')}.py"
            layout = "contiguous_format" if self.channels_first else "channels_last"
            narrow = TORCH_TYPES.get(self.dtype, "")
            path.write_text(NETWORK.format(name=model, layout=layout, narrow=narrow))
            model = f"{path}:trained"
        elif self.library == "module":
            model = f"{Path(__file__).parent / 'device_modules.py'}:{model}"
        words = ["predict", model, f"1x1x{device}", "--dtype", self.dtype]
        words += ["--framework", self.framework] if self.framework else []
        words += ["--micro-batch", str(self.batch), "--global-batch", str(self.batch), *self.flags]
        words += ["--seq", str(self.seq)] if self.seq else []
        if self.library == "torchtitan" or self.recompute != "none":
            words += ["--recompute", self.recompute]
        words += ["--lora", str(self.lora)] if self.lora else []
        words += ["--compile"] if self.compile else []
        if self.recipe:
            words += ["--fp8-recipe", self.recipe]
        return words


MODELS = json.loads((Path(__file__).parent / "device_models.json").read_text())


TORCH_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""What autocast computes in; without it in tf32 and fp32."""
VALUES_BELOW = {
    "bert_base_squad": (30522, 2, 2, 384),
    "bert_large_phase1": (30522, 2, 2, 128, 30522, 2),
    "transformer_big": (33000, 33000, 33000),
    "gnmt": (32000, 32000, 32000),
    "ncf": (138000, 26000, 1),
    "ssd300": (1, 1, 81),
    "waveglow": (1, 1),
}
"""What whole numbers that a network reads are below, input by input: all rows of its tables are read."""
NETWORK = """# A network as `_torchvision` trains it.
import torch

from foreshard.profile.networks.catalog import network


class Cast(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        narrow = {narrow!r}
        with torch.autocast("cuda", getattr(torch, narrow or "bfloat16"), enabled=bool(narrow)):
            return self.inner(images)


def loss(scores):
    labels = torch.zeros(len(scores), dtype=torch.long)
    return torch.nn.functional.cross_entropy(scores.float(), labels)


def trained():
    inner, images = network("{name}")
    inner = inner.to(memory_format=torch.{layout})
    return Cast(inner), images, loss
"""


def _language(
    library: str, name: str, model: dict, batch: int, seq: int, kind: str = "dense", **more: Any
) -> Step:
    return Step(name=name, kind=kind, library=library, model=model, batch=batch, seq=seq, **more)


_hf, _sharded, _titan = (partial(_language, name) for name in ("transformers", "sharded", "torchtitan"))


def _network(model: str, batch: int, **more: Any) -> Step:
    flags = ("--optimizer", "sgd")
    own = {"name": f"{model}-{batch}"} | more
    return Step(kind="network", library="torchvision", model=model, batch=batch, flags=flags, **own)


def _channels_first(model: str, batch: int, dtype: str) -> Step:
    return _network(model, batch, name=f"{model}-{batch}-{dtype}-first", dtype=dtype, channels_first=True)


def _module(name: str, batch: int) -> Step:
    return Step(name=f"{name}-{batch}", kind="module", library="module", model=name, batch=batch)


def _catalog(name: str, batch: int, dtype: str) -> Step:
    named = f"{name}-{batch}-{dtype}"
    return Step(name=named, kind="network", library="catalog", model=name, batch=batch, dtype=dtype)


TITAN_8B = {"flavor": "llama3:8B", "n_layers": 8}
TITAN_8B_4 = {**TITAN_8B, "n_layers": 4}
FP8: dict[str, Any] = {"dtype": "fp8", "compile": True}
STEPS_TRAINED = (
    _hf("gpt2", MODELS["GPT2"], 16, 1024),
    _hf("gpt2-tf32", MODELS["GPT2"], 8, 1024, dtype="tf32"),
    _hf("gpt2-xl", MODELS["GPT2_XL"], 4, 1024),
    _hf("bert-large", MODELS["BERT"], 32, 512),
    _hf("llama-1b", MODELS["LLAMA_1B"], 4, 2048),
    _hf("llama-1b-long", MODELS["LLAMA_1B"], 1, 8192),
    _hf("llama-1b-small", MODELS["LLAMA_1B"], 1, 512),
    _hf("llama-3b", MODELS["LLAMA_3B"], 1, 2048),
    _hf("qwen3-0.6b", MODELS["QWEN3_06B"], 4, 2048),
    _hf("qwen3-moe", MODELS["QWEN3_30B_3"], 4, 2048, "experts"),
    _hf("mixtral", MODELS["MIXTRAL_2"], 2, 4096, "experts"),
    _sharded("hf-llama-1b", MODELS["LLAMA_1B"], 4, 2048),
    _sharded("hf-qwen3-0.6b", MODELS["QWEN3_06B"], 4, 2048),
    _sharded("hf-qwen3-moe", MODELS["QWEN3_30B_3"], 4, 2048, "experts"),
    _sharded("hf-mixtral", MODELS["MIXTRAL_2"], 2, 4096, "experts"),
    _titan("titan-llama", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B),
    _titan("titan-llama-sac", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B, recompute="selective:op"),
    _titan("titan-llama-full", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B, recompute="full"),
    _titan("titan-llama-compiled", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B, compile=True),
    _titan(
        "titan-llama-tensorwise", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B, recipe="tensorwise", **FP8
    ),
    _titan("titan-llama-rowwise", MODELS["LLAMA_8B_8"], 2, 4096, size=TITAN_8B, recipe="rowwise", **FP8),
    _titan(
        "titan-llama-fp8-eager",
        MODELS["LLAMA_8B_8"],
        2,
        4096,
        size=TITAN_8B,
        dtype="fp8",
        recipe="tensorwise",
    ),
    _titan(
        "titan-qwen3-moe",
        MODELS["QWEN3_30B_3"],
        2,
        4096,
        "experts",
        size={"flavor": "qwen3:30B-A3B", "n_layers": 3},
    ),
    _titan(
        "titan-deepseek",
        MODELS["DEEPSEEK_16B_4"],
        2,
        4096,
        "experts",
        size={"flavor": "deepseek_v3:16B", "n_layers": 4, "attn_type": "sdpa"},
    ),
    _network("resnet50", 256),
    _network("resnet50", 32),
    _network("vgg16", 128),
    _network("densenet121", 128),
    _network("mobilenet_v2", 256),
    _network("convnext_tiny", 128),
    _network("swin_t", 128),
    _network("efficientnet_b0", 128),
    # Trained after what those above had shown was modelled.
    _hf("gpt2-medium", MODELS["GPT2_MEDIUM"], 8, 1024),
    _hf("bert-base", MODELS["BERT_BASE"], 128, 128),
    _hf("qwen2.5-0.5b", MODELS["QWEN2_05B"], 4, 2048),
    _hf("phi-1.5", MODELS["PHI"], 4, 2048),
    _hf("pythia-410m", MODELS["PYTHIA"], 8, 2048),
    _hf("smollm-360m", MODELS["SMOL"], 8, 2048),
    _titan("titan-llama-4", MODELS["LLAMA_8B_4"], 4, 4096, size=TITAN_8B_4),
    _titan(
        "titan-llama-4-tensorwise", MODELS["LLAMA_8B_4"], 4, 4096, size=TITAN_8B_4, recipe="tensorwise", **FP8
    ),
    _titan("titan-llama-4-rowwise", MODELS["LLAMA_8B_4"], 4, 4096, size=TITAN_8B_4, recipe="rowwise", **FP8),
    _titan(
        "titan-deepseek-3",
        MODELS["DEEPSEEK_16B_3"],
        4,
        4096,
        "experts",
        size={"flavor": "deepseek_v3:16B", "n_layers": 3, "attn_type": "sdpa"},
    ),
    _network("resnet50", 128),
    _network("regnet_y_16gf", 64),
    # Trained on an H100 only: of models, layers and ways to train that no step above has.
    _hf("opt-1.3b", MODELS["OPT_1B3"], 4, 2048),
    _hf("gemma-2b", MODELS["GEMMA_2B"], 1, 2048),
    _hf("mistral-6", MODELS["MISTRAL_7B_6"], 2, 4096),
    _hf("olmo2-1b", MODELS["OLMO2_1B"], 2, 4096),
    _hf("qwen2.5-1.5b", MODELS["QWEN2_1B5"], 4, 1024),
    _hf("roberta-large", MODELS["ROBERTA_LARGE"], 16, 256),
    _hf("bloom-1b1", MODELS["BLOOM_1B1"], 2, 1024),
    _hf("falcon-4", MODELS["FALCON_7B_4"], 4, 2048),
    _hf("starcoder2-8", MODELS["STARCODER2_3B_8"], 2, 4096),
    _hf("phi3-8", MODELS["PHI3_MINI_8"], 4, 2048),
    _hf("olmoe-4", MODELS["OLMOE_4"], 2, 2048, "experts"),
    _hf("llama-1b-full", MODELS["LLAMA_1B"], 8, 2048, recompute="full"),
    _hf("llama-1b-compiled", MODELS["LLAMA_1B"], 4, 2048, compile=True),
    _hf("gpt2-medium-compiled", MODELS["GPT2_MEDIUM"], 8, 1024, compile=True),
    _hf("llama-3b-lora", MODELS["LLAMA_3B"], 4, 2048, lora=16),
    _hf("llama-8b-16-lora", MODELS["LLAMA_8B_16"], 2, 4096, lora=16),
    _sharded("hf-mistral-6", MODELS["MISTRAL_7B_6"], 2, 4096),
    _sharded("hf-qwen2.5-1.5b", MODELS["QWEN2_1B5"], 4, 2048),
    _sharded("hf-olmoe-4", MODELS["OLMOE_4"], 4, 4096, "experts"),
    _titan("titan-llama-70b-1", MODELS["LLAMA_70B_1"], 2, 4096, size={"flavor": "llama3:70B", "n_layers": 1}),
    _titan("titan-llama-4-long", MODELS["LLAMA_8B_4"], 1, 16384, size=TITAN_8B_4, recompute="selective:op"),
    _titan(
        "titan-qwen3-14",
        MODELS["QWEN3_1B7_14"],
        4,
        4096,
        size={"flavor": "qwen3:1.7B", "n_layers": 14, "enable_weight_tying": False},
        recompute="selective:op",
        compile=True,
    ),
    _network("resnet101", 64),
    _network("resnext50_32x4d", 128),
    _network("shufflenet_v2_x1_0", 256),
    _network("convnext_small", 64),
    _module("encoder", 32),
    _module("mixer", 128),
    _module("recommender", 8192),
    _module("unet", 16),
    _module("lstm", 64),
    # Trained after what those above had shown was modelled, as a test of it.
    _hf("gptj-4", MODELS["GPTJ_6B_4"], 4, 1024),
    _hf("gemma2-8", MODELS["GEMMA2_2B_8"], 1, 2048),
    _hf("stablelm-1.6b", MODELS["STABLELM_1B6"], 2, 2048),
    _hf("granite-16", MODELS["GRANITE_2B_16"], 4, 2048),
    _hf("qwen2.5-1.5b-lora", MODELS["QWEN2_1B5"], 4, 2048, lora=8),
    _hf("llama-3b-lora-full", MODELS["LLAMA_3B"], 8, 2048, lora=16, recompute="full"),
    _sharded("hf-granite-16", MODELS["GRANITE_2B_16"], 4, 2048),
    # Trained on an H100 after all above: channels first, other precisions, models that no step above has.
    _channels_first("resnet50", 256, "fp16"),
    _channels_first("resnet50", 256, "tf32"),
    _channels_first("resnet50", 1024, "fp16"),
    _network("resnet50", 256, name="resnet50-256-fp16", dtype="fp16"),
    _channels_first("vgg16_bn", 128, "fp16"),
    _channels_first("densenet121", 128, "fp16"),
    _channels_first("mobilenet_v3_large", 512, "fp16"),
    _channels_first("efficientnet_b0", 256, "fp16"),
    _channels_first("regnet_y_8gf", 128, "fp16"),
    _channels_first("convnext_tiny", 128, "fp16"),
    _channels_first("swin_t", 128, "fp16"),
    _hf("gemma3-1b", MODELS["GEMMA3_1B"], 2, 2048),
    _hf("smollm3-16", MODELS["SMOLLM3_3B_16"], 2, 4096),
    _hf("exaone4-1.2b", MODELS["EXAONE4_1B2"], 4, 2048),
    _hf("olmo3-6", MODELS["OLMO3_7B_6"], 2, 4096),
    _hf("gptneo-1.3b", MODELS["GPTNEO_1B3"], 2, 2048),
    _hf("nemotron-8", MODELS["NEMOTRON_4B_8"], 2, 2048),
    _hf("glm4-6", MODELS["GLM4_9B_6"], 2, 2048),
    _hf("hunyuan-1.8b", MODELS["HUNYUAN_1B8"], 2, 2048),
    _hf("ernie-0.3b", MODELS["ERNIE_03B"], 8, 2048),
    _hf("cohere2-4", MODELS["COHERE2_7B_4"], 1, 4096),
    _hf("mpt-6", MODELS["MPT_7B_6"], 2, 2048),
    _sharded("hf-qwen2-moe-4", MODELS["QWEN2_MOE_4"], 4, 2048, "experts"),
    _sharded("hf-granitemoe-8", MODELS["GRANITEMOE_8"], 4, 2048, "experts"),
    _sharded("hf-deepseek-v2-4", MODELS["DEEPSEEK_V2_LITE_4"], 4, 2048, "experts"),
    _sharded("hf-gpt-oss-2", MODELS["GPT_OSS_20B_2"], 2, 4096, "experts"),
    _sharded("hf-ernie-moe-4", MODELS["ERNIE_MOE_4"], 4, 2048, "experts"),
    # Trained after what those above had shown was modelled, as a test of it.
    _channels_first("resnet101", 128, "fp16"),
    _channels_first("wide_resnet50_2", 128, "fp16"),
    _channels_first("resnet18", 512, "fp16"),
    _channels_first("mobilenet_v2", 256, "fp16"),
    _channels_first("mnasnet1_0", 256, "fp16"),
    _channels_first("shufflenet_v2_x1_0", 512, "fp16"),
    _channels_first("squeezenet1_0", 256, "fp16"),
    _channels_first("regnet_x_3_2gf", 128, "fp16"),
    _channels_first("densenet161", 64, "fp16"),
    _channels_first("vgg11", 128, "fp16"),
    _channels_first("mobilenet_v2", 128, "tf32"),
    _channels_first("resnet101", 64, "tf32"),
    _channels_first("resnet50", 256, "bf16"),
    _channels_first("mobilenet_v2", 256, "bf16"),
    # Trained on an H200 after all above: networks that make their own loss, long sequences, a compiled model.
    _catalog("bert_base_squad", 32, "fp16"),
    _catalog("bert_base_squad", 32, "tf32"),
    _catalog("bert_large_phase1", 64, "fp16"),
    _catalog("transformer_big", 160, "fp16"),
    _catalog("transformer_big", 160, "tf32"),
    _catalog("gnmt", 128, "fp16"),
    _catalog("gnmt", 128, "tf32"),
    _catalog("ncf", 1048576, "fp16"),
    _catalog("ncf", 1048576, "tf32"),
    _catalog("ssd300", 64, "fp16"),
    _catalog("ssd300", 64, "tf32"),
    _catalog("waveglow", 4, "tf32"),
    _hf("llama-1b-16k", MODELS["LLAMA_1B"], 1, 16384, recompute="full"),
    _hf("mistral-6-16k", MODELS["MISTRAL_7B_6"], 1, 16384, recompute="full"),
    _hf("qwen2.5-0.5b-compiled", MODELS["QWEN2_05B"], 4, 2048, compile=True),
    # Trained after what those above had shown was modelled, as a test of it.
    _hf("qwen3-0.6b-16k", MODELS["QWEN3_06B"], 1, 16384, recompute="full"),
    _hf("smollm-360m-16k", MODELS["SMOL"], 1, 16384, recompute="full"),
    _hf("llama-3b-8k", MODELS["LLAMA_3B"], 1, 8192, recompute="full"),
)
