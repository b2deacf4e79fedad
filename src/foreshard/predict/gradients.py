"""When the gradients of a data-parallel rank are ready in its last backward, by parameter tensor.

Seconds of layers are those of the graph engine. Inside a layer the backward is spread over its matrices in
proportion to their parameters, which is what their products take; attention itself has no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import Tables
from foreshard.catalog.training import training_constants
from foreshard.comm.collectives import AllReduce, all_reduce
from foreshard.comm.fusion.priority import LayerWork
from foreshard.comm.fusion.timeline import Gradients
from foreshard.cost.tables import tabled
from foreshard.errors import SpecError
from foreshard.graph.pipeline_schedules import Op
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.prices import GroupPrices, LayerUnits, group_prices
from foreshard.spec.block import Block
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardPass:
    """The last backward of a step on one rank: its gradients, and their tensors in the order of forward."""

    gradients: Gradients
    layers: tuple[LayerWork, ...]
    num_replicas: int
    reduction: AllReduce  # over the replicas
    slowdown: float  # of gradient collectives inside a training step, as the predictor has it

    def reduce_s(self, num_bytes: Any) -> Any:
        """Return seconds of reducing bytes of gradients over the replicas.

        Outside the sizes of a measured table it is the closed form times what that is off by at the nearest
        size inside: a size is not better for being priced by another source.
        """
        size = np.asarray(num_bytes, dtype=float)
        time_s = self.reduction.time_s(size)
        if self.reduction.measured is not None:
            nearest = np.clip(size, *self._measured_span())
            closed = replace(self.reduction, measured=None)
            time_s = closed.time_s(size) * self.reduction.time_s(nearest) / closed.time_s(nearest)
        return time_s * self.slowdown

    def is_measured(self, num_bytes: Any) -> Any:
        """Return whether a measured table has the time of reducing so many bytes, before the slowdown."""
        measured = self.reduction.measured
        if measured is None:
            return np.zeros(np.shape(num_bytes), dtype=bool)
        return tabled(measured.tables, (measured.ranks, num_bytes))

    def _measured_span(self) -> tuple[float, float]:
        """Return the smallest and the largest size that a table has over the replicas, all without one."""
        measured = self.reduction.measured
        table = None if measured is None else np.asarray(measured.tables).item()
        sizes = np.exp(table.axes[1]) if table else np.empty(0)
        sizes = sizes[self.is_measured(sizes)]
        return (float(sizes[0]), float(sizes[-1])) if len(sizes) else (1.0, np.inf)


def backward_pass(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    gradient_bytes: float | None = None,
    *,
    costs: str | Tables = "auto",
) -> BackwardPass:
    """Return when gradients of `gradient_bytes` per parameter are ready under a data-parallel plan.

    Without them they are in the format that the framework reduces in. `costs` is where times of kernels come
    from; measured tables may have those of the reduction too.

    Raises
    ------
    SpecError
        The plan cuts the model: several stages, or groups that differ.
    """
    framework = load_framework(plan.framework)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework, costs=costs)
    prices = group_prices(case, build_batch([case], training_constants()))
    if len(prices) > 1 or prices[0].num_stages > 1 or prices[0].num_chunks > 1:
        raise SpecError(
            "the plan has a pipeline or groups that differ",
            key="plan",
            rule="Buckets are those of data-parallel replicas of a whole model",
            fix="Give --dp and --tp only",
        )
    units = prices[0].units[0][0]
    backward_s = _seconds(prices[0], Op.BACKWARD)
    tensors = list(_works(model, units, _seconds(prices[0], Op.FORWARD), backward_s))
    if not tensors:
        raise SpecError("no parameter is trained", key="MODEL", rule="Buckets hold gradients")
    machine = prices[0].machines[0]
    rank = machine.rank
    each = float(machine.traits.grad_reduce_bytes) if gradient_bytes is None else gradient_bytes
    works = tuple(replace(work, num_bytes=work.num_bytes * each) for _, work in tensors)
    ready = np.minimum(np.cumsum([work.backward_s for work in works]), backward_s)
    replicas = int(float(rank.dp) * float(rank.cp))
    return BackwardPass(
        gradients=Gradients(
            names=tuple(name for name, _ in tensors),
            num_bytes=np.array([work.num_bytes for work in works]),
            ready_s=ready,
            backward_s=backward_s,
        ),
        layers=works[::-1],
        num_replicas=replicas,
        reduction=all_reduce(replicas, rank.sync_stride, machine.sync),
        slowdown=float(machine.constants.data_comm),
    )


def _seconds(prices: GroupPrices, op: Op) -> float:
    """Return seconds of an op of the last micro-batch."""
    return float(prices.op_s[op, 0, 0, 1])


def _works(
    model: Model, units: LayerUnits, forward_s: float, backward_s: float
) -> Iterator[tuple[str, LayerWork]]:
    """Yield the tensors in the order of backward, with their parameters and their part of both passes."""
    last, waiting = len(units.params) - 1, 0.0
    for unit in range(last, -1, -1):
        params = float(units.params[unit] + units.expert_params[unit])
        forward, backward = float(units.forward[unit]) * forward_s, float(units.backward[unit]) * backward_s
        if not params:
            waiting += backward  # frozen, or a table that an earlier unit holds: delays what comes after
        for name, share in _tensors(model, unit, last) if params else ():
            yield (
                name,
                LayerWork(
                    forward_s=forward * share,
                    backward_s=backward * share + waiting,
                    num_bytes=params * share,
                ),
            )
            waiting = 0.0


def _tensors(model: Model, unit: int, last: int) -> list[tuple[str, float]]:
    """Return the tensors of a unit in the order of backward, with their share of its parameters."""
    if unit in (0, last):
        return [("head" if unit else "embedding", 1.0)]
    block = model.blocks[min(unit, model.num_layers) - 1]
    pieces = block_tensors(block)
    total = sum(size for _, size in pieces)
    return [(f"layer{unit}.{name}", size / total) for name, size in reversed(pieces)]


def block_tensors(block: Block) -> list[tuple[str, int]]:
    """Return the tensors of a block with their parameters, in the order of its forward.

    Matrices stand for themselves; norms, biases, routers and what else is small are one tensor, experts one
    tensor per matrix as grouped products hold them. Of a block that trains adapters all is one tensor.

    Examples
    --------
    >>> from foreshard.catalog.models import load_model
    >>> block = load_model("llama3-8b").blocks[0]
    >>> sum(size for _, size in block_tensors(block)) == block.num_params
    True
    """
    if block.lora_rank or block.scan_heads:
        return [("all", block.num_params)]
    hidden, heads = block.hidden, block.num_kv_heads
    tensors = [("attention", block.attention_matmul_params)]
    if not block.kv_lora and not block.cross_attention:
        tensors = [
            ("q", hidden * block.query_width),
            ("k", hidden * heads * block.head_dim),
            ("v", hidden * heads * block.value_head_dim),
            ("o", hidden * block.num_heads * block.value_head_dim),
        ]
    matrices = ("gate", "up", "down") if block.gated else ("up", "down")
    tensors += [(name, hidden * block.ffn) for name in matrices if block.ffn]
    experts = block.num_experts * block.expert_params // len(matrices)
    tensors += [(f"experts.{name}", experts) for name in matrices if experts]
    rest = block.num_params - sum(size for _, size in tensors)
    return [*tensors, ("rest", rest)] if rest > 0 else tensors
