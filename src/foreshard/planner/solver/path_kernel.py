"""Shortest paths over cuts as loops, for numba; used by `pricing.cheapest_path`."""

from __future__ import annotations

import numpy as np

BEHIND, SLOWEST = 0, 1
"""Kinds of stages beside those before the slowest: that behind it, and itself."""


def shortest_path(
    types: np.ndarray,
    options: np.ndarray,
    times_s: np.ndarray,
    behind_s: np.ndarray,
    tail_s: np.ndarray,
    rooms: np.ndarray,
    units: np.ndarray,
    option_cost: np.ndarray,
    spared: np.ndarray,
    limit: int,
    rate: float,
    lower_s: float,
    upper_s: float,
    longest_tail_s: float,
    deepest: int,
    bands: np.ndarray,
    lengths: np.ndarray,
) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Return the least cost, the number of stages (0 where there is no path), their options and stops.

    Parameters
    ----------
    types, options, times_s, behind_s, tail_s, rooms, units : arrays, shape (stages,)
        Of every stage a path may have, by time; `behind_s` is what it costs in place of that behind the
        slowest; `rooms` is how many stages may follow it, itself included, at most `deepest`; `units` of a
        resource of which a path takes at most `limit`.
    option_cost : array, by option
    spared : array, by number of stages
        What such paths cost less.
    rate, lower_s, upper_s, longest_tail_s, deepest : numbers
        The last stage that takes `lower_s` or more counts as the slowest.
    bands : array of int, shape (layers, layers)
        Type of the stage from each start by length less one, -1 past the end.
    lengths : array of int
        Layers of the longest stage of each type.
    """
    num_layers = bands.shape[0]
    # Stages come by time; types beyond the greatest in use are never asked for.
    number = 0
    while number < len(times_s) and times_s[number] <= upper_s:
        number += 1
    used_types = 0
    for k in range(number):
        if tail_s[k] <= longest_tail_s and types[k] >= used_types:
            used_types = types[k] + 1
    # Stages behind the slowest, the slowest, and those before it.
    least = np.full((3, limit + 1, deepest + 1, used_types), np.inf)
    chosen = np.full((3, limit + 1, deepest + 1, used_types), -1)
    cheapest = np.zeros(3)
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        for kind in range(3):
            if (kind == BEHIND and times_s[k] >= lower_s) or (kind == SLOWEST and times_s[k] < lower_s):
                continue
            seconds = behind_s[k] if kind == BEHIND else times_s[k]
            cost = seconds * rate + option_cost[options[k]]
            cheapest[kind] = min(cheapest[kind], cost)
            if cost < least[kind, units[k], rooms[k], types[k]]:
                least[kind, units[k], rooms[k], types[k]] = cost
                chosen[kind, units[k], rooms[k], types[k]] = options[k]
    longest = np.zeros((3, limit + 1), dtype=np.int64)
    for kind in range(3):
        for unit in range(limit + 1):
            for depth in range(deepest - 1, 0, -1):
                for t in range(used_types):
                    if least[kind, unit, depth + 1, t] < least[kind, unit, depth, t]:
                        least[kind, unit, depth, t] = least[kind, unit, depth + 1, t]
                        chosen[kind, unit, depth, t] = chosen[kind, unit, depth + 1, t]
            for t in range(used_types):
                if chosen[kind, unit, 1, t] >= 0 and lengths[t] > longest[kind, unit]:
                    longest[kind, unit] = lengths[t]
    # By whether the slowest stage is among them, what stages up to the last one cost.
    after = np.full((2, deepest + 1, limit + 1, num_layers + 1), np.inf)
    stops = np.full((2, deepest + 1, limit + 1, num_layers + 1), -1)
    took = np.full((2, deepest + 1, limit + 1, num_layers + 1), -1)
    kinds = np.full((2, deepest + 1, limit + 1, num_layers + 1), -1)
    after[0, 0, 0, num_layers] = 0.0
    best = np.inf
    best_depth = 0
    best_used = 0
    reached = np.array([True, False])
    for depth in range(1, deepest + 1):
        any_left = np.array([False, False])
        for used in range(limit + 1):
            for unit in range(used + 1):
                for kind in range(3):
                    to, come = int(kind > BEHIND), int(kind > SLOWEST)
                    if longest[kind, unit] == 0 or not reached[come]:
                        continue
                    for start in range(num_layers):
                        low = after[to, depth, used, start]
                        at = -1
                        for length in range(min(longest[kind, unit], num_layers - start)):
                            rest = after[come, depth - 1, used - unit, start + 1 + length]
                            t = bands[start, length]
                            if rest + cheapest[kind] < low and t < used_types:
                                total = least[kind, unit, depth, t] + rest
                                if total < low:
                                    low = total
                                    at = start + 1 + length
                        if at >= 0:
                            after[to, depth, used, start] = low
                            stops[to, depth, used, start] = at
                            took[to, depth, used, start] = unit
                            kinds[to, depth, used, start] = kind
                            any_left[to] = True
            if after[1, depth, used, 0] - spared[depth] < best:
                best = after[1, depth, used, 0] - spared[depth]
                best_depth = depth
                best_used = used
        reached = any_left
        if not any_left.any():
            break
    path_options = np.full(best_depth, -1)
    path_stops = np.full(best_depth, -1)
    start, to = 0, 1
    for i in range(best_depth):
        depth = best_depth - i
        stop = stops[to, depth, best_used, start]
        unit = took[to, depth, best_used, start]
        kind = kinds[to, depth, best_used, start]
        path_options[i] = chosen[kind, unit, depth, bands[start, stop - start - 1]]
        path_stops[i] = stop
        start, to = stop, int(kind > SLOWEST)
        best_used -= unit
    return best, best_depth, path_options, path_stops
