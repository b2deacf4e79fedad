"""The time of a pipeline without its schedule: the longest of the paths through its graph of tasks.

`pipeline_pace` is the shortest form: `fill_s + passes * period_s`, exact for equal stages. `pipeline_span`
follows every stage through warm-up, steady state and flush, so that it holds for unequal stages and slow
messages too. The schedule itself is lowered by `graph.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

_ROUNDING = 1e-9
"""Part of a micro-batch that counts as none."""


class PipelinePace(NamedTuple):
    """How pipelines go: n micro-batches take `fill_s + n * period_s`."""

    # one passage of all stages but the slowest
    fill_s: Any
    # one micro-batch on the slowest stage
    period_s: Any


def pipeline_pace(stage_s: np.ndarray) -> PipelinePace:
    """Return how pipelines go whose stages take so long for a micro-batch, messages included.

    Source
    ------
    Flush of a pipeline; docs/derivations/step.md.

    Examples
    --------
    >>> pipeline_pace(np.array([1.0, 3.0, 2.0]))
    PipelinePace(fill_s=np.float64(3.0), period_s=np.float64(3.0))
    """
    period_s = stage_s.max(0)
    return PipelinePace(fill_s=stage_s.sum(0) - period_s, period_s=period_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRows:
    """Pipelines as runs of equal stages: what `pipeline_span` goes through, shape (runs, pipelines) each.

    Seconds are those of one chunk of layers and one micro-batch.
    """

    # stages of the run, 0 where a pipeline has fewer runs
    count: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    # what holds a stage behind an op whose output has left, where another op follows at once
    after_forward_s: np.ndarray
    after_backward_s: np.ndarray
    # what a forward takes longer behind a backward, of the period
    behind_s: np.ndarray
    # messages one way over all boundaries between stages of the run
    inside_s: np.ndarray
    # message one way from the run's last stage to the stage after it, 0 after the last stage
    after_s: np.ndarray
    # message from the last stage back to the first, shape (pipelines,)
    wrap_s: np.ndarray
    # messages that hold a stage beside each op outside the steady state
    beside_s: np.ndarray
    # the longest message of one op to or from a stage
    widest_s: np.ndarray
    # a forward and a backward in the steady state, with the messages that hold the stage
    period_s: np.ndarray
    # message that holds the run's first stage, and its last, between forward and backward
    call_first_s: np.ndarray
    call_s: np.ndarray
    # part of the period that stage i puts off by i micro-batches
    late_s: np.ndarray
    # ops in one direction before the steady state on the run's first stage, and on each stage after it
    # `per_stage` fewer
    warm_up: np.ndarray
    per_stage: np.ndarray
    # from the begin of the step to the first forward; from the last backward of a stage until its gradients
    # are ready
    ready_s: np.ndarray
    tail_s: np.ndarray
    # what the last backward of a chunk takes longer beside gradients that leave in it; `tail_s` has it too
    slowed_s: np.ndarray
    # what the first forward of a stage waits for weights that are gathered no further than one bucket ahead
    wait_s: np.ndarray
    # time of the last micro-batch over that of the others: it may have fewer samples
    last_share: np.ndarray
    # layers of a chunk, in the mean, and what each of them takes
    layers: np.ndarray
    layer_forward_s: np.ndarray
    layer_backward_s: np.ndarray
    # forwards of a stage in a step, shape (pipelines,), as `chunks` and `stages`
    rounds: np.ndarray
    chunks: np.ndarray
    stages: np.ndarray

    @property
    def around_s(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a forward, and of a backward, through a chunk of every stage and back to the first."""
        forward_s, backward_s = ((self.count * op_s).sum(0) for op_s in (self.forward_s, self.backward_s))
        messages_s = np.where(self.count > 0, self.inside_s + self.after_s, 0.0).sum(0) + self.wrap_s
        return forward_s + messages_s, backward_s + messages_s


class PipelineSpan(NamedTuple):
    """The longest path through each pipeline, shape (pipelines,)."""

    # from the begin of the step until all gradients are ready
    seconds: np.ndarray
    # run of stages on which the path spends the steady state
    run: np.ndarray
    # seconds of the path before the first forward and after the last backward
    data_s: np.ndarray


def pipeline_span(rows: PipelineRows) -> PipelineSpan:
    """Return the longest path through pipelines, over all stages that may set the pace.

    Where the last micro-batch is short, the one before it may come up last: its backwards take longer, and
    the first stage still has the short one to do after it.
    """
    span = _longest_path(rows)
    first = rows.last_share[0]
    is_short = (rows.last_share < 1.0 - _ROUNDING).any(0) & (rows.rounds > rows.chunks)
    if not is_short.any():
        return span
    fewer = _longest_path(
        replace(rows, rounds=rows.rounds - rows.chunks, last_share=np.ones_like(rows.last_share))
    )
    before_s = np.where(is_short, fewer.seconds + first * rows.backward_s[0], -np.inf)
    later = before_s > span.seconds
    return PipelineSpan(
        seconds=np.where(later, before_s, span.seconds),
        run=np.where(later, fewer.run, span.run),
        data_s=np.where(later, fewer.data_s, span.data_s),
    )


def _longest_path(rows: PipelineRows) -> PipelineSpan:
    """Return the longest path whose last micro-batch is the last one.

    A path goes down the stages, stays on one for the steady state and comes up again. Each of the two ways is
    the longest of: the ops of that stage alone, and a passage of the stages behind it. What lies inside a run
    is linear in the stage, so its first and its last stage are enough.

    Source
    ------
    docs/derivations/step.md.
    """
    places = _ways_from_first(rows)
    rounds = rows.rounds
    around = rows.around_s
    around_f, around_b = ((rows.chunks - 1.0) * seconds for seconds in around)
    around_f = around_f + (rows.chunks - 1.0) * (rows.count * rows.wait_s).sum(0)
    # Where messages run beside the work, a round through all stages takes a period a stage: a chunk of layers
    # goes back to the first stage, but for the last chunk; zero-bubble pipelines go down and up again. Of
    # two neighbours of those only one micro-batch more is on its way: two go down and up before the third.
    is_cut = rows.chunks > 1.0
    round_s = np.where(is_cut, np.maximum(*around), np.add(*around)) / rows.stages
    is_split = (rows.late_s > 0.0).any(0)
    part = np.where(is_cut, 1.0 - 1.0 / rows.chunks, is_split)
    pair_s = rows.forward_s + rows.backward_s + rows.late_s / 2.0 + rows.widest_s
    of_pair_s = is_split * np.maximum(pair_s - rows.period_s, 0.0)
    slower_s = part * np.maximum(round_s - rows.period_s, 0.0)
    if is_cut.any():
        slower_s = np.where(is_cut, np.maximum(slower_s, part * _round_waits(rows)), slower_s)
    none = _pair(np.full_like(rounds, -np.inf))
    start, end, best, run = none, none, none, np.zeros(rounds.shape, dtype=int)
    is_deepest = np.ones(rounds.shape, dtype=bool)
    for place in reversed(places):
        r, present = place.run, place.present
        f, b, kept = rows.forward_s[r], rows.backward_s[r], rows.last_share[r]
        steady = rounds - 1.0 - place.warm_up
        round_trip_f = np.where(is_deepest, around_f, -np.inf)
        round_trip_b = np.where(is_deepest, around_b, -np.inf)
        own_f = _later(place.down_busy, place.down + _pair(f + rows.after_forward_s[r] + round_trip_f))
        own_b = _later(place.up_busy, place.up + _pair(kept * (b + round_trip_b)))
        # Work that stage i puts off by i micro-batches: before its last forward, and from then to its last
        # backward.
        late = rows.late_s[r]
        late_f_s = late * np.maximum(steady - place.stage, 0.0)
        late_b_s = late * np.maximum(rounds - 1.0 - place.stage, 0.0) - late_f_s
        own_b = own_b + _pair(late_b_s)
        here_start = _later(own_f, start)
        here_end = _later(own_b, np.where(steady > 0.0, end, -np.inf))
        # A last forward that is short ends the steady state.
        whole = here_start + here_end
        whole[0] += steady * (rows.period_s[r] - late) + late_f_s - place.call_s
        # Rounds of so many micro-batches that begin and end on this stage.
        gaps = np.maximum(steady - (place.warm_up > 0.0), 0.0)
        in_rounds = np.where(is_cut, steady, gaps - np.mod(gaps, rows.stages))
        whole[0] += np.maximum(in_rounds * slower_s[r], (gaps - np.mod(gaps, 2.0)) * of_pair_s[r])
        whole[0] -= np.where(steady > 0.0, (1.0 - kept) * f, 0.0)
        better = present & (whole[0] > best[0])
        best, run = np.where(better, whole, best), np.where(better, r, run)
        steps, message = place.steps_above, place.message_above
        start = np.where(present, here_start + _pair(steps * b + message), start)
        end = np.where(present, here_end + _pair(steps * kept * f + message), end)
        is_deepest &= ~present
    return PipelineSpan(seconds=best[0], run=run, data_s=best[1])


def _round_waits(rows: PipelineRows) -> np.ndarray:
    """Return what a micro-batch's round through a chunk of every stage takes longer than a period, a stage.

    Larger chunks come first, forwards and backwards in opposite order: a stage pairs forwards of larger with
    backwards of smaller ones and the other way round, and between these either. The chunk of the head goes
    back to no stage. Shape (runs, pipelines).
    """
    larger, smaller = np.ceil(rows.layers), np.floor(rows.layers)
    part = rows.layers - smaller
    messages_s = np.where(rows.count > 0, rows.inside_s + rows.after_s, 0.0).sum(0) + rows.wrap_s
    alike = np.where(part > 0.5, larger, smaller)
    few = np.minimum(part, 1.0 - part)
    found = np.zeros_like(part)
    for forwards, backwards, share in (
        (larger, smaller, few),
        (smaller, larger, few),
        (alike, alike, 1.0 - 2.0 * few),
    ):
        forward_s, backward_s = forwards * rows.layer_forward_s, backwards * rows.layer_backward_s
        around_s = [(rows.count * op_s).sum(0) + messages_s for op_s in (forward_s, backward_s)]
        period_s = rows.period_s - rows.forward_s - rows.backward_s + forward_s + backward_s
        found += share * np.maximum(np.maximum(*around_s) / rows.stages - period_s, 0.0)
    return found


class _Place(NamedTuple):
    """First or last stage of a run, and the ways to it from the first stage, as pairs of seconds.

    Of a pair the second is the part before the first forward or after the last backward. `down` and `up` are
    the ways before its first forward and after its last backward; `down_busy` and `up_busy` add its own ops
    outside the steady state. The place before is `steps_above` stages and `message_above` seconds away.
    """

    run: int
    stage: np.ndarray
    present: np.ndarray
    warm_up: np.ndarray
    call_s: np.ndarray
    down: np.ndarray
    up: np.ndarray
    down_busy: np.ndarray
    up_busy: np.ndarray
    steps_above: np.ndarray
    message_above: np.ndarray


def _ways_from_first(rows: PipelineRows) -> list[_Place]:
    """Return the first and the last stage of every run, in order, with the ways to them."""
    rounds = rows.rounds
    places: list[_Place] = []
    none = np.zeros_like(rounds)
    down = up = _pair(none)
    slow_f = slow_b = after_s = before = none
    for r, count in enumerate(rows.count):
        present, more = count > 0, np.maximum(count - 1.0, 0.0)
        f, b, beside = rows.forward_s[r], rows.backward_s[r], rows.beside_s[r]
        kept, wait = rows.last_share[r], rows.wait_s[r]
        after_f, after_b, slowed = rows.after_forward_s[r], rows.after_backward_s[r], rows.slowed_s[r]
        slow_f = np.where(
            present, np.maximum(slow_f, np.maximum(f + after_f + beside, rows.widest_s[r])), slow_f
        )
        slow_b = np.where(
            present, np.maximum(slow_b, np.maximum(b + after_b + beside, rows.widest_s[r])), slow_b
        )
        gate, tail, late = _pair(rows.ready_s[r], data=True), _pair(rows.tail_s[r], data=True), rows.late_s[r]
        here_down, here_up = down, up
        for is_last in (False, True):
            steps, message = (more, rows.inside_s[r]) if is_last else (none, none)
            here_down = _later(here_down + _pair(steps * (f + wait) + message), gate)
            put_off = np.minimum(before + steps, rounds - 1.0) + kept
            passed = here_up + _pair(steps * (kept * b + slowed) + message)
            here_up = _later(passed + _pair(slowed, data=True) * (not is_last), tail + _pair(put_off * late))
            call = rows.call_s[r] if is_last else rows.call_first_s[r]
            warm_up = np.clip(rows.warm_up[r] - steps * rows.per_stage[r], 0.0, rounds - 1.0)
            first = np.where(warm_up == rounds - 1.0, kept, 1.0)
            places.append(
                _Place(
                    run=r,
                    stage=before + steps,
                    present=present & (more > 0) if is_last else present,
                    warm_up=warm_up,
                    call_s=call,
                    down=here_down + _pair(wait, data=True),
                    up=here_up,
                    down_busy=here_down
                    + _pair(wait, data=True)
                    + _pair(first * f + after_f + warm_up * slow_f + call),
                    up_busy=here_up + _pair(kept * b + warm_up * slow_b + call),
                    steps_above=steps if is_last else none + 1.0,
                    message_above=message if is_last else after_s,
                )
            )
        before = before + count
        after_s = np.where(present, rows.after_s[r], after_s)
        down = np.where(present, here_down + _pair(f + wait + rows.after_s[r]), down)
        up = np.where(present, here_up + _pair(kept * b + rows.after_s[r]), up)
    return places


def _pair(seconds: np.ndarray, *, data: bool = False) -> np.ndarray:
    """Return seconds of a path beside those of them that gradients and weights take."""
    found = np.zeros((2, *np.shape(seconds)))
    found[: 1 + data] = seconds
    return found


def _later(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the longer of two ways."""
    return np.where(one[0] >= other[0], one, other)
