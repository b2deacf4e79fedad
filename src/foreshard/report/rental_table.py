"""The result of a rental search as a screen: nodes, plan, time and price of the whole run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from foreshard import quantity
from foreshard.report.plan_screen import searched_box
from foreshard.report.plan_words import dated, degrees
from foreshard.report.screen import Box, Screen, listing

if TYPE_CHECKING:
    from foreshard.planner.rental import Offer, RentResult

_NAMED = 4  # instances named in a note; --json has all


def rental_screen(result: RentResult, *, pressed: bool = False) -> Screen:
    """Return the offers, the chosen one first, and what was left out."""
    boxes, header = [searched_box(result)], f"Nothing to rent: {result.infeasible}"
    if result.offers:
        best = result.offers[0]
        prediction = best.ranked.prediction
        header = f"{prediction.model} on rented nodes"
        partly = ", the best of what was searched in time" if result.interrupted else ""
        boxes = [
            Box(title="Rent", value=best.cluster, note=f"{quantity.usd(best.usd_per_h)} an hour{partly}"),
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
    columns: dict[str, Callable[[Offer], object]] = {
        "chosen": lambda offer: "yes ->" if offer is result.offers[0] else "",
        "rent": lambda offer: offer.cluster,
        ">price of run": lambda offer: quantity.usd(offer.ranked.prediction.cost.usd_total),
        ">run": lambda offer: quantity.seconds(offer.ranked.prediction.run_time_s),
        ">$ an hour": lambda offer: quantity.usd(offer.usd_per_h),
        ">step": lambda offer: quantity.seconds(offer.ranked.prediction.step_time_s),
        ">MFU": lambda offer: quantity.percent(offer.ranked.prediction.mfu),
        ">device-hours": lambda offer: quantity.count(offer.ranked.prediction.cost.device_hours),
        "prices of": lambda offer: offer.price_date and dated(offer.price_date),
        "plan": lambda offer: degrees(offer.ranked.prediction.plan),
        "why": lambda offer: offer.ranked.why,
    }
    spare = (">MFU", "prices of", ">step", "plan")
    offers = (listing("Offers, best first", result.offers, columns, spare=spare),) if result.offers else ()
    return Screen(header=(header,), boxes=tuple(boxes), tables=offers, notes=tuple(notes))


def _reasons(left_out: dict[str, str]) -> dict[str, str]:
    """Return the instances of each reason, joined."""
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    return {why: _first(names) for why, names in reasons.items()}


def _first(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more (--json names them)" if more > 0 else "")
