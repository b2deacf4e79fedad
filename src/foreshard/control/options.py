"""The rules of the controller in numbers: what each is worth is measured by `bench/bench_ablation.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Rules of the controller; docs/controller.md has what each is worth.

    Attributes
    ----------
    dead_zone : float
        Part of a step that a better structure must gain. Structures are compared for speeds on a grid of 5 %,
        which is 2.5 % to either side; the rest is noise.
    share_dead_zone : float
        Part of a slot's objective that new shares must gain: they cost nothing, but every order is a message.
    patience : float
        Part of what a change costs that staying must have lost before it is made. With all of it, of two
        plans never more than twice the best possible is lost (ski rental); on the shipped `spot` that is
        0.6 % of a step slower than a third.
    learns_dual : bool
        Whether queues start from what the states seen so far make of the budgets.
    grid : float
        Step, in the logarithm, of the estimates that structures are chosen for; 0: as they are.
    trusts_first_sight : bool
        Whether shares follow a single measurement that is far off.
    experts : bool
        Whether a plan that stays runs where it would have done better than the forecasts.
    foresees : bool
        Whether plans are for the speeds that are expected next, where that pays in the mean and surely did
        so far.
    guard : bool
        Whether a plan that keeps the budgets runs while an excess is above the limit of the guarantee.
    """

    dead_zone: float = 0.03
    share_dead_zone: float = 0.005
    patience: float = 0.3
    learns_dual: bool = True
    grid: float = 0.05
    trusts_first_sight: bool = True
    experts: bool = True
    foresees: bool = True
    guard: bool = True


DEFAULTS = ControllerOptions()
