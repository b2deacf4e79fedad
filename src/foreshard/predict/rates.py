"""Utilisation and energy of a step: FLOPs over the peaks of the devices, power over its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshard.cost.energy import BUSY_PARTS, energy_j
from foreshard.errors import SpecError
from foreshard.predict.batch import Batch, Case
from foreshard.predict.explanation import rate_explanations
from foreshard.predict.flops import model_flops, recomputed_flops
from foreshard.spec.device import Device


def devices_of(case: Case) -> list[tuple[Device, int]]:
    """Return the devices that the plan uses and how many of each."""
    cluster = case.cluster
    ends = np.cumsum([nodes.num_devices for nodes in cluster.nodes])
    counts = np.bincount(np.searchsorted(ends, case.plan.ranks, side="right"), minlength=len(ends)).tolist()
    return [(nodes.device, n) for nodes, n in zip(cluster.nodes, counts, strict=True) if n]


def peak_of(case: Case, precision: str) -> float | None:
    """Return the dense peak of all devices of the plan in a precision; None where one lacks it."""
    devices = devices_of(case)
    if not all(device.supports(precision) for device, _ in devices):
        return None
    return sum(n * device.peak(precision) for device, n in devices)


def watts_of(case: Case) -> float | None:
    """Return the power limits of all devices of the plan; None where one is not published."""
    devices = devices_of(case)
    return sum(n * device.tdp_w for device, n in devices) if all(d.tdp_w for d, _ in devices) else None


def rates_of(
    case: Case, batch: Batch, parts: Mapping[str, float], step_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return utilisation and energy, and what explains them."""
    peak, peak16, watts = peak_of(case, case.plan.precision), peak_of(case, "bf16"), watts_of(case)
    if peak is None:  # unreachable after the rules of a plan; measured runs skip them
        raise SpecError(
            f"a device of the plan has no {case.plan.precision}", key="--dtype", value=case.plan.precision
        )
    flops, again = model_flops(case, causal=False), recomputed_flops(case, batch)
    rates = {
        "mfu": flops / (step_s * peak),
        "mfu_causal": model_flops(case, causal=True) / (step_s * peak),
        "mfu_bf16": None if peak16 is None else flops / (step_s * peak16),
        "hfu": (flops + again) / (step_s * peak),
        "energy_j_per_step": None if watts is None else energy_j(watts, parts),
    }
    busy_s = sum(parts[name] for name in BUSY_PARTS)
    texts = rate_explanations(
        case, flops=flops, again=again, peak=peak, step_s=step_s, watts=watts, busy_s=busy_s
    )
    return rates, texts
