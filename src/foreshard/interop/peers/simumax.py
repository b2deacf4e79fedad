"""SimuMax (github.com/MooreThreads/SimuMax): its costs of layers and collectives, from its own system files.

Of its system files the size of a node and the rate of the network between nodes are replaced by those of the
cluster. Options that a plan does not state keep the defaults of SimuMax.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

from foreshard.interop.peers.one_replica import OneReplica, one_replica, recompute_word, refuse_if
from foreshard.validation.predictors import RefusedRun, RunInputs, StepAnswer, StepPredictor

SYSTEMS = {"a100-pcie-80gb": "a100_pcie", "b200-sxm": "b200_bf16_ceperm"}


def load(path: Path) -> StepPredictor:
    """Return the predictor of a checkout."""
    from simumax.core.config import (  # type: ignore[import-not-found]
        ModelConfig,
        StrategyConfig,
        SystemConfig,
    )
    from simumax.core.perf_llm import PerfLLM  # type: ignore[import-not-found]

    systems = {
        device: json.loads((path / "configs" / "system" / f"{name}.json").read_text(encoding="utf-8"))
        for device, name in SYSTEMS.items()
    }

    def predict(run: RunInputs) -> StepAnswer:
        found = one_replica(run)
        system, strategy = system_of(systems, found), strategy_of(run, found)
        model, tool = model_of(run, found), PerfLLM()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tool.configure(
                    strategy_config=StrategyConfig.init_from_dict(strategy),
                    model_config=ModelConfig.init_from_dict(model),
                    system_config=SystemConfig.init_from_dict(system),
                )
                tool.run_estimate()
                cost = tool.analysis_cost().data
            except (AssertionError, ValueError, KeyError, NotImplementedError, ZeroDivisionError) as error:
                raise RefusedRun(f"SimuMax: {str(error)[:60] or type(error).__name__}") from error
        # Its seconds are rounded text; its rate is a number.
        rate = cost["throughput_per_accelerator"] * strategy["world_size"]
        return StepAnswer(step_time_s=float(cost["all_tokens_per_iter"] / rate))

    return StepPredictor(name="SimuMax", predict=predict, note=f"its files {', '.join(SYSTEMS.values())}")


def system_of(systems: dict[str, Any], found: OneReplica) -> dict[str, Any]:
    """Return the system file of the device with the node and network of the cluster."""
    device = found.nodes.device.name
    refuse_if(device not in systems, f"no system file of {device}")
    system: dict[str, Any] = json.loads(json.dumps(systems[device]))
    system["num_per_node"] = found.nodes.per_node
    if found.nodes.nic_bytes_per_s:
        between = system["networks"]["inter_node"]["bandwidth"]
        between["gbps"] = found.nodes.nic_bytes_per_s / 1e9  # of a node, as there
    return system


def model_of(run: RunInputs, found: OneReplica) -> dict[str, Any]:
    """Return the model as SimuMax writes it."""
    block = found.block
    refuse_if(bool(block.shared_ffn), "shared experts")
    refuse_if(bool(block.num_experts and block.ffn), "a dense MLP beside experts")
    ffn = block.expert_ffn if block.num_experts else block.ffn
    return {
        "model_type": "moe" if block.num_experts else "dense",
        "model_name": run.model.name,
        "hidden_size": block.hidden,
        "head_num": block.num_heads,
        "kv_head_num": block.num_kv_heads,
        "head_size": block.head_dim,
        "intermediate_size": ffn,
        "moe_ffn_hidden_size": ffn,
        "layer_num": found.degrees.num_blocks,
        "expert_num": max(1, block.num_experts),
        "topk": max(1, block.top_k),
        "vocab_size": run.model.vocab,
        "use_swiglu": block.gated,
    }


def strategy_of(run: RunInputs, found: OneReplica) -> dict[str, Any]:
    """Return the plan as SimuMax writes it."""
    d = found.degrees
    refuse_if(d.zero > 1, "ZeRO 2 or 3")
    refuse_if(d.zero == 1 and d.shard_size not in (1, d.num_replicas), "shard groups")
    refuse_if(run.plan.precision not in ("bf16", "fp16"), f"precision {run.plan.precision}")
    granularity = recompute_word(found, none=None, selective="sdp_only", full="full_block")
    overlap = run.plan.comm.get("grad_overlap", run.framework.hides("grad_overlap", d.zero))
    return {
        "seq_len": run.plan.seq_len,
        "micro_batch_size": d.micro_batch,
        "micro_batch_num": d.num_micro_batches,
        "dtype": run.plan.precision,
        "world_size": d.tp * d.cp * d.pp * d.dp,
        "tp_size": d.tp,
        "cp_size": d.cp,
        "pp_size": d.pp,
        "ep_size": d.ep,
        "etp_size": d.etp,
        "enable_sequence_parallel": bool(d.sp),
        "interleaving_size": d.vpp,
        "zero_state": d.zero,
        "overlap_grad_reduce": bool(overlap),
        "enable_recompute": granularity is not None,
        "recompute_granularity": granularity,
        "recompute_layer_num": found.degrees.num_blocks if granularity else 0,
    }
