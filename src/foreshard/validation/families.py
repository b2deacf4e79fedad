"""What each source of published training runs leaves unsaid, and what is read in its place.

A family is the part of a row's id before its last '-'. Every rule that fills a blank is written here and
listed in the assumptions of the rows it touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
class Recipe:
    """What the code of a source sets away from its framework entry, for the rows it names.

    where : patterns by column, all of which a row's cells contain (case does not matter)
    sets : fields of the framework
    why : the file that sets them
    """

    where: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Any]
    why: str

    def names(self, raw: Mapping[str, str]) -> bool:
        """Whether the recipe is the one of this row."""
        return all(re.search(text, raw.get(column, ""), re.IGNORECASE) for column, text in self.where.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Readings of one source; an empty string or None means the framework's own default.

    dtype, recompute, seq_len, zero, nic : what a blank cell means, with why
    flops : how the source counts the FLOPs behind its TFLOP/s: causal | full | hardware
    gigabyte : bytes of the unit of metric_peak_memory_gb
    memory : what metric_peak_memory_gb counts where a row's notes do not say: '' | allocated | reserved
        (bytes that the allocator or the whole process holds), with why
    recipes : what the source's code sets away from the framework entry
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
    memory: str = ""
    memory_why: str = ""
    recipes: tuple[Recipe, ...] = ()


_JEAN_ZAY = "4 Omni-Path 100 Gb/s links per node (IDRIS, Jean Zay description)"

_BIGSCIENCE = (
    Recipe(
        where={"source": r"chronicles-prequel \(line [1-8]?\d?\d\)"},
        sets={"grad_bytes": 2},
        why="16-bit gradients: before line 899 of chronicles-prequel.md, which brings the BF16 optimizer",
    ),
)
_BRIDGE = (
    Recipe(
        where={"model": "405B", "gpu": "GB200", "dtype": "FP8"},
        sets={"memory": "megatron-bridge-expandable"},
        why="expandable segments (Megatron-Bridge v0.2.0-v0.4.2 scripts/performance/perf_plugins.py)",
    ),
)
_BRIDGE_MEMORY = (
    Recipe(
        where={"model": "Moonlight"},
        sets={"master_bytes": 2, "moment_bytes": 2, "grad_bytes": 2, "grad_reduce_bytes": 2},
        why="precision-aware optimizer (Megatron-Bridge recipes/moonlight/h100/moonlight_16b.py)",
    ),
    Recipe(
        where={"model": "Llama-3.*70B"},
        sets={"memory": "megatron-bridge-no-transpose", "fp8_params": True, "grad_bytes": 2},
        why="no transposes of 8-bit weights kept (llama3_70b_sft_32gpu_h100_fp8cs_config)",
    ),
)
_STAS = (
    Recipe(
        where={"notes": "base \\(no Liger\\)"},
        sets={"memory": "deepspeed-eager"},
        why="model code without Liger kernels (stas00/ml-engineering)",
    ),
)

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
        memory="reserved",
        memory_why="nvidia-smi (tr11-176B-ml/chronicles-prequel.md)",
        recipes=_BIGSCIENCE,
    ),
    "internevo": Family(
        flops="hardware",
        seq_len=2048,
        seq_why="SEQ_LEN of configs/7B_sft.py",
        recompute="full",
        memory="reserved",
        memory_why="read from outside the process, as its table of host memory (doc/en/train_performance.md)",
    ),
    "mlperf": Family(
        dtype="fp8", dtype_why="the NVIDIA LoRA submissions of these rounds train in fp8", flops="causal"
    ),
    "korthikanti": Family(flops="full", dtype="fp16", recompute="full"),
    "sc21": Family(flops="hardware", dtype="fp16", recompute="full"),
    "megatron_2020": Family(flops="hardware", dtype="fp16", recompute="full"),
    "megatron_h100": Family(flops="full"),
    "megatronbridge": Family(flops="causal", recipes=_BRIDGE),
    "megatronbridge_memory": Family(
        flops="causal",
        gigabyte=1e9,
        memory="allocated",
        memory_why="peak allocated, 1e9 bytes (Megatron-Bridge training/utils/train_utils.py)",
        recipes=_BRIDGE_MEMORY,
    ),
    "stas_h200_b200": Family(
        flops="causal",
        gigabyte=1e9,
        memory="reserved",
        memory_why="max_memory_reserved, as the other rows of the source",
        recipes=_STAS,
    ),
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
    ("llm-foundry", "composer"),
    ("mosaicml", "composer"),
    ("fms-fsdp", "fms-fsdp"),
    ("torchtitan", "torchtitan@2024"),
    ("internevo", "internevo"),
    ("nanotron", "nanotron"),
    ("colossal", "colossalai"),
    ("maxtext", "maxtext"),
    ("pax", "paxml"),
    ("deepspeed", "deepspeed"),
)
# What other frameworks run on: (word, entry, why).
_ALIKE = (
    ("torchtune", "torchtitan", "FSDP2 of PyTorch"),
    ("fsdp2", "torchtitan", "FSDP2 of PyTorch"),
    ("fully_shard", "torchtitan", "FSDP2 of PyTorch"),
    ("gpt-neox", "megatron-deepspeed@2022", "it is built on Megatron-DeepSpeed"),
    ("sailor", "megatron-deepspeed@2021", "it is built on Megatron-DeepSpeed"),
    ("galvatron", "megatron-lm@2024", "it is built on Megatron-LM"),
    ("mindspeed", "megatron-core", "it is built on Megatron-Core"),
    ("flagscale", "megatron-core", "it is built on Megatron-Core"),
    ("megatron-fsdp", "megatron-core", "it is part of Megatron-Core"),
    ("mcore", "megatron-core", "its short name"),
    ("megatron", "megatron-lm@2024", "its code"),
    ("litgpt", "composer", "FSDP1 of PyTorch"),
    ("lit-gpt", "composer", "FSDP1 of PyTorch"),
    ("lightning", "composer", "FSDP1 of PyTorch"),
    ("fairscale", "composer", "FSDP1 of PyTorch"),
    ("metaseq", "composer", "FSDP1 of PyTorch"),
    ("fsdp", "composer", "FSDP1 of PyTorch"),
    ("zero", "deepspeed", "ZeRO of DeepSpeed"),
    ("alpa", "maxtext", "JAX and XLA"),
    ("levanter", "maxtext", "JAX and XLA"),
    ("t5x", "maxtext", "JAX and XLA"),
    ("tpu", "maxtext", "JAX and XLA"),
    ("jax", "maxtext", "JAX and XLA"),
    ("xla", "maxtext", "JAX and XLA"),
    ("ddp", "ddp", "DDP of PyTorch"),
)
_PARENTS = (
    "accelerate|transformers|hugging ?face|trl|axolotl|llama-?factory|unsloth|pytorch|torch|apex|habana"
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
            return _stated_release(label, text)
    return _alike(raw)


def _stated_release(label: str, text: str) -> tuple[Framework, tuple[str, ...]]:
    """Return the entry of this label, at the release the text names where the table has several."""
    name, _, release = label.partition("@")
    said = re.search(rf"{name} ?@?v?(\d+\.\d+)", text)
    if said and name == "torchtitan" and said[1] != release:
        return _at_release(name, said[1])
    return load_framework(label), ()


def _alike(raw: Mapping[str, str]) -> tuple[Framework, tuple[str, ...]]:
    """Return the entry that runs most like a framework the table does not hold.

    PyTorch as such is what the row says of its sharding; nothing at all is Megatron-Core where the model is
    cut and FSDP where it is not.
    """
    text, sharding = raw["framework"].lower(), raw["zero_stage_or_fsdp"].lower()
    shown = repr(raw["framework"][:60]) if text else "not stated"
    for where in (text, sharding if not text or re.search(_PARENTS, text) else ""):
        for word, label, why in _ALIKE:
            if where and word in where:
                entry = load_framework(label)
                return entry, (f"framework {shown} read as {entry.label}: {why}",)
    uncut = all(raw[name] in ("", "1", "1.0") for name in ("tp", "pp"))
    if re.search(_PARENTS, text) and uncut:
        entry = load_framework("ddp" if re.search("none|ddp", sharding) else "composer")
        return entry, (f"framework {shown} read as {entry.label}: PyTorch of an uncut model",)
    return load_framework("megatron-core"), (f"framework {shown} read as megatron-core",)


def with_recipe(
    family: Family, framework: Framework, raw: Mapping[str, str]
) -> tuple[Framework, tuple[str, ...]]:
    """Return the framework as the source's own code sets it for this row, and the lines that say so."""
    used = [recipe for recipe in family.recipes if recipe.names(raw)]
    for recipe in used:
        framework = replace(framework, **recipe.sets)
    return framework, tuple(recipe.why for recipe in used)


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
    degrees_blank = not (raw["tp"] or raw["cp"] or raw["in_cuda_graph"])
    batch, devices = raw["global_batch"], raw["gpus"]
    shared = batch.isdecimal() and devices.isdecimal() and int(batch) < int(devices)
    if degrees_blank and shared and "lora" in raw["model"].lower() and _release_key(entry.release) >= (4, 1):
        return replace(entry, cuda_graphs="full"), (
            *notes,
            "CUDA graphs not stated: of whole layers, as in submissions whose ranks share a sample (cp > 1)",
        )
    return entry, notes
