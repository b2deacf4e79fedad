"""Search for the best plan, with a proof of how far it can be from the best possible."""

from __future__ import annotations

from typing import Any

__all__ = ["plan", "rent"]


def __getattr__(name: str) -> Any:
    """Import the searches only when one is asked for."""
    if name == "plan":
        from foreshard.planner.search import plan

        return plan
    if name == "rent":
        from foreshard.planner.rental import rent

        return rent
    raise AttributeError(name)
