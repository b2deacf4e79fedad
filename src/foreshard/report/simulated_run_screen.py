"""Policies foretold in a lab as a screen: step times, budgets, changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreshard import quantity
from foreshard.report.screen import Box, Screen, table
from foreshard.report.simulation_table import KEPT, budget_words, kept_words


def foretold_screen(name: str, policies: Mapping[str, Mapping[str, Any]]) -> Screen:
    """Return what `foreshard simulate LAB.toml` shows: those that keep the budgets first, fastest first."""
    steps = max(one["steps"] for one in policies.values())
    rows = sorted(
        (one["violation"] > KEPT, one["mean_step_time_s"], policy, one) for policy, one in policies.items()
    )
    cells = [
        (policy, quantity.seconds(mean_s), _kept(one), one["reconfigurations"], one["reshares"])
        for _, mean_s, policy, one in rows
    ]
    boxes = []
    if "lyapunov" in policies:
        ours = policies["lyapunov"]
        boxes.append(
            Box(
                title="lyapunov",
                value=f"{quantity.seconds(ours['mean_step_time_s'])} a step",
                note=budget_words(ours["violation"]) if ours["budget"] else "",
                alarm=ours["violation"] > KEPT,
            )
        )
    return Screen(
        header=(f"{name}: {steps} steps, foretold from measured costs",),
        boxes=tuple(boxes),
        tables=(table("Policies", ("policy", ">step", ">budget", ">reconfigurations", ">re-shares"), cells),),
        notes=("Seconds are those of 'predict --costs' at each step, and what moves between plans takes.",),
    )


def _kept(one: Mapping[str, Any]) -> str:
    return kept_words(one["violation"]) if one["budget"] else "none"
