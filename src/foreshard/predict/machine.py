"""What the time of a task depends on apart from its shape: kernels, fabrics, framework, rank, constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric
from foreshard.graph.shapes import LayerShape, RankShape
from foreshard.predict.traits import Traits

_ROWS_SLOWER = 1.4
"""Seconds of 8-bit products with a scale per row over those with one of the tensor where CUTLASS runs them.

No kernel table has them; public logs of torchtitan until 2025 show steps 20 to 40 % longer at large batches.
With this and the casts of `traits` (torchtitan 2024, 8192 tokens, two samples) Llama-3-8B on 8 H100 takes
22 % longer, 70B on 64 takes 27 %.
"""
_H100_J_PER_FLOP = 700.0 / (0.716 * 989.4e12)  # 700 W; share of the peak: its curve of 16-bit products


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything a task's time depends on apart from its shape; fields broadcast to the batch."""

    kernels: KernelModel
    fabric: Fabric  # what collectives inside a stage see
    sync: Fabric  # what gradient collectives over all groups see
    link: Fabric  # what messages to the neighbouring stages see
    traits: Traits
    rank: RankShape
    constants: TrainingConstants


def tokens_of(machine: Machine) -> Any:
    """Return tokens a rank computes on between collectives."""
    rank = machine.rank
    return rank.micro_batch * rank.seq_len / rank.cp


def own_tokens(machine: Machine) -> Any:
    """Return tokens of a rank's sequence-parallel part."""
    return tokens_of(machine) / np.where(machine.rank.sp > 0, machine.rank.tp, 1.0)


def sustained(machine: Machine, slower: float = 1.0) -> KernelModel:
    """Return the kernels at the rates matrix products keep inside a training step.

    What falls is the arithmetic rate (clocks under load, processors lent to collectives); bandwidth stays.
    A TPU keeps its clock, and its links move data on their own (docs/derivations/step.md).
    """
    c, t, rank, kernels = machine.constants, machine.traits, machine.rank, machine.kernels
    sixteen = c.gemm_derate * (1.0 + t.hopper * (c.gemm_derate_hopper - 1.0))
    sixteen = sixteen * slower * (1.0 + c.gemm_power * _short_of_power(kernels.gemm16_eff, machine))
    sixteen = sixteen * (1.0 + t.blackwell * (c.gemm_derate_blackwell - 1.0))
    if np.count_nonzero(t.static):
        sixteen = np.where(t.static > 0, slower, sixteen)
    wide = {"gemm16_eff": kernels.gemm16_eff / sixteen, "gemm16_slower": sixteen}
    if not np.count_nonzero(rank.low):
        return replace(kernels, gemm_eff=kernels.gemm_eff / sixteen, gemm_slower=sixteen, **wide)
    narrow = np.where(rank.four_bit > 0, c.gemm_derate_4bit, c.gemm_derate_8bit)
    narrow = narrow * np.where(t.row_scaled > 0, _ROWS_SLOWER, 1.0)
    narrow = narrow * slower * (1.0 + c.gemm_power * _short_of_power(kernels.gemm_eff, machine))
    own = np.where(rank.low > 0, narrow, sixteen)
    return replace(kernels, gemm_eff=kernels.gemm_eff / own, gemm_slower=own, **wide)


def in_sixteen_bit(kernels: KernelModel) -> KernelModel:
    """Return the kernels of products in 16 bit in the place of narrower ones."""
    names = ("eff", "k0", "split_k", "learned", "table", "slower")
    wide = {f"gemm_{name}": getattr(kernels, f"gemm16_{name}") for name in names}
    return replace(kernels, peak_flops_per_s=kernels.bf16_peak_flops_per_s, **wide)


def _short_of_power(reached: Any, machine: Machine) -> Any:
    """Return the share of an H100-SXM's energy per FLOP that a device lacks at its power limit.

    `reached` is the share of the peak that products alone reach, which measurements of kernels tell: what a
    peak promises and no kernel reaches takes no power. Peaks of narrower formats are multiples of the 16-bit
    one, and so are their FLOPs a joule.
    """
    given = machine.traits.watts / np.maximum(reached * machine.kernels.bf16_peak_flops_per_s, 1.0)
    return np.where(machine.traits.watts > 0, np.maximum(0.0, 1.0 - given / _H100_J_PER_FLOP), 0.0)


def kv_share(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of keys and values on a rank: heads are copied where there are fewer than ranks."""
    return np.maximum(1.0 / machine.rank.tp, 1.0 / np.maximum(1.0, layer.num_kv_heads))
