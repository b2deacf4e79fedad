"""What-if edits of a priced step: tasks get faster, are repeated, or wait for each other otherwise.

An edit changes the durations or the dependencies of tasks that are priced already. Where the same change can
be made to the input, a fresh prediction of that input gives the same step (`tests/laws/test_edit_laws.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.predict.explanation import PART_WORDS
from foreshard.predict.graph.prices import GroupPrices, LayerUnits, outside_s
from foreshard.predict.tasks.kernels import KERNELS

CLASSES = {name: words for name, words in PART_WORDS.items() if name not in ("bubble", "straggler")}
CLASSES |= {"optimizer": "the optimizer"}
"""Classes of tasks that an edit can make faster, by the part of a step that they are, and their words."""
OVERLAPS = ("grad_overlap", "param_gather_overlap", "p2p_overlap")
"""Switches that only say what runs beside what, so that the tasks stay as they are priced."""
_COMPUTED = ("compute", "recompute", "optimizer")
_UNIT_SECONDS = (
    *("gather_s", "regather_s", "scatter_s"),
    *("copy_weights_s", "copy_again_s", "copy_gradients_s", "add_gradients_s"),
)


def sped_up(prices: list[GroupPrices], speeds: Mapping[str, float]) -> list[GroupPrices]:
    """Return the step with the tasks of some classes so many times as fast; infinity makes them free."""
    return [_faster(price, speeds) for price in prices] if speeds else prices


def of_kernels(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return the speeds of classes of kernels, of which prices are made and not edited."""
    return {name: factor for name, factor in speeds.items() if name in KERNELS}


def words_of(name: str) -> str:
    """Return what a class is in words."""
    return CLASSES.get(name) or KERNELS[name]


def check_speeds(speeds: Mapping[str, float]) -> None:
    """Raise SpecError for an unknown class of tasks, or a factor that is not above 0."""
    for name, factor in speeds.items():
        if name not in CLASSES and name not in KERNELS:
            rule = f"Classes of tasks are {', '.join((*CLASSES, *KERNELS))}"
            raise SpecError(f"unknown class {name!r}", key="speeds", value=name, rule=rule)
        if not factor > 0.0:
            rule, fix = "A speed is a factor above 0, inf for free", "Write it like 2 or inf"
            raise SpecError(
                f"{name} {factor:g} times as fast", key="speeds", value=factor, rule=rule, fix=fix
            )


def _faster(price: GroupPrices, speeds: Mapping[str, float]) -> GroupPrices:
    data = speeds.get("data_comm", 1.0)
    faster = {
        id(unit): _faster_unit(unit, speeds, speeds.get(price.sharding_part(s), 1.0))
        for s, row in enumerate(price.units)
        for unit in row
    }
    units = [[faster[id(unit)] for unit in row] for row in price.units]
    ops = price.ops.sped_up(speeds)
    ops = replace(ops, outside=outside_s(units, price.machines, ops.device))
    return replace(
        price,
        ops=ops,
        parts=ops.parts(),
        units=units,
        send_s=price.send_s / speeds.get("pipeline_comm", 1.0),
        optimizer_s=price.optimizer_s / speeds.get("optimizer", 1.0),
        across_s=price.across_s / data,
        tied_s=price.tied_s / data,
        data_speed=price.data_speed * data,
    )


def _faster_unit(unit: LayerUnits, speeds: Mapping[str, float], sharding: float) -> LayerUnits:
    changed: dict[str, Any] = {name: getattr(unit, name) / sharding for name in _UNIT_SECONDS}
    for name in ("forward_s", "backward_s"):
        changed[name] = {part: value / speeds.get(part, 1.0) for part, value in getattr(unit, name).items()}
    before, after = (sum(one.values()) for one in (unit.forward_s, changed["forward_s"]))
    faster = np.divide(after, before, out=np.ones(len(unit.params)), where=before > 0)
    changed["counting_s"] = unit.counting_s * np.append(1.0, faster[:-1])
    return replace(unit, **changed)


def rewired(prices: list[GroupPrices], overlaps: Mapping[str, bool]) -> list[GroupPrices]:
    """Return the step with some collectives beside computation, or in turn with it.

    Weights that are sharded over the layers (ZeRO 3), and gradients that are reduced every micro-batch
    (ZeRO 2), are priced by whether they overlap: for these `takes` says no.
    """
    made = []
    for price in prices:
        machines = [
            replace(
                machine, traits=replace(machine.traits, **{name: float(on) for name, on in overlaps.items()})
            )
            for machine in price.machines
        ]
        ops = replace(price.ops, outside=outside_s(price.units, machines, price.ops.device))
        made.append(replace(price, machines=machines, ops=ops, parts=ops.parts()))
    return made


def takes(prices: list[GroupPrices], overlap: str) -> bool:
    """Return whether an overlap can be switched by an edit of the priced step."""
    levels = {float(machine.rank.zero) for price in prices for machine in price.machines}
    return overlap in OVERLAPS and (overlap == "p2p_overlap" or max(levels) < 2)


def with_micro_batches(prices: list[GroupPrices], factor: int) -> list[GroupPrices]:
    """Return the step with so many times its micro-batches, which must be whole ones."""
    made = []
    for price in prices:
        group = price.group
        if group.share % group.micro_batch:
            rule = "A last micro-batch that is short is not one of equal ones"
            raise SpecError("a short last micro-batch", key="global_batch", value=group.share, rule=rule)
        made.append(replace(price, group=replace(group, share=group.share * factor)))
    return made


def with_transfers_of(prices: list[GroupPrices], other: list[GroupPrices]) -> list[GroupPrices]:
    """Return the step with the transfers of the same plan on another network, or by other algorithms."""
    made = []
    for mine, theirs in zip(prices, other, strict=True):
        rows = zip(mine.units, theirs.units, strict=True)
        units = [[_computed_as(a, b) for a, b in zip(*row, strict=True)] for row in rows]
        device = _kept(mine.ops.device, theirs.ops.device)
        outside = outside_s(units, theirs.machines, device)
        ops = replace(theirs.ops, device=device, host=mine.ops.host, outside=outside)
        optimizer_s = mine.optimizer_s
        made.append(replace(theirs, ops=ops, parts=ops.parts(), units=units, optimizer_s=optimizer_s))
    return made


def _computed_as(mine: LayerUnits, theirs: LayerUnits) -> LayerUnits:
    forward_s = _kept(mine.forward_s, theirs.forward_s)
    return replace(theirs, forward_s=forward_s, backward_s=_kept(mine.backward_s, theirs.backward_s))


def _kept(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return seconds by part: computation of one, transfers of the other."""
    return {name: mine[name] if name in _COMPUTED else value for name, value in theirs.items()}
