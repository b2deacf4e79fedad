"""Label setting of `column_enumeration` where every stage costs its time, as loops."""

from __future__ import annotations

import numpy as np


def label_paths(
    types: np.ndarray,
    options: np.ndarray,
    times_s: np.ndarray,
    tail_s: np.ndarray,
    rooms: np.ndarray,
    classes: np.ndarray,
    class_takes: np.ndarray,
    duals: np.ndarray,
    counts: np.ndarray,
    most: np.ndarray,
    rate: float,
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
    in_rounds: bool,
    slot: np.ndarray,
    pool: tuple[np.ndarray, ...],
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return paths over cuts, of each demand for devices the one that loses least, up to a reduced cost.

    Parameters
    ----------
    types, options, times_s, tail_s, rooms, classes : arrays, shape (stages,)
        Of every stage a path may have, as in `plain_paths.shortest_path`; stages of a class take the same
        devices.
    class_takes : array, shape (classes, kinds)
    duals : array, shape (kinds,)
    counts, most : arrays of int, shape (kinds,)
        Sizes of the code of a demand, and the most devices a path may take.
    rate, upper_s, longest_tail_s, deepest, bands, lengths
        As in `plain_paths.shortest_path`.
    reach : float
        Samples that a path which loses none would process.
    cost_limit : float
        Most by which the dual price of a path's devices may exceed the samples it processes.
    least_samples, grain, batch : float
        A path of several stages processes at least so many, each whole grains, and at most the batch.
    size, in_rounds : float, bool
        Samples of a micro-batch. They come in rounds of as many as a path has stages, the last one of a round
        whole or shorter by whole grains; or one by one.
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
    least = np.full((num_classes, deepest + 2, used_types), np.inf)
    chosen = np.full((num_classes, deepest + 2, used_types), -1)
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        loss = times_s[k] * rate
        if loss < least[classes[k], rooms[k], types[k]]:
            least[classes[k], rooms[k], types[k]] = loss
            chosen[classes[k], rooms[k], types[k]] = options[k]
    longest = np.zeros(num_classes, dtype=np.int64)
    cheapest = np.full((deepest + 2, used_types), np.inf)
    for c in range(num_classes):
        for depth in range(deepest, 0, -1):
            for t in range(used_types):
                if least[c, depth + 1, t] < least[c, depth, t]:
                    least[c, depth, t] = least[c, depth + 1, t]
                    chosen[c, depth, t] = chosen[c, depth + 1, t]
                if least[c, depth, t] + class_cost[c] < cheapest[depth, t]:
                    cheapest[depth, t] = least[c, depth, t] + class_cost[c]
        for t in range(used_types):
            if chosen[c, 1, t] >= 0 and lengths[t] > longest[c]:
                longest[c] = lengths[t]
    farthest = longest.max()
    # What the layers before a stage cost at least, by the number of stages from it on.
    before = np.full((deepest + 1, num_layers + 1), np.inf)
    before[:, 0] = 0.0
    for depth in range(deepest - 1, -1, -1):
        for start in range(1, num_layers + 1):
            low = np.inf
            for length in range(min(farthest, start)):
                at = start - 1 - length
                t = bands[at, length]
                if t < used_types:
                    low = min(low, cheapest[depth + 1, t] + before[depth + 1, at])
            before[depth, start] = low
    no_paths = np.full((0, deepest), -1)
    limit = reach + cost_limit
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
    first = np.zeros((deepest + 1, num_layers + 1), dtype=np.int64)
    last = np.zeros((deepest + 1, num_layers + 1), dtype=np.int64)
    count = 1
    last[0, num_layers] = 1
    # What a stage and those behind it cost at least: where no path has room for that, no option is tried.
    behind = np.full((deepest + 1, num_layers + 1), np.inf)
    behind[0, num_layers] = 0.0
    for depth in range(1, deepest + 1):
        any_left = False
        for start in range(num_layers - 1, -1, -1):
            begin = count
            room = limit - before[depth, start]
            low = np.inf
            for length in range(min(farthest, num_layers - start)):
                t = bands[start, length]
                if t < used_types:
                    low = min(low, cheapest[depth, t] + behind[depth - 1, start + 1 + length])
            behind[depth, start] = low
            if low > room:
                first[depth, start], last[depth, start] = begin, begin
                continue
            for c in range(num_classes):
                for length in range(min(longest[c], num_layers - start)):
                    t = bands[start, length]
                    if t >= used_types:
                        continue
                    stop = start + 1 + length
                    more = least[c, depth, t] + class_cost[c]
                    for i in range(first[depth - 1, stop], last[depth - 1, stop]):
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
                            option[at] = chosen[c, depth, t]
                            stop_of[at] = stop
            first[depth, start], last[depth, start] = begin, count
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
        for i in range(first[depth, 0], last[depth, 0]):
            price, rest = 0.0, code[i]
            for k in range(kinds):
                price += (rest % (counts[k] + 1)) * duals[k]
                rest //= counts[k] + 1
            through = reach - (value_of[i] - price)
            whole = np.floor(through / grain + 1e-9) * grain
            if in_rounds and depth > 1:
                rounds = np.floor(through / (depth * size) + 1e-9) * depth * size
                begun = rounds + (depth - 1) * size
                whole = whole if whole > begun else rounds
            whole = min(whole, batch)
            if (depth > 1 and through < least_samples * (1.0 - 1e-9)) or whole <= 0.0:
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
