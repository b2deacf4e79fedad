"""The answer: what a step costs in time, memory, money and energy, broken into parts that sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshard.spec.codec import plain
from foreshard.spec.plan import Plan
from foreshard.spec.shown import Shown
from foreshard.spec.variation import RunEfficiency, StepDistribution

TIME_LABELS = {
    "compute": "compute",
    "recompute": "recompute",
    "tensor_comm": "tensor-parallel comm, exposed",
    "context_comm": "context-parallel comm, exposed",
    "expert_comm": "expert comm, exposed",
    "pipeline_comm": "pipeline comm, exposed",
    "bubble": "pipeline bubble",
    "data_comm": "data-parallel comm, exposed",
    "optimizer": "optimizer",
    "host": "host launches, exposed",
    "straggler": "waiting for stragglers",
}
"""Parts of a step's time, in the order of reports, and what reports call them."""
MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary tensors",
    "comm_buffers": "comm buffers",
    "reserved": "context and allocator",
}
"""The same of the peak memory of a rank."""
TIME_PARTS = tuple(TIME_LABELS)
MEMORY_PARTS = tuple(MEMORY_LABELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes on the fullest rank; `breakdown_bytes` sums to `peak_bytes`, all that the device gives away.

    Allocated bytes are those of live tensors, reserved ones what the caching allocator holds for them.
    Intervals hold the measured peak with the probability of `Prediction.interval`, `fits_probability` is that
    of staying within the capacity; None where bytes are measured. `host_peak_bytes` are those of a node's own
    memory that offload fills.
    """

    peak_bytes: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    peak_rank: int
    capacity_bytes: float
    fits: bool
    breakdown_bytes: Mapping[str, float]
    per_stage_peak_bytes: tuple[tuple[float, ...], ...]
    peak_interval_bytes: tuple[float, float] | None = None
    peak_allocated_interval_bytes: tuple[float, float] | None = None
    fits_probability: float | None = None
    host_peak_bytes: float = 0.0

    def counted(self, kind: str) -> float:
        """Return the peak as it is counted: reserved, of the whole device, or else allocated bytes."""
        counts = {"reserved": self.peak_reserved_bytes, "device": self.peak_bytes}
        return counts.get(kind, self.peak_allocated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """US dollars; None where no price is known, never zero."""

    usd_per_step: float | None
    usd_per_1b_tokens: float | None
    usd_total: float | None
    price_date: str | None
    device_hours: float | None = None  # of the whole run, on the devices of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """Transfers of one class on the critical rank, by themselves and on a network that all share."""

    # a communication part of `TIME_PARTS`; of data parallelism gradient_reduce and parameter_gather
    collective: str
    # closed_form_s and flow_s: seconds of them all, hidden ones too
    closed_form_s: float
    flow_s: float
    busiest_resource: str  # of those that they pass, the one that the whole step keeps busiest
    utilisation: float  # of that resource, over the step

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a prediction's JSON object."""
        return {
            "collective": self.collective,
            "closed_form_s": self.closed_form_s,
            "flow_s": self.flow_s,
            "difference": self.flow_s / self.closed_form_s - 1.0,
            "busiest": {"resource": self.busiest_resource, "utilisation": self.utilisation},
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction(Shown):
    """One predicted training step. Times are exposed seconds on the critical rank."""

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    interval: float
    step_time_intervals_s: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    tokens_per_s: float
    samples_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    mfu_causal: float
    mfu_bf16: float | None
    hfu: float
    time_breakdown_s: Mapping[str, float]
    memory: Memory
    cost: Money
    energy_j_per_step: float | None
    goodput: float | None
    run: RunEfficiency | None = None
    run_time_s: float | None = None
    bottleneck: str
    plan: Plan
    model: str
    cluster: str
    framework: str
    engine: str
    network: str = "closed-form"
    collectives: tuple[CollectiveTimes, ...] = ()
    step_time_distribution: StepDistribution | None = None
    costs: str
    cost_sources: Mapping[str, float] = field(default_factory=dict)
    fidelity: str
    evidence: str
    assumptions: tuple[str, ...]
    explain: Mapping[str, str] = field(default_factory=dict)
    catalog_version: str = ""
    predict_s: float = 0.0
    schema_version: int = 1

    @property
    def energy_j_total(self) -> float | None:
        """Joules of the devices for the whole run; None without its tokens, or where power is not known."""
        if self.energy_j_per_step is None or self.run_time_s is None:
            return None
        return self.energy_j_per_step * self.run_time_s / self.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the contract."""
        apart = ("plan", "memory", "cost")
        out = {name: plain(getattr(self, name)) for name in self.__slots__ if name not in apart}
        levels = self.step_time_intervals_s.items()
        out["step_time_intervals_s"] = {f"{level:g}": list(ends) for level, ends in levels}
        out["collectives"] = [one.to_dict() for one in self.collectives]
        out |= {"energy_j_total": self.energy_j_total, "memory": plain(self.memory)}
        return out | {"cost": plain(self.cost), "plan": self.plan.to_dict()}
