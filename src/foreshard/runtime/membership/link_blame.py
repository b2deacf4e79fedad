"""Blames lost links: decides which rank to exclude when ranks are alive but cannot reach each other.

Both ends of a lost link wait until their timeout, and cut off all other ranks by it. If generations of the
same ranks end like this twice in a row, a third attempt would not do better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

_TIMEOUT_WORDS = ("timed out", "timeout", "unreachable", "no route", "connect:")
_IN_A_ROW = 2
"""Failed generations before a rank is excluded: one may fail because a rank starts up or dies."""
_SHORT_S = 60.0
"""A generation that lasted longer has trained: its end is not the link's fault."""


class LinkBlame:
    """Counts timeouts of ranks in generations that failed soon after they began.

    Parameters
    ----------
    detect_s : float
        The timeout of the ranks.
    """

    def __init__(self, detect_s: float):
        self._detect_s = detect_s
        self._timed_out: dict[int, set[int]] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._began_s: dict[int, float] = {}
        self._excluded_until_s: dict[int, float] = {}
        self._times_excluded: Counter[int] = Counter()

    def began(self, number: int, ranks: Collection[int], now_s: float) -> None:
        """Note the ranks of a new generation."""
        self._members[number], self._began_s[number] = tuple(ranks), now_s
        for old in [n for n in self._members if n < number - _IN_A_ROW]:
            self._members.pop(old)
            self._timed_out.pop(old, None)
            self._began_s.pop(old)

    def left(self, rank: int, number: int, reason: str) -> None:
        """Note why a rank left a generation."""
        if any(word in reason.lower() for word in _TIMEOUT_WORDS):
            self._timed_out.setdefault(number, set()).add(rank)

    def rank_to_exclude(self, number: int, waiting: Collection[int], now_s: float) -> int | None:
        """Return the rank to exclude from the generation after `number`, if its link is to blame.

        It is the rank that timed out most often in generations of the same ranks that failed in a row, each
        soon after it began; of equals the highest, so that rank 0 stays. If one of them was excluded before,
        one failure is enough.
        """
        known = any(self._times_excluded[rank] for rank in waiting)
        row = range(number if known else number - _IN_A_ROW + 1, number + 1)
        if len(waiting) < 2 or any(self._members.get(n) != tuple(sorted(waiting)) for n in row):
            return None
        ends = [*(self._began_s[n] for n in row[1:]), now_s]
        lasted_s = [end - self._began_s[n] for n, end in zip(row, ends, strict=True)]
        if max(lasted_s) > max(_SHORT_S, 6 * self._detect_s) or not all(self._timed_out.get(n) for n in row):
            return None
        blamed = Counter(rank for n in row for rank in self._timed_out[n])
        rank = max(blamed, key=lambda r: (blamed[r], r))
        self._times_excluded[rank] += 1
        self._excluded_until_s[rank] = now_s + self._detect_s * 4 * 2 ** self._times_excluded[rank]
        return rank

    def excludes(self, rank: int, now_s: float) -> bool:
        """Return whether a rank is excluded at present."""
        return now_s < self._excluded_until_s.get(rank, 0.0)
