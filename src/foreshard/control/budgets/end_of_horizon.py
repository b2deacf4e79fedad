"""The rest of a run: how long each of two plans may run in it so that what is left of the budgets is spent.

The steps of a run are known. In a calm rest the best mixture of two plans needs one change, whose time
follows from what was saved so far and what either plan spends above the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from foreshard.control.budgets.queues import Queues
from foreshard.control.slots import SECONDS, Budget, Choice, Structure

SPARE = 0.002
"""Part of the whole budget that is left for what was foreseen wrongly."""
_LEAST = 0.003
"""Part of the whole budget that the rest must be above it, for a change to a cheaper plan."""
_BETTER = 0.02
"""Part of a step that a faster plan must gain: estimates are no finer."""
_LOOKS = 6
Ask = Callable[[float, Mapping[str, float]], Structure]
"""The best structure at a weight of time and weights of cost by budget name."""
See = Callable[[Structure], Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfHorizon:
    """What is left.

    Attributes
    ----------
    steps : int
    saved : mapping of budget name to float
        Allowed less spent so far, and less what is spared; negative when too much was spent.
    whole : mapping of budget name to float
        What all steps of the run may cost, about.
    budgets : tuple of Budget
    """

    steps: int
    saved: Mapping[str, float]
    whole: Mapping[str, float]
    budgets: tuple[Budget, ...]

    @staticmethod
    def of(queues: Queues, horizon: int) -> EndOfHorizon | None:
        """Return the rest of a run; None where no budget is left to be kept or no step."""
        left = horizon - queues.steps
        if left <= 0 or not queues.steps or not queues.budgets:
            return None
        known = {one.name: queues[one.name] for one in queues.budgets}
        whole = {name: queue.allowed / queues.steps * horizon for name, queue in known.items()}
        saved = {name: queue.allowed - queue.spent - SPARE * whole[name] for name, queue in known.items()}
        return EndOfHorizon(steps=left, saved=saved, whole=whole, budgets=queues.budgets)

    def less(self, time_s: float, costs: Mapping[str, float]) -> EndOfHorizon:
        """Return what is left after a change that takes so long and costs so much, by budget name."""
        saved = {
            one.name: self.saved[one.name]
            - costs[one.name]
            + (0.0 if one.per == "step" else one.allowance(time_s))
            for one in self.budgets
        }
        return replace(self, saved=saved)

    def left(self, running: Choice, budget: Budget) -> float:
        """Return what is left in the end if a plan runs to it."""
        return self.saved[budget.name] - self.steps * excess_of(running, budget)

    def shortest(self, running: Choice) -> Budget:
        """Return the budget that a plan keeps worst."""
        return min(self.budgets, key=lambda one: self.left(running, one) / self.whole[one.name])

    def is_kept(self, running: Choice) -> bool:
        """Return whether a plan keeps all budgets to the end, but for what is not worth a change."""
        return all(self.left(running, one) >= -_LEAST * self.whole[one.name] for one in self.budgets)

    def steps_of(self, other: Choice, running: Choice) -> float:
        """Return for how many steps of the rest another plan can be paid, or if it is slower, has to run.

        It is more than all of them where any number can be paid, or even all of them do not save enough.
        """
        needed, paid = 0.0, math.inf
        for one in self.budgets:
            more, left = excess_of(other, one) - excess_of(running, one), self.left(running, one)
            if more < 0.0 and left < 0.0:
                needed = max(needed, left / more)
            elif more > 0.0:
                paid = min(paid, max(left, 0.0) / more)
        return paid if other.time_s < running.time_s else needed

    def seconds(self, other: Choice, running: Choice) -> float:
        """Return what the rest takes with as much of another plan as has to be or can be; inf if too dear."""
        steps = min(self.steps_of(other, running), self.steps)
        for one in self.budgets:
            more = excess_of(other, one) - excess_of(running, one)
            if self.left(running, one) - steps * more < -_LEAST * self.whole[one.name]:
                return math.inf
        return steps * other.time_s + (self.steps - steps) * running.time_s


def excess_of(choice: Choice, budget: Budget) -> float:
    """Return the cost of a step above what it is allowed."""
    return choice.costs[budget.key] - budget.allowance(choice.time_s)


class Partner:
    """The plan with which the running one shares the rest best: it is looked for a little in every step.

    Of all mixtures of the running plan and another that spend what is left, the least time has the one
    that is best at the weights at which the two are equally good (Dinkelbach's iteration).
    """

    def __init__(self) -> None:
        self._for: tuple[object, ...] = ()
        self._found: Choice | None = None
        self._looks = 0

    def of(self, rest: EndOfHorizon, running: Choice, mark: object, ask: Ask, see: See) -> Choice | None:
        """Return the other plan as far as it is known; None where the running one is right to the end.

        Parameters
        ----------
        rest : EndOfHorizon
        running : Choice
        mark : object
            What is the same while the cluster is.
        ask, see : callable
        """
        kept, tight = rest.is_kept(running), rest.shortest(running)
        asked = (mark, running.structure, kept, tight.name)
        if asked != self._for:
            self._for, self._found, self._looks = asked, None, 0
        if self._looks < _LOOKS:
            self._looks += 1
            self._look(rest, running, tight, ask, see, cheaper=not kept)
        found = self._found
        if found is None:
            return None
        if kept:
            faster = found.time_s < (1.0 - _BETTER) * running.time_s
            return found if faster else None
        return found if excess_of(found, tight) < excess_of(running, tight) else None

    def _look(
        self, rest: EndOfHorizon, running: Choice, tight: Budget, ask: Ask, see: See, *, cheaper: bool
    ) -> None:
        last = self._found
        if last is None:
            weights = (0.0, 1.0) if cheaper else (1.0, 0.0)
        else:
            gain_s = last.time_s - running.time_s
            spent = excess_of(running, tight) - excess_of(last, tight)
            if gain_s * spent <= 0.0:
                self._looks = _LOOKS  # better in both
                return
            weights = (1.0, gain_s / spent)
        found = see(ask(*_weights(rest, tight, *weights)))
        if last is not None and rest.seconds(found, running) >= rest.seconds(last, running):
            self._looks = _LOOKS
        elif last is None or found.structure != running.structure:
            self._found = found


def _weights(rest: EndOfHorizon, tight: Budget, time: float, cost: float) -> tuple[float, dict[str, float]]:
    """Return the weights of a second and of costs that weigh time and what is above a budget."""
    per_s = 0.0 if tight.per == "step" else tight.limit / SECONDS[tight.per]
    return time - cost * per_s, {one.name: cost * (one is tight) for one in rest.budgets}
