"""Dollars of a step, of a billion tokens and of a whole run."""

from __future__ import annotations

from foreshard.spec.cluster import Cluster
from foreshard.spec.prediction import Money


def money(
    cluster: Cluster,
    step_time_s: float,
    tokens_per_step: float,
    *,
    tokens: float | None = None,
    usd_per_device_hour: float | None = None,
    num_devices: int | None = None,
) -> Money:
    """Return what the time of nodes costs: all of them are paid, their idle devices too.

    `tokens` are those of the whole run, without them there is no total; `usd_per_device_hour` stands in for
    the prices of the cluster. What lacks a price is None. `num_devices` train, for the hours of the run.
    """
    used = cluster.num_devices if num_devices is None else num_devices
    hours = None if tokens is None else used * step_time_s * tokens / tokens_per_step / 3600.0
    rate = cluster.usd_per_h
    date = min((group.price_date for group in cluster.nodes if group.price_date), default=None)
    if usd_per_device_hour is not None:
        rate, date = usd_per_device_hour * cluster.num_devices, None
    if rate is None:
        return Money(
            usd_per_step=None, usd_per_1b_tokens=None, usd_total=None, price_date=None, device_hours=hours
        )
    step = rate * step_time_s / 3600.0
    return Money(
        usd_per_step=step,
        usd_per_1b_tokens=step * 1e9 / tokens_per_step,
        usd_total=None if tokens is None else step * tokens / tokens_per_step,
        price_date=date,
        device_hours=hours,
    )
