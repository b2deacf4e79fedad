"""Label setting of `column_enumeration`, as loops: where a stage costs its time, and where it does not."""

from __future__ import annotations

import numpy as np


def plain_labels(
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
        Of every stage a path may have, as in `paths.plain_path`; stages of a class take the same
        devices.
    class_takes : array, shape (classes, kinds)
    duals : array, shape (kinds,)
    counts, most : arrays of int, shape (kinds,)
        Sizes of the code of a demand, and the most devices a path may take.
    rate, upper_s, longest_tail_s, deepest, bands, lengths
        As in `paths.plain_path`.
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
    number, used_types = stages_in_use(types, times_s, tail_s, upper_s, longest_tail_s)
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
    code, field, value_of, parent, option, stop_of = pool
    class_code, class_field, field[0], over = demand_codes(class_takes, counts, most)
    code[0], value_of[0], parent[0] = 0, 0.0, -1
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
                # The best first: the rest is passed over as soon as one has no room.
                sort_labels(begin, count, pool)
        if not any_left:
            break
    # Of each demand the path that processes most, of any number of stages; of equal ones what loses least.
    ends = np.empty(count, dtype=np.int64)
    end_samples = np.empty(count)
    end_price = np.empty(count)
    num_ends = 0
    for depth in range(1, deepest + 1):
        for i in range(first[depth, 0], last[depth, 0]):
            price = price_of(code[i], counts, duals)
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
    return written(num_ends, ends, end_samples, end_price, cost_limit, deepest, slot, pool)


def paced_labels(
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
    seconds: np.ndarray,
    lower_s: float,
    hidden_s: np.ndarray,
    early_s: np.ndarray,
    weights: np.ndarray,
    least_tail_s: float,
    by_longest_tail: bool,
    short_s: np.ndarray,
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return paths over cuts, of each demand for devices the one that processes most, up to a reduced cost.

    Labels are of paths from the last stage on, behind the pace or with it, as in `paths.paced_path`.

    Parameters
    ----------
    types, options, times_s, tail_s, rooms, classes, class_takes, duals, counts, most, rate, upper_s
        As in `plain_labels`.
    longest_tail_s, deepest, bands, lengths, reach, cost_limit, least_samples, grain, batch, size, in_rounds
        Likewise.
    slot, pool
        Likewise.
    seconds, lower_s, hidden_s, early_s, weights, least_tail_s, by_longest_tail
        As in `paths.paced_path`; without a second weight stages behind the pace count in full.
    short_s : array, shape (stages,)
        Of a time of `upper_s`, what a last micro-batch adds at least, of which a part r takes r of it.

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
    number, used_types = stages_in_use(types, times_s, tail_s, upper_s, longest_tail_s)
    # Roles of a stage: behind the pace, at it, before it (3 each): any, with the tail, or before that; as the
    # first of several at the pace or before it (2 each): with the tail, or before that; alone.
    least = np.full((14, num_classes, deepest + 2, used_types), np.inf)
    chosen = np.full((14, num_classes, deepest + 2, used_types), -1)
    least_short = np.full(used_types, np.inf)
    slack_s = 0.0
    paced_s = 2.0 * upper_s if in_rounds else upper_s  # of which stages behind the pace cost less
    for k in range(number):
        if times_s[k] >= lower_s and tail_s[k] <= longest_tail_s:
            slack_s = max(slack_s, hidden_s[k])
    for k in range(number):
        if tail_s[k] > longest_tail_s:
            continue
        is_pace, is_tail = times_s[k] >= lower_s, tail_s[k] >= least_tail_s
        c, room, t = classes[k], rooms[k], types[k]
        for role in range(14):
            place = role // 3 if role < 9 else (1 + (role - 9) // 2 if role < 13 else 1)
            kind = role % 3 if role < 9 else (1 + (role - 9) % 2 if role < 13 else 0)
            if (place == 0 and is_pace) or (place == 1 and not is_pace):
                continue
            if role == 13:
                loss = rate * seconds[3, k]
            else:
                loss = rate * (seconds[1, k] if place == 0 else seconds[0, k])
                if role >= 9:
                    loss += rate * seconds[2, k]
                if role >= 9 and not by_longest_tail:
                    if kind == 2:
                        continue
                elif kind > 0:
                    if is_tail != (kind == 1):
                        continue
                    loss -= 0.0 if is_tail else rate * early_s[k]
            if loss < least[role, c, room, t]:
                least[role, c, room, t] = loss
                chosen[role, c, room, t] = options[k]
        least_short[t] = min(least_short[t], short_s[k])
    longest = np.zeros(num_classes, dtype=np.int64)
    cheapest = np.full((14, deepest + 2, used_types), np.inf)
    for c in range(num_classes):
        for role in range(14):
            for depth in range(deepest, 0, -1):
                for t in range(used_types):
                    if least[role, c, depth + 1, t] < least[role, c, depth, t]:
                        least[role, c, depth, t] = least[role, c, depth + 1, t]
                        chosen[role, c, depth, t] = chosen[role, c, depth + 1, t]
                    if least[role, c, depth, t] + class_cost[c] < cheapest[role, depth, t]:
                        cheapest[role, depth, t] = least[role, c, depth, t] + class_cost[c]
        for t in range(used_types):
            if chosen[6, c, 1, t] >= 0 and lengths[t] > longest[c]:
                longest[c] = lengths[t]
    farthest = longest.max()
    # States: behind the pace, with it, behind it with the tail, with both. From each to each by a role.
    by_role = np.full((4, 4), -1)
    by_role[0, 0], by_role[0, 1], by_role[1, 1] = 0, 3, 6
    if by_longest_tail:
        by_role[0, 2], by_role[0, 3], by_role[1, 3] = 1, 4, 7
        by_role[2, 2], by_role[2, 3], by_role[3, 3] = 2, 5, 8
    as_first = np.array([9, 11, 10, 12])
    # What the layers before a stage cost at least, by the number of stages from it on and the state there.
    before = np.full((4, deepest + 1, num_layers + 1), np.inf)
    before[3, :, 0] = 0.0
    for depth in range(deepest - 1, -1, -1):
        for start in range(1, num_layers + 1):
            for state in range(4):
                low = np.inf
                for length in range(min(farthest, start)):
                    at = start - 1 - length
                    t = bands[at, length]
                    if t >= used_types:
                        continue
                    if at == 0:
                        low = min(low, cheapest[as_first[state], depth + 1, t])
                        if depth == 0 and state == 0:
                            low = min(low, cheapest[13, 1, t])
                        continue
                    for to in range(state, 4):
                        if by_role[state, to] >= 0:
                            low = min(
                                low, cheapest[by_role[state, to], depth + 1, t] + before[to, depth + 1, at]
                            )
                before[state, depth, start] = low
    no_paths = np.full((0, deepest), -1)
    limit = reach + cost_limit
    code, field, value_of, parent, option, stop_of = pool
    class_code, class_field, field[0], over = demand_codes(class_takes, counts, most)
    code[0], value_of[0], parent[0] = 0, 0.0, -1
    first = np.zeros((4, deepest + 1, num_layers + 1), dtype=np.int64)
    last = np.zeros((4, deepest + 1, num_layers + 1), dtype=np.int64)
    count = 1
    last[0, 0, num_layers] = 1
    # What a stage and those behind it cost at least: where no path has room for that, no option is tried.
    behind = np.full((4, deepest + 1, num_layers + 1), np.inf)
    behind[0, 0, num_layers] = 0.0
    for depth in range(1, deepest + 1):
        any_left = False
        for start in range(num_layers - 1, -1, -1):
            for state in range(4):
                begin = count
                first[state, depth, start], last[state, depth, start] = begin, begin
                if start == 0 and state != 3:
                    continue
                # A short last micro-batch is only counted with the first stage.
                room = limit + (0.0 if start == 0 else size - grain) - before[state, depth, start]
                short_room = room + (size - grain if start == 0 else 0.0)
                low = np.inf
                for length in range(min(farthest, num_layers - start)):
                    t = bands[start, length]
                    if t >= used_types:
                        continue
                    for source in range(state + 1):
                        role = by_role[source, state]
                        if start == 0:
                            role = 13 if depth == 1 else as_first[source]
                        if role >= 0:
                            rest_cost = behind[source, depth - 1, start + 1 + length]
                            low = min(low, cheapest[role, depth, t] + rest_cost)
                behind[state, depth, start] = low
                if low > short_room:
                    continue
                for c in range(num_classes):
                    for length in range(min(longest[c], num_layers - start)):
                        t = bands[start, length]
                        if t >= used_types:
                            continue
                        stop = start + 1 + length
                        for source in range(state + 1):
                            role = by_role[source, state]
                            if start == 0:
                                role = 13 if depth == 1 else as_first[source]
                            if role < 0 or (source == 2 and state == 1):
                                continue
                            hides = len(weights) > 1 and source == 0 and (role == 3 or role == 4 or role == 9)
                            more = least[role, c, depth, t] + class_cost[c]
                            if more == np.inf:
                                continue
                            for i in range(first[source, depth - 1, stop], last[source, depth - 1, stop]):
                                value = value_of[i]
                                if value + more > short_room:
                                    break
                                fields = field[i] + class_field[c]
                                if fields & over:
                                    continue
                                own = code[i] + class_code[c]
                                if hides or start == 0:
                                    price = price_of(code[i], counts, duals)
                                    if hides:
                                        lost = value - price
                                        half = 0.5 * (lost + (depth - 1) * paced_s * rate)
                                        half -= (depth - 1) * slack_s * rate
                                        value = price + max(0.0, half, lost)
                                    value += more
                                    if start == 0:
                                        price += class_cost[c]
                                        through = reach - (value - price)
                                        if depth == 1:
                                            whole = np.floor(through / grain + 1e-9) * grain
                                        else:
                                            if through < least_samples * (1.0 - 1e-9):
                                                continue
                                            passes = np.floor(through / size + 1e-9)
                                            short = max(size - grain, 0.0)
                                            whole = passes * size
                                            begun = passes % depth if in_rounds else 0
                                            rest_s = (through - whole) / size * upper_s
                                            if short > 0.0 and rest_s < least_short[t]:
                                                part = max(rest_s, 0.0) / least_short[t] * size / grain
                                                short = min(short, np.floor(part + 1e-9) * grain)
                                            if not in_rounds or (short > 0.0 and begun == depth - 1):
                                                whole += short
                                            else:
                                                whole -= begun * size
                                        whole = min(whole, batch)
                                        if whole <= 0.0:
                                            continue
                                        value = price + reach - whole
                                else:
                                    value += more
                                if value > room:
                                    continue
                                at = slot[own]
                                if at < begin:
                                    if count >= len(code):
                                        for j in range(begin, count):
                                            slot[code[j]] = -1
                                        return -1, code[:0], value_of[:0], no_paths, no_paths
                                    at = count
                                    count += 1
                                    code[at] = own
                                    field[at] = fields
                                    slot[own] = at
                                    value_of[at] = np.inf
                                if value < value_of[at]:
                                    value_of[at] = value
                                    parent[at] = i
                                    option[at] = chosen[role, c, depth, t]
                                    stop_of[at] = stop
                last[state, depth, start] = count
                for i in range(begin, count):
                    slot[code[i]] = -1
                if count > begin:
                    any_left = True
                    # The best first: the rest is passed over as soon as one has no room.
                    sort_labels(begin, count, pool)
        if not any_left:
            break
    # Of each demand the path that processes most, of any number of stages; of equal ones what loses least.
    ends = np.empty(count, dtype=np.int64)
    end_samples = np.empty(count)
    end_price = np.empty(count)
    num_ends = 0
    for depth in range(1, deepest + 1):
        for i in range(first[3, depth, 0], last[3, depth, 0]):
            price = price_of(code[i], counts, duals)
            whole = np.rint(reach - (value_of[i] - price))
            at = slot[code[i]]
            if at < 0:
                at = num_ends
                slot[code[i]] = at
                num_ends += 1
            elif whole <= end_samples[at]:
                continue
            ends[at], end_samples[at], end_price[at] = i, whole, price
    return written(num_ends, ends, end_samples, end_price, cost_limit, deepest, slot, pool)


def stages_in_use(
    types: np.ndarray, times_s: np.ndarray, tail_s: np.ndarray, upper_s: float, longest_tail_s: float
) -> tuple[int, int]:
    """Return how many stages are in time, which come by it, and their types up to the greatest one."""
    number = 0
    while number < len(times_s) and times_s[number] <= upper_s:
        number += 1
    used_types = 0
    for k in range(number):
        if tail_s[k] <= longest_tail_s and types[k] >= used_types:
            used_types = types[k] + 1
    return number, used_types


def demand_codes(
    class_takes: np.ndarray, counts: np.ndarray, most: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return code and field of what each class takes, the field of nothing, and the bits of a field too full.

    A demand is a mixed-radix code, to tell demands apart, and fields of bits whose top bit says too many.
    """
    num_classes, kinds = class_takes.shape
    codes = np.zeros(num_classes, dtype=np.int64)
    fields = np.zeros(num_classes, dtype=np.int64)
    radix, shift, nothing, over = 1, 0, 0, 0
    for k in range(kinds):
        bits = 1
        while (1 << bits) <= counts[k]:
            bits += 1
        nothing += ((1 << bits) - 1 - most[k]) << shift
        over += 1 << (shift + bits)
        for c in range(num_classes):
            codes[c] += class_takes[c, k] * radix
            fields[c] += class_takes[c, k] << shift
        shift += bits + 1
        radix *= counts[k] + 1
    return codes, fields, nothing, over


def price_of(code: int, counts: np.ndarray, duals: np.ndarray) -> float:
    """Return the dual price of the devices that a demand's code says."""
    price = 0.0
    for k in range(len(counts)):
        price += (code % (counts[k] + 1)) * duals[k]
        code //= counts[k] + 1
    return price


def sort_labels(begin: int, end: int, pool: tuple[np.ndarray, ...]) -> None:
    """Sort the labels of a range by value, in place (Shell's sort)."""
    code, field, value_of, parent, option, stop_of = pool
    gap = 1
    while gap < (end - begin) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(begin + gap, end):
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


def written(
    num_ends: int,
    ends: np.ndarray,
    end_samples: np.ndarray,
    end_price: np.ndarray,
    cost_limit: float,
    deepest: int,
    slot: np.ndarray,
    pool: tuple[np.ndarray, ...],
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what `plain_labels` does, of the labels that paths end at; `slot` is emptied."""
    code, _, _, parent, option, stop_of = pool
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
