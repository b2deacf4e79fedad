"""Board of a run with a controller: plan, budgets, step time over its bound, last orders; drawn by rich."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreshard.quantity import count, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_ORDERS, _TIMES = 5, 60  # last orders and step times shown
_BACKLOG = 20  # width of the bar of a queue, in cells
_BARS = "▁▂▃▄▅▆▇█"
_MEAN = "time_metrics/end_to_end(s)"


def shown_loss(line: Mapping[str, Any]) -> str:
    """Return the loss of a step; it is null in the metrics where it was NaN or infinite."""
    loss = line["loss_metrics/global_avg_loss"]
    return "not finite" if loss is None else f"{loss:.4g}"


class Board:
    """State of the board, from the lines of the metrics."""

    def __init__(self, steps: int):
        self.steps = steps
        self.line: Mapping[str, Any] = {}
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._orders: deque[str] = deque(maxlen=_ORDERS)
        self._last_order, self._changes = "", 0
        self._most_backlog: dict[str, float] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a step; one that was finished after a rank was lost has no entries of the controller."""
        line = self.line = {**self.line, **line}
        if line.get(_MEAN):
            self._times.append(line[_MEAN])
        order = (line.get("controller/order", ""), line.get("controller/orders", 0))
        if order[0] and order != (self._last_order, self._changes):
            self._orders.append(f"step {line['step']}  {order[0]}")
        self._last_order, self._changes = order
        for name, values in self._budgets():
            self._most_backlog[name] = max(self._most_backlog.get(name, 0.0), values["backlog"])

    def _budgets(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Return the numbers of each budget."""
        for key in self.line:
            if key.startswith("budget/") and key.endswith("/backlog"):
                whose = key.removesuffix("backlog")
                numbers = {what: self.line[whose + what] for what in ("backlog", "over", "limit", "mean")}
                yield key.split("/")[1], numbers

    def head(self) -> str:
        """Return the line of the step: loss, its time, the bound."""
        line = self.line
        words = [f"step {line['step'] + 1}/{self.steps}", f"loss {shown_loss(line)}"]
        if line.get(_MEAN):
            words.append(f"{seconds(line[_MEAN])} a step")
            bound_s = line["controller/bound_s"]
            words.append(f"bound {seconds(bound_s)} (+{100 * (line[_MEAN] / bound_s - 1):.0f} %)")
            words.append(f"{count(line['n_tokens'] / line[_MEAN])} tokens/s")
        return "  ".join(words)

    def pipelines(self) -> list[tuple[str, str]]:
        """Return the share and the stages of every pipeline: ranks with their layers."""
        total = sum(self.line["shares"])
        rows = []
        for share, stages in zip(self.line["shares"], self.line["pipelines"], strict=True):
            rows.append((f"{share} ({100 * share / total:.0f} %)", "  >  ".join(map(_stage, stages))))
        return rows

    def budgets(self) -> list[tuple[str, str, str, str, str]]:
        """Return of every budget its limit, the mean so far, the excess and the queue."""
        return [
            (
                name,
                f"{numbers['limit']:.4g}",
                f"{numbers['mean']:.4g}",
                f"{100 * numbers['over']:+.1f} %",
                f"{numbers['backlog']:8.3g} {_bar(numbers['backlog'], self._most_backlog[name])}",
            )
            for name, numbers in self._budgets()
        ]

    def foot(self) -> str:
        """Return the policy, its weight of time, and how often it changed the plan."""
        line = self.line
        return (
            f"policy {line['controller/policy']}  weight of time {line['controller/weight']:.3g}  "
            f"reconfigurations {line['controller/reconfigurations']}  generation {line['generation']}"
        )

    def render(self) -> RenderableType:
        """Return the board for rich to draw."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        plan = Table("share", "ranks: layers", box=None, pad_edge=False, header_style="dim")
        for share, stages in self.pipelines():
            plan.add_row(share, stages)
        parts: list[RenderableType] = [Text(self.head()), Text(sparks(self._times), style="cyan"), plan]
        budgets = self.budgets()
        if budgets:
            table = Table(
                "budget", "limit", "mean", "over", "queue", box=None, pad_edge=False, header_style="dim"
            )
            for row in budgets:
                table.add_row(*row)
            parts.append(table)
        parts.append(Text(self.foot(), style="dim"))
        parts += [Text(order) for order in self._orders]
        return Panel(Group(*parts), title="foreshard run", title_align="left", expand=False)


def sparks(times: Sequence[float]) -> str:
    """Return times as bars of eight heights, from 0 to the longest."""
    longest = max(times, default=0.0)
    if longest <= 0.0:
        return ""
    return "".join(_BARS[min(int(8 * time_s / longest), 7)] for time_s in times)


def _bar(value: float, most: float) -> str:
    return "█" * round(_BACKLOG * value / most) if most > 0 else ""


def _stage(stage: Sequence[int]) -> str:
    """Return ranks and layers, given as ranks, first layer, end."""
    *ranks, first, stop = stage
    return f"{', '.join(map(str, ranks))}: {first}-{stop - 1}"
