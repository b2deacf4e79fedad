"""Blames lost links: decides which rank to exclude when ranks are alive but cannot reach each other.

Both ends of a lost link wait for each other, and all other ranks for them. If generations of the same ranks
end like this twice in a row, a third attempt would not do better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

_IN_A_ROW = 2
"""Failed generations before a rank is excluded: one may fail because a rank starts up or dies."""
_SHORT_S = 60.0
"""A generation that lasted longer has trained: its end is not the link's fault."""
_LONGEST_S = 600.0
"""Longest exclusion, if that is not shorter than the first one: a link that is mended is found out."""


class LinkBlame:
    """Counts how often ranks were stuck in generations that failed soon after they began.

    An excluded rank stays away for multiples of `detect_s`, longer each time up to a bound.
    """

    def __init__(self, detect_s: float):
        self._detect_s = detect_s
        self._stuck: dict[int, set[int]] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._began_s: dict[int, float] = {}
        self._excluded_until_s: dict[int, float] = {}
        self._times_excluded: Counter[int] = Counter()

    def began(self, number: int, ranks: Collection[int], now_s: float) -> None:
        """Note the ranks of a new generation."""
        self._members[number], self._began_s[number] = tuple(ranks), now_s
        for old in [n for n in self._members if n < number - _IN_A_ROW]:
            self._members.pop(old)
            self._stuck.pop(old, None)
            self._began_s.pop(old)

    def stuck(self, number: int, ranks: Collection[int]) -> None:
        """Note ranks of a generation that wait for each other, or could not connect."""
        self._stuck.setdefault(number, set()).update(ranks)

    def rank_to_exclude(self, number: int, waiting: Collection[int], now_s: float) -> int | None:
        """Return the rank to `exclude` from the generation after `number`, if its link is to blame.

        It is the rank that was stuck most often in generations of the same ranks that failed in a row, each
        soon after it began; of equals the highest, so that rank 0 stays. If one of them was excluded before,
        one failure is enough.
        """
        known = any(self._times_excluded[rank] for rank in waiting)
        row = range(number if known else number - _IN_A_ROW + 1, number + 1)
        if len(waiting) < 2 or any(self._members.get(n) != tuple(sorted(waiting)) for n in row):
            return None
        ends = [*(self._began_s[n] for n in row[1:]), now_s]
        lasted_s = [end - self._began_s[n] for n, end in zip(row, ends, strict=True)]
        if max(lasted_s) > max(_SHORT_S, 6 * self._detect_s) or not all(self._stuck.get(n) for n in row):
            return None
        blamed = Counter(rank for n in row for rank in self._stuck[n])
        return max(blamed, key=lambda r: (blamed[r], r))

    def exclude(self, rank: int, now_s: float) -> None:
        """Exclude a rank for a while."""
        self._times_excluded[rank] += 1
        first_s = 8 * self._detect_s
        away_s = first_s * 2 ** min(self._times_excluded[rank] - 1, 30)
        self._excluded_until_s[rank] = now_s + min(away_s, max(first_s, _LONGEST_S))

    def excludes(self, rank: int, now_s: float) -> bool:
        """Return whether a rank is excluded at present."""
        return now_s < self._excluded_until_s.get(rank, 0.0)
