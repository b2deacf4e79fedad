"""Fully sharded weights in closed form: what gathering them and scattering gradients adds to a stage.

A stage runs its units one after another: the embedding, each layer, the head. Copies, and computation that a
collective slows, are device time, which the host's launches hide as they hide any other. Where a collective
is longer than the unit beside it, the stage waits: for the gather of the unit after next, in backward behind
the scatter of the unit before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from foreshard.graph.shapes import LayerOrder, Neighbours
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


def on_device(units: Sequence[ShardedUnit], machine: Machine, shape: tuple[int, ...]) -> np.ndarray:
    """Return device seconds that sharding adds to a forward, and to both parts of a backward: (3, *shape).

    They are copies and slowed computation; collectives too where nothing runs beside them.
    """
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
    return np.stack([np.zeros(shape) + seconds for seconds in (forward, first, both - first)])


class Waits(NamedTuple):
    """Seconds for which passes wait for collectives that nothing is left to hide.

    Of both, the parts that a stage which is idle between two passes does not wait for: a pass gives its
    output before the pass after it has its first weights.
    """

    forward: Any
    backward: Any
    behind_backward: Any  # of a forward, for the gradients of the backward before it
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
    order: LayerOrder,
    longer: Any,
    chunks: Any,
    part: Literal["whole", "given", "late"] = "whole",
) -> Waits:
    """Return what forward and backward wait for, all chunks of a stage together.

    `layers` are those of each kind, and `order` says what lies before and behind them in the model.
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
    total = np.asarray(sum(counts))
    some = 1.0 * (total > 0)

    def over(places: Mapping[Neighbours, Any], seconds: Callable[[_Pass, _Pass, _Pass], Any]) -> Any:
        return sum(weight * seconds(*(runs[kind] for kind in place)) for place, weight in places.items())

    each = {place: share * counts[place[1]] for place, share in order.shares.items()}
    usual = {place: number / np.maximum(total, 1e-9) for place, number in each.items()}

    # What a layer waits for beside layers of the same pass.
    def ahead_s(_: _Pass, own: _Pass, behind: _Pass) -> Any:
        return wait(behind.gather + own.counting, own.forward)

    def back_s(before: _Pass, own: _Pass, behind: _Pass) -> Any:
        return wait(before.again + behind.scatter, own.backward)

    forward, backward = over(each, ahead_s), over(each, back_s)
    usual_s, usual_back = over(usual, ahead_s), over(usual, back_s)
    # A pass begins and ends beside units of other passes, or beside the ends; the head stays gathered.
    first, last = run(embedding), run(head)
    has_first, has_last = np.asarray(embedding.count), np.asarray(head.count)
    behind = over(usual, lambda _, own, behind: wait(own.scatter + behind.gather + own.counting, own.forward))
    behind_backward = some * (chunks - has_first) * (behind - usual_s)
    at_first = over(order.first, lambda _, own, behind: wait(first.scatter + own.gather, first.forward))
    forward = forward + behind_backward + has_first * at_first
    alone = over(order.first, lambda _, own, behind: wait(own.gather, first.forward))
    behind_backward = behind_backward + has_first * (at_first - alone)
    before_head = over(order.last, lambda _, own, behind: wait(last.gather + own.counting, own.forward))
    forward = forward + some * has_last * (before_head - over(order.last, ahead_s))
    behind_table = over(order.first, lambda _, own, behind: wait(behind.scatter + first.again, own.backward))
    backward = backward + some * has_first * (behind_table - over(order.first, back_s))
    at_first = over(order.first, lambda _, own, behind: wait(own.scatter + first.gather, first.backward))
    backward = backward + has_first * at_first
    after_backward = some * (chunks - has_first) * usual_back + has_first * at_first
    begins = over(usual, lambda before, own, _: wait(before.again, own.backward))
    backward = backward + some * (chunks - has_last) * (begins - usual_back)
    behind_head = over(order.last, lambda before, own, _: wait(last.scatter + before.again, own.backward))
    beside_head = over(order.last, lambda _, own, behind: wait(own.again, last.backward))
    backward = backward + has_last * (beside_head + some * (behind_head - over(order.last, back_s)))
    if part == "given":  # the gradients of weights that follow gather nothing
        backward, after_backward = backward - after_backward, 0.0 * after_backward
    if part == "late":
        ends = over(usual, lambda _, own, behind: wait(behind.scatter + own.gather, own.backward))
        backward = backward + some * (chunks - has_first) * (ends - usual_back)
    forward, backward = np.maximum(forward, 0.0), np.maximum(backward, 0.0)
    after_forward = np.minimum(some * (chunks - has_last) * usual_s, forward)
    return Waits(
        forward=forward,
        backward=backward,
        behind_backward=np.minimum(behind_backward, forward - after_forward),
        after_forward=after_forward,
        after_backward=np.minimum(after_backward, backward),
    )
