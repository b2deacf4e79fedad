"""What the cluster is like, from what steps measured: filters that outliers do not move and changes do.

Speeds and rates are followed in logarithms, because they change by factors. Nothing here believes a number
that is none, and nothing believes a device that claims to be far faster than it was stated to be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from foreshard.control.estimation.plausibility import is_rate, is_speed
from foreshard.control.slots import State, link_kinds

GAIN = 0.1
"""Part of a surprise that the level takes over."""
_SLACK = 0.5
"""Drift of a value that is let pass, in spreads: half of the least change to find (Page 1954)."""
_CLIP = 6.0
"""Most that one value adds to the sum, in spreads: below the alarm, so that an outlier alone rings none."""
_ALARM = 8.0
"""Sum of drifts that rings the alarm, in spreads: the second value far off does (2 (6 - 0.5) > 8)."""
_LEAST_SPREAD = 0.02
"""Least spread of values, in the logarithm: without noise every rounding would be a change."""
_FIRST_SPREAD = 0.1
"""Spread before anything is measured, in the logarithm: twice the noise of the scenarios."""
_SUSPECT = 0.25
"""Logarithm by which a value must be off to be suspected before the alarm rings: five steps of _GRID."""
_GRID = 0.05
"""Estimates are handed out in steps of this size in the logarithm, so that noise does not make new states."""
MOST_REPEATS = 3
"""Steps reported at once count as at most so many values: enough to ring the alarm."""
APART = 0.25
"""Logarithm by which a link must differ from those like it to go by its own rate: well beyond noise."""


class FilteredLevel:
    """A positive quantity that stays for a while and then changes.

    Attributes
    ----------
    value : float
        Estimate.
    steps, changes, refused : int
        Values taken in, changes seen, values that were no numbers.
    """

    def __init__(self, value: float, grid: float = _GRID):
        self._log = self._shown = math.log(value)
        self._grid = grid
        self._spread = _FIRST_SPREAD
        self._up = self._down = 0.0
        self._recent: deque[float] = deque(maxlen=5)
        self.steps = self.changes = self.refused = 0

    @property
    def value(self) -> float:
        """Return the estimate."""
        return math.exp(self._log)

    @property
    def shown(self) -> float:
        """Return the estimate on a grid, unchanged while the estimate stays near."""
        return math.exp(self._shown)

    @property
    def latest(self) -> float:
        """Return the estimate, or the last value where that is so far off that the level may have changed.

        What follows is for decisions that cost nothing to take back.
        """
        if self._recent and abs(self._recent[-1] - self._log) > max(_CLIP * self._spread, _SUSPECT):
            return math.exp(self._recent[-1])
        return self.value

    @property
    def seen(self) -> float:
        """Return the last value on the grid where it is far off, else the estimate on the grid."""
        latest = self.latest
        return self.shown if latest == self.value else math.exp(self._rounded(math.log(latest)))

    @property
    def uncertainty(self) -> float:
        """Return the standard error of the estimate, as a part of it."""
        return self._spread * math.sqrt(GAIN / (2.0 - GAIN) + 1.0 / (1.0 + self.steps))

    def see(self, value: float, times: int = 1) -> bool:
        """Take in a value, or the mean of several; return whether the level was found to have changed."""
        changed = False
        for _ in range(min(times, MOST_REPEATS)):
            changed |= self._see(value)
        self.steps += max(times - MOST_REPEATS, 0)
        return changed

    def _see(self, value: float) -> bool:
        if not 0.0 < value < math.inf:
            self.refused += 1
            return False
        self.steps += 1
        seen = math.log(value)
        self._recent.append(seen)
        surprise = seen - self._log
        scaled = min(max(surprise / self._spread, -_CLIP), _CLIP)
        self._up = max(0.0, self._up + scaled - _SLACK)
        self._down = max(0.0, self._down - scaled - _SLACK)
        changed = max(self._up, self._down) > _ALARM
        if changed:
            self._move(scaled > 0)
        else:
            self._log += GAIN * min(max(surprise, -2.0 * self._spread), 2.0 * self._spread)
            if abs(scaled) < 3.0:
                wide = self._spread + GAIN * (1.25 * abs(surprise) - self._spread)
                self._spread = max(wide, _LEAST_SPREAD)
        if not self._grid or changed or abs(self._log - self._shown) > 0.75 * self._grid + self.uncertainty:
            self._shown = self._rounded(self._log)
        return changed

    def _rounded(self, log: float) -> float:
        return self._grid * round(log / self._grid) if self._grid else log

    def _move(self, upward: bool) -> None:
        """Go to the median of the latest values that lie beyond the old level."""
        beyond = [seen for seen in self._recent if (seen > self._log) == upward]
        self._log = float(np.median(beyond[-3:]))
        self._up = self._down = 0.0
        self.changes += 1

    def set(self, value: float) -> None:
        """Take a value that is known."""
        if 0.0 < value < math.inf:
            self._log = math.log(value)
            self._shown = self._rounded(self._log)
            self._up = self._down = 0.0
            self._recent.clear()
        else:
            self.refused += 1


_SETTLED = 3
"""Measurements after which a link that has changed is known again: the alarm rings at the second."""


class Links:
    """Rates between ranks. Links between the same kinds of places are taken to be alike until one is not.

    What is measured on some links is what the others of their kind are expected to have; a link that was
    measured itself and is far from them goes by its own rate, until those like it or those of its ends have
    changed without it. All links of a rank being slow, so are those that were not measured.
    """

    def __init__(self, stated: State):
        self._stated = stated
        kinds = link_kinds(stated)
        self._class = np.full(stated.bandwidth_bytes_per_s.shape, -1)
        known: dict[tuple[object, ...], int] = {}
        size = len(kinds)
        for a in range(size):
            for b in range(size):
                ends = sorted((kinds[a], kinds[b]))
                if a != b:
                    alike = (*ends, float(stated.bandwidth_bytes_per_s[a, b]))
                    self._class[a, b] = known.setdefault(alike, len(known))
        self.single: dict[tuple[int, int], FilteredLevel] = {}
        self.common: dict[int, FilteredLevel] = {}
        self._now = 0
        self._last: dict[tuple[int, int], int] = {}
        self._kind_moved = np.zeros(len(known), int)
        self._end_moved = np.zeros(size, int)
        self._rates = np.array(stated.bandwidth_bytes_per_s, float)

    def see(self, seen: Mapping[tuple[int, int], tuple[float, float]], times: int) -> bool:
        """Take in bytes and seconds of transfers; return whether some rate changed."""
        changed = False
        self._now += 1
        together: dict[int, dict[tuple[int, int], float]] = {}
        size = len(self._class)
        for (source, target), (amount, seconds) in sorted(seen.items()):
            if not (0 <= source < size and 0 <= target < size and source != target):
                continue
            if not (0.0 < amount < math.inf and 0.0 < seconds < math.inf):
                continue
            # The stated latency is part of what was measured.
            moving = max(seconds - float(self._stated.latency_s[source, target]), 0.01 * seconds)
            rate = amount / moving
            if not is_rate(rate, float(self._stated.bandwidth_bytes_per_s[source, target])):
                continue
            level = self._level(source, target, rate)
            self._last[source, target] = self._now
            if level.see(rate, times):
                changed = True
                self._end_moved[[source, target]] = self._now
            together.setdefault(int(self._class[source, target]), {})[source, target] = rate
        for kind, rates in together.items():
            middle = _middle(rates)
            pair = np.argwhere(self._class == kind)[0]
            common = self.common.setdefault(
                kind, FilteredLevel(self._first(int(pair[0]), int(pair[1]), middle))
            )
            if common.see(middle, times):
                self._kind_moved[kind] = self._now
        if together:
            before = self._rates
            self._refresh()
            # What was forgotten of a link and is found as it was is news too.
            measured = (pair for rates in together.values() for pair in rates)
            changed |= any(_differ(before[pair], self._rates[pair]) for pair in measured)
        return changed

    def set(self, source: int, target: int, rate: float) -> bool:
        """Take a rate that is known; return whether it is believed."""
        stated = float(self._stated.bandwidth_bytes_per_s[source, target])
        if source == target or not is_rate(rate, stated):
            return False
        self._last[source, target] = self._now
        self.single.setdefault((source, target), FilteredLevel(rate)).set(rate)
        self.common.setdefault(int(self._class[source, target]), FilteredLevel(rate)).set(rate)
        self._refresh()
        return True

    def _level(self, source: int, target: int, rate: float) -> FilteredLevel:
        """Return a link's own level; one not measured lately is where it was expected if that is nearer."""
        pair, expected = (source, target), float(self._rates[source, target])
        if pair not in self.single:
            self.single[pair] = FilteredLevel(expected if 0.0 < expected < math.inf else rate)
        level = self.single[pair]
        stale = pair in self._last and not self._is_fresh(pair)
        if stale and abs(math.log(expected / rate)) < abs(math.log(level.value / rate)):
            level.set(expected)
        return level

    def _first(self, source: int, target: int, rate: float) -> float:
        stated = float(self._stated.bandwidth_bytes_per_s[source, target])
        return stated if 0.0 < stated < math.inf else rate

    def rates(self) -> np.ndarray:
        """Return bytes per second between all ranks; the same object while none changes."""
        return self._rates

    def _refresh(self) -> None:
        rate = np.array(self._stated.bandwidth_bytes_per_s, float)
        for kind, level in self.common.items():
            rate[self._class == kind] = level.shown
        fresh = {pair: level for pair, level in self.single.items() if self._is_fresh(pair)}
        rate *= self._weakest_end(rate, fresh)
        for (source, target), level in fresh.items():
            if abs(math.log(level.shown / rate[source, target])) > APART:
                rate[source, target] = level.shown
        if not np.array_equal(rate, self._rates):
            self._rates = rate

    def _is_fresh(self, pair: tuple[int, int]) -> bool:
        """Return whether nothing has changed near a link since it was measured."""
        moved = max(self._kind_moved[self._class[pair]], *self._end_moved[list(pair)])
        last = self._last[pair]
        return bool(not moved or last >= moved + _SETTLED or self._now - last < _SETTLED)

    def _weakest_end(self, rate: np.ndarray, fresh: Mapping[tuple[int, int], FilteredLevel]) -> np.ndarray:
        """Return by what part links are slower because all links measured at one of their ends are."""
        best = np.full(len(rate), -1.0)
        for (source, target), level in fresh.items():
            part = min(level.shown / rate[source, target], 1.0)
            best[[source, target]] = np.maximum(best[[source, target]], part)
        best[(best < 0.0) | (best > math.exp(-APART))] = 1.0
        return np.minimum(best[:, None], best[None, :])


def _differ(before: float, after: float) -> bool:
    return before > 0.0 and math.isfinite(before) and bool(abs(math.log(after / before)) > APART)


def _middle(rates: Mapping[tuple[int, int], float]) -> float:
    """Return the rate of most links; where slow ones meet at few ends, what most of the ends reach."""
    best: dict[int, float] = {}
    for ends, rate in rates.items():
        for end in ends:
            best[end] = max(best.get(end, 0.0), rate)
    links, reached = (sorted(each.values())[len(each) // 2] for each in (rates, best))
    return reached if math.log(reached / links) > APART else links


class Estimates:
    """State of the cluster as it seems to be.

    Parameters
    ----------
    stated : State
        What is known before anything is measured.
    """

    def __init__(self, stated: State, *, grid: float = _GRID, trusts_first_sight: bool = True):
        self._stated, self._trusts_first_sight = stated, trusts_first_sight
        self.speed = [FilteredLevel(float(speed) if speed > 0 else 1.0, grid) for speed in stated.speed]
        self.links = Links(stated)
        self.available = np.array(stated.available, bool)
        self.usd_per_h = np.array(stated.usd_per_h, float)
        self.kg_per_j = np.array(stated.kg_per_j, float)
        self.not_believed = 0
        self._coarse: State | None = None
        self._fine: State | None = None
        self._seen: State | None = None
        self._expected: list[float] | None = None
        self._moved: set[int] = set()
        self._grid = grid

    def see_speed(self, rank: int, relative: float, times: int = 1) -> bool:
        """Take in a speed relative to the nominal one; return whether it changed."""
        if not self._believes(rank, relative):
            return False
        level = self.speed[rank]
        if self._expected is not None and 0.0 < relative < math.inf:
            there, was = (abs(math.log(relative / log)) for log in (self._expected[rank], level.value))
            if there < APART < was:
                level.set(self._expected[rank])  # a change that was expected needs no second sight
        return level.see(relative, times)

    def latest(self) -> list[float]:
        """Return the speeds as they are, changes at first sight."""
        return [level.latest for level in self.speed]

    def expect(self, speeds: list[float] | None) -> None:
        """Let the next decision be for these speeds; None: for those that are."""
        self._expected, now = speeds, self.latest()
        self._moved = {
            rank for rank, speed in enumerate(speeds or ()) if abs(math.log(speed / now[rank])) > APART
        }

    def confirm(self, ranks: Iterable[int]) -> None:
        """Where some ranks were found as expected, and not as they were, take the others to be so too."""
        if self._expected is None:
            return
        seen = [rank for rank in ranks if 0 <= rank < len(self.speed)]
        apart = [
            abs(math.log(level.latest / speed))
            for level, speed in zip(self.speed, self._expected, strict=True)
        ]
        if not any(rank in self._moved for rank in seen) or max(apart[rank] for rank in seen) > APART:
            return
        for rank in self._moved.difference(seen):
            self.speed[rank].set(self._expected[rank])

    def expected(self) -> State:
        """Return the state that structures are chosen for: on a grid, as expected where it is."""
        if self._expected is None:
            return self.state()
        logs = [math.log(speed) for speed in self._expected]
        speeds = [math.exp(self._grid * round(log / self._grid) if self._grid else log) for log in logs]
        return self._with(speeds, self._coarse)

    def set_speed(self, rank: int, relative: float) -> bool:
        """Take a speed that is known; return whether it is believed."""
        if not self._believes(rank, relative):
            return False
        self.speed[rank].set(relative)
        return True

    def _believes(self, rank: int, relative: float) -> bool:
        believed = is_speed(relative, float(self._stated.speed[rank]))
        self.not_believed += not believed
        return believed

    def state(self) -> State:
        """Return the state that structures are chosen for: on a grid, the same while little changes."""
        self._coarse = self._with([level.shown for level in self.speed], self._coarse)
        return self._coarse

    def stated(self) -> State:
        """Return the state of the ranks that are there at the speeds and rates that were stated."""
        return replace(
            self._stated,
            available=self.available.copy(),
            usd_per_h=self.usd_per_h.copy(),
            kg_per_j=self.kg_per_j.copy(),
        )

    def finest(self) -> State:
        """Return the state that shares are chosen for: the estimates as they are, changes at first sight."""
        first_sight = self._trusts_first_sight
        speeds = self._expected or [level.latest if first_sight else level.value for level in self.speed]
        self._fine = self._with(speeds, self._fine)
        return self._fine

    def seen(self) -> State:
        """Return the last step's state on the grid, changes at first sight: decisions are judged by it."""
        speeds = [level.seen for level in self.speed]
        self._seen = self._with(speeds, self._seen)
        return self._seen

    def _with(self, speeds: list[float], last: State | None) -> State:
        """Return a state, the last one where nothing changed since."""
        speed, rates = np.array(speeds), self.links.rates()
        if (
            last is not None
            and last.bandwidth_bytes_per_s is rates
            and np.array_equal(last.speed, speed)
            and np.array_equal(last.available, self.available)
            and np.array_equal(last.usd_per_h, self.usd_per_h)
            and np.array_equal(last.kg_per_j, self.kg_per_j)
        ):
            return last
        return replace(
            self._stated,
            speed=speed,
            available=self.available.copy(),
            bandwidth_bytes_per_s=rates,
            usd_per_h=self.usd_per_h.copy(),
            kg_per_j=self.kg_per_j.copy(),
        )
