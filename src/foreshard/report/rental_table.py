"""The result of a rental search as a screen: nodes, plan, time and price of the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshard import quantity
from foreshard.report.plan_words import degrees
from foreshard.report.screen import Box, Screen, table
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.planner.rental import Offer, RentResult

_NAMED = 4  # instances named in a note; --json has all


def rental_screen(result: RentResult, model: str, *, pressed: bool = False) -> Screen:
    """Return the offers, the chosen one first, and what was left out."""
    plans = number_of(result.evaluated + result.pruned, "plan")
    note = f"{result.evaluated:,} timed, {result.pruned:,} excluded, in {quantity.seconds(result.wall_s)}"
    boxes = [Box(title="Searched", value=plans, note=note)]
    if result.offers:
        best = result.offers[0]
        prediction = best.ranked.prediction
        boxes = [
            Box(title="Rent", value=best.cluster, note=f"{quantity.usd(best.usd_per_h)} an hour"),
            Box(
                title="The run",
                value=quantity.usd(prediction.cost.usd_total),
                note=f"in {quantity.seconds(prediction.run_time_s)}",
            ),
            *boxes,
        ]
    notes = [f"Left out: {names}: {why}." for why, names in _reasons(result.left_out).items()]
    if pressed:
        notes.append("Interrupted: the best offers so far.")
    columns = (
        "chosen",
        "rent",
        ">price of run",
        ">run",
        ">$ an hour",
        ">step",
        ">MFU",
        "prices of",
        "plan",
        "why",
    )
    rows = [_row(i, one) for i, one in enumerate(result.offers)]
    spare = (">MFU", "prices of", ">step", "plan")
    offers = (table("Offers, best first", columns, rows, spare=spare),) if rows else ()
    return Screen(header=(f"{model} on rented nodes",), boxes=tuple(boxes), tables=offers, notes=tuple(notes))


def _row(i: int, offer: Offer) -> tuple[object, ...]:
    prediction = offer.ranked.prediction
    return (
        "yes ->" if i == 0 else "",
        offer.cluster,
        quantity.usd(prediction.cost.usd_total),
        quantity.seconds(prediction.run_time_s),
        quantity.usd(offer.usd_per_h),
        quantity.seconds(prediction.step_time_s),
        quantity.percent(prediction.mfu),
        offer.price_date,
        degrees(prediction.plan),
        offer.ranked.why,
    )


def _reasons(left_out: dict[str, str]) -> dict[str, str]:
    """Return the instances of each reason, joined."""
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    return {why: _first(names) for why, names in reasons.items()}


def _first(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more (--json names them)" if more > 0 else "")
