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
    frame_steps : int
        While nothing is seen to change, layers and groups stay at least so long.
    plans_end : bool
        Whether the last change of a run is placed where what is left of the budgets is spent exactly.
    learns_dual : bool
        Whether queues start from what the states seen so far make of the budgets.
    grid : float
        Step, in the logarithm, of the estimates that structures are chosen for; 0: as they are.
    trusts_first_sight : bool
        Whether shares follow a single measurement that is far off.
    experts : bool
        Whether a plan that stays runs where it would have done better than the forecasts.
    """

    dead_zone: float = 0.02
    share_dead_zone: float = 0.005
    patience: float = 0.3
    frame_steps: int = 200
    plans_end: bool = True
    learns_dual: bool = True
    grid: float = 0.05
    trusts_first_sight: bool = True
    experts: bool = True


DEFAULTS = ControllerOptions()
