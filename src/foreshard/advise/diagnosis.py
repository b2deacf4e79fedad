"""Diagnosis of a run: its critical path, and what would help, by edits of its priced tasks.

The step is priced once. Each question changes durations or dependencies of its tasks and executes them again;
a change that the user can make is then predicted by itself, which also says whether it fits memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from foreshard.advise.advice import MIN_GAIN, improvements, offered
from foreshard.advise.change import Effect, apply, effect
from foreshard.advise.request import Request
from foreshard.advise.traced_request import SPEEDS, Asked, TracedRequest
from foreshard.errors import ForeshardError, SpecError
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.critical import Stretch, critical_path
from foreshard.predict.graph.edits import (
    CLASSES,
    OVERLAPS,
    rewired,
    sped_up,
    takes,
    with_micro_batches,
    with_transfers_of,
    words_of,
)
from foreshard.predict.graph.engine import MAX_TASKS, PricedStep
from foreshard.predict.graph.prices import GroupPrices
from foreshard.predict.measured.tasks import critical_path as measured_critical_path
from foreshard.predict.tasks.kernels import KERNELS
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

TWICE = 2.0
_LONG_ROUNDS = 24
"""Rounds of micro-batches to which the path of a very long step is cut; the others are like those left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlace:
    """What one stage does on the critical path, all stretches of one kind together."""

    kind: str
    group: int
    stage: int
    ranks: tuple[int, ...]
    times: int
    parts_s: dict[str, float]

    @property
    def seconds(self) -> float:
        """All its seconds."""
        return sum(self.parts_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """Something that would help: tokens per second won, as a fraction, and the step with it.

    `most` is the gain if the tasks were free, None where nothing bounds it; `change` is what --change takes;
    `by` is graph edit, or prediction where the change was predicted by itself.
    """

    what: str
    gain: float
    step_time_s: float
    most: float | None
    change: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The critical path by place, and what would help, best first.

    `cut` is the number of micro-batches that the path was cut to, 0 for the whole step.
    """

    makespan_s: float
    path: tuple[PathPlace, ...]
    helps: tuple[Help, ...]
    cut: int

    def to_dict(self) -> dict[str, Any]:
        """Return the object ``diagnosis`` of ``whatif --diagnose --json``."""
        return {
            "critical_path_s": self.makespan_s,
            "critical_path": [asdict(place) | {"seconds": place.seconds} for place in self.path],
            "micro_batches": self.cut or None,
            "helps": [asdict(found) for found in self.helps],
        }


def diagnose(request: Asked, base: Prediction) -> Diagnosis:
    """Return the critical path of a run, and what would help it.

    Raises
    ------
    SpecError
        Where another engine than graph was asked for, or transfers that share a network.
    """
    network = None if isinstance(request, TracedRequest) else request.network
    if request.engine != "graph" or network not in (None, "closed-form"):
        key, value = ("engine", request.engine) if request.engine != "graph" else ("network", network)
        rule = "The critical path is one of tasks, each transfer by itself"
        fix = f"Leave out --{key}, or state a --change"
        raise SpecError(f"a diagnosis under {key} {value}", key=f"--{key}", value=value, rule=rule, fix=fix)
    if isinstance(request, TracedRequest):
        return _of_trace(request, base)
    case = request.planned_run()
    step = PricedStep.of(case, _batch(request, case))
    prices, cut = _shortened(step.prices)
    program, times, _ = step.executed(prices)
    found = (*_faster_classes(case, base, step), *_changes(request, base, step))
    return Diagnosis(
        makespan_s=times.makespan_s,
        path=_by_place(case.plan, critical_path(program, times)),
        helps=_ranked(request, base, found),
        cut=cut,
    )


def _of_trace(request: TracedRequest, base: Prediction) -> Diagnosis:
    """Return the diagnosis of a traced module, whose tasks are few enough to price for each question."""
    step, times = request.executed(base.plan)
    return Diagnosis(
        makespan_s=times.makespan_s,
        path=_by_place(base.plan, measured_critical_path(step, times)),
        helps=_ranked(request, base, tuple(_faster_parts(request, base))),
        cut=0,
    )


def _faster_parts(request: TracedRequest, base: Prediction) -> Iterator[Help]:
    """Yield each part of the step and each class of kernels twice as fast, with the gain if it were free."""
    for name in SPEEDS:
        change = f"speed-{name.replace('_', '-')}="
        twice, free = (effect(request, base, f"{change}{factor:g}") for factor in (TWICE, math.inf))
        if twice.prediction is not None and free.prediction is not None and twice.gain:
            yield _predicted(twice, f"{words_of(name)} twice as fast", most=free.gain)


def _predicted(found: Effect, what: str, *, most: float | None = None) -> Help:
    """Return a change that was predicted by itself as something that would help."""
    assert found.prediction is not None and found.gain is not None
    return Help(
        what=what,
        gain=found.gain,
        step_time_s=found.prediction.step_time_s,
        most=most,
        change=found.change,
        by="prediction",
    )


def _batch(request: Request, case: PlannedRun) -> Any:
    return build_batch([case], request.constants, fidelity=request.fidelity)


def _shortened(prices: list[GroupPrices]) -> tuple[list[GroupPrices], int]:
    """Return the step, one of very many micro-batches with fewer of them, and that number or 0."""
    first = prices[0]
    rounds = first.num_micro_batches // first.num_stages
    if len(prices) > 1 or first.num_tasks <= MAX_TASKS or rounds <= _LONG_ROUNDS:
        return prices, 0
    shorter = first.without(rounds - _LONG_ROUNDS)
    return [shorter], shorter.num_micro_batches


def _by_place(plan: Plan, stretches: tuple[Stretch, ...]) -> tuple[PathPlace, ...]:
    found: dict[tuple[str, int, int], list[Stretch]] = {}
    for stretch in stretches:
        found.setdefault((stretch.kind, stretch.group, stretch.stage), []).append(stretch)
    places = []
    for (kind, group, stage), some in found.items():
        names = dict.fromkeys(name for stretch in some for name in stretch.parts_s)
        ranks = plan.groups[group].stages[stage].ranks if stage >= 0 else ()
        places.append(
            PathPlace(
                kind=kind,
                group=group,
                stage=stage,
                ranks=ranks,
                times=len(some),
                parts_s={name: math.fsum(s.parts_s.get(name, 0.0) for s in some) for name in names},
            )
        )
    return tuple(sorted(places, key=lambda place: -place.seconds))


def _ranked(request: Asked, base: Prediction, helps: tuple[Help, ...]) -> tuple[Help, ...]:
    """Return what helps by a hundredth or more, the most first; of one change written twice the better."""
    found = [*helps, *(_predicted(better, better.change) for better in improvements(request, base))]
    best: dict[str, Help] = {}
    for one in sorted(found, key=lambda one: -one.gain):
        best.setdefault(one.change, one)
    return tuple(one for one in best.values() if one.gain >= MIN_GAIN)


def _faster_classes(case: PlannedRun, base: Prediction, step: PricedStep) -> Iterator[Help]:
    """Yield each class of tasks and of kernels twice as fast, with the gain if it were free."""
    now_s = sum(step.parts().values())
    ratio = base.step_time_s / now_s  # of a run that one measured step was given for

    def seconds(name: str, factor: float) -> float:
        if name in KERNELS:
            return sum(PricedStep.of(case, step.batch, {name: factor}).parts().values())
        return sum(step.parts(sped_up(step.prices, {name: factor})).values())

    for name in (*CLASSES, *KERNELS):
        twice_s = seconds(name, TWICE)
        if twice_s < now_s:
            free_s = seconds(name, math.inf)
            yield Help(
                what=f"{words_of(name)} twice as fast",
                gain=now_s / twice_s - 1.0,
                step_time_s=ratio * twice_s,
                most=now_s / free_s - 1.0 if free_s > 0.0 else None,
                change=f"speed-{name.replace('_', '-')}=2",
                by="graph edit",
            )


def _changes(request: Request, base: Prediction, step: PricedStep) -> Iterator[Help]:
    """Yield changes of the input whose edit of the priced step wins, each predicted by itself to be sure."""
    now_s = sum(step.parts().values())
    for words, change, prices, factor in _edits(request, base, step):
        if now_s * factor < sum(step.parts(prices).values()) * (1.0 + MIN_GAIN):
            continue
        found = effect(request, base, change)
        if found.prediction is not None and found.prediction.memory.fits:
            yield _predicted(found, words)


def _edits(
    request: Request, base: Prediction, step: PricedStep
) -> Iterator[tuple[str, str, list[GroupPrices], int]]:
    """Yield (words, change, edited prices, times the tokens): overlaps, batch, network."""
    shipped = offered(request, base.plan).overlaps
    traits = step.prices[0].machines[0].traits
    for name in OVERLAPS:
        if name in shipped and float(getattr(traits, name)) <= 0 and takes(step.prices, name):
            switched = rewired(step.prices, {name: True})
            flag = name.replace("_", "-")
            yield f"{flag} on", f"{flag}=true", switched, 1
    whole = all(price.group.share % price.group.micro_batch == 0 for price in step.prices)
    if whole and request.plan is None:
        batch = 2 * base.plan.global_batch
        yield "twice the micro-batches", f"global-batch={batch}", with_micro_batches(step.prices, 2), 2
    if request.cluster.num_nodes > 1 and len(request.cluster.nodes) == 1:
        rate = 2.0 * request.cluster.nodes[0].nic_bytes_per_s
        change = f"nic={8 * rate / 1e9:g} Gb/s"
        try:
            changed = apply(request, change)
            assert isinstance(changed, Request)
            case = changed.planned_run()
        except ForeshardError:
            return
        other = PricedStep.of(case, _batch(request, case))
        yield "NICs twice as fast", change, with_transfers_of(step.prices, other.prices), 1
