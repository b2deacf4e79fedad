"""The bucket size to set: DDP with every cap of a grid, beside other rules and the best buckets of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.comm.fusion.optimum import optimal_buckets
from foreshard.comm.fusion.rules import MIB, ddp_buckets, ddp_limits, horovod_buckets, merged_buckets
from foreshard.comm.fusion.timeline import (
    Bounds,
    BucketTime,
    Cost,
    Gradients,
    bucket_times,
    exposed_s,
)

_WHOLE_CAPS = 64  # caps of 1, 2, ... MiB are all tried up to here, above it steps of about 5 %
_STEP = 1.05
_SAME = 1e-9  # of the exposed time: rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionPlan:
    """Buckets under one rule, when they are reduced, and what of it the backward does not hide."""

    rule: str
    times: tuple[BucketTime, ...]
    exposed_s: float
    cap_mib: int | None = None  # of DDP, where the user would set one


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAdvice:
    """The default of DDP, the best cap, the best buckets of all, and other rules to compare with."""

    default: FusionPlan
    best_cap: FusionPlan
    optimum: FusionPlan
    others: tuple[FusionPlan, ...]

    @property
    def saved_s(self) -> float:
        """Return what the best cap saves of a step against the default."""
        return self.default.exposed_s - self.best_cap.exposed_s


def bucket_advice(gradients: Gradients, cost: Cost) -> BucketAdvice:
    """Return which cap to give DDP (``bucket_cap_mb``), with what else could be done.

    Of caps with equal exposed time the smallest is taken, which keeps least memory in one bucket. Where no
    cap is better than the default, the best cap is the default itself.
    """
    sizes = gradients.num_bytes.tolist()
    default = _plan("ddp", gradients, ddp_buckets(sizes, ddp_limits()), cost)
    best = default
    for cap in caps_mib(sum(sizes)):
        made = _plan(f"ddp {cap} MiB", gradients, ddp_buckets(sizes, ddp_limits(cap)), cost, cap_mib=cap)
        if made.exposed_s < best.exposed_s * (1.0 - _SAME):
            best = made
    horovod, dispatch = horovod_buckets(gradients)
    everything: Bounds = ((0, len(sizes)),)
    return BucketAdvice(
        default=default,
        best_cap=best,
        optimum=_plan("optimum", gradients, optimal_buckets(gradients, cost), cost),
        others=(
            _plan("mg-wfbp", gradients, merged_buckets(gradients, cost, float(cost(1.0))), cost),
            _plan("horovod", gradients, horovod, cost, dispatch_s=dispatch),
            _plan("one bucket", gradients, everything, cost),
            _plan("no fusion", gradients, tuple((i, i + 1) for i in range(len(sizes))), cost),
        ),
    )


def caps_mib(total_bytes: float) -> list[int]:
    """Return the caps that are tried: every whole MiB at first, then in steps, to one bucket for all."""
    most = max(1, int(np.ceil(total_bytes / MIB)))
    caps = list(range(1, min(most, _WHOLE_CAPS) + 1))
    while caps[-1] < most:
        caps.append(min(most, max(caps[-1] + 1, int(caps[-1] * _STEP))))
    return caps


def _plan(
    rule: str,
    gradients: Gradients,
    bounds: Bounds,
    cost: Cost,
    *,
    dispatch_s: tuple[float, ...] = (),
    cap_mib: int | None = None,
) -> FusionPlan:
    times = bucket_times(gradients, bounds, cost, dispatch_s)
    return FusionPlan(rule=rule, times=times, exposed_s=exposed_s(gradients, times), cap_mib=cap_mib)
