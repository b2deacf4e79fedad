"""What each source of published training runs leaves unsaid, and what is read in its place.

A family is the part of a row's id before its last '-'. Every rule that fills a blank is written here and
listed in the assumptions of the rows it touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreshard.catalog.frameworks import frameworks, load_framework
from foreshard.spec.framework import Framework

GIB = 2.0**30
TRIO = ("dgxc", "megatronbridge", "nemo_docs")  # share code and configurations: they leave together
_PAPERS = (
    ("korthikanti", "korthikanti"),
    ("sc21", "sc21"),
    ("h100", "megatron_h100"),
    ("2020", "megatron_2020"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Readings of one source; an empty string or None means the framework's own default.

    dtype, recompute, seq_len, zero, nic : what a blank cell means, with why
    flops : how the source counts the FLOPs behind its TFLOP/s: causal | full | hardware
    gigabyte : bytes of the unit of metric_peak_memory_gb
    """

    dtype: str = "bf16"
    dtype_why: str = "the default of its framework"
    recompute: str = "none"
    seq_len: int = 0
    seq_why: str = ""
    zero: int | None = None
    zero_why: str = "the default of its framework"
    nic: str = ""
    nic_why: str = ""
    flops: str = "full"
    gigabyte: float = GIB


_JEAN_ZAY = "4 Omni-Path 100 Gb/s links per node (IDRIS, Jean Zay description)"

FAMILIES: dict[str, Family] = {
    "vtrain_single": Family(
        dtype="fp16", dtype_why="--fp16 of the Megatron-DeepSpeed launch scripts vTrain builds on", zero=0
    ),
    "bigscience": Family(
        flops="hardware",
        zero=1,
        zero_why="ZERO_STAGE=1 in tr3m-1B3-emb-norm-pile.slurm",
        nic="400 Gb/s",
        nic_why=_JEAN_ZAY,
    ),
    "internevo": Family(
        flops="hardware", seq_len=2048, seq_why="SEQ_LEN of configs/7B_sft.py", recompute="full"
    ),
    "mlperf": Family(
        dtype="fp8", dtype_why="the NVIDIA LoRA submissions of these rounds train in fp8", flops="causal"
    ),
    "korthikanti": Family(flops="full", dtype="fp16", recompute="full"),
    "sc21": Family(flops="hardware", dtype="fp16", recompute="full"),
    "megatron_2020": Family(flops="hardware", dtype="fp16", recompute="full"),
    "megatron_h100": Family(flops="full"),
    "megatronbridge": Family(flops="causal"),
    "megatronbridge_memory": Family(flops="causal"),
    "stas_h200_b200": Family(flops="causal", gigabyte=1e9),
    "simumax_b200": Family(gigabyte=1e9),
    "torchtitan_2024": Family(gigabyte=1e9),
    "torchtitan": Family(gigabyte=1e9),
}


def family_of(row_id: str, source: str) -> str:
    """Return the family of a training row: its id up to the last '-', megatron_papers by paper.

    Examples
    --------
    >>> family_of("megatron_papers-0032", "Korthikanti et al. 2022 Table 5 (via Calculon)")
    'korthikanti'
    """
    family = row_id.rpartition("-")[0] or row_id
    if family == "megatron_papers":
        text = source.lower()
        family = next((name for word, name in _PAPERS if word in text), family)
    return family


def _release_key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _at_release(name: str, release: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework at this release, or at the newest known one before it."""
    known = [entry for entry in frameworks() if entry.name == name]
    exact = [entry for entry in known if entry.release == release]
    if exact:
        return exact[0], ()
    if not release:
        return known[-1], (f"framework release not stated: {known[-1].label}",)
    before = [entry for entry in known if _release_key(entry.release) <= _release_key(release)]
    chosen = before[-1] if before else known[0]
    return chosen, (f"{name} {release} is not in the framework table: read as {chosen.label}",)


_MEGATRON_LM = {"korthikanti": "2022", "sc21": "2021", "megatron_2020": "2020", "megatron_h100": "2024"}
_PLAIN = (
    ("megatron-core", "megatron-core"),
    ("composer", "composer"),
    ("fms-fsdp", "fms-fsdp"),
    ("torchtitan", "torchtitan@2024"),
    ("internevo", "internevo"),
    ("nanotron", "nanotron"),
    ("colossal", "colossalai"),
    ("maxtext", "maxtext"),
    ("pax", "paxml"),
    ("deepspeed", "deepspeed"),
)


def framework_of(family: str, raw: Mapping[str, str], precision: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework and release a row was run with, before its in_* facts, and what was assumed."""
    text, source = raw["framework"].lower(), raw["source"]
    number = re.search(r"\d\d\.\d\d(?:\.\d+)?", text)
    if "megatron-bridge" in text:
        return _at_release("megatron-bridge", number[0] if number else "")
    if "megatron-deepspeed" in text:
        return load_framework(f"megatron-deepspeed@{'2022' if precision == 'bf16' else '2021'}"), ()
    if family in _MEGATRON_LM or "megatron-lm" in text:
        return load_framework(f"megatron-lm@{_MEGATRON_LM.get(family, '2024')}"), ()
    if family == "mlperf" and not re.search("maxtext|pax", text):
        return _mlperf(raw)
    if "nemo" in text:
        tag = re.search(r"\bv?(\d\d\.\d\d(?:\.\d+)?)\b", source)
        release = number[0] if number else tag[1] if tag else ""
        return _at_release("nemo", release.removesuffix(".1") if release.startswith("24.11") else release)
    for word, label in _PLAIN:
        if word in text:
            return load_framework(label), ()
    return load_framework("megatron-core"), (f"framework {raw['framework']!r} read as megatron-core",)


def _mlperf(raw: Mapping[str, str]) -> tuple[Framework, tuple[str, ...]]:
    """Return NVIDIA's reference code of the round; other vendors run a port of it."""
    number = re.search(r"MLPerf Training v(\d+\.\d+)", raw["source"])
    entry, notes = _at_release("mlperf-nemo", number[1] if number else "")
    if re.search("gaudi|amd|mi3", raw["gpu"].lower()):
        ported = replace(entry, attention="fa2", elementwise="eager")
        return ported, (
            *notes,
            "not NVIDIA: read as a port of the NVIDIA code with flash attention 2, eager norms",
        )
    return entry, notes
