"""Shortest paths over cuts as loops, for numba; `pricing.cheapest_path` does the same in numpy without it."""

from __future__ import annotations


def shortest_path(
    times_s,
    tail_s,
    rooms,
    prices,
    rate,
    upper_s,
    longest_tail_s,
    most,
    deepest,
    bands,
    least,
    after,
    chosen,
    stops,
):
    """Fill chosen and stops by number of stages still to come; return the least cost and its number of stages.

    Parameters
    ----------
    times_s, tail_s, rooms : arrays, shape (options, types)
    prices : array, shape (options,)
    rate, upper_s, longest_tail_s, most, deepest : numbers
    bands : array of int, shape (layers, layers)
        Type of the stage from each start by length less one, -1 past the end.
    least, chosen : arrays, shape (deepest + 1, types)
        Work space: infinite, and -1.
    after, stops : arrays, shape (deepest + 1, layers + 1)
        Work space: infinite, and -1.
    """
    num_options, num_types = times_s.shape
    num_layers = bands.shape[0]
    for k in range(num_options):
        for t in range(num_types):
            room = rooms[k, t]
            if room < 1 or times_s[k, t] > upper_s or tail_s[k, t] > longest_tail_s:
                continue
            # Room for all rounds is room for any number of stages behind.
            depth = deepest if room >= most or room > deepest else room
            cost = times_s[k, t] * rate + prices[k]
            if cost < least[depth, t]:
                least[depth, t] = cost
                chosen[depth, t] = k
    for depth in range(deepest - 1, 0, -1):
        for t in range(num_types):
            if least[depth + 1, t] < least[depth, t]:
                least[depth, t] = least[depth + 1, t]
                chosen[depth, t] = chosen[depth + 1, t]
    longest = 0
    for length in range(num_layers):
        for start in range(num_layers - length):
            if chosen[1, bands[start, length]] >= 0:
                longest = length + 1
                break
    if longest == 0:
        return after[0, 0], 0
    after[0, num_layers] = 0.0
    best = after[0, 0]
    best_depth = 0
    for depth in range(1, deepest + 1):
        any_left = False
        for start in range(num_layers):
            low = after[depth, start]
            at = -1
            for length in range(min(longest, num_layers - start)):
                rest = after[depth - 1, start + 1 + length]
                if rest < low:
                    total = least[depth, bands[start, length]] + rest
                    if total < low:
                        low = total
                        at = start + 1 + length
            after[depth, start] = low
            stops[depth, start] = at
            any_left = any_left or at >= 0
        if after[depth, 0] < best:
            best = after[depth, 0]
            best_depth = depth
        if not any_left:
            break
    return best, best_depth
