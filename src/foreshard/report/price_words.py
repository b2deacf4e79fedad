"""How prices are dated where they stand."""

from __future__ import annotations

from foreshard.catalog.instances import is_old


def dated(price_date: str) -> str:
    """Return the date of a price; an old one, or none, says so.

    Examples
    --------
    >>> dated("2020-Q1")
    '2020-Q1, over a year old'
    """
    if not price_date[:1].isdigit():
        return price_date
    return f"{price_date}, over a year old" if is_old(price_date) else price_date
