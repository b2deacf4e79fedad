"""How results show themselves in a session: the layer that draws registers here, results only ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_views: list[Callable[[str, Any], Any]] = []


def show_with(view: Callable[[str, Any], Any]) -> None:
    """Let results be shown by a function of ('text', 'html', 'pandas' or 'plot', and the result)."""
    _views[:] = [view]


class Shown:
    """A result with a short text, a table in notebooks, a frame of pandas and a drawing of matplotlib."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return a few lines in blocks; without the API loaded, the name alone."""
        return str(_views[0]("text", self)).rstrip() if _views else f"<{type(self).__name__}>"

    def _repr_html_(self) -> str:
        """Return the same as an HTML fragment, as notebooks show it."""
        return str(_views[0]("html", self)) if _views else ""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame: one row of a prediction, one for each plan or policy of others.

        Raises
        ------
        ExtraMissingError
            Without pandas (the extra foreshard[notebook]).
        """
        return _views[0]("pandas", self)

    def plot(self) -> Any:
        """Return a matplotlib Figure: parts of time and memory, step times of plans, or of policies.

        Raises
        ------
        ExtraMissingError
            Without matplotlib (the extra foreshard[notebook]).
        """
        return _views[0]("plot", self)
