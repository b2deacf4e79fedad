"""Shortest paths over cuts where every stage costs its time, as loops; used by `pricing.plain_path`."""

from __future__ import annotations

import numpy as np


def shortest_path(
    types: np.ndarray,
    options: np.ndarray,
    times_s: np.ndarray,
    tail_s: np.ndarray,
    rooms: np.ndarray,
    units: np.ndarray,
    option_cost: np.ndarray,
    limit: int,
    rate: float,
    upper_s: float,
    longest_tail_s: float,
    deepest: int,
    bands: np.ndarray,
    lengths: np.ndarray,
) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Return the least cost, the number of stages (0 where there is no path), their options and stops.

    Parameters
    ----------
    types, options, times_s, tail_s, rooms, units : arrays, shape (stages,)
        Of every stage a path may have, by time; `rooms` is how many stages may follow it, itself included, at
        most `deepest`; `units` of a resource of which a path takes at most `limit`.
    option_cost : array, by option
    rate, upper_s, longest_tail_s, deepest : numbers
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
    least = np.full((limit + 1, deepest + 1, used_types), np.inf)
    chosen = np.full((limit + 1, deepest + 1, used_types), -1)
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        cost = times_s[k] * rate + option_cost[options[k]]
        if cost < least[units[k], rooms[k], types[k]]:
            least[units[k], rooms[k], types[k]] = cost
            chosen[units[k], rooms[k], types[k]] = options[k]
    longest = np.zeros(limit + 1, dtype=np.int64)
    for unit in range(limit + 1):
        for depth in range(deepest - 1, 0, -1):
            for t in range(used_types):
                if least[unit, depth + 1, t] < least[unit, depth, t]:
                    least[unit, depth, t] = least[unit, depth + 1, t]
                    chosen[unit, depth, t] = chosen[unit, depth + 1, t]
        for t in range(used_types):
            if chosen[unit, 1, t] >= 0 and lengths[t] > longest[unit]:
                longest[unit] = lengths[t]
    after = np.full((deepest + 1, limit + 1, num_layers + 1), np.inf)
    after[0, 0, num_layers] = 0.0
    best = np.inf
    best_depth = 0
    best_used = 0
    for depth in range(1, deepest + 1):
        any_left = False
        for used in range(limit + 1):
            for unit in range(used + 1):
                if longest[unit] == 0:
                    continue
                costs, rest = least[unit, depth], after[depth - 1, used - unit]
                for start in range(num_layers):
                    # Which stage is the least is found along the best path alone: so this is quicker by half.
                    low = after[depth, used, start]
                    for length in range(min(longest[unit], num_layers - start)):
                        t = bands[start, length]
                        if t < used_types:
                            low = min(low, costs[t] + rest[start + 1 + length])
                    after[depth, used, start] = low
                    any_left |= low < np.inf
            if after[depth, used, 0] < best:
                best = after[depth, used, 0]
                best_depth = depth
                best_used = used
        if not any_left:
            break
    path_options = np.full(best_depth, -1)
    path_stops = np.full(best_depth, -1)
    start = 0
    for i in range(best_depth):
        depth, used, begin = best_depth - i, best_used, start
        for unit in range(used + 1):
            for length in range(min(longest[unit], num_layers - begin)):
                t, stop = bands[begin, length], begin + 1 + length
                if start > begin or t >= used_types:
                    continue
                if least[unit, depth, t] + after[depth - 1, used - unit, stop] == after[depth, used, begin]:
                    path_options[i], path_stops[i] = chosen[unit, depth, t], stop
                    best_used, start = used - unit, stop
    return best, best_depth, path_options, path_stops
