"""A run as tools that model one kind of device and one set of degrees take it, or why it is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreshard.interop.exporters.uniform import Uniform, uniform
from foreshard.spec.block import Block
from foreshard.spec.cluster import NodeGroup
from foreshard.validation.predictors import RefusedRun, RunInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class OneReplica:
    """Degrees that hold for every replica, the one kind of block, the one kind of node."""

    degrees: Uniform
    block: Block
    nodes: NodeGroup

    @property
    def nic_gb_per_s(self) -> float:
        """Network of a device, one direction, GB/s."""
        return self.nodes.nic_bytes_per_s / self.nodes.per_node / 1e9


def one_replica(run: RunInputs) -> OneReplica:
    """Return the run with one set of degrees, one kind of block and of node; raise where it has more."""
    refuse_if(len({nodes.device.name for nodes in run.cluster.nodes}) > 1, "devices of several kinds")
    degrees, reasons = uniform(run.plan)
    if degrees is None:
        raise RefusedRun(reasons[0])
    kinds = run.model.block_kinds()
    refuse_if(run.model.kind != "decoder", f"a model that is no decoder ({run.model.kind})")
    refuse_if(len(kinds) != 1, "blocks that differ")
    block = kinds[0][0]
    refuse_if(bool(block.lora_rank or block.frozen), "adapters or frozen layers")
    refuse_if(bool(block.kv_lora), "latent attention")
    refuse_if(bool(block.window), "windowed attention")
    refuse_if(bool(block.scan_state), "state-space layers")
    refuse_if(not degrees.even_blocks(), "stages of unequal numbers of blocks")
    refuse_if(degrees.offload != "none", "offload to the host")
    refuse_if(degrees.schedule not in ("1f1b", "interleaved"), f"schedule {degrees.schedule}")
    return OneReplica(degrees=degrees, block=block, nodes=run.cluster.nodes[0])


def recompute_word(found: OneReplica, *, none: Any, selective: Any, full: Any) -> Any:
    """Return what a tool calls the recompute rule: nothing again, scores of attention, or whole blocks."""
    words = {"none": none, **dict.fromkeys(("selective", "selective:core_attn"), selective)}
    words |= dict.fromkeys(("full", "full:uniform:1"), full)
    rule = found.degrees.recompute
    refuse_if(rule not in words, f"recompute {rule}")
    return words[rule]


def refuse_if(wrong: bool, what: str) -> None:
    """Raise `RefusedRun` where a tool cannot express something."""
    if wrong:
        raise RefusedRun(what)
