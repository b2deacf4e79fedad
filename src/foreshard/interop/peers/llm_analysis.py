"""llm-analysis (github.com/cli99/llm-analysis): FLOPs and bytes over rates, from its own files of devices.

Efficiencies are half of the peak, which its constants advise, and nine tenths of the memory's rate. The
network of its files is replaced by that of the cluster. It has neither a pipeline bubble nor virtual stages;
its step is what it prints.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from foreshard.interop.peers.one_replica import OneReplica, one_replica, recompute_word, refuse_if
from foreshard.validation.predictors import RefusedRun, RunInputs, StepAnswer, StepPredictor

FLOPS_EFFICIENCY, MEMORY_EFFICIENCY = 0.5, 0.9
SYSTEMS = {
    "a100-sxm-40gb": "a100-sxm-40gb",
    "a100-sxm-80gb": "a100-sxm-80gb",
    "a100-pcie-40gb": "a100-pcie-40gb",
    "a100-pcie-80gb": "a100-pcie-80gb",
    "h100-sxm": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "v100-sxm-16gb": "v100-sxm-16gb",
    "v100-sxm-32gb": "v100-sxm-32gb",
    "v100-sxm3-32gb": "v100-sxm-32gb",
}


def load(path: Path) -> StepPredictor:
    """Return the predictor of a checkout."""
    from llm_analysis import analysis, config  # type: ignore[import-not-found]

    logging.getLogger("llm_analysis").setLevel(logging.CRITICAL)
    analysis.logger.setLevel(logging.CRITICAL)
    folder = path / "llm_analysis" / "gpu_configs"

    def predict(run: RunInputs) -> StepAnswer:
        found = one_replica(run)
        d = found.degrees
        device = found.nodes.device.name
        refuse_if(device not in SYSTEMS, f"no device file of {device}")
        sizes = model_sizes(run, found)
        degrees = parallel_sizes(found)
        refuse_if(run.plan.precision not in ("bf16", "fp16"), f"precision {run.plan.precision}")
        recompute = recompute_word(found, none="NONE", selective="ATTN_COMPUTE", full="FULL")
        gpu = json.loads((folder / f"{SYSTEMS[device]}.json").read_text(encoding="utf-8"))
        gpu["inter_node_bandwidth_in_GB_per_sec"] = found.nodes.nic_bytes_per_s / 1e9  # of a node, as there
        try:
            tool = analysis.LLMAnalysis(
                config.ModelConfig(**sizes),
                config.GPUConfig(**gpu),
                config.DtypeConfig(),
                config.ParallelismConfig(**degrees),
                flops_efficiency=FLOPS_EFFICIENCY,
                hbm_memory_efficiency=MEMORY_EFFICIENCY,
            )
            made = tool.training(
                batch_size_per_gpu=d.micro_batch,
                gradient_accumulation_steps=d.num_micro_batches,
                seq_len=run.plan.seq_len,
                activation_recomputation=analysis.ActivationRecomputation[recompute],
                ds_zero=analysis.DSZeRO(d.zero),
            )
        except (AssertionError, ZeroDivisionError) as error:
            raise RefusedRun(f"llm-analysis: {str(error)[:60] or 'an assertion of its own'}") from error
        return StepAnswer(step_time_s=made["latency_per_iter"])

    note = f"FLOPs efficiency {FLOPS_EFFICIENCY}, memory efficiency {MEMORY_EFFICIENCY}"
    return StepPredictor(name="llm-analysis", predict=predict, note=note)


def model_sizes(run: RunInputs, found: OneReplica) -> dict[str, Any]:
    """Return the model as llm-analysis writes it."""
    block = found.block
    refuse_if(block.head_dim * block.num_heads != block.hidden, "heads that do not add up to the model")
    refuse_if(bool(block.shared_ffn), "shared experts")
    return {
        "name": run.model.name,
        "num_layers": found.degrees.num_blocks,
        "n_head": block.num_heads,
        "hidden_dim": block.hidden,
        "vocab_size": run.model.vocab,
        "max_seq_len": max(run.model.max_seq_len, run.plan.seq_len),
        "num_key_value_heads": block.num_kv_heads,
        "ffn_embed_dim": block.expert_ffn if block.num_experts else block.ffn,
        "moe_num_experts": max(1, block.num_experts),
        "moe_top_k": max(1, block.top_k),
        "mlp_gated_linear_units": block.gated,
    }


def parallel_sizes(found: OneReplica) -> dict[str, int]:
    """Return the degrees as llm-analysis writes them."""
    d = found.degrees
    refuse_if(d.cp > 1, "context parallelism")
    refuse_if(d.etp not in (1, d.tp), "experts cut over other ranks")
    refuse_if(d.zero > 0 and d.dp % d.shard_size != 0, "shard groups")
    shards = d.shard_size if d.zero else 1
    return {
        "tp_size": d.tp,
        "pp_size": d.pp,
        "dp_size": shards,
        "rdp_size": d.dp // shards,
        "ep_size": d.ep,
        "sp_size": d.tp if d.sp else 1,
    }
