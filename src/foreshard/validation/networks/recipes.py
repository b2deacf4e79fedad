"""How the networks of tables were trained: what each benchmark's own commands say of a row.

Lambda runs NVIDIA's DeepLearningExamples by commands of its own (pytorch/scripts/config_v1 and v2); NVIDIA's
tables follow its README and configurations. Both train in 16 bit by Apex at level O2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError

NO_BATCH = "no batch size stated"

SENTENCE, FILLED = 30, mean((10.0 * bucket - 4.5) / (10.0 * bucket) for bucket in range(1, 6))
"""Pieces of words of a sentence of GNMT, and the share that is none of filling.

Its sentences of up to 50 pieces lie in five buckets of ten lengths, each batch from one bucket and filled up
to the longest: the middle bucket's here, and lengths that are even within each.
"""
_MEAN_FRAMES = 566  # of sound of the mean clip of LJSpeech, 6.57 s at 256 of 22,050 samples a frame
_TRANSLATED = 32  # pieces of a sentence, for attention alone: batches are counted in pieces


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """A network as a benchmark trains it.

    Attributes
    ----------
    network : str
    counted : float
        What the source counts of a sample: tokens, or 1.
    samples : float
        Of what the source states as its batch.
    changed : mapping
        Arguments of the network in place of its own.
    sums : bool
        Whether devices sum their gradients.
    """

    network: str
    counted: float = 1.0
    samples: float = 1.0
    changed: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    sums: bool = True


_GNMT = TrainingRecipe(network="gnmt", counted=(2 * SENTENCE - 1) * FILLED, changed={"words": SENTENCE})
_UNCLUSTERED = {"cutoffs": (), "narrower": 1}
"""Of Transformer-XL: Lambda's commands lack `--adaptive` and `--div_val`.

They lack `--multi_gpu ddp` too, without which train.py starts a process on each device and sums nothing.
"""
LAMBDA_WORDS = {
    "bert_base_squad": TrainingRecipe(network="bert_base_squad"),
    "bert_large_squad": TrainingRecipe(network="bert_large_squad"),
    "gnmt": _GNMT,
    "ncf": TrainingRecipe(network="ncf"),
    "transformerxlbase": TrainingRecipe(
        network="transformer_xl_base", counted=192, changed=_UNCLUSTERED, sums=False
    ),
    "transformerxllarge": TrainingRecipe(
        network="transformer_xl_large", counted=256, changed={**_UNCLUSTERED, "words": 256}, sums=False
    ),
}
"""By the names of Lambda's tables."""
_DLE: dict[str, Callable[[str], TrainingRecipe]] = {
    "GNMT": lambda _: _GNMT,
    "NCF": lambda _: TrainingRecipe(network="ncf"),
    "Transformer": lambda _: TrainingRecipe(
        network="transformer_big",
        counted=_TRANSLATED,
        samples=1 / _TRANSLATED,
        changed={"words": _TRANSLATED},
    ),
    "Transformer-XL": lambda text: (
        TrainingRecipe(network="transformer_xl_base", counted=192)
        if "Base" in text
        else TrainingRecipe(network="transformer_xl_large", counted=384)
    ),
    "BERT": lambda text: TrainingRecipe(
        network="bert_large_squad" if "Fine-tuning" in text else f"bert_large_phase{1 + text.endswith('512')}"
    ),
}


_WORDS_OF_DLE = {"bert_large_phase1", "bert_large_phase2", "transformer_big"}
WORDS = frozenset({run.network for run in LAMBDA_WORDS.values()} | _WORDS_OF_DLE)
"""Networks of these runs."""


def dle_run(row: Mapping[str, str]) -> TrainingRecipe | None:
    """Return how a row of DeepLearningExamples was trained, None for networks of images."""
    if row["model"] not in _DLE:
        return None
    return _DLE[row["model"]](f"{row['section']} {row['seq_or_variant']}")


def dle_batch(row: Mapping[str, str]) -> tuple[int, int]:
    """Return (what a device takes at once, how often before it updates), as a row's own precision has it."""
    narrow = row["precision"] == "mixed"
    steps = re.search(r"ccumulation.*?=(\d+)(?: and | , )(\d+)", row["other_columns"])
    whole = [int(number) for number in re.findall(r"\d+", row["batch_per_gpu"].split(";")[-1])]
    if not whole:
        raise SpecError(NO_BATCH)
    narrow_first = row["model"] == "Transformer" or row.get("framework") == "TensorFlow2"
    place = 0 if narrow == narrow_first else -1
    if row["model"] == "Transformer":
        return whole[place], 1
    batch, many = whole[place], int(steps[1 if place == 0 else 2]) if steps else 1
    return batch // many, many


def dle_device(row: Mapping[str, str]) -> str:
    """Return the catalog's name of the devices of a section."""
    if not row["gpu_model"].startswith(("A100", "V100")):
        raise SpecError(f"no commands for {row['gpu_model']!r}, but for A100, V100")
    memory = re.search(r"(\d+) ?GB?\b", row["section"].split(">")[-1] + row["gpu_model"])
    memory = re.search(r"(\d\d) ?GB?\b", row["section"]) if memory is None else memory
    if memory is None:
        raise SpecError("no memory of the devices stated, by which their model is told")
    return f"{'a100' if row['gpu_model'].startswith('A100') else 'v100'}-sxm-{memory[1]}gb"


_NODES = (("a100-sxm-80gb", "tf32"), ("v100-sxm-16gb", "fp32"), ("v100-sxm-32gb", "fp32"))


def _batches(*each: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Return batches by device and precision: of each of `_NODES` in 16 bit, and in TF32 or 32 bit."""
    return {
        device: {"fp16": narrow, wider: wide}
        for (device, wider), (narrow, wide) in zip(_NODES, each, strict=True)
    }


_EFFICIENT = {
    "b0": _batches((256, 256), (128, 64), (256, 128)),
    "b4": _batches((128, 64), (32, 16), (64, 32)),
}
DLE_BATCHES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "resnet50": _batches((256, 256), (256, 112), (256, 112)),
    **{f"efficientnet_{size}": batches for size, batches in _EFFICIENT.items()},
    **{f"efficientnet_widese_{size}": batches for size, batches in _EFFICIENT.items()},
    "efficientdet_d0": {
        "a100-sxm-80gb": {"fp16": 150, "tf32": 80},
        "v100-sxm-32gb": {"fp16": 60, "fp32": 30},
    },
}
"""Images that a device takes at once where tables leave it out, by network, device and precision.

Of configs.yml of PyTorch's classifiers (commit 729963dd, that of the tables), and of the scripts
`scripts/D0/train-benchmark_*.sh` of EfficientDet.
"""
DLE_NAMES = {"Efficientdet": "efficientdet_d0"}
"""Networks whose rows do not say which of a family they are."""
DLE_CHANNELS_FIRST = ("efficientdet_d0", "gpunet_0", "gpunet_1", "gpunet_2")
"""Networks of images that keep that layout in 16 bit; Mask R-CNN leaves it in TF32 too."""
DLE_DEVICE = {"A100": "a100-sxm-80gb", "V100 16GB": "v100-sxm-16gb", "V100 32GB": "v100-sxm-32gb"}
LAMBDA_MEDIA = {  # network, optimizer, units of speed of a sample; padding of Tacotron's is not counted
    "resnet50": ("resnet50", "sgd", 1.0),
    "ssd": ("ssd300", "sgd", 1.0),
    "tacotron2": ("tacotron2", "adam", float(_MEAN_FRAMES)),
    "waveglow": ("waveglow", "adam", 8000.0),
}
MLPERF = {"resnet": "resnet50", "maskrcnn": "mask_rcnn", "ssd": "retinanet", "unet3d": "unet3d"}
"""Networks by the names of MLPerf's benchmarks; `ssd` is RetinaNet since the second round."""
_NOT_AMP = {"tacotron2": 0.0, "waveglow": 0.0, "ncf": 64e9}
"""By network, bytes of memory from which on devices trained it in 32 bit or TF32 whatever the table says.

Commands of the first two pass `--amp-run`, which train.py does not know and passes over (its flag is
`--amp`); V100s are equally fast with and without. Those of NCF (`PyTorch_ncf_FP16_PARAMS`) pass `--amp` for
devices of 16 to 48 GB, and nothing for those of 80 GB and more, which ncf.py trains in 32 bit.
"""
LAMBDA_THROUGH_HOST = frozenset(
    (
        *("v100-sxm-16gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
        *("h100-pcie", "rtx-3090", "rtx-4090", "rtx-a6000", "rtx-6000-ada"),
    )
)
"""Devices that Lambda timed while its script exported NCCL_P2P_DISABLE=1.

So `benchmark_pytorch.sh` did from 2022-10-16 (commit 0a684b62) to 2023-02-06 (aad0d1cd); configurations of
several of these devices were committed between, those of H100-SXM and later ones after it.
"""
_SQUAD_QUESTIONS, _SQUAD_EPOCHS, _SQUAD_STEPS = 87_599, 2, 100
"""Of SQuAD 1.1's training set, each a sample and few more than one; how often and for how many steps Lambda
trains on them (`PyTorch_bert_*_PARAMS`)."""


def lambda_narrow(row: Mapping[str, str], memory_bytes: float) -> bool:
    """Return whether a row of Lambda's was trained in 16 bit."""
    return row["precision"].startswith("amp") and memory_bytes < _NOT_AMP.get(row["model"], math.inf)


def lambda_trained_share(row: Mapping[str, str], batch: int) -> float:
    """Return the samples that a run of Lambda's trained, of those that its speed is counted by.

    run_squad.py counts 100 steps over the seconds of its loops; they end after the step that follows those,
    or after two epochs, of which each device has its share.
    """
    if not row["model"].endswith("_squad"):
        return 1.0
    there = _SQUAD_EPOCHS * math.ceil(_SQUAD_QUESTIONS / int(row["num_gpus"]))
    return min((_SQUAD_STEPS + 1) * batch, there) / (_SQUAD_STEPS * batch)


def lambda_batch(row: Mapping[str, str], *, narrow: bool) -> int:
    """Return what a device takes at once in a row of Lambda's.

    Raises
    ------
    SpecError
        Where neither the row nor the commands of its devices say so.
    """
    if row["global_batch"]:
        return int(float(row["global_batch"])) // int(row["num_gpus"])
    memory = re.search(r"\d+GB", row["gpu"])
    known = shipped("lambda_batches.toml", "foreshard.validation").get(memory[0] if memory else "", {})
    if row["model"] not in known:
        raise SpecError(NO_BATCH)
    return int(known[row["model"]][not narrow])
