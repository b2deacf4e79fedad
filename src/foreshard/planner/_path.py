"""Shortest paths over cuts as loops, for numba; `pricing.cheapest_path` does the same in numpy without it."""

from __future__ import annotations

import numpy as np


def shortest_path(
    types,
    options,
    times_s,
    tail_s,
    rooms,
    units,
    prices,
    limit,
    rate,
    upper_s,
    longest_tail_s,
    deepest,
    bands,
    num_types,
):
    """Return the least cost, the number of stages (0 where there is no path), their options and stops.

    Parameters
    ----------
    types, options, times_s, tail_s, rooms, units : arrays, shape (stages,)
        Of every stage a path may have; `rooms` is how many stages may follow it, itself included, at most
        `deepest`; `units` of a resource of which a path takes at most `limit`.
    prices : array, by option
    rate, upper_s, longest_tail_s, deepest : numbers
    bands : array of int, shape (layers, layers)
        Type of the stage from each start by length less one, -1 past the end.
    num_types : int
    """
    num_layers = bands.shape[0]
    least = np.full((limit + 1, deepest + 1, num_types), np.inf)
    chosen = np.full((limit + 1, deepest + 1, num_types), -1)
    for k in range(len(types)):
        if times_s[k] > upper_s or tail_s[k] > longest_tail_s:
            continue
        cost = times_s[k] * rate + prices[options[k]]
        if cost < least[units[k], rooms[k], types[k]]:
            least[units[k], rooms[k], types[k]] = cost
            chosen[units[k], rooms[k], types[k]] = options[k]
    lengths = np.zeros(limit + 1, dtype=np.int64)
    for unit in range(limit + 1):
        for depth in range(deepest - 1, 0, -1):
            for t in range(num_types):
                if least[unit, depth + 1, t] < least[unit, depth, t]:
                    least[unit, depth, t] = least[unit, depth + 1, t]
                    chosen[unit, depth, t] = chosen[unit, depth + 1, t]
        for length in range(num_layers):
            for start in range(num_layers - length):
                if chosen[unit, 1, bands[start, length]] >= 0:
                    lengths[unit] = length + 1
                    break
    after = np.full((deepest + 1, limit + 1, num_layers + 1), np.inf)
    stops = np.full((deepest + 1, limit + 1, num_layers + 1), -1)
    took = np.full((deepest + 1, limit + 1, num_layers + 1), -1)
    after[0, 0, num_layers] = 0.0
    best = np.inf
    best_depth = 0
    best_used = 0
    for depth in range(1, deepest + 1):
        any_left = False
        for used in range(limit + 1):
            for unit in range(used + 1):
                longest = lengths[unit]
                if longest == 0:
                    continue
                for start in range(num_layers):
                    low = after[depth, used, start]
                    at = -1
                    for length in range(min(longest, num_layers - start)):
                        rest = after[depth - 1, used - unit, start + 1 + length]
                        if rest < low:
                            total = least[unit, depth, bands[start, length]] + rest
                            if total < low:
                                low = total
                                at = start + 1 + length
                    if at >= 0:
                        after[depth, used, start] = low
                        stops[depth, used, start] = at
                        took[depth, used, start] = unit
                        any_left = True
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
        depth = best_depth - i
        stop = stops[depth, best_used, start]
        unit = took[depth, best_used, start]
        path_options[i] = chosen[unit, depth, bands[start, stop - start - 1]]
        path_stops[i] = stop
        start = stop
        best_used -= unit
    return best, best_depth, path_options, path_stops
