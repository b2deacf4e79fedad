"""How the networks of words and tables were trained: what each benchmark's own commands say of a row.

Lambda runs NVIDIA's DeepLearningExamples by commands of its own (pytorch/scripts/config_v1); NVIDIA's
tables follow its README and configurations. Both train in 16 bit by Apex at level O2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

SENTENCE, FILLED = 30, mean((10.0 * bucket - 4.5) / (10.0 * bucket) for bucket in range(1, 6))
"""Pieces of words of a sentence of GNMT, and the share that is none of filling.

Its sentences of up to 50 pieces lie in five buckets of ten lengths, each batch from one bucket and filled up
to the longest: the middle bucket's here, and lengths that are even within each.
"""
_TRANSLATED = 32  # pieces of a sentence, for attention alone: batches are counted in pieces
SUPERLINEAR = 1.05  # N devices are more than so many times N as fast as one: not what a row says


@dataclass(frozen=True, kw_only=True)
class Run:
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
    """

    network: str
    counted: float = 1.0
    samples: float = 1.0
    changed: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"


_GNMT = Run(network="gnmt", counted=(2 * SENTENCE - 1) * FILLED, changed={"words": SENTENCE})
_UNCLUSTERED = {"cutoffs": (), "narrower": 1}  # Lambda's commands lack --adaptive and --div_val
LAMBDA_WORDS = {
    "bert_base_squad": Run(network="bert_base_squad"),
    "bert_large_squad": Run(network="bert_large_squad"),
    "gnmt": _GNMT,
    "ncf": Run(network="ncf"),
    "transformerxlbase": Run(network="transformer_xl_base", counted=192, changed=_UNCLUSTERED),
    "transformerxllarge": Run(
        network="transformer_xl_large", counted=256, changed={**_UNCLUSTERED, "words": 256}
    ),
}
"""By the names of Lambda's tables."""
_DLE: dict[str, Callable[[str], Run]] = {
    "GNMT": lambda _: _GNMT,
    "NCF": lambda _: Run(network="ncf"),
    "Transformer": lambda _: Run(
        network="transformer_big",
        counted=_TRANSLATED,
        samples=1 / _TRANSLATED,
        changed={"words": _TRANSLATED},
    ),
    "Transformer-XL": lambda text: (
        Run(network="transformer_xl_base", counted=192)
        if "Base" in text
        else Run(network="transformer_xl_large", counted=384)
    ),
    "BERT": lambda text: Run(
        network="bert_large_squad" if "Fine-tuning" in text else f"bert_large_phase{1 + text.endswith('512')}"
    ),
}


_WORDS_OF_DLE = {"bert_large_phase1", "bert_large_phase2", "transformer_big"}
WORDS = frozenset({run.network for run in LAMBDA_WORDS.values()} | _WORDS_OF_DLE)
"""Networks of these runs."""


def dle_run(row: Mapping[str, str]) -> Run | None:
    """Return how a row of DeepLearningExamples was trained, None for other networks and several nodes."""
    if row["framework"] != "PyTorch" or row["num_nodes"] or row["model"] not in _DLE:
        return None
    return _DLE[row["model"]](f"{row['section']} {row['seq_or_variant']}")


def dle_batch(row: Mapping[str, str]) -> tuple[int, int]:
    """Return (what a device takes at once, how often before it updates), as a row's own precision has it."""
    narrow = row["precision"] == "mixed"
    steps = re.search(r"Accumulation steps \((\w+) and (\w+)\)=(\d+) and (\d+)", row["other_columns"])
    whole = [int(number) for number in re.findall(r"\d+", row["batch_per_gpu"].split(";")[-1])]
    if row["model"] == "Transformer":  # mixed precision first
        return whole[0 if narrow else -1], 1
    batch, many = whole[-1 if narrow else 0], int(steps[3 + narrow]) if steps else 1
    return batch // many, many


def dle_device(row: Mapping[str, str]) -> str:
    """Return the catalog's name of the devices of a section."""
    memory = re.search(r"(\d+) ?GB?\b", row["section"].split(">")[-1] + row["gpu_model"])
    memory = re.search(r"(\d\d) ?GB?\b", row["section"]) if memory is None else memory
    if memory is None:
        raise ValueError(row["section"])
    return f"{'a100' if row['gpu_model'].startswith('A100') else 'v100'}-sxm-{memory[1]}gb"


def suspects(speeds: Iterable[tuple[Any, int, int, float]]) -> set[tuple[Any, int, int, float]]:
    """Return the measurements that are faster by devices than devices are more, by over 5 %.

    Each is (case, devices, batch of a device, speed), compared with the median of one device of the same case
    and batch. Lambda's logs have such where a run ends before the steps that its speed is counted by.
    """
    speeds = list(speeds)
    alone: dict[Any, list[float]] = {}
    for case, devices, batch, speed in speeds:
        if devices == 1:
            alone.setdefault((case, batch), []).append(speed)
    return {
        (case, devices, batch, speed)
        for case, devices, batch, speed in speeds
        if (case, batch) in alone
        and speed > SUPERLINEAR * devices * median(alone[case, batch])
        and devices > 1
    }
