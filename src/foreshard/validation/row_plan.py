"""The Plan of a training row: degrees, options and blanks as its family declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.validation.cells import truth
from foreshard.validation.degrees import ModelSize, degrees
from foreshard.validation.facts import integer, recompute_of, sharding_of
from foreshard.validation.families import families
from foreshard.validation.row_cluster import RowReading, node_size
from foreshard.validation.row_cuts import cost_cuts, layer_cuts, virtual_stages, with_cuts
from foreshard.validation.row_dimensions import ROW_SOURCE

_GSPMD = ("maxtext", "paxml")  # one program over the whole mesh: no micro-batch loop of its own


def _micro_batch(row: RowReading, framework: Framework, size: ModelSize, at: dict[str, int]) -> int:
    stated = row.whole("micro_batch")
    whole = max(1, at["global_batch"] // at["dp"])
    together = stated is None or stated * at["tp"] * at["cp"] == whole
    if framework.name in _GSPMD and at["pp"] == 1 and stated != whole and together:
        # MaxText base.yml: per_device_batch_size counts every device, also those that share a sample.
        said = "micro-batch not stated" if stated is None else f"micro-batch {stated} of a device"
        row.note(f"{said}: {whole}, all samples of a replica at once")
        return whole
    if stated is not None:
        return stated
    text = row.raw["framework"].lower()
    if text.startswith("colossal"):
        row.note("micro-batch not stated: the batch per data-parallel rank, no accumulation")
        return whole
    sharding = framework.fsdp != "none" or framework.name in ("ddp", "deepspeed")
    if ("megatron" in text and "nemo" not in text) or sharding:
        largest = size.largest_micro_batch(at["tp"], at["pp"], at["dp"], at["cp"], at["vpp"])
        row.note(f"micro-batch not stated: {largest}, the largest power of two that fits")
        return largest
    row.note("micro-batch not stated: 1")
    return 1


def _sequence_parallel(row: RowReading, framework: Framework, tp: int) -> bool:
    said = truth(row.raw["sp"])
    if framework.name in _GSPMD and tp > 1 and not said:
        # MaxText base.yml, logical_axis_rules: activation_embed lies on the tensor axis.
        row.note("what layers pass on is cut over tp, as MaxText's axis rules do: as sequence parallelism")
        return True
    if said is not None:
        return said
    if tp > 1:
        row.note("sequence parallelism not stated: on with tp > 1, as the recipes of the framework set it")
    return tp > 1


def row_plan(row: RowReading, model: Model, framework: Framework, precision: str) -> tuple[Plan, Framework]:
    """Return the plan of a training row and the framework with the sharding the row states."""
    gpus, seq_len = device_count(row.raw), sequence_of(row, model)
    size = ModelSize(
        model=model,
        device=row.device,
        seq_len=seq_len,
        global_batch=row.whole("global_batch") or gpus,
        sharded=sharding_of(row.raw["zero_stage_or_fsdp"], _default_zero(row, framework))[0] >= 3,
    )
    cut: dict[str, Any] = degrees(row, gpus, size)
    vpp = virtual_stages(row, model.num_layers, cut["pp"])
    zero, shard, framework = _sharding(row, framework, cut)
    global_batch = row.whole("global_batch") or _batch_of(row, cut)
    size = replace(size, global_batch=global_batch)
    micro_batch = _micro_batch(row, framework, size, {**cut, "vpp": vpp, "global_batch": global_batch})
    fits = size.fits(
        cut["tp"], cut["pp"], cut["dp"], cp=cut["cp"], micro_batch=micro_batch, vpp=vpp, recompute=False
    )
    known = row.name in families() or fits
    recompute, offload = _memory_options(row, framework, "" if known else "full")
    if micro_batch * cut["dp"] > global_batch:
        row.note("micro-batch times dp exceeds the global batch: one short micro-batch")
    plan = plan_from_degrees(
        model.num_layers,
        cut["tp"] * cut["pp"] * cut["cp"] * cut["dp"],
        **cut,
        etp=_expert_tensor(row, framework, cut),
        zero=zero,
        shard_size=shard,
        recompute=recompute,
        offload=offload,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq_len=seq_len,
        sp=_sequence_parallel(row, framework, cut["tp"]),
        precision=precision,
        framework=framework.label,
    )
    if framework.name == "nanotron" and vpp == 1:
        cuts = cost_cuts(model, cut["pp"])
    else:
        cuts = layer_cuts(row, model.num_layers, cut["pp"] * vpp)
    return with_cuts(plan, cuts, cut["pp"]), framework


def device_count(raw: Mapping[str, str]) -> int:
    """Return how many devices a row used: stated, else what its degrees make."""
    gpus = integer(raw, "gpus")
    if gpus is not None:
        return gpus
    known = [integer(raw, name) for name in ("dp", "tp", "pp")]
    if None in known:
        raise SpecError("the number of devices is not stated", key="gpus", rule="gpus is stated")
    return prod(value or 1 for value in known) * (integer(raw, "cp") or 1)


def sequence_of(row: RowReading, model: Model) -> int:
    """Return the tokens of a sample: stated, else the family's, else what the model is trained with."""
    family, stated = row.family, row.whole("seq_len")
    if stated is not None:
        return stated
    if family.seq_len:
        row.note(f"sequence not stated: {family.seq_len}, {family.seq_why}")
        return family.seq_len
    if not model.max_seq_len or model.source == ROW_SOURCE:
        raise SpecError("seq_len is not stated", key="seq_len", rule="Sequence and global batch are stated")
    row.note(f"sequence not stated: {model.max_seq_len}, the model's own")
    return model.max_seq_len


def _batch_of(row: RowReading, cut: dict[str, int]) -> int:
    """Return a global batch where only a rate was measured: it hardly depends on accumulation.

    A step time without its batch says nothing.
    """
    micro_batch = row.whole("micro_batch")
    if micro_batch is None or row.raw["metric_step_time_s"]:
        raise SpecError(
            "global_batch is not stated", key="global_batch", rule="Sequence and global batch are stated"
        )
    micro_batches = 1 if cut["pp"] == 1 else 4 * cut["pp"]
    row.note(f"global batch not stated: {micro_batches} micro-batches for each replica")
    return micro_batch * cut["dp"] * micro_batches


def _expert_tensor(row: RowReading, framework: Framework, degrees: dict[str, int]) -> int:
    """Return the tensor degree of experts: NeMo's Grok recipes leave it blank, Megatron then uses tp."""
    tp, ranks = degrees["tp"], degrees["tp"] * degrees["cp"] * degrees["dp"]
    if framework.name == "nemo" and row.raw["model"].startswith("Grok") and ranks % (tp * degrees["ep"]) == 0:
        row.note(f"tensor degree of experts not stated: {tp}, Megatron's default is tp")
        return tp
    return 1


def _default_zero(row: RowReading, framework: Framework) -> int:
    return framework.default_zero if row.family.zero is None else row.family.zero


def _sharding(
    row: RowReading, framework: Framework, degrees: dict[str, int]
) -> tuple[int, int | None, Framework]:
    """Return ZeRO stage, shard size and the framework that shards that way."""
    text = row.raw["zero_stage_or_fsdp"]
    zero, shard, flavour = sharding_of(text, _default_zero(row, framework))
    if not text:
        row.note(f"sharding not stated: ZeRO {zero}, {row.family.zero_why}")
    if "split not stated" in text:
        row.note("FSDP split not stated: sharded over every data-parallel rank")
    if re.search("hsdp|hybrid_shard", text.lower()) and shard is None:
        shard = node_size(row, device_count(row.raw)) // degrees["tp"]
        row.note(f"hybrid sharding: over {shard} ranks of a node, replicated across nodes")
    if "remaining ICI" in text:
        found = re.search(r"\((\d+) chips/slice\)", row.raw["intra_link"])
        shard = int(found[1]) // degrees["tp"] if found else None
    ranks = degrees["dp"] * degrees["cp"]
    if shard is not None and (not 0 < shard < ranks or ranks % shard):
        shard = None
    if flavour == "megatron-fsdp" or (flavour and framework.fsdp == "none"):
        framework = replace(framework, fsdp=flavour if flavour == "megatron-fsdp" else "fsdp1")
    elif not flavour and zero < 3 and framework.fsdp != "none":
        framework = replace(framework, fsdp="none")
    return zero, shard, framework


def _memory_options(row: RowReading, framework: Framework, needed: str) -> tuple[str, str]:
    """Return recompute and offload of a row; `needed` is what a blank means where little memory is free."""
    text = row.raw["act_recompute"]
    if not text and "full recompute counted" in row.raw["check"]:
        text = "full"
        row.note("recompute not stated: full, which its FLOP count includes")
    elif not text and needed:
        text = needed
        row.note(f"recompute not stated: {needed}, activations would not fit")
    elif not text:
        text = row.family.recompute
        row.note(f"recompute not stated: {text}")
    elif framework.name == "torchtitan" and text.lower().strip() == "selective":
        text = "selective:op"
        row.note("selective recompute of torchtitan: per operation")
    elif framework.name == "fms-fsdp" and text.lower().strip() == "selective":
        text = "full"  # its README has 0.74 hardware over 0.55 model FLOPs: four thirds
        row.note("selective recompute of fms-fsdp: every block (scripts/train.sh selective_checkpointing=1)")
    recompute, offload, more = recompute_of(text)
    row.note(*more)
    if re.search(r"cpu.?offload|offloaded adam", row.raw["zero_stage_or_fsdp"].lower()):
        offload = "optimizer" if offload == "none" else "all"
    return recompute, offload
