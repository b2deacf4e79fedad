"""Which ranks have become slow: own work a sample against what it was, and against the others.

A rank is held against itself, since devices and plans differ, and its change against that of the others,
since a busy machine slows all of them. Medians over several steps decide, with a wider bound to become slow
than to have recovered: a hiccup is no slow rank, and a rank at the bound is reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

WINDOW_STEPS = 15
"""Latest steps whose median says what a rank takes now; odd, so that the median is one of them."""
LEARNED_STEPS = 51
"""Steps whose median says what a rank takes when it is well."""
SLOW, RECOVERED = 1.5, 1.2
"""Times as long as before, from which a rank is slow, and up to which it has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChange:
    """A rank that has become slow, or has recovered, since a step.

    Beside what the others take longer, it takes `factor` times as long as before for a sample.
    """

    rank: int
    slow: bool
    factor: float
    since_step: int

    @property
    def text(self) -> str:
        """Return it in words."""
        if self.slow:
            times = f"{self.factor:.2f} times as long a sample"
            return f"rank {self.rank} takes {times} since step {self.since_step}"
        return f"rank {self.rank} is as fast as before since step {self.since_step}"


@dataclass(slots=True)
class _Known:
    """A rank: seconds a sample when it was well, those of the latest steps, and whether it is slow now."""

    well_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEARNED_STEPS))
    late_s: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    slow_by: float | None = None

    def forget(self) -> None:
        """Learn anew how long it takes when it is well."""
        self.well_s.clear()
        self.late_s.clear()


class StragglerDetector:
    """Finds ranks that become slow, from the work of every step.

    `slow_by` has the factors of ranks that were slow already when this began.
    """

    def __init__(self, slow_by: Mapping[int, float] | None = None):
        self._known: dict[int, _Known] = {r: _Known(slow_by=f) for r, f in (slow_by or {}).items()}
        self._under: Hashable = None

    def stepped(
        self, step: int, under: Hashable, work_s: Mapping[int, float], samples: Mapping[int, float]
    ) -> list[PaceChange]:
        """Take in a step and return what has changed.

        `work_s` is the own work of each rank, `samples` what it was done for. `under` is the plan and
        whatever else decides how long a rank works for a sample; after a change of it ranks are learned anew,
        those that are slow as slow.
        """
        if under != self._under:
            self._under = under
            for known in self._known.values():
                known.forget()
        for rank, count in samples.items():
            if count > 0 and work_s[rank] > 0:
                self._seen(self._known.setdefault(rank, _Known()), step, work_s[rank] / count)
        longer = {
            rank: median(s for _, s in known.late_s) / median(known.well_s)
            for rank, known in self._known.items()
            if samples.get(rank) and len(known.late_s) == WINDOW_STEPS
        }
        if not longer:
            return []
        well = [factor for rank, factor in longer.items() if self._known[rank].slow_by is None]
        all_of_them = median_low(well) if well else 1.0  # slow ranks are no measure: they may recover
        judged = (self._judged(rank, factor / all_of_them, all_of_them) for rank, factor in longer.items())
        return [change for change in judged if change is not None]

    def _seen(self, known: _Known, step: int, sample_s: float) -> None:
        """Take in what a rank took for a sample: as long as it is well that is how it is when it is well."""
        known.late_s.append((step, sample_s))
        if len(known.well_s) < LEARNED_STEPS and (known.slow_by is None or len(known.well_s) < WINDOW_STEPS):
            known.well_s.append(sample_s / (known.slow_by or 1.0))

    def _judged(self, rank: int, factor: float, all_of_them: float) -> PaceChange | None:
        known = self._known[rank]
        was, known.slow_by = known.slow_by, factor if known.slow_by is not None else None
        if was is None and factor >= SLOW:
            known.slow_by = factor
        elif was is not None and factor <= RECOVERED:
            known.slow_by = None
        if (was is None) == (known.slow_by is None):
            return None
        slow = known.slow_by is not None
        bound_s = (SLOW if slow else RECOVERED) * all_of_them * median(known.well_s)
        since = next(step for step, s in known.late_s if (s >= bound_s if slow else s <= bound_s))
        return PaceChange(rank=rank, slow=slow, factor=factor, since_step=since)


def slow_in(events: Iterable[Mapping[str, Any]], pids: Mapping[int, int]) -> dict[int, float]:
    """Return the ranks that are slow by the operator's log: who begins to conduct goes on from it.

    A rank whose process (`pids`) was started again since is not the one that was slow.
    """
    found: dict[int, float] = {}
    for event in events:
        who, factor = event.get("who"), event.get("factor")
        if type(who) is not int:
            continue
        if (
            event.get("kind") == "rank_slow"
            and pids.get(who) == event.get("pid")
            and isinstance(factor, int | float)
            and not isinstance(factor, bool)
        ):
            found[who] = factor
        elif event.get("kind") == "rank_recovered":
            found.pop(who, None)
    return found
