"""The loops of max-min rates and of the flow simulation: plain Python that numba can also compile unchanged.

Arrays come in named tuples. A slot holds the task that a queue runs now; a task in no queue has a slot of
its own. Active flows hang in one doubly linked list for each resource; entry ``(slot << shift) + i`` is the
i-th resource of the route of the slot's flow. All loops are in this one file, because numba compiles a cached
function anew only when the file of that function changes, not when one that it calls does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

EMPTY = -1
IDLE, DELAYED, FLOWING = 0, 1, 2  # phases of a slot
WAITING, FILLING, FIXED = 0, 1, 2  # marks of a flow while rates are solved
SAME_TIME = 1e-14  # relative; events nearer than this differ by rounding only
NEVER = float("inf")
NO_CAPACITY = 1e-12  # part of a capacity; what is left below this is rounding


class Routes(NamedTuple):
    """Resources, and the routes over them (see `FlowProgram`)."""

    capacity: Any
    indptr: Any
    resources: Any
    usage: Any
    rate_alone: Any


class Tasks(NamedTuple):
    """Columns of the tasks; `after` lists those that wait for a task, `next` the one behind it in a queue."""

    delay_s: Any
    num_bytes: Any
    weight: Any
    priority: Any
    release_s: Any
    route: Any
    slot: Any
    next: Any
    after_indptr: Any
    after: Any


class Slots(NamedTuple):
    """What each slot does now, and the heap of its next events."""

    task: Any
    phase: Any
    route: Any
    weight: Any
    priority: Any
    rate: Any
    new_rate: Any
    left_bytes: Any
    since_s: Any
    mark: Any
    seen: Any
    event_s: Any
    heap: Any
    place: Any


class Shares(NamedTuple):
    """The flows of each resource, and the room to solve for their rates."""

    head: Any
    next: Any
    before: Any
    left: Any
    load: Any
    num_filling: Any
    level: Any
    heap: Any
    place: Any
    seen: Any
    resources: Any
    flows: Any
    seeds: Any


def sift_up(heap: Any, place: Any, key: Any, at: int) -> None:
    """Move an item of a heap up to where its key belongs."""
    item = heap[at]
    value = key[item]
    while at > 0:
        parent = (at - 1) >> 1
        above = heap[parent]
        if key[above] <= value:
            break
        heap[at] = above
        place[above] = at
        at = parent
    heap[at] = item
    place[item] = at


def sift_down(heap: Any, place: Any, key: Any, at: int, size: int) -> None:
    """Move an item of a heap down to where its key belongs."""
    item = heap[at]
    value = key[item]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        below = heap[child]
        if key[below] >= value:
            break
        heap[at] = below
        place[below] = at
        at = child
    heap[at] = item
    place[item] = at


def put(heap: Any, place: Any, key: Any, item: int, size: int) -> int:
    """Add an item to a heap, or move one whose key has changed; return the size."""
    at = place[item]
    if at < 0:
        heap[size] = item
        sift_up(heap, place, key, size)
        return size + 1
    sift_up(heap, place, key, at)
    if place[item] == at:
        sift_down(heap, place, key, at, size)
    return size


def take(heap: Any, place: Any, key: Any, item: int, size: int) -> int:
    """Remove an item from a heap and return the size."""
    at = place[item]
    place[item] = EMPTY
    size -= 1
    if at < size:
        last = heap[size]
        heap[at] = last
        place[last] = at
        if at > 0:
            sift_up(heap, place, key, at)
        if place[last] == at:
            sift_down(heap, place, key, at, size)
    return size


def attach(routes: Any, slots: Any, shares: Any, shift: int, slot: int) -> None:
    """Add a slot's flow to the list of every resource on its route."""
    first = routes.indptr[slots.route[slot]]
    for i in range(first, routes.indptr[slots.route[slot] + 1]):
        resource = routes.resources[i]
        entry = (slot << shift) + i - first
        behind = shares.head[resource]
        shares.next[entry] = behind
        shares.before[entry] = EMPTY
        if behind >= 0:
            shares.before[behind] = entry
        shares.head[resource] = entry


def detach(routes: Any, slots: Any, shares: Any, shift: int, slot: int) -> None:
    """Remove a slot's flow from the lists of its route."""
    first = routes.indptr[slots.route[slot]]
    for i in range(first, routes.indptr[slots.route[slot] + 1]):
        entry = (slot << shift) + i - first
        ahead, behind = shares.before[entry], shares.next[entry]
        if ahead >= 0:
            shares.next[ahead] = behind
        else:
            shares.head[routes.resources[i]] = behind
        if behind >= 0:
            shares.before[behind] = ahead


def component(routes: Any, slots: Any, shares: Any, shift: int, seed: int, stamp: int) -> Any:
    """List the flows and resources that a resource is connected with; return how many of each."""
    shares.resources[0] = seed
    shares.seen[seed] = stamp
    num_resources, num_flows, at = 1, 0, 0
    while at < num_resources:
        entry = shares.head[shares.resources[at]]
        at += 1
        while entry >= 0:
            slot = entry >> shift
            entry = shares.next[entry]
            if slots.seen[slot] == stamp:
                continue
            slots.seen[slot] = stamp
            shares.flows[num_flows] = slot
            num_flows += 1
            route = slots.route[slot]
            for i in range(routes.indptr[route], routes.indptr[route + 1]):
                resource = routes.resources[i]
                if shares.seen[resource] != stamp:
                    shares.seen[resource] = stamp
                    shares.resources[num_resources] = resource
                    num_resources += 1
    return num_flows, num_resources


def exact_level(routes: Any, slots: Any, shares: Any, shift: int, resource: int) -> float:
    """Return the rate of weight 1 at which a resource is full, from sums without accumulated rounding."""
    used, load = 0.0, 0.0
    entry = shares.head[resource]
    while entry >= 0:
        slot = entry >> shift
        usage = routes.usage[routes.indptr[slots.route[slot]] + entry - (slot << shift)]
        if slots.mark[slot] == FIXED:
            used += usage * slots.new_rate[slot]
        elif slots.mark[slot] == FILLING:
            load += usage * slots.weight[slot]
        entry = shares.next[entry]
    left = routes.capacity[resource] - used
    if left <= NO_CAPACITY * routes.capacity[resource]:
        return 0.0
    return left / load


def fix(routes: Any, slots: Any, shares: Any, slot: int, level: float) -> None:
    """Give a flow its rate and take that from every resource on its route."""
    weight = slots.weight[slot]
    rate = level * weight
    slots.new_rate[slot] = rate
    slots.mark[slot] = FIXED
    route = slots.route[slot]
    for i in range(routes.indptr[route], routes.indptr[route + 1]):
        resource = routes.resources[i]
        shares.left[resource] -= routes.usage[i] * rate
        shares.load[resource] -= routes.usage[i] * weight
        shares.num_filling[resource] -= 1


def load_class(
    routes: Any, slots: Any, shares: Any, num_flows: int, num_resources: int, priority: int
) -> Any:
    """Count the flows of one priority on each resource; return their number and that of heaped resources."""
    for n in range(num_resources):
        resource = shares.resources[n]
        shares.load[resource] = 0.0
        shares.num_filling[resource] = 0
        shares.place[resource] = EMPTY
    num_filling = 0
    for n in range(num_flows):
        slot = shares.flows[n]
        if slots.priority[slot] == priority:
            slots.mark[slot] = FILLING
            num_filling += 1
            route = slots.route[slot]
            for i in range(routes.indptr[route], routes.indptr[route + 1]):
                shares.load[routes.resources[i]] += routes.usage[i] * slots.weight[slot]
                shares.num_filling[routes.resources[i]] += 1
    size = 0
    for n in range(num_resources):
        resource = shares.resources[n]
        if shares.num_filling[resource] > 0:
            shares.level[resource] = max(shares.left[resource], 0.0) / shares.load[resource]
            size = put(shares.heap, shares.place, shares.level, resource, size)
    return num_filling, size


def fill_class(routes: Any, slots: Any, shares: Any, shift: int, num_filling: int, size: int) -> None:
    """Raise all flows of one priority together; fix those of each resource that gets full."""
    while num_filling > 0:
        resource = shares.heap[0]
        if shares.num_filling[resource] == 0:
            size = take(shares.heap, shares.place, shares.level, resource, size)
            continue
        if shares.load[resource] > 0.0:  # may be lost in rounding beside much larger weights
            level = shares.left[resource] / shares.load[resource]
            if level > shares.level[resource] * (1.0 + NO_CAPACITY):  # flows of it were fixed since
                shares.level[resource] = level
                sift_down(shares.heap, shares.place, shares.level, 0, size)
                continue
        size = take(shares.heap, shares.place, shares.level, resource, size)
        level = exact_level(routes, slots, shares, shift, resource)
        entry = shares.head[resource]
        while entry >= 0:
            slot = entry >> shift
            if slots.mark[slot] == FILLING:
                fix(routes, slots, shares, slot, level)
                num_filling -= 1
            entry = shares.next[entry]


def solve(routes: Any, slots: Any, shares: Any, shift: int, num_flows: int, num_resources: int) -> None:
    """Set the new rates of a component: the highest priority first, the others of what is left."""
    if num_flows == 1:
        slots.new_rate[shares.flows[0]] = routes.rate_alone[slots.route[shares.flows[0]]]
        return
    for n in range(num_resources):
        shares.left[shares.resources[n]] = routes.capacity[shares.resources[n]]
    num_fixed, last = 0, 0
    for n in range(num_flows):
        slots.mark[shares.flows[n]] = WAITING
    while num_fixed < num_flows:
        priority, found = 0, False
        for n in range(num_flows):
            own = slots.priority[shares.flows[n]]
            if (num_fixed == 0 or own < last) and (not found or own > priority):
                priority, found = own, True
        num_filling, size = load_class(routes, slots, shares, num_flows, num_resources, priority)
        fill_class(routes, slots, shares, shift, num_filling, size)
        last = priority
        num_fixed += num_filling


def apply_rates(slots: Any, shares: Any, num_flows: int, now_s: float, size: int) -> int:
    """Move the end of every flow whose rate has changed; return the size of the heap of events.

    Of a component, only the flows that end first are in the heap: before any other ends, all are solved anew.
    """
    first_s = NEVER
    for n in range(num_flows):
        slot = shares.flows[n]
        rate = slots.new_rate[slot]
        if rate != slots.rate[slot]:
            passed = slots.rate[slot] * (now_s - slots.since_s[slot])
            slots.left_bytes[slot] = max(slots.left_bytes[slot] - passed, 0.0)
            slots.since_s[slot] = now_s
            slots.rate[slot] = rate
            slots.event_s[slot] = now_s + slots.left_bytes[slot] / rate if rate > 0.0 else NEVER
            if slots.place[slot] >= 0:
                size = take(slots.heap, slots.place, slots.event_s, slot, size)
        first_s = min(first_s, slots.event_s[slot])
    if first_s == NEVER:
        return size
    limit_s = first_s * (1.0 + SAME_TIME)
    for n in range(num_flows):
        slot = shares.flows[n]
        if slots.event_s[slot] <= limit_s:
            if slots.place[slot] < 0:
                size = put(slots.heap, slots.place, slots.event_s, slot, size)
        elif slots.place[slot] >= 0:
            size = take(slots.heap, slots.place, slots.event_s, slot, size)
    return size


def begin(tasks: Any, slots: Any, start_s: Any, task: int, now_s: float, size: int) -> int:
    """Start a task that waits for nothing more; return the size of the heap of events."""
    slot = tasks.slot[task]
    start_s[task] = max(now_s, tasks.release_s[task])
    slots.task[slot] = task
    slots.phase[slot] = DELAYED
    slots.event_s[slot] = start_s[task] + tasks.delay_s[task]
    return put(slots.heap, slots.place, slots.event_s, slot, size)


def seed(routes: Any, slots: Any, shares: Any, slot: int, stamp: int, num_seeds: int) -> int:
    """Note the resources of a flow's route, each once a moment: flows connected with them get new rates."""
    route = slots.route[slot]
    for i in range(routes.indptr[route], routes.indptr[route + 1]):
        resource = routes.resources[i]
        if shares.seen[resource] != -stamp:
            shares.seen[resource] = -stamp
            shares.seeds[num_seeds] = resource
            num_seeds += 1
    return num_seeds


def flow_starts(
    routes: Any, tasks: Any, slots: Any, shares: Any, shift: int, slot: int, now_s: float
) -> None:
    """Let the bytes of a slot's task flow, at no rate yet."""
    task = slots.task[slot]
    slots.phase[slot] = FLOWING
    slots.route[slot] = tasks.route[task]
    slots.weight[slot] = tasks.weight[task]
    slots.priority[slot] = tasks.priority[task]
    slots.left_bytes[slot] = tasks.num_bytes[task]
    slots.rate[slot] = 0.0
    slots.since_s[slot] = now_s
    slots.event_s[slot] = NEVER
    attach(routes, slots, shares, shift, slot)


def has_flow(routes: Any, tasks: Any, task: int) -> bool:
    """Return whether a task's bytes occupy any resource."""
    route = tasks.route[task]
    return tasks.num_bytes[task] > 0.0 and route >= 0 and routes.indptr[route] < routes.indptr[route + 1]


def release(tasks: Any, slots: Any, waits: Any, start_s: Any, task: int, now_s: float, size: int) -> int:
    """Start what waited for a task only; return the size of the heap of events."""
    first, last = tasks.after_indptr[task], tasks.after_indptr[task + 1]
    for i in range(first, last + 1):
        behind = tasks.after[i] if i < last else tasks.next[task]
        if behind >= 0:
            waits[behind] -= 1
            if waits[behind] == 0:
                size = begin(tasks, slots, start_s, behind, now_s, size)
    return size


def execute(
    routes: Any, tasks: Any, slots: Any, shares: Any, shift: int, waits: Any, start_s: Any, end_s: Any
) -> Any:
    """Fill start_s and end_s; return how many tasks ended.

    All events of a moment are handled before rates are solved, once for each component of flows and
    resources that one of them touches.
    """
    size, num_done, num_moments = 0, 0, 0
    for task in range(len(waits)):
        if waits[task] == 0:
            size = begin(tasks, slots, start_s, task, 0.0, size)
    while size > 0:
        now_s = slots.event_s[slots.heap[0]]
        limit_s = now_s * (1.0 + SAME_TIME)
        num_moments += 1
        num_seeds = 0
        while size > 0 and slots.event_s[slots.heap[0]] <= limit_s:
            slot = slots.heap[0]
            task = slots.task[slot]
            size = take(slots.heap, slots.place, slots.event_s, slot, size)
            if slots.phase[slot] == DELAYED and has_flow(routes, tasks, task):
                flow_starts(routes, tasks, slots, shares, shift, slot, now_s)
                num_seeds = seed(routes, slots, shares, slot, num_moments, num_seeds)
                continue
            if slots.phase[slot] == FLOWING:
                detach(routes, slots, shares, shift, slot)
                num_seeds = seed(routes, slots, shares, slot, num_moments, num_seeds)
            slots.phase[slot] = IDLE
            end_s[task] = now_s
            num_done += 1
            size = release(tasks, slots, waits, start_s, task, now_s, size)
        for n in range(num_seeds):
            resource = shares.seeds[n]
            if shares.seen[resource] == num_moments or shares.head[resource] < 0:
                continue
            num_flows, num_resources = component(routes, slots, shares, shift, resource, num_moments)
            solve(routes, slots, shares, shift, num_flows, num_resources)
            size = apply_rates(slots, shares, num_flows, now_s, size)
    return num_done


def transpose(indptr: Any, indices: Any, after_indptr: Any, after: Any, fill: Any) -> None:
    """List the tasks that wait for each task (CSR); `after_indptr` and `fill` come in as zeros."""
    num_tasks = len(indptr) - 1
    for i in range(len(indices)):
        after_indptr[indices[i] + 1] += 1
    for task in range(num_tasks):
        after_indptr[task + 1] += after_indptr[task]
        fill[task] = after_indptr[task]
    for task in range(num_tasks):
        for i in range(indptr[task], indptr[task + 1]):
            before = indices[i]
            after[fill[before]] = task
            fill[before] += 1


def chain(slot: Any, last: Any, next_task: Any, waits: Any) -> None:
    """Link each task to the one behind it in its queue; `last` and `next_task` come in as -1."""
    for task in range(len(slot)):
        before = last[slot[task]]
        if before >= 0:
            next_task[before] = task
            waits[task] += 1
        last[slot[task]] = task


def longest_path(tasks: Any, waits: Any, duration_s: Any, start_s: Any, stack: Any) -> float:
    """Move each start behind all that its task waits for; return the last end. Starts come in as releases."""
    size, end_s = 0, 0.0
    for task in range(len(waits)):
        if waits[task] == 0:
            stack[size] = task
            size += 1
    while size > 0:
        size -= 1
        task = stack[size]
        own_end_s = start_s[task] + duration_s[task]
        end_s = max(end_s, own_end_s)
        first, last = tasks.after_indptr[task], tasks.after_indptr[task + 1]
        for i in range(first, last + 1):
            behind = tasks.after[i] if i < last else tasks.next[task]
            if behind >= 0:
                start_s[behind] = max(start_s[behind], own_end_s)
                waits[behind] -= 1
                if waits[behind] == 0:
                    stack[size] = behind
                    size += 1
    return end_s
