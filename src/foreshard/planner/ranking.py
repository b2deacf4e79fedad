"""Plans in order, with the reason why each stands where it does, and the limits of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from foreshard.errors import LimitError
from foreshard.planner.result import Ranked
from foreshard.predict.explanation import PART_WORDS
from foreshard.quantity import seconds
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

SHOWN = 5
"""Plans that an answer shows however late it is, fewer where fewer were asked for."""
OBJECTIVES = ("time", "cost", "energy")
_TIE = 1e-4
"""Part of a step by which plans are as fast as each other in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may take. Both need the tokens of the run."""

    max_usd: float | None = None
    max_hours: float | None = None

    def __bool__(self) -> bool:
        """Return whether there is any limit."""
        return self.max_usd is not None or self.max_hours is not None

    def keeps(self, prediction: Prediction) -> bool:
        """Return whether a predicted run stays within the limits; an unknown price does not."""
        usd, seconds = prediction.cost.usd_total, prediction.run_time_s
        in_money = self.max_usd is None or (usd is not None and usd <= self.max_usd)
        return in_money and (self.max_hours is None or (seconds or 0.0) <= 3600.0 * self.max_hours)

    def step_s(self, *, tokens: float | None, tokens_per_step: float, usd_per_h: float | None) -> float:
        """Return the seconds that a step may take on nodes of some price; 0 when the price is not known."""
        steps = (tokens or 0.0) / tokens_per_step
        hours = [] if self.max_hours is None else [self.max_hours]
        if self.max_usd is not None:
            free = float("inf") if usd_per_h == 0 else 0.0
            hours.append(self.max_usd / usd_per_h if usd_per_h else free)
        return min(hours, default=float("inf")) * 3600.0 / steps if steps else float("inf")

    def error(self, predictions: Sequence[Prediction]) -> LimitError:
        """Return the error that names the limit nothing meets and the least that would be met."""
        found = []
        if self.max_hours is not None:
            least = min(prediction.run_time_s or 0.0 for prediction in predictions) / 3600.0
            found.append(("--max-hours", self.max_hours, least, "hours"))
        if self.max_usd is not None:
            prices = [
                prediction.cost.usd_total
                for prediction in predictions
                if prediction.cost.usd_total is not None
            ]
            if not prices:
                return LimitError(
                    "no device of the cluster has a price",
                    key="--max-usd",
                    value=self.max_usd,
                    rule="A limit on the price needs prices",
                    fix="Give --usd-per-device-hour, or usd_per_h in the cluster file",
                )
            found.append(("--max-usd", self.max_usd, min(prices), "dollars"))
        broken = [item for item in found if item[2] > item[1]] or found
        key, value, least, unit = broken[0]
        both = len(broken) < len(found) or len(found) == 1
        below = f"no plan takes less than {_four_digits(least, math.floor)} {unit}"
        what = below if both else "no plan meets both limits"
        return LimitError(
            what,
            key=key,
            value=value,
            rule="A plan must keep every limit",
            fix=f"Allow {_four_digits(least, math.ceil)} {unit}, more devices or other ones",
        )


def _four_digits(value: float, rounded: Callable[[float], int]) -> str:
    """Return the next number of four digits above or below, without an exponent: a limit can be set to it."""
    power = math.floor(math.log10(value)) - 3 if value > 0 else 0
    return f"{rounded(value / 10.0**power) * 10.0**power:.{max(0, -power)}f}"


def score(prediction: Prediction, objectives: Sequence[str]) -> tuple[float, ...]:
    """Return what is made small, the first objective first; what is not known counts as infinite."""
    values = {
        "time": prediction.step_time_s,
        "cost": prediction.cost.usd_per_step,
        "energy": prediction.energy_j_per_step,
    }
    found = (values[name] for name in objectives)
    return (*(float("inf") if value is None else value for value in found), prediction.step_time_s)


def ranked(
    predictions: Sequence[Prediction],
    objectives: Sequence[str],
    limits: Limits,
    top: int,
    *,
    neighbours: bool = False,
) -> tuple[tuple[Ranked, ...], LimitError | None]:
    """Return the best plans of different families with reasons, and the error if none keeps the limits.

    With `neighbours`, as many of the best come beside them, whatever their family. Plans within the limits
    come first; when there are none, all are shown beside the error.
    """
    within = [prediction for prediction in predictions if limits.keeps(prediction)]
    error = limits.error(predictions) if limits and predictions and not within else None
    families: dict[Hashable, Prediction] = {}
    best_first = sorted(within or predictions, key=lambda one: score(one, objectives))
    for prediction in best_first:
        families.setdefault((prediction.cluster, family_of(prediction.plan)), prediction)
    order = list(families.values())[:top]
    if neighbours:
        heads = {id(one) for one in order}
        order = [one for i, one in enumerate(best_first) if i < top or id(one) in heads]
    return tuple(
        Ranked(plan=prediction.plan, prediction=prediction, why=_why(prediction, order[0], objectives[0]))
        for prediction in order
    ), error


def family_of(plan: Plan) -> Hashable:
    """Return what plans of one family agree in: precision, communication, and the degrees of each pipeline.

    They differ in cuts, shares, micro-batches, recomputation, sharding of states, or where pipelines lie.
    """
    shapes = Counter(
        (
            group.schedule,
            group.num_chunks,
            tuple((len(stage.ranks), stage.tp, stage.cp, stage.ep, stage.etp) for stage in group.stages),
        )
        for group in plan.groups
    )
    return plan.precision, tuple(sorted(plan.comm.items())), frozenset(shapes.items())


def front_of(predictions: Sequence[Prediction], limits: Limits) -> tuple[Ranked, ...]:
    """Return the plans within the limits that no other beats in one objective without losing in another.

    Of plans on equally many devices the fastest is also the cheapest.
    """
    within = [prediction for prediction in predictions if limits.keeps(prediction)]
    found = pareto(within, OBJECTIVES)
    return tuple(Ranked(plan=item.plan, prediction=item, why=_trade(item, found[0])) for item in found)


def _trade(one: Prediction, fastest: Prediction) -> str:
    """Return what a plan gives and takes beside the fastest."""
    if one is fastest:
        return "the fastest"
    words = [f"{one.step_time_s / fastest.step_time_s - 1.0:+.1%} time"]
    for name, value, other in (
        ("cost", one.cost.usd_per_step, fastest.cost.usd_per_step),
        ("energy", one.energy_j_per_step, fastest.energy_j_per_step),
    ):
        if value is not None and other:
            words.append(f"{value / other - 1.0:+.1%} {name}")
    return ", ".join(words)


def pareto(predictions: Sequence[Prediction], objectives: Sequence[str]) -> tuple[Prediction, ...]:
    """Return those that no other beats in one objective without being worse in another."""
    values = [score(prediction, objectives)[:-1] for prediction in predictions]
    kept = []
    for i, mine in enumerate(values):
        better = (all(o <= m for o, m in zip(other, mine, strict=True)) and other != mine for other in values)
        if not any(better) and mine not in values[:i]:
            kept.append(predictions[i])
    return tuple(sorted(kept, key=lambda one: one.step_time_s))


def _why(one: Prediction, best: Prediction, objective: str) -> str:
    """Return what decides between a plan and the best: the part of the step that grew most."""
    if one is best:
        return f"chosen: {one.bottleneck}"
    mine, least = score(one, (objective,))[0], score(best, (objective,))[0]
    slower = one.step_time_s / best.step_time_s - 1.0
    share = f"{abs(slower):.{1 if abs(slower) >= 5e-4 else 2}%}"
    lead = f"{share} slower" if slower >= _TIE else "as fast" if slower > -_TIE else f"{share} faster"
    if objective != "time" and least > 0:
        lead = f"{mine / least - 1.0:.1%} more {objective}, {lead}"
    grown = {name: value - best.time_breakdown_s[name] for name, value in one.time_breakdown_s.items()}
    part = max(grown, key=lambda name: grown[name])
    text = lead
    if grown[part] > _TIE * best.step_time_s:
        text += f": {seconds(grown[part])} more for {PART_WORDS[part]}"
    more = (one.memory.peak_bytes - best.memory.peak_bytes) / 2**30
    if abs(slower) < _TIE and abs(more) >= 0.1:
        text += f"; {abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"
    return text
