"""Calculon (github.com/calculon-ai/calculon): its closed model of dense decoders, from its own system files.

Of its system files the rate of the network and the size of a node are replaced by those of the cluster. A
gated MLP is written as an ungated one of 1.5 times the width, which has the same weights and products.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from foreshard.interop.peers.one_replica import OneReplica, one_replica, recompute_word, refuse_if
from foreshard.validation.predictors import RefusedRun, RunInputs, StepAnswer, StepPredictor

SYSTEMS = {"a100-sxm-80gb": "a100_80g", "h100-sxm": "h100_80g_nvl8"}


def load(path: Path) -> StepPredictor:
    """Return the predictor of a checkout."""
    from calculon import System  # type: ignore[import-not-found]
    from calculon.llm import Llm  # type: ignore[import-not-found]

    systems = {
        device: json.loads((path / "systems" / f"{name}.json").read_text(encoding="utf-8"))
        for device, name in SYSTEMS.items()
    }
    logger = logging.Logger("calculon")

    def predict(run: RunInputs) -> StepAnswer:
        found = one_replica(run)
        stated = execution(run, found)
        system = System(system_of(systems, found))
        model = Llm(Llm.Application(application(run, found)), logger)
        try:
            model.compile(system, Llm.Execution.from_json(stated))
            model.run(system)
        except (Llm.Error, AssertionError) as error:
            raise RefusedRun(_own_words(str(error))) from error
        return StepAnswer(step_time_s=model.get_total_time(), allocated_bytes=model.get_mem_tier1_cap_req())

    return StepPredictor(name="Calculon", predict=predict, note=f"its files {', '.join(SYSTEMS.values())}")


def _own_words(text: str) -> str:
    """Return why Calculon raised, without the numbers of one run."""
    return (
        "does not fit by its own count of memory" if text.startswith("Mem tier") else text[:60] or "assertion"
    )


def system_of(systems: dict[str, Any], found: OneReplica) -> dict[str, Any]:
    """Return the system file of the device with the node and network of the cluster."""
    device = found.nodes.device.name
    refuse_if(device not in systems, f"no system file of {device}")
    system: dict[str, Any] = json.loads(json.dumps(systems[device]))
    inside, between = system["networks"]
    inside["size"] = found.nodes.per_node
    between["bandwidth"] = found.nic_gb_per_s
    return system


def application(run: RunInputs, found: OneReplica) -> dict[str, Any]:
    """Return the model as Calculon writes it."""
    block = found.block
    refuse_if(bool(block.num_experts), "experts")
    refuse_if(block.num_kv_heads != block.num_heads, "grouped-query attention")
    return {
        "hidden": block.hidden,
        "feedforward": block.ffn * 3 // 2 if block.gated else block.ffn,
        "seq_size": run.plan.seq_len,
        "attn_heads": block.num_heads,
        "attn_size": block.head_dim,
        "num_blocks": found.degrees.num_blocks,
    }


def execution(run: RunInputs, found: OneReplica) -> dict[str, Any]:
    """Return the plan as Calculon writes it."""
    d = found.degrees
    refuse_if(d.cp > 1, "context parallelism")
    refuse_if(d.zero > 1, "ZeRO 2 or 3")
    refuse_if(d.zero == 1 and d.shard_size not in (1, d.dp), "shard groups")
    refuse_if(run.plan.precision not in ("bf16", "fp16"), f"precision {run.plan.precision}")
    recompute = recompute_word(found, none="none", selective="attn_only", full="full")
    overlap = run.plan.comm.get("grad_overlap", run.framework.hides("grad_overlap", d.zero))
    return written(
        tp=d.tp,
        pp=d.pp,
        dp=d.dp,
        vpp=d.vpp,
        micro_batch=d.micro_batch,
        batch=run.plan.global_batch,
        recompute=recompute,
        sharded=d.zero == 1,
        sp=d.sp,
        overlap=bool(overlap),
        per_node=found.nodes.per_node,
    )


def written(
    *,
    tp: int,
    pp: int,
    dp: int,
    vpp: int,
    micro_batch: int,
    batch: int,
    recompute: str,
    sharded: bool,
    sp: bool,
    overlap: bool,
    per_node: int,
) -> dict[str, Any]:
    """Return an execution file of Calculon; network 0 is inside a node, network 1 between nodes."""
    return {
        "num_procs": tp * pp * dp,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": int(tp > per_node),
        "pipeline_par_net": int(tp * dp * pp > per_node),
        "data_par_net": int(tp * dp > per_node),
        "microbatch_size": micro_batch,
        "batch_size": batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": vpp,
        "optimizer_sharding": sharded and dp > 1,
        "tensor_par_comm_type": "rs_ag" if sp and tp > 1 else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": overlap and dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
