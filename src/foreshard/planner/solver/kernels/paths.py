"""Shortest paths over cuts, as loops of `pricing`: where a stage costs its time, and where it does not."""

from __future__ import annotations

import numpy as np


def plain_path(
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
    number, used_types = stages_in_use(types, times_s, tail_s, upper_s, longest_tail_s)
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


def paced_path(
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
    seconds: np.ndarray,
    lower_s: float,
    hidden_s: np.ndarray,
    early_s: np.ndarray,
    weights: np.ndarray,
    least_tail_s: float,
    by_longest_tail: bool,
) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Return the least cost, the number of stages (0 where there is no path), their options and stops.

    The last stage of at least `lower_s` sets the pace. Stages behind it cost other seconds than those up to
    it, the first stage some more. Paths grow from the last stage to the first: behind the pace, with the
    least cost by each of some weights of the seconds there, or with the pace among their stages. Of the
    weights the one counts that says most.

    Parameters
    ----------
    types, options, times_s, tail_s, rooms, units, option_cost, limit, rate, upper_s, longest_tail_s, deepest
        As in `plain_path`.
    bands, lengths
        Likewise.
    seconds : array, shape (4, stages)
        That a stage costs at the pace or before it, behind it, and more as the first of several or the only
        stage.
    lower_s : float
    hidden_s : array, shape (stages,)
        What a stage at the pace hides at most of each one behind it when half of the seconds there count.
    weights : array
        Of the seconds behind the pace; at 0.5, those of a stage less what the pace hides.
    early_s : array, shape (stages,)
        How much less a stage costs that lies before the first one of a tail of at least `least_tail_s`.
    least_tail_s, by_longest_tail : float, bool
        Whether a path has such a tail, which then counts; else the tail of the first stage does.
    """
    num_layers = bands.shape[0]
    number, used_types = stages_in_use(types, times_s, tail_s, upper_s, longest_tail_s)
    # Roles of a stage: behind the pace by weight; behind it with the tail, or before that; at it and before
    # it (3 each) any, with the tail, or before that; as the first of several likewise (2 each), without any.
    ways = len(weights)
    least = np.full((ways + 12, limit + 1, deepest + 1, used_types), np.inf)
    chosen = np.full((ways + 12, limit + 1, deepest + 1, used_types), -1)
    best = np.inf
    best_depth = 0
    best_used = 0
    alone = -1
    whole = bands[0, num_layers - 1]
    slack_s = 0.0
    for k in range(number):
        if times_s[k] >= lower_s and tail_s[k] <= longest_tail_s:
            slack_s = max(slack_s, hidden_s[k])
    roles = np.array([*range(ways), ways + 2, ways + 5, ways + 8, ways + 10])
    if by_longest_tail:
        roles = np.arange(ways + 12)
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        own, unit, room, t = option_cost[options[k]], units[k], rooms[k], types[k]
        front = own + rate * seconds[0, k]
        behind = own + rate * seconds[1, k]
        early, first = rate * early_s[k], rate * seconds[2, k]
        is_pace, is_tail = times_s[k] >= lower_s, tail_s[k] >= least_tail_s
        if is_pace and t == whole and unit <= limit and own + rate * seconds[3, k] < best:
            best, best_depth, best_used, alone = own + rate * seconds[3, k], 1, unit, options[k]
        for role in roles:
            # Of stages up to the pace 0 to 2 are at it, 3 to 5 before it; then as the first ones.
            place, cost = role - ways - 2, np.inf
            if role < ways:
                if not is_pace:
                    cost = own + rate * weights[role] * seconds[1, k]
                    if weights[role] == 0.5:
                        cost = own + rate * (times_s[k] - slack_s)
            elif place < 0:
                if not is_pace and is_tail == (place == -2):
                    cost = behind - (0.0 if is_tail else early)
            elif place < 6:
                if is_pace or place >= 3:
                    if place % 3 == 0:
                        cost = front
                    elif is_tail == (place % 3 == 1):
                        cost = front - (0.0 if is_tail else early)
            elif is_pace or place >= 8:
                if not by_longest_tail:
                    cost = front + first if place % 2 == 0 else np.inf
                elif is_tail == (place % 2 == 0):
                    cost = front + first - (0.0 if is_tail else early)
            if cost < least[role, unit, room, t]:
                least[role, unit, room, t], chosen[role, unit, room, t] = cost, options[k]
    longest = np.zeros(limit + 1, dtype=np.int64)
    for unit in range(limit + 1):
        for role in roles:
            for depth in range(deepest - 1, 0, -1):
                for t in range(used_types):
                    if least[role, unit, depth + 1, t] < least[role, unit, depth, t]:
                        least[role, unit, depth, t] = least[role, unit, depth + 1, t]
                        chosen[role, unit, depth, t] = chosen[role, unit, depth + 1, t]
        for t in range(used_types):
            if chosen[ways + 5, unit, 1, t] >= 0 and lengths[t] > longest[unit]:
                longest[unit] = lengths[t]
    # States: behind the pace by weight, with the pace, behind it with the tail, with both.
    paced, tailed, both = ways, ways + 1, ways + 2
    after = np.full((ways + 3, deepest + 1, limit + 1, num_layers + 1), np.inf)
    stops = np.full((ways + 3, deepest + 1, limit + 1, num_layers + 1), -1)
    took = np.full((ways + 3, deepest + 1, limit + 1, num_layers + 1), -1)
    came = np.full((ways + 3, deepest + 1, limit + 1, num_layers + 1), -1)
    # Of paths behind the pace the cost by the weight that says most.
    most = np.full((limit + 1, num_layers + 1), np.inf)
    which = np.zeros((limit + 1, num_layers + 1), dtype=np.int64)
    for way in range(ways):
        after[way, 0, 0, num_layers] = 0.0
    most[0, num_layers] = 0.0
    for depth in range(1, deepest + 1):
        any_left = False
        for used in range(limit + 1):
            for unit in range(used + 1):
                if longest[unit] == 0:
                    continue
                rest_most, way_most = most[used - unit], which[used - unit]
                rest_paced = after[paced, depth - 1, used - unit]
                at_pace, ahead = least[ways + 2, unit, depth], least[ways + 5, unit, depth]
                for start in range(num_layers - 1, 0, -1):
                    if by_longest_tail:
                        break
                    low, low_at, by = after[paced, depth, used, start], -1, 0
                    for length in range(min(longest[unit], num_layers - start)):
                        stop, t = start + 1 + length, bands[start, length]
                        if t >= used_types:
                            continue
                        if rest_most[stop] + at_pace[t] < low:
                            low, low_at, by = rest_most[stop] + at_pace[t], stop, way_most[stop]
                        if rest_paced[stop] + ahead[t] < low:
                            low, low_at, by = rest_paced[stop] + ahead[t], stop, paced
                    if low_at >= 0:
                        after[paced, depth, used, start], came[paced, depth, used, start] = low, by
                        stops[paced, depth, used, start], took[paced, depth, used, start] = low_at, unit
                        any_left = True
                    for way in range(ways):
                        rest, costs = after[way, depth - 1, used - unit], least[way, unit, depth]
                        low, low_at = after[way, depth, used, start], -1
                        for length in range(min(longest[unit], num_layers - start)):
                            t = bands[start, length]
                            if t < used_types and rest[start + 1 + length] + costs[t] < low:
                                low, low_at = rest[start + 1 + length] + costs[t], start + 1 + length
                        if low_at >= 0:
                            after[way, depth, used, start] = low
                            stops[way, depth, used, start], took[way, depth, used, start] = low_at, unit
                            any_left = True
                for start in range(num_layers - 1 if by_longest_tail else 0, -1, -1):
                    if start == 0 and depth == 1:
                        continue
                    for length in range(min(longest[unit], num_layers - start)):
                        stop, t = start + 1 + length, bands[start, length]
                        if t >= used_types:
                            continue
                        open_, other = rest_most[stop], after[paced, depth - 1, used - unit, stop]
                        last, last_both = np.inf, np.inf
                        if by_longest_tail:
                            last = after[tailed, depth - 1, used - unit, stop]
                            last_both = after[both, depth - 1, used - unit, stop]
                        if open_ == np.inf and other == np.inf and last == np.inf and last_both == np.inf:
                            continue
                        if start == 0:
                            low, by = open_ + least[ways + 8, unit, depth, t], way_most[stop]
                            total = last + least[ways + 9, unit, depth, t]
                            if total < low:
                                low, by = total, tailed
                            total = other + least[ways + 10, unit, depth, t]
                            if total < low:
                                low, by = total, paced
                            total = last_both + least[ways + 11, unit, depth, t]
                            if total < low:
                                low, by = total, both
                            if low < after[both, depth, used, 0]:
                                after[both, depth, used, 0], came[both, depth, used, 0] = low, by
                                stops[both, depth, used, 0], took[both, depth, used, 0] = stop, unit
                            continue
                        if open_ < np.inf:
                            for way in range(ways):
                                total = after[way, depth - 1, used - unit, stop] + least[way, unit, depth, t]
                                if total < after[way, depth, used, start]:
                                    after[way, depth, used, start] = total
                                    stops[way, depth, used, start], took[way, depth, used, start] = stop, unit
                                    any_left = True
                        low, by = open_ + least[ways + 2, unit, depth, t], way_most[stop]
                        total = other + least[ways + 5, unit, depth, t]
                        if total < low:
                            low, by = total, paced
                        if low < after[paced, depth, used, start]:
                            after[paced, depth, used, start], came[paced, depth, used, start] = low, by
                            stops[paced, depth, used, start], took[paced, depth, used, start] = stop, unit
                            any_left = True
                        if not by_longest_tail:
                            continue
                        low, by = after[0, depth - 1, used - unit, stop] + least[ways, unit, depth, t], 0
                        total = last + least[ways + 1, unit, depth, t]
                        if total < low:
                            low, by = total, tailed
                        if low < after[tailed, depth, used, start]:
                            after[tailed, depth, used, start], came[tailed, depth, used, start] = low, by
                            stops[tailed, depth, used, start], took[tailed, depth, used, start] = stop, unit
                        low, by = open_ + least[ways + 3, unit, depth, t], way_most[stop]
                        total = last + least[ways + 4, unit, depth, t]
                        if total < low:
                            low, by = total, tailed
                        total = other + least[ways + 6, unit, depth, t]
                        if total < low:
                            low, by = total, paced
                        total = last_both + least[ways + 7, unit, depth, t]
                        if total < low:
                            low, by = total, both
                        if low < after[both, depth, used, start]:
                            after[both, depth, used, start], came[both, depth, used, start] = low, by
                            stops[both, depth, used, start], took[both, depth, used, start] = stop, unit
            if after[both, depth, used, 0] < best:
                best = after[both, depth, used, 0]
                best_depth = depth
                best_used = used
        if not any_left:
            break
        for used in range(limit + 1):
            for start in range(num_layers + 1):
                most[used, start], which[used, start] = after[0, depth, used, start], 0
                for way in range(1, ways):
                    if after[way, depth, used, start] > most[used, start]:
                        most[used, start], which[used, start] = after[way, depth, used, start], way
    path_options = np.full(best_depth, -1)
    path_stops = np.full(best_depth, -1)
    if best_depth == 1:
        path_options[0], path_stops[0] = alone, num_layers
        return best, best_depth, path_options, path_stops
    start = 0
    state = both
    for i in range(best_depth):
        depth = best_depth - i
        stop = stops[state, depth, best_used, start]
        unit = took[state, depth, best_used, start]
        role = state
        if state >= ways:
            by = came[state, depth, best_used, start]
            if start == 0:
                role = ways + (10 if by in (paced, both) else 8) + (1 if by >= tailed else 0)
            elif state == tailed:
                role = ways + (1 if by == tailed else 0)
            else:
                role = ways + (5 if by in (paced, both) else 2)
                if state == both:
                    role += 2 if by >= tailed else 1
            state = by
        path_options[i] = chosen[role, unit, depth, bands[start, stop - start - 1]]
        path_stops[i] = stop
        start = stop
        best_used -= unit
    return best, best_depth, path_options, path_stops


def stages_in_use(
    types: np.ndarray, times_s: np.ndarray, tail_s: np.ndarray, upper_s: float, longest_tail_s: float
) -> tuple[int, int]:
    """Return how many stages are in time, which come by it, and their types up to the greatest one.

    Also in `labels`: compiled functions call those of their own module only.
    """
    number = 0
    while number < len(times_s) and times_s[number] <= upper_s:
        number += 1
    used_types = 0
    for k in range(number):
        if tail_s[k] <= longest_tail_s and types[k] >= used_types:
            used_types = types[k] + 1
    return number, used_types
