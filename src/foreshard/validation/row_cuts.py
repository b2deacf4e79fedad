"""Where the stages of a training row are cut: printed, by its recipe or framework, else evenly."""

from __future__ import annotations

import re
from dataclasses import replace

from foreshard.spec.degrees import block_cuts, spans_of
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.validation.row_cluster import RowReading


def _layout_cuts(text: str) -> list[int]:
    """Return blocks per virtual stage of a Megatron layout string such as 'Et*4|(t*4|)*14tmL'."""
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    flat = re.sub(r"([a-zA-Z])\*(\d+)", lambda found: found[1] * int(found[2]), flat)
    return [part.count("t") for part in flat.split("|")]


# Megatron-Bridge DeepSeek-V3/Kimi-K2 layouts by number of virtual stages, where a row does not print one.
_SIXTY_ONE = {4: [15, 16, 16, 14], 8: [8] * 7 + [5], 16: [4] * 15 + [1], 32: [1] + [2] * 30 + [0]}


def layer_cuts(row: RowReading, num_blocks: int, num_chunks: int) -> list[int]:
    """Return blocks per virtual stage: printed by the row, its recipe's layout, else `block_cuts`."""
    other = row.raw.get("in_other", "")
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
    elif num_blocks == 61 and num_chunks in _SIXTY_ONE and "megatron-bridge" in row.raw["framework"].lower():
        cuts = _SIXTY_ONE[num_chunks]
        row.note("pipeline layout not stated: Megatron-Bridge's layout for 61 layers")
    if len(cuts) == num_chunks and sum(cuts) == num_blocks:
        return cuts
    if cuts:
        row.note(f"the stated layout does not fit {num_blocks} layers in {num_chunks} chunks: even cut")
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


def with_cuts(plan: Plan, cuts: list[int], pp: int) -> Plan:
    """Return the plan with these blocks per virtual stage; the embedding is first, the head last."""
    group = plan.groups[0]
    spans = zip(group.stages, spans_of(cuts, pp), strict=True)
    stages = tuple(replace(stage, layers=tuple(span)) for stage, span in spans)
    schedule = "interleaved" if len(cuts) > pp else "1f1b"
    return replace(plan, groups=(replace(group, stages=stages, schedule=schedule),))


def virtual_stages(row: RowReading, num_blocks: int, pp: int) -> int:
    """Return virtual stages per stage: stated, else as the family's runs had them."""
    vpp = row.whole("vpp")
    if vpp is None:
        vpp = 1
        if pp > 1 and row.name in ("megatron_h100", "nemo_docs", "mlperf", "sc21", "korthikanti"):
            per_stage = num_blocks // pp
            even = (v for v in (per_stage // 2, per_stage, 1) if v and num_blocks % (pp * v) == 0)
            vpp = next(even, 0)
            chunks = (
                f"interleaved, {num_blocks // (pp * vpp)} layers per chunk" if vpp else "1, uneven stages"
            )
            row.note(f"vpp not stated with pp {pp}: {chunks}")
            vpp = vpp or 1
    if pp == 1 and vpp > 1:
        row.note(f"vpp {vpp} with pp 1 has no meaning: 1")
        vpp = 1
    if num_blocks + 2 < pp * vpp:
        row.note(f"vpp {vpp} leaves chunks without layers: 1")
        vpp = 1
    return vpp
