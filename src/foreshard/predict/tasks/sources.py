"""Which cost source each kernel's time comes from, and the share of a step that is.

Sources are asked in a fixed order for every kind of kernel: learned where the request and the device allow
it, else the formula. Collectives, the optimizer and the host have formulas only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshard.predict.batch import Batch
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.formula import end_times
from foreshard.predict.tasks.kernels import adapter_times, attention_times, expert_times, linear_times

ORDER = ("learned", "formula")
"""Sources of kernel times, the first asked first."""
_KERNELS = ("compute", "recompute")
_WAITING = ("bubble", "straggler")


def source_shares(batch: Batch, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of a step's time that each source gave, in the order they are asked; they sum to 1.

    Computation is split by the seconds of its kernels over all stages. Waiting counts as what is waited for
    does: in the proportion of the rest of the step.
    """
    learned = learned_share_of_kernels(batch) if _has_learned(batch.machine) else 0.0
    if not learned:
        return {"formula": 1.0}
    work = {name: value for name, value in parts.items() if name not in _WAITING}
    share = learned * sum(work[name] for name in _KERNELS) / sum(work.values())
    return {"learned": share, "formula": 1.0 - share}


def sources_text(shares: Mapping[str, float], asked: str) -> str:
    """Return which share of a step each source gave, and why, in one sentence."""
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    order = {
        "formula": "formula",
        "learned": "learned where better on devices left out and the device is like those trained on, "
        "else formula",
        "auto": "learned on devices that the formula was never fitted on, where better on devices left out "
        "and the device is like those trained on, else formula",
    }
    return f"{parts} of the step; asked in the order: {order[asked]} (docs/cost_sources.md)"


def _has_learned(machine: Machine) -> bool:
    kernels = machine.kernels
    flags = (kernels.gemm_learned, kernels.gemm16_learned, kernels.attn_learned, kernels.grouped_learned)
    return any(np.count_nonzero(flag) for flag in flags)


def learned_share_of_kernels(batch: Batch) -> float:
    """Return the share of the seconds of kernels, forward and backward, that learned costs gave."""
    kernels = batch.machine.kernels
    found = np.zeros(2)
    for layer, count in zip(batch.kinds, batch.counts, strict=True):
        linear = linear_times(layer, batch.machine)
        products = linear.forward + linear.input_gradient + linear.weight_gradient
        adapters = sum(adapter_times(layer, batch.machine))
        flash = np.asarray(batch.machine.traits.flash) > 0
        wide = np.where(flash, kernels.attn_learned, kernels.gemm16_learned)
        weight = count * batch.multiplicity
        found += _parted(products, kernels.gemm_learned, weight)
        found += _parted(adapters, kernels.gemm16_learned, weight)
        found += _parted(sum(attention_times(layer, batch.machine)), wide, weight)
        grouped = np.where(np.asarray(batch.machine.traits.grouped) > 0, kernels.grouped_learned, 0.0)
        looped = np.where(np.asarray(batch.machine.traits.grouped) > 0, 0.0, kernels.gemm_learned)
        found += _parted(sum(expert_times(layer, batch.machine)), grouped + looped, weight)
        found += _parted(_streams_s(layer, batch.machine), 0.0, weight)
    pipe = batch.pipeline
    ends = end_times(pipe.hidden, pipe.vocab, pipe.head_rows, batch.machine, heads=pipe.heads)
    found += _parted(ends.head_forward + ends.head_backward, kernels.gemm16_learned, batch.has_head)
    return float(found[0] / found.sum())


def _streams_s(layer: Any, machine: Machine) -> Any:
    from foreshard.predict.tasks.kernels import cast_s, elementwise_times

    forward, backward, _, _ = elementwise_times(layer, machine)
    return forward + backward + 2.0 * cast_s(layer, machine)


def _parted(seconds: Any, learned: Any, weight: Any) -> np.ndarray:
    """Return (learned, other) seconds of kernels of which `weight` run on each rank."""
    seconds, which, weight = np.broadcast_arrays(seconds, np.asarray(learned) > 0, weight)
    total = float((seconds * weight).sum())
    mine = float((seconds * weight * which).sum())
    return np.array([mine, total - mine])
