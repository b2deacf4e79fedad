"""The Plan of a training row: degrees, layer cuts and blanks as its family declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreshard.errors import SpecError
from foreshard.profile.facts import integer, recompute_of, sharding_of
from foreshard.profile.families import Family
from foreshard.profile.row_cluster import Notes
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.layout import block_cuts, plan_from_degrees
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan

_KEEP_FREE = 0.85  # share of the device memory that the blank micro-batch rule fills


def _layout_cuts(text: str) -> list[int]:
    """Return blocks per virtual stage of a Megatron layout string such as 'Et*4|(t*4|)*14tmL'."""
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    flat = re.sub(r"([a-zA-Z])\*(\d+)", lambda found: found[1] * int(found[2]), flat)
    return [part.count("t") for part in flat.split("|")]


# Megatron-Bridge DeepSeek-V3/Kimi-K2 layouts by number of virtual stages, where a row does not print one.
_SIXTY_ONE = {4: [15, 16, 16, 14], 8: [8] * 7 + [5], 16: [4] * 15 + [1], 32: [1] + [2] * 30 + [0]}


def layer_cuts(raw: Mapping[str, str], num_blocks: int, num_chunks: int, notes: Notes) -> list[int]:
    """Return blocks per virtual stage: printed by the row, its recipe's layout, else `block_cuts`."""
    other = raw.get("in_other", "")
    cuts: list[int] = []
    printed = re.search(r"layout (?:set: )?(E[tmL|()*\d]+)", other)
    last = re.search(r"layout set \((\d+) stages, last=\[([^\]]*)\]", other)
    if printed:
        cuts = _layout_cuts(printed[1])
    elif last:
        stages, tail = int(last[1]), last[2].count("decoder")
        cuts = [(num_blocks - tail) // max(1, stages - 1)] * (stages - 1) + [tail]
    elif "first/last stage shorter by 1/2 layers" in other and num_chunks > 1:
        size = -(-(num_blocks + 3) // num_chunks)
        cuts = [size - 1] + [size] * (num_chunks - 2) + [size - 2]
    elif num_blocks == 61 and num_chunks in _SIXTY_ONE and "megatron-bridge" in raw["framework"].lower():
        cuts = _SIXTY_ONE[num_chunks]
        notes.add("pipeline layout not stated: Megatron-Bridge's layout for 61 layers")
    if len(cuts) == num_chunks and sum(cuts) == num_blocks:
        return cuts
    if cuts:
        notes.add(f"the stated layout does not fit {num_blocks} layers in {num_chunks} chunks: even cut")
    return block_cuts(num_blocks, num_chunks)


def cost_cuts(model: Model, num_stages: int) -> list[int]:
    """Return blocks per stage as nanotron cuts: a stage takes blocks until it passes its share of the cost.

    Source
    ------
    nanotron 2411b022 models/base.py build_model (cumulative costs against even thresholds) and
    models/llama.py get_block_compute_costs: 4h^2 + 3hf per layer, Vh for the head, nothing for the embedding.
    """
    block = model.blocks[0]
    layer = model.hidden * (4 * block.num_heads * block.head_dim + 3 * block.ffn)
    total = model.num_layers * layer + model.vocab * model.hidden
    cuts = [0] * num_stages
    stage = 0
    for done in range(1, model.num_layers + 1):
        cuts[stage] += 1
        stage += done * layer > total * (stage + 1) / num_stages
    return cuts


def _with_cuts(plan: Plan, cuts: list[int], pp: int) -> Plan:
    """Return the plan with these blocks per virtual stage; the embedding is first, the head last."""
    group = plan.groups[0]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    start = 0
    for chunk, count in enumerate(cuts):
        stop = start + count + (chunk == 0) + (chunk == len(cuts) - 1)
        spans[chunk % pp].append((start, stop))
        start = stop
    stages = tuple(
        replace(stage, layers=tuple(span)) for stage, span in zip(group.stages, spans, strict=True)
    )
    schedule = "interleaved" if len(cuts) > pp else "1f1b"
    return replace(plan, groups=(replace(group, stages=stages, schedule=schedule),))


def _virtual_stages(raw: Mapping[str, str], num_blocks: int, pp: int, family_name: str, notes: Notes) -> int:
    vpp = integer(raw, "vpp")
    if vpp is None:
        vpp = 1
        if pp > 1 and family_name in ("megatron_h100", "nemo_docs", "mlperf", "sc21", "korthikanti"):
            per_stage = num_blocks // pp
            vpp = next(v for v in (per_stage // 2, per_stage, 1) if v and num_blocks % (pp * v) == 0)
            notes.add(
                f"vpp not stated with pp {pp}: interleaved, {num_blocks // (pp * vpp)} layers per chunk"
            )
    if pp == 1 and vpp > 1:
        notes.add(f"vpp {vpp} with pp 1 has no meaning: 1")
        vpp = 1
    if num_blocks + 2 < pp * vpp:
        notes.add(f"vpp {vpp} leaves chunks without layers: 1")
        vpp = 1
    return vpp


def _largest_micro_batch(model: Model, device: Device, seq_len: int, at: dict[str, int]) -> int:
    """Return the largest power of two whose Megatron bytes fit: 6 + 12/dp per parameter, 34 s b h / t.

    Source
    ------
    Korthikanti et al. 2022 (arXiv 2205.05198) eq. 4 with flash attention, in-flight of interleaved 1F1B.
    """
    tp, pp, dp, vpp = at["tp"], at["pp"], at["dp"], at["vpp"]
    per_rank = at["global_batch"] // dp
    states = model.num_params / (tp * pp) * (6 + 12 / dp)
    layers = model.num_layers * (1 + (pp - 1) / (pp * vpp) if pp > 1 else 1)
    best, size = 1, 1
    while size <= per_rank:
        activations = 34 * seq_len * size * model.hidden / tp * layers
        logits = 6 * seq_len * size * model.vocab / tp
        if per_rank % size or (pp > 1 and per_rank // size < pp):
            break
        if states + activations + logits <= _KEEP_FREE * device.capacity_bytes:
            best = size
        size *= 2
    return best


def _micro_batch(
    raw: Mapping[str, str], model: Model, device: Device, at: dict[str, int], notes: Notes
) -> int:
    stated = integer(raw, "micro_batch")
    if stated is not None:
        return stated
    if raw["framework"].lower().startswith("colossal"):
        notes.add("micro-batch not stated: the batch per data-parallel rank, no accumulation")
        return at["global_batch"] // at["dp"]
    if "megatron" in raw["framework"].lower() and "nemo" not in raw["framework"].lower():
        size = _largest_micro_batch(model, device, at["seq_len"], at)
        notes.add(f"micro-batch not stated: {size}, the largest power of two that fits")
        return size
    notes.add("micro-batch not stated: 1")
    return 1


def _sequence_parallel(raw: Mapping[str, str], tp: int, notes: Notes) -> bool:
    if raw["sp"]:
        return raw["sp"].lower() in ("true", "1", "yes")
    if tp > 1:
        notes.add("sequence parallelism not stated: on with tp > 1, as the recipes of the framework set it")
    return tp > 1


def _degrees(raw: Mapping[str, str], gpus: int, notes: Notes) -> dict[str, int]:
    """Return tp, pp, cp, ep and dp; at most dp may be blank."""
    out = {}
    for name in ("tp", "pp"):
        value = integer(raw, name)
        if value is None:
            raise SpecError("parallel degrees are not stated", key=name, rule="tp and pp are stated")
        out[name] = value
    for name in ("cp", "ep"):
        out[name] = integer(raw, name) or 1
    size = out["tp"] * out["pp"] * out["cp"]
    out["dp"] = integer(raw, "dp") or max(1, gpus // size)
    if out["dp"] * size != gpus:
        notes.add(f"dp {out['dp']} x {size} is not {gpus} devices: dp {max(1, gpus // size)}")
        out["dp"] = max(1, gpus // size)
    group = out["tp"] * out["cp"] * out["dp"]
    if group % out["ep"]:
        fitting = max(ep for ep in range(1, out["ep"]) if group % ep == 0)
        notes.add(f"ep {out['ep']} does not divide the {group} devices of a stage: {fitting}")
        out["ep"] = fitting
    return out


def row_plan(
    raw: Mapping[str, str],
    model: Model,
    device: Device,
    family_name: str,
    family: Family,
    framework: Framework,
    precision: str,
    notes: Notes,
) -> tuple[Plan, Framework]:
    """Return the plan of a training row and the framework with the sharding the row states."""
    gpus = integer(raw, "gpus") or 0
    degrees = _degrees(raw, gpus, notes)
    seq_len, global_batch = integer(raw, "seq_len") or family.seq_len, integer(raw, "global_batch")
    if not seq_len or global_batch is None:
        key = "global_batch" if seq_len else "seq_len"
        raise SpecError(f"{key} is not stated", key=key, rule="sequence and global batch are stated")
    if not raw["seq_len"]:
        notes.add(f"sequence not stated: {seq_len}, {family.seq_why}")
    vpp = _virtual_stages(raw, model.num_layers, degrees["pp"], family_name, notes)
    at = {**degrees, "vpp": vpp, "seq_len": seq_len, "global_batch": global_batch}
    micro_batch = _micro_batch(raw, model, device, at, notes)
    zero, shard, framework = _sharding(raw, family, framework, degrees, notes)
    recompute, offload = _memory_options(raw, family, framework, notes)
    if micro_batch * degrees["dp"] > global_batch:
        notes.add("micro-batch times dp exceeds the global batch: one short micro-batch")
    options: dict[str, Any] = {
        **degrees,
        "zero": zero,
        "shard_size": shard,
        "recompute": recompute,
        "offload": offload,
    }
    plan = plan_from_degrees(
        model.num_layers,
        gpus,
        etp=_expert_tensor(raw, framework, degrees, notes),
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq_len=seq_len,
        sp=_sequence_parallel(raw, degrees["tp"], notes),
        precision=precision,
        framework=framework.label,
        **options,
    )
    if framework.name == "nanotron" and vpp == 1:
        cuts = cost_cuts(model, degrees["pp"])
    else:
        cuts = layer_cuts(raw, model.num_layers, degrees["pp"] * vpp, notes)
    return _with_cuts(plan, cuts, degrees["pp"]), framework


def _expert_tensor(
    raw: Mapping[str, str], framework: Framework, degrees: dict[str, int], notes: Notes
) -> int:
    """Return the tensor degree of experts: NeMo's Grok recipes leave it blank, Megatron then uses tp."""
    tp, ranks = degrees["tp"], degrees["tp"] * degrees["cp"] * degrees["dp"]
    if framework.name == "nemo" and raw["model"].startswith("Grok") and ranks % (tp * degrees["ep"]) == 0:
        notes.add(f"tensor degree of experts not stated: {tp}, Megatron's default is tp")
        return tp
    return 1


def _sharding(
    raw: Mapping[str, str], family: Family, framework: Framework, degrees: dict[str, int], notes: Notes
) -> tuple[int, int | None, Framework]:
    """Return ZeRO stage, shard size and the framework that shards that way."""
    default = framework.default_zero if family.zero is None else family.zero
    zero, shard, flavour = sharding_of(raw["zero_stage_or_fsdp"], default)
    if not raw["zero_stage_or_fsdp"]:
        notes.add(f"sharding not stated: ZeRO {zero}, {family.zero_why}")
    if "split not stated" in raw["zero_stage_or_fsdp"]:
        notes.add("FSDP split not stated: sharded over every data-parallel rank")
    if "remaining ICI" in raw["zero_stage_or_fsdp"]:
        found = re.search(r"\((\d+) chips/slice\)", raw["intra_link"])
        shard = int(found[1]) // degrees["tp"] if found else None
    ranks = degrees["dp"] * degrees["cp"]
    if shard is not None and (not 0 < shard < ranks or ranks % shard):
        shard = None
    if flavour == "megatron-fsdp" or (flavour and framework.fsdp == "none"):
        framework = replace(framework, fsdp=flavour if flavour == "megatron-fsdp" else "fsdp1")
    elif not flavour and zero < 3 and framework.fsdp != "none":
        framework = replace(framework, fsdp="none")
    return zero, shard, framework


def _memory_options(
    raw: Mapping[str, str], family: Family, framework: Framework, notes: Notes
) -> tuple[str, str]:
    """Return recompute and offload of a row."""
    text = raw["act_recompute"]
    if not text and "full recompute counted" in raw["check"]:
        text = "full"
        notes.add("recompute not stated: full, which its FLOP count includes")
    elif not text:
        text = family.recompute
        notes.add(f"recompute not stated: {text}")
    elif framework.name == "torchtitan" and text.lower().strip() == "selective":
        text = "selective:op"
        notes.add("selective recompute of torchtitan: per operation")
    elif framework.name == "fms-fsdp" and text.lower().strip() == "selective":
        text = "full"  # its README has 0.74 hardware over 0.55 model FLOPs: four thirds
        notes.add("selective recompute of fms-fsdp: every block (scripts/train.sh selective_checkpointing=1)")
    recompute, offload, more = recompute_of(text)
    for line in more:
        notes.add(line)
    if re.search(r"cpu.?offload|offloaded adam", raw["zero_stage_or_fsdp"].lower()):
        offload = "optimizer" if offload == "none" else "all"
    return recompute, offload
