"""Fully sharded weights in closed form: what gathering them and scattering gradients adds to a stage.

A stage runs its units one after another: the embedding, each layer, the head. Copies, and computation that a
collective slows, are device time, which the host's launches hide as they hide any other. Where a collective
is longer than the unit beside it, the stage waits: for the gather of the unit after next, in backward behind
the scatter of the unit before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from foreshard.predict.machine import Machine
from foreshard.predict.tasks.collectives import ShardTimes, slowed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedUnit:
    """Units of a stage that are alike: layers of one kind, the embedding, or the head."""

    count: Any
    forward: Any  # device seconds
    backward: Any
    late: Any  # of backward what zero-bubble schedules move
    counting: Any  # of forward before the next gather leaves
    shard: ShardTimes
    regathers: Any  # 1 where weights are gathered again before backward

    def accumulating(self, where: Any) -> ShardedUnit:
        """Return the unit in a micro-batch that adds its gradients to whole ones, where it does."""
        shard = self.shard
        copies = np.where(where, shard.add_gradients, shard.copy_gradients)
        scatter = np.where(where, 0.0, shard.scatter)
        return replace(self, shard=replace(shard, scatter=scatter, copy_gradients=copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """Device seconds that sharding adds to the passes of a stage; `late` of backward, `first` the rest."""

    forward: Any
    first: Any
    late: Any


def on_device(units: Sequence[ShardedUnit], machine: Machine) -> OnDevice:
    """Return copies and slowed computation; collectives too where nothing runs beside them."""
    alone = 1.0 * (machine.traits.grad_overlap <= 0)
    forward, first, both = 0.0, 0.0, 0.0
    for unit in units:
        shard = unit.shard
        again, copies = unit.regathers * shard.gather, unit.regathers * shard.copy_weights
        early = unit.backward - unit.late
        slowed = slowed_s(shard.gather, unit.forward - unit.counting, machine)
        forward = forward + unit.count * (shard.copy_weights + alone * shard.gather + slowed)
        first = first + unit.count * (copies + alone * again + slowed_s(again, early, machine))
        whole = slowed_s(again + shard.scatter, unit.backward, machine)
        moved = alone * (again + shard.scatter)
        both = both + unit.count * (copies + shard.copy_gradients + moved + whole)
    return OnDevice(forward=forward, first=first, late=both - first)


class Waits(NamedTuple):
    """Seconds for which passes wait for collectives that nothing is left to hide.

    Of both, the parts that a stage which is idle between two passes does not wait for: a pass gives its
    output before the pass after it has its first weights.
    """

    forward: Any
    backward: Any
    # of a forward, for the gradients of the backward before it
    behind_backward: Any
    # of a forward and of a backward, for the first weights of the pass after it
    after_forward: Any
    after_backward: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Units as their stage runs them: seconds of a forward and a backward, collectives beside them."""

    forward: Any
    backward: Any
    gather: Any
    again: Any  # the gather before backward
    scatter: Any
    counting: Any


def waits(
    layers: Sequence[ShardedUnit],
    embedding: ShardedUnit,
    head: ShardedUnit,
    machine: Machine,
    *,
    order: Mapping[tuple[int, int, int], Any],
    longer: Any,
    chunks: Any,
    part: Literal["whole", "given", "late"] = "whole",
) -> Waits:
    """Return what forward and backward wait for, all chunks of a stage together.

    `layers` are those of each kind, of which `order` says what lies before and behind (`Batch.neighbours`).
    Ends have a count of 1 on stages that hold them. The host makes computation `longer` by this factor.
    `part` is what of a backward runs: all of it, the gradients of inputs ('given'), or those of weights with
    their scatters ('late'), as one follows the other in pipelines with zero bubble.
    """
    beside = 1.0 * (machine.traits.grad_overlap > 0)

    def run(unit: ShardedUnit) -> _Pass:
        shard = unit.shard
        regathers, scatters = (0.0 if part == "late" else unit.regathers), 1.0 * (part != "given")
        again, scatter = regathers * shard.gather, scatters * shard.scatter
        back = {"whole": unit.backward, "given": unit.backward - unit.late, "late": unit.late}[part]
        copies = regathers * shard.copy_weights + scatters * shard.copy_gradients
        slowed = slowed_s(shard.gather, unit.forward - unit.counting, machine)
        slowed_back = slowed_s(again + scatter, back, machine)
        return _Pass(
            forward=longer * unit.forward + shard.copy_weights + slowed,
            backward=longer * back + copies + slowed_back,
            gather=shard.gather,
            again=again,
            scatter=scatter,
            counting=(longer * unit.counting + shard.copy_weights) * (np.asarray(unit.counting) > 0),
        )

    def wait(moved: Any, busy: Any) -> Any:
        return beside * np.maximum(moved - busy, 0.0)

    runs = [run(unit) for unit in layers]
    counts = [np.asarray(unit.count) for unit in layers]
    total = np.maximum(np.asarray(sum(counts)), 1e-9)

    def mean(values: Sequence[Any]) -> Any:
        return sum(count * value for count, value in zip(counts, values, strict=True)) / total

    some = 1.0 * (np.asarray(sum(counts)) > 0)
    forward: Any = 0.0
    backward: Any = 0.0
    for (before, kind, behind), share in order.items():
        own, count = runs[kind], share * counts[kind]
        forward = forward + count * wait(runs[behind].gather + own.counting, own.forward)
        backward = backward + count * wait(runs[before].again + runs[behind].scatter, own.backward)
    # A pass begins and ends beside units of other passes, or beside the ends; the head stays gathered.
    layer = _Pass(**{name: mean([getattr(r, name) for r in runs]) for name in _Pass.__slots__})
    first, last = run(embedding), run(head)
    has_first, has_last = np.asarray(embedding.count), np.asarray(head.count)
    usual = wait(layer.gather + layer.counting, layer.forward)
    usual_back = wait(layer.again + layer.scatter, layer.backward)
    behind = wait(layer.scatter + layer.gather + layer.counting, layer.forward) - usual
    at_first = wait(first.scatter + layer.gather, first.forward)
    behind_backward = some * (chunks - has_first) * behind
    forward = forward + behind_backward + has_first * at_first
    behind_backward = behind_backward + has_first * (at_first - wait(layer.gather, first.forward))
    forward = forward + some * has_last * (wait(last.gather + layer.counting, layer.forward) - usual)
    backward = backward + some * has_first * (wait(layer.scatter + first.again, layer.backward) - usual_back)
    at_first = wait(layer.scatter + first.gather, first.backward)
    backward = backward + has_first * at_first
    after_backward = some * (chunks - has_first) * usual_back + has_first * at_first
    ahead = wait(layer.again, layer.backward) - usual_back
    backward = backward + some * (chunks - has_last) * ahead
    behind = wait(last.scatter + layer.again, layer.backward) - usual_back
    backward = backward + has_last * (wait(layer.again, last.backward) + some * behind)
    if part == "given":  # the gradients of weights that follow gather nothing
        backward, after_backward = backward - after_backward, 0.0 * after_backward
    if part == "late":
        next_s = wait(layer.scatter + layer.gather, layer.backward) - usual_back
        backward = backward + some * (chunks - has_first) * next_s
    forward, backward = np.maximum(forward, 0.0), np.maximum(backward, 0.0)
    after_forward = np.minimum(some * (chunks - has_last) * usual, forward)
    return Waits(
        forward=forward,
        backward=backward,
        behind_backward=np.minimum(behind_backward, forward - after_forward),
        after_forward=after_forward,
        after_backward=np.minimum(after_backward, backward),
    )
