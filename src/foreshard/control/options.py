"""The rules of the controller in numbers: what each is worth is measured by `bench/bench_ablation.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Rules of the controller; docs/controller.md has what each is worth.

    Attributes
    ----------
    dead_zone : float
        Part of a slot's objective below which a better structure is not better: estimates are no finer.
    share_dead_zone : float
        Part of a slot's objective that new shares must gain: they cost nothing, but every order is a message.
    patience : float
        Part of what a change costs that staying must have lost before it is made. With all of it, of two
        plans never more than twice the best possible is lost (ski rental); the ablation prefers a third.
    longest_dwell : float, steps
        For which a choice is expected to stay at most; its backlogs are those after so many steps. 0: of one.
    cooldown_steps : int
        While nothing is seen to change, layers and groups stay at least so long.
    plans_end : bool
        Whether the last change of a run is placed where what is left of the budgets is spent exactly.
    learns_dual : bool
        Whether queues start from what the states seen so far make of the budgets.
    catches_up : bool
        Whether what was spent too much is spread over the rest of the run when that is learned.
    margin : float
        Part of a budget that is aimed to be left: what changes and late sight cost is not in what is learned.
    grid : float
        Step, in the logarithm, of the estimates that structures are chosen for; 0: as they are.
    trusts_first_sight : bool
        Whether shares follow a single measurement that is far off.
    """

    dead_zone: float = 0.02
    share_dead_zone: float = 0.005
    patience: float = 0.3
    longest_dwell: float = 20.0
    cooldown_steps: int = 200
    plans_end: bool = True
    learns_dual: bool = True
    catches_up: bool = True
    margin: float = 0.004
    grid: float = 0.05
    trusts_first_sight: bool = True


DEFAULTS = ControllerOptions()
