"""The label-setting search of `column_enumeration` as loops, for numba."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.path_kernel import BEHIND, SLOWEST


def label_paths(
    types: np.ndarray,
    options: np.ndarray,
    times_s: np.ndarray,
    behind_s: np.ndarray,
    tail_s: np.ndarray,
    rooms: np.ndarray,
    classes: np.ndarray,
    class_takes: np.ndarray,
    duals: np.ndarray,
    counts: np.ndarray,
    most: np.ndarray,
    rate: float,
    lower_s: float,
    upper_s: float,
    longest_tail_s: float,
    deepest: int,
    bands: np.ndarray,
    lengths: np.ndarray,
    reach: float,
    cost_limit: float,
    least_samples: float,
    grain: float,
    batch: float,
    size: float,
    chunks: int,
    spared: np.ndarray,
    slot: np.ndarray,
    pool: tuple[np.ndarray, ...],
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return paths over cuts, of each demand for devices the one that loses least, up to a reduced cost.

    Parameters
    ----------
    types, options, times_s, behind_s, tail_s, rooms, classes : arrays, shape (stages,)
        Of every stage a path may have, as in `path_kernel.shortest_path`; stages of a class take the same
        devices.
    class_takes : array, shape (classes, kinds)
    duals : array, shape (kinds,)
    counts, most : arrays of int, shape (kinds,)
        Sizes of the code of a demand, and the most devices a path may take.
    rate, lower_s, upper_s, longest_tail_s, deepest, bands, lengths
        As in `path_kernel.shortest_path`.
    reach : float
        Samples that a path which loses none would process.
    cost_limit : float
        Most by which the dual price of a path's devices may exceed the samples it processes.
    least_samples, grain, batch : float
        A path processes at least so many, whole grains, and at most the batch.
    size, chunks : float, int
        Samples of a micro-batch, each counted once for each chunk. With several chunks they come in rounds
        of as many as a path has stages, the last one of a round whole or shorter by whole grains.
    spared : array, by number of stages
        Samples by which a path processes more at most, where its last micro-batch is short.
    slot : array of int, all -1
        By code of a demand; is left as it was.
    pool : tuple of arrays
        Room for labels: code, fields, value, parent, option, stop.

    Returns
    -------
    tuple
        Number of paths (-1 when labels outgrow their room), code and samples of each, options and stops of
        its stages, shape (paths, deepest), padded with -1.
    """
    num_layers = bands.shape[0]
    num_classes, kinds = class_takes.shape
    class_cost = np.zeros(num_classes)
    for c in range(num_classes):
        for k in range(kinds):
            class_cost[c] += class_takes[c, k] * duals[k]
    # Stages come by time; types beyond the greatest in use are never asked for.
    number = 0
    while number < len(times_s) and times_s[number] <= upper_s:
        number += 1
    used_types = 0
    for k in range(number):
        if tail_s[k] <= longest_tail_s and types[k] >= used_types:
            used_types = types[k] + 1
    # Stages behind the slowest, the slowest, and those before it.
    least = np.full((3, num_classes, deepest + 2, used_types), np.inf)
    chosen = np.full((3, num_classes, deepest + 2, used_types), -1)
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        for kind in range(3):
            if (kind == BEHIND and times_s[k] >= lower_s) or (kind == SLOWEST and times_s[k] < lower_s):
                continue
            loss = (behind_s[k] if kind == BEHIND else times_s[k]) * rate
            if loss < least[kind, classes[k], rooms[k], types[k]]:
                least[kind, classes[k], rooms[k], types[k]] = loss
                chosen[kind, classes[k], rooms[k], types[k]] = options[k]
    longest = np.zeros((3, num_classes), dtype=np.int64)
    cheapest = np.full((3, deepest + 2, used_types), np.inf)
    for kind in range(3):
        for c in range(num_classes):
            for depth in range(deepest, 0, -1):
                for t in range(used_types):
                    if least[kind, c, depth + 1, t] < least[kind, c, depth, t]:
                        least[kind, c, depth, t] = least[kind, c, depth + 1, t]
                        chosen[kind, c, depth, t] = chosen[kind, c, depth + 1, t]
                    if least[kind, c, depth, t] + class_cost[c] < cheapest[kind, depth, t]:
                        cheapest[kind, depth, t] = least[kind, c, depth, t] + class_cost[c]
            for t in range(used_types):
                if chosen[kind, c, 1, t] >= 0 and lengths[t] > longest[kind, c]:
                    longest[kind, c] = lengths[t]
    farthest = longest.max()
    # What the layers before a stage cost at least, by whether the slowest stage is behind and the number of
    # stages from this one on.
    before = np.full((2, deepest + 1, num_layers + 1), np.inf)
    before[1, :, 0] = 0.0
    for depth in range(deepest - 1, -1, -1):
        for start in range(1, num_layers + 1):
            for kind in range(3):
                come, to = int(kind > SLOWEST), int(kind > BEHIND)
                low = before[come, depth, start]
                for length in range(min(farthest, start)):
                    at = start - 1 - length
                    t = bands[at, length]
                    if t < used_types:
                        low = min(low, cheapest[kind, depth + 1, t] + before[to, depth + 1, at])
                before[come, depth, start] = low
    no_paths = np.full((0, deepest), -1)
    limit = reach + cost_limit + spared.max()
    # A demand is a mixed-radix code, to tell demands apart, and fields of bits whose top bit says too many.
    class_code = np.zeros(num_classes, dtype=np.int64)
    class_field = np.zeros(num_classes, dtype=np.int64)
    code, field, value_of, parent, option, stop_of = pool
    code[0], field[0], value_of[0], parent[0] = 0, 0, 0.0, -1
    radix, shift, over = 1, 0, 0
    for k in range(kinds):
        bits = 1
        while (1 << bits) <= counts[k]:
            bits += 1
        field[0] += ((1 << bits) - 1 - most[k]) << shift
        over += 1 << (shift + bits)
        for c in range(num_classes):
            class_code[c] += class_takes[c, k] * radix
            class_field[c] += class_takes[c, k] << shift
        shift += bits + 1
        radix *= counts[k] + 1
    first = np.zeros((2, deepest + 1, num_layers + 1), dtype=np.int64)
    last = np.zeros((2, deepest + 1, num_layers + 1), dtype=np.int64)
    count = 1
    last[0, 0, num_layers] = 1
    # What a stage and those behind it cost at least: where no path has room for that, no option is tried.
    behind = np.full((2, deepest + 1, num_layers + 1), np.inf)
    behind[0, 0, num_layers] = 0.0
    for depth in range(1, deepest + 1):
        any_left = False
        for start in range(num_layers - 1, -1, -1):
            for to in range(2):
                begin = count
                room = limit - before[to, depth, start]
                for kind in range(to, 2 * to + 1):
                    come = int(kind > SLOWEST)
                    low = np.inf
                    for length in range(min(farthest, num_layers - start)):
                        t = bands[start, length]
                        if t < used_types:
                            low = min(
                                low, cheapest[kind, depth, t] + behind[come, depth - 1, start + 1 + length]
                            )
                    behind[to, depth, start] = min(behind[to, depth, start], low)
                    if low > room:
                        continue
                    for c in range(num_classes):
                        for length in range(min(longest[kind, c], num_layers - start)):
                            t = bands[start, length]
                            if t >= used_types:
                                continue
                            stop = start + 1 + length
                            more = least[kind, c, depth, t] + class_cost[c]
                            for i in range(first[come, depth - 1, stop], last[come, depth - 1, stop]):
                                value = value_of[i] + more
                                if value > room:
                                    break
                                fields = field[i] + class_field[c]
                                if fields & over:
                                    continue
                                at = slot[code[i] + class_code[c]]
                                if at < begin:
                                    if count >= len(code):
                                        for j in range(begin, count):
                                            slot[code[j]] = -1
                                        return -1, code[:0], value_of[:0], no_paths, no_paths
                                    at = count
                                    count += 1
                                    code[at] = code[i] + class_code[c]
                                    field[at] = fields
                                    slot[code[at]] = at
                                    value_of[at] = np.inf
                                if value < value_of[at]:
                                    value_of[at] = value
                                    parent[at] = i
                                    option[at] = chosen[kind, c, depth, t]
                                    stop_of[at] = stop
                first[to, depth, start], last[to, depth, start] = begin, count
                for i in range(begin, count):
                    slot[code[i]] = -1
                if count > begin:
                    any_left = True
                    # The best first (Shell's sort): the rest is passed over as soon as one has no room.
                    gap = 1
                    while gap < (count - begin) // 3:
                        gap = 3 * gap + 1
                    while gap > 0:
                        for i in range(begin + gap, count):
                            own, own_code, own_field = value_of[i], code[i], field[i]
                            own_parent, own_option, own_stop = parent[i], option[i], stop_of[i]
                            j = i
                            while j >= begin + gap and value_of[j - gap] > own:
                                k = j - gap
                                value_of[j], code[j], field[j] = value_of[k], code[k], field[k]
                                parent[j], option[j], stop_of[j] = parent[k], option[k], stop_of[k]
                                j = k
                            value_of[j], code[j], field[j] = own, own_code, own_field
                            parent[j], option[j], stop_of[j] = own_parent, own_option, own_stop
                        gap //= 3
        if not any_left:
            break
    # Of each demand the path that processes most, of any number of stages; of equal ones what loses least.
    ends = np.empty(count, dtype=np.int64)
    end_samples = np.empty(count)
    end_price = np.empty(count)
    num_ends = 0
    for depth in range(1, deepest + 1):
        for i in range(first[1, depth, 0], last[1, depth, 0]):
            price, rest = 0.0, code[i]
            for k in range(kinds):
                price += (rest % (counts[k] + 1)) * duals[k]
                rest //= counts[k] + 1
            # The slowest stage alone takes a micro-batch (of a chunk), whatever the others add.
            through = reach - max(value_of[i] - price, size / chunks)
            if through < least_samples * (1.0 - 1e-9):
                continue
            if chunks > 1:
                through += spared[depth]
                whole = np.floor(through / grain + 1e-9) * grain
            else:
                # The part of a last micro-batch that takes what is left: it spares its part less of the rest.
                begun = np.floor(through / size + 1e-9) * size
                part = ((through - begun) / size + depth - 1.0) / depth
                whole = begun + np.floor(max(part, 0.0) * size / grain + 1e-9) * grain
            if chunks > 1 and depth > 1:
                rounds = np.floor(through / (depth * size) + 1e-9) * depth * size
                begun = rounds + (depth - 1) * size
                whole = whole if whole > begun else rounds
            whole = min(whole, batch)
            if whole <= 0.0:
                continue
            at = slot[code[i]]
            if at < 0:
                at = num_ends
                slot[code[i]] = at
                num_ends += 1
            elif whole < end_samples[at] or (whole == end_samples[at] and value_of[i] >= value_of[ends[at]]):
                continue
            ends[at], end_samples[at], end_price[at] = i, whole, price
    codes = np.empty(num_ends, dtype=np.int64)
    samples = np.empty(num_ends)
    path_options = np.full((num_ends, deepest), -1)
    path_stops = np.full((num_ends, deepest), -1)
    kept = 0
    for e in range(num_ends):
        i = ends[e]
        slot[code[i]] = -1
        if end_price[e] - end_samples[e] > cost_limit:
            continue
        codes[kept], samples[kept] = code[i], end_samples[e]
        s = 0
        while parent[i] >= 0:
            path_options[kept, s] = option[i]
            path_stops[kept, s] = stop_of[i]
            i = parent[i]
            s += 1
        kept += 1
    return kept, codes[:kept], samples[:kept], path_options[:kept], path_stops[:kept]
