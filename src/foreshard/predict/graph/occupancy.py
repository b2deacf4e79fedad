"""How long the bytes of every task of a step occupy links and NICs.

The step is priced again on fabrics of which only the links, or only the NICs, take time, with computation
that takes none and so hides nothing. What a formula gives there is the time for which its bytes occupy that
part, at the rate that the collective reaches of it. No formula is written a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.comm.fabric import Fabric, PartialFabric, links_alone, network_alone
from foreshard.graph.program import Kind
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.graph.lowering import Step, lower
from foreshard.predict.graph.prices import GroupPrices, group_prices

INLINE_PARTS = ("tensor_comm", "context_comm", "expert_comm", "data_comm")
"""Parts of an op that are collectives: the op waits for them, or they run beside its computation."""
_FAST = 1e15
_NEGLIGIBLE = 1e-9  # of the seconds on one port: what occupies the other for less does not pass it
_RATES = ("peak_flops_per_s", "bf16_peak_flops_per_s", "memory_bytes_per_s")
_HIDING = ("tp_overlap", "expert_overlap", "tensor_async")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Seconds that tasks occupy the links (row 0) and the NIC (row 1) of the ranks they run on."""

    transfer_s: np.ndarray  # of transfers, 0 for ops; shape (2, tasks)
    # of the collectives inside ops, a dict by group: parts by (4, stages, chunks, 2) each
    op_s: dict[int, dict[str, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialPrices:
    """The prices of every distinct group on links alone and on NICs alone."""

    links: list[GroupPrices]
    network: list[GroupPrices]

    def occupancy(self, step: Step) -> Occupancy:
        """Return how long the tasks of a lowered step occupy links and NICs.

        The step may have fewer micro-batches than the prices are of.
        """
        views = [
            [
                replace(price, group=lowered.prices.group, launch_s=lowered.prices.launch_s)
                for price, lowered in zip(prices, step.groups, strict=True)
            ]
            for prices in (self.links, self.network)
        ]
        whole = step.program
        rows = np.stack([lower(prices, 0.0).program.duration_s for prices in views])
        moves = whole.kind > Kind.BACKWARD_WEIGHT
        moves &= (whole.kind != Kind.OPTIMIZER) & (whole.kind != Kind.HOST) & (whole.duration_s > 0.0)
        rows[:, ~moves] = 0.0
        return Occupancy(
            transfer_s=_passing(rows),
            op_s={
                lowered.prices.index: {
                    name: _passing(np.stack([view[g].parts[name] for view in views])) for name in INLINE_PARTS
                }
                for g, lowered in enumerate(step.groups)
            },
        )


def partial_prices(case: PlannedRun, batch: Batch) -> PartialPrices:
    """Return the prices of a plan on parts of the fabric."""
    return PartialPrices(
        links=group_prices(case, _partial(batch, links_alone)),
        network=group_prices(case, _partial(batch, network_alone)),
    )


def _partial(batch: Batch, part: Callable[[Fabric], PartialFabric]) -> Batch:
    """Return the batch on a part of the fabric, with nothing that hides its collectives."""
    machine = batch.machine
    none = {name: 0.0 * getattr(machine.traits, name) for name in _HIDING}
    return replace(
        batch,
        machine=replace(
            machine,
            fabric=part(machine.fabric),
            sync=part(machine.sync),
            link=part(machine.link),
            kernels=_instant(machine.kernels),
            traits=replace(machine.traits, prefetches=1.0 + 0.0 * machine.traits.prefetches, **none),
        ),
    )


def _passing(rows: np.ndarray) -> np.ndarray:
    """Return seconds on links and on NICs, 0 where a transfer does not pass them."""
    return np.where(rows > _NEGLIGIBLE * rows.max(axis=0), rows, 0.0)


def _instant(kernels: KernelModel) -> KernelModel:
    """Return kernels that take no time."""
    values: dict[str, Any] = {name: _FAST * getattr(kernels, name) for name in _RATES}
    values |= {f.name: 0.0 * getattr(kernels, f.name) for f in fields(kernels) if f.name.endswith("launch_s")}
    values |= {f.name: 0.0 for f in fields(kernels) if f.name.endswith("_table")}
    return replace(kernels, **values)
