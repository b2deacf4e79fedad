"""How much time shall weigh against budgets: as much as a wanted excess over a finite run allows."""

from __future__ import annotations

from foreshard.errors import SpecError

LEAST_WEIGHT, MOST_WEIGHT = 0.1, 1000.0


def weight_for(violation: float, horizon: float, multiplier: float) -> float:
    """Return the V that leaves an excess of `violation` of the budget after `horizon` steps.

    A queue settles near V times the multiplier of its budget, and the excess over a run is at most the last
    backlog over the number of steps.

    Examples
    --------
    >>> weight_for(0.01, 10_000, 2.0)
    50.0
    """
    if not (violation > 0.0 and horizon > 0.0):
        raise SpecError(
            f"an excess of {violation} over {horizon} steps", key="violation", value=violation,
            rule="Both are above 0", fix="Allow a small excess, or start the queues with a backlog",
        )  # fmt: skip
    wanted = violation * horizon / multiplier if multiplier > 0.0 else MOST_WEIGHT
    return min(max(wanted, LEAST_WEIGHT), MOST_WEIGHT)


class Tuner:
    """Finds V while running: what the budget's multiplier is shows in the backlog.

    Parameters
    ----------
    violation : float
        Wanted excess of mean cost over budget at the end, as a part of the budget.
    horizon : int, steps
        Of the run; after it the wanted excess keeps its meaning over all steps so far.
    weight : float
        V to start with.
    settle : int, steps
        How long the mean of the backlog looks back; the first change comes after as many.
    """

    def __init__(self, *, violation: float, horizon: int, weight: float = 1.0, settle: int = 50):
        weight_for(violation, horizon, 1.0)
        self.violation, self.horizon, self.weight, self.settle = violation, horizon, weight, settle
        self.multiplier = 0.0
        self._steps = 0

    def observe(self, backlog: float) -> float:
        """Return the V of the next slot, given the largest backlog.

        V falls at once when the backlog calls for it and rises by at most 1 % a step: a backlog that has to
        be filled first looks like a budget that does not bind.
        """
        self._steps += 1
        seen = backlog / self.weight
        self.multiplier += (seen - self.multiplier) / min(self._steps, self.settle)
        if self._steps >= self.settle:
            # The latest backlog counts too: what is over by now is what the run ends with.
            wanted = weight_for(self.violation, max(self.horizon, self._steps), max(self.multiplier, seen))
            self.weight = min(wanted, self.weight * 1.01)
        return self.weight

    def place_holder(self, part: float = 0.9) -> float:
        """Return the backlog to start the next run with: where it will settle, less a margin."""
        return part * self.weight * self.multiplier
