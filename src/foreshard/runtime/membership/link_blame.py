"""Links that are lost while both ends live: who stays out so that the others can train.

Both ends of a lost link wait until their timeout; everybody else is cut off by them. A generation of the
same ranks that ends so twice in a row will not do better the third time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

_LATE_WORDS = ("timed out", "timeout", "unreachable", "no route", "connect:")
_IN_A_ROW = 2
_SHORT_S = 60.0


class LinkBlame:
    """Counts who timed out in generations that got nowhere.

    Parameters
    ----------
    detect_s : float
        The timeout of the ranks.
    """

    def __init__(self, detect_s: float):
        self._detect_s = detect_s
        self._late: dict[int, set[int]] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._began_s: dict[int, float] = {}
        self._out_until_s: dict[int, float] = {}
        self._times_out: Counter[int] = Counter()

    def began(self, number: int, ranks: Collection[int], now_s: float) -> None:
        """Note who is in a generation."""
        self._members[number], self._began_s[number] = tuple(ranks), now_s
        for old in [n for n in self._members if n < number - _IN_A_ROW]:
            self._members.pop(old)
            self._late.pop(old, None)
            self._began_s.pop(old)

    def left(self, rank: int, number: int, reason: str) -> None:
        """Note why a rank left a generation."""
        if any(word in reason.lower() for word in _LATE_WORDS):
            self._late.setdefault(number, set()).add(rank)

    def judged(self, number: int, waiting: Collection[int], now_s: float) -> int | None:
        """Return the rank to leave out of the generation after `number`, if its link is to blame.

        That is the one that timed out most often in generations of the same ranks that failed in a row,
        each soon after it began; of equals the highest, so that rank 0 stays. One failure is enough with a
        rank that was suspected before.
        """
        known = any(self._times_out[rank] for rank in waiting)
        row = range(number if known else number - _IN_A_ROW + 1, number + 1)
        if len(waiting) < 2 or any(self._members.get(n) != tuple(sorted(waiting)) for n in row):
            return None
        ends = [*(self._began_s[n] for n in row[1:]), now_s]
        lasted_s = [end - self._began_s[n] for n, end in zip(row, ends, strict=True)]
        if max(lasted_s) > max(_SHORT_S, 6 * self._detect_s) or not all(self._late.get(n) for n in row):
            return None
        blamed = Counter(rank for n in row for rank in self._late[n])
        rank = max(blamed, key=lambda r: (blamed[r], r))
        self._times_out[rank] += 1
        self._out_until_s[rank] = now_s + self._detect_s * 4 * 2 ** self._times_out[rank]
        return rank

    def holds_out(self, rank: int, now_s: float) -> bool:
        """Return whether a rank has to wait at the door."""
        return now_s < self._out_until_s.get(rank, 0.0)
