"""Lowered pipelines against an event simulation that follows the frameworks' own loops, and closed forms.

The oracle shares nothing with the product: each stage is a SimPy process that runs the loop of the named
source, transfers are rendezvous of a posted send and a posted receive on a link that works in order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import simpy

from foreshard.graph.pipeline import pipeline_program
from foreshard.graph.pipeline_schedules import in_flight
from foreshard.sim import critical_path

F, B, W = "F", "B", "W"
HOLD, FREE = "hold", "free"


def gpipe_loop(stage, p, m):
    """All forwards, then all backwards, blocking receives and sends (ScheduleGPipe of torch)."""
    for k in range(m):
        yield "call", HOLD, [("recv", F, stage, k)]
        yield "compute", F, stage, k
        yield "call", HOLD, [("send", F, stage, k)] + ([("recv", B, stage, 0)] if k == m - 1 else [])
    for k in range(m):
        if k:
            yield "call", HOLD, [("recv", B, stage, k)]
        yield "compute", B, stage, k
        yield "call", HOLD, [("send", B, stage, k)]


def megatron_1f1b_loop(stage, p, m):
    """Loop of forward_backward_pipelining_without_interleaving."""
    warm_up = min(p - stage - 1, m)
    for k in range(warm_up):
        yield "call", HOLD, [("recv", F, stage, k)]
        yield "compute", F, stage, k
        yield "call", HOLD, [("send", F, stage, k)]
    if m > warm_up:
        yield "call", HOLD, [("recv", F, stage, warm_up)]
    for i in range(m - warm_up):
        yield "compute", F, stage, warm_up + i
        yield "call", HOLD, [("send", F, stage, warm_up + i), ("recv", B, stage, i)]
        yield "compute", B, stage, i
        receive = [] if i == m - warm_up - 1 else [("recv", F, stage, warm_up + i + 1)]
        yield "call", HOLD, [("send", B, stage, i), *receive]
    for i in range(warm_up):
        yield "call", HOLD, [("recv", B, stage, m - warm_up + i)]
        yield "compute", B, stage, m - warm_up + i
        yield "call", HOLD, [("send", B, stage, m - warm_up + i)]


def megatron_zb_h1_loop(stage, p, m):
    """1F1B loop with weight gradients delayed by the stage number (zb-h1-quick-start of sail-sg).

    The gradient of the input leaves before any weight gradient (exact semantics), so where a weight gradient
    follows, the next activation is received after it, on its own.
    """
    warm_up = min(p - stage - 1, m)
    for k in range(warm_up):
        yield "call", HOLD, [("recv", F, stage, k)]
        yield "compute", F, stage, k
        yield "call", HOLD, [("send", F, stage, k)]
    if m > warm_up:
        yield "call", HOLD, [("recv", F, stage, warm_up)]
    for i in range(m):
        if i < m - warm_up:
            yield "compute", F, stage, warm_up + i
            yield "call", HOLD, [("send", F, stage, warm_up + i), ("recv", B, stage, i)]
        else:
            yield "call", HOLD, [("recv", B, stage, i)]
        yield "compute", B, stage, i
        receive = [("recv", F, stage, warm_up + i + 1)] if i < m - warm_up - 1 else []
        if i < stage:
            yield "call", HOLD, [("send", B, stage, i), *receive]
        else:
            yield "call", HOLD, [("send", B, stage, i)]
            yield "compute", W, stage, i - stage
            yield "call", HOLD, receive
    for k in range(max(m - stage, 0), m):
        yield "compute", W, stage, k


def megatron_interleaved_loop(stage, p, m, v, group, overlap_p2p):
    """Loop of forward_backward_pipelining_with_interleaving without warm-up overlap."""
    table = [(c, k) for g in range(0, m, group) for c in range(v) for k in range(g, min(g + group, m))]
    total = m * v
    warm_up = min(total, 2 * (p - stage - 1) + (v - 1) * group)
    steady = total - warm_up

    def visit(kind, k):
        chunk, micro_batch = table[k]
        return kind, (chunk if kind == F else v - 1 - chunk) * p + stage, micro_batch

    def send(kind, k):
        return [("send", *visit(kind, k))]

    def receive(kind, k):
        """Megatron's recv_tensor_from_previous_stage(k - 1)."""
        if k >= total:
            return []
        if stage != (0 if kind == F else p - 1):
            return [("recv", *visit(kind, k))]
        chunk, micro_batch = table[k - p]  # aligned with the stage at the other end
        if k < p or chunk == v - 1:
            return []
        return [("recv", kind, (chunk + 1 if kind == F else v - 2 - chunk) * p + stage, micro_batch)]

    yield "call", HOLD, receive(F, 0)
    for k in range(warm_up):
        yield "compute", *visit(F, k)
        last = k == warm_up - 1 and steady > 0
        gradient = receive(B, 0) if last else []
        yield "call", HOLD, send(F, k) + receive(F, k + 1) + (gradient if not overlap_p2p else [])
        yield "call", FREE, gradient if overlap_p2p else []
    for k in range(steady):
        yield "compute", *visit(F, warm_up + k)
        next_forward = receive(F, warm_up + k + 1)
        if overlap_p2p:
            yield "call", FREE, send(F, warm_up + k) + next_forward
            yield "compute", *visit(B, k)
            yield "call", FREE, send(B, k) + receive(B, k + 1)
        else:
            yield "compute", *visit(B, k)
            yield "call", HOLD, send(F, warm_up + k) + send(B, k) + next_forward + receive(B, k + 1)
    if steady == 0:
        yield "call", HOLD, receive(B, 0)
    for k in range(steady, total):
        yield "compute", *visit(B, k)
        yield "call", HOLD, send(B, k) + receive(B, k + 1)


class Cluster:
    """Runs the loops of all stages; a free receive counts as posted from the start."""

    def __init__(self, loops, times, sends, p, v, all_free=False):
        self.env = simpy.Environment()
        self.times, self.sends, self.p, self.num_virtual = times, sends, p, p * v
        self.posted = defaultdict(self.env.event)
        self.done = defaultdict(self.env.event)
        self.computed = {}
        self.queues = {(i, kind): simpy.Store(self.env) for i in range(p) for kind in (F, B)}
        self.all_free = all_free
        actions = [list(loop) for loop in loops]
        for action in itertools.chain(*actions):
            if action[0] == "call":
                for verb, *transfer in action[2]:
                    if verb == "recv" and (all_free or action[1] == FREE):
                        self.posted["recv", *transfer].succeed()
        for link in self.queues:
            self.env.process(self.link(link))
        stages = [self.env.process(self.stage(i, loop)) for i, loop in enumerate(actions)]
        self.env.run(self.env.all_of(stages))
        self.makespan_s = self.env.now

    def crosses(self, verb, kind, virtual):
        other = virtual + (1 if (verb == "send") == (kind == F) else -1)
        return 0 <= other < self.num_virtual and self.p > 1

    def link(self, link):
        stage, kind = link
        while True:
            transfer = yield self.queues[link].get()
            yield self.posted["recv", *transfer]
            boundary = stage if kind == F else (stage - 1) % self.p
            yield self.env.timeout(self.sends[kind][boundary])
            self.done[transfer].succeed()

    def post(self, verb, kind, virtual, micro_batch):
        if verb == "send":  # a transfer is named by the op that needs it
            transfer = kind, virtual + (1 if kind == F else -1), micro_batch
            self.queues[virtual % self.p, kind].put(transfer)
            return transfer
        transfer = kind, virtual, micro_batch
        if not self.posted["recv", *transfer].triggered:
            self.posted["recv", *transfer].succeed()
        return transfer

    def stage(self, stage, loop):
        for what, *rest in loop:
            if what == "compute":
                kind, virtual, micro_batch = rest
                if kind != W and self.crosses("recv", kind, virtual):
                    yield self.done[kind, virtual, micro_batch]
                yield self.env.timeout(self.times[kind][virtual, micro_batch])
                self.computed[kind, virtual, micro_batch] = self.env.now
                continue
            hold, ops = rest
            transfers = [self.post(*op) for op in ops if self.crosses(*op[:3])]
            if hold == HOLD and not self.all_free:
                yield self.env.all_of([self.done[transfer] for transfer in transfers])


def random_times(rng, p, v, m):
    shape = (p * v, m)
    times = {kind: rng.uniform(0.5, 2.0, shape) for kind in (F, B, W)}
    return times, {kind: rng.uniform(0.0, 0.7, p) for kind in (F, B)}


def lowered(schedule, times, sends, p, v, m, **options):
    def table(kind):  # [virtual, m] -> [stage, chunk, m]
        return times[kind].reshape(v, p, m).transpose(1, 0, 2)

    boundaries = slice(None) if v > 1 or p == 1 else slice(p - 1)
    split = schedule == "zb-h1"
    backward = (
        {"backward_input_s": table(B), "backward_weight_s": table(W)} if split else {"backward_s": table(B)}
    )
    return pipeline_program(
        schedule=schedule,
        num_micro_batches=m,
        forward_s=table(F),
        send_forward_s=sends[F][boundaries],
        send_backward_s=sends[B][boundaries],
        **backward,
        **options,
    )


LOOPS = {"gpipe": gpipe_loop, "1f1b": megatron_1f1b_loop, "zb-h1": megatron_zb_h1_loop}


def ends(program, timeline):
    """End of each op by (kind, virtual stage, micro-batch)."""
    num_stages = len(program.resource_names) // 3
    names = {0: F, 1: B, 2: B, 3: W}
    keys = zip(program.kind, program.chunk * num_stages + program.stage, program.micro_batch, strict=True)
    return {
        (names[kind], virtual, k): end
        for (kind, virtual, k), end in zip(keys, timeline.end_s, strict=True)
        if kind in names
    }


def agree(program, cluster):
    timeline = critical_path.run(program)
    assert timeline.makespan_s == pytest.approx(cluster.makespan_s, rel=1e-12)
    assert ends(program, timeline) == pytest.approx(cluster.computed, rel=1e-12)


@pytest.mark.parametrize("overlap_p2p", [False, True])
@pytest.mark.parametrize("schedule", list(LOOPS))
def test_plain_schedules_equal_the_event_simulation(schedule, overlap_p2p):
    rng = np.random.default_rng(1)
    for p, m in itertools.product(range(1 + (schedule == "gpipe"), 5), range(1, 7)):
        times, sends = random_times(rng, p, 1, m)
        cluster = Cluster([LOOPS[schedule](i, p, m) for i in range(p)], times, sends, p, 1, overlap_p2p)
        agree(lowered(schedule, times, sends, p, 1, m, overlap_p2p=overlap_p2p), cluster)


@pytest.mark.parametrize("mode", ["blocking", "steady", "everywhere"])
def test_interleaved_equals_the_event_simulation(mode):
    rng = np.random.default_rng(2)
    options = {"overlap_p2p": mode != "blocking", "overlap_warm_up": mode == "everywhere"}
    sizes = [(2, 2, 2, 2), (2, 2, 4, 2), (2, 3, 6, 2), (3, 2, 3, 3), (3, 2, 6, 3), (3, 3, 6, 3), (4, 2, 4, 4)]
    larger_groups = [(2, 2, 4, 4), (2, 3, 5, 3), (2, 2, 6, 4), (3, 2, 7, 4), (3, 3, 8, 5), (4, 2, 13, 8)]
    for p, v, m, group in sizes + larger_groups:
        times, sends = random_times(rng, p, v, m)
        loops = [megatron_interleaved_loop(i, p, m, v, group, options["overlap_p2p"]) for i in range(p)]
        cluster = Cluster(loops, times, sends, p, v, mode == "everywhere")
        agree(lowered("interleaved", times, sends, p, v, m, group_size=group, **options), cluster)


def even(schedule, p, m, v=1, **times_s):
    program = pipeline_program(
        schedule=schedule,
        num_micro_batches=m,
        overlap_p2p=True,
        **{key: np.full((p, v), value / v) for key, value in times_s.items()},
    )
    return critical_path.run(program).makespan_s


@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (2, 5), (4, 4), (4, 9), (8, 3), (8, 32)])
def test_even_stages_take_the_published_time(p, m):
    """Narayanan et al. 2021, section 2.2: (p - 1)(f + b) of bubble."""
    for schedule in ("gpipe", "1f1b"):
        assert even(schedule, p, m, forward_s=1.0, backward_s=2.5) == pytest.approx((m + p - 1) * 3.5)


@pytest.mark.parametrize("p, m, v", [(2, 2, 2), (2, 8, 3), (4, 4, 2), (4, 8, 4), (8, 16, 2)])
def test_even_interleaving_divides_the_bubble(p, m, v):
    """Narayanan et al. 2021, section 2.2: (p - 1)(f + b)/v of bubble when p divides m."""
    expected = m * 3.5 + (p - 1) * 3.5 / v
    assert even("interleaved", p, m, v, forward_s=1.0, backward_s=2.5) == pytest.approx(expected)


@pytest.mark.parametrize("p, m", [(1, 2), (2, 2), (2, 7), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("f, b, w", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.5, 1.0, 0.5), (1.0, 2.0, 0.0)])
def test_zb_h1_bubble(p, m, f, b, w):
    """Qi et al. 2023 (arXiv 2401.10241): (p - 1)(f + b - w) of bubble; exact only for w <= f and w <= b."""
    time_s = even("zb-h1", p, m, forward_s=f, backward_input_s=b, backward_weight_s=w)
    assert time_s == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))


@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 16, 3)])
def test_interleaved_first_stage_holds_what_korthikanti_states(p, m, v):
    """Korthikanti et al. 2022, section 4.2.3: (1 + (p - 1)/(p v)) times the layers of the whole model."""
    held = in_flight("interleaved", num_stages=p, num_micro_batches=m, num_chunks=v)[0]
    assert held / (p * v) == pytest.approx(1 + (p - 1) / (p * v))


def orders_of_a_stage(m, most_held):
    """All orders of m forwards and m backwards, forward k before backward k, at most most_held between."""
    ops = [(kind, k) for kind in (F, B) for k in range(m)]
    for order in itertools.permutations(ops):
        held, peak, seen = 0, 0, set()
        for op in order:
            if op[0] == B and (F, op[1]) not in seen:
                break
            seen.add(op)
            held += 1 if op[0] == F else -1
            peak = max(peak, held)
        else:
            if peak <= most_held:
                yield order


def order_makespan(orders, f, b):
    """Time of given orders, stage by stage, or None if they wait for each other."""
    p, end, free, heads = len(orders), {}, [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for i, order in enumerate(orders):
            while heads[i] < len(order):
                kind, k = order[heads[i]]
                before = i - 1 if kind == F else i + 1
                if 0 <= before < p and (kind, before, k) not in end:
                    break
                ready = end[kind, before, k] if 0 <= before < p else 0.0
                free[i] = max(free[i], ready) + (f if kind == F else b)[i]
                end[kind, i, k] = free[i]
                heads[i] += 1
                moved = True
    return max(free) if all(h == len(o) for h, o in zip(heads, orders, strict=True)) else None


@pytest.mark.parametrize("p, m", [(2, 2), (2, 3), (3, 2)])
def test_no_order_of_equal_memory_beats_1f1b_and_no_order_at_all_beats_gpipe_on_even_stages(p, m):
    f, b = [1.0] * p, [2.0] * p
    for schedule, held in (("1f1b", [min(m, p - i) for i in range(p)]), ("gpipe", [m] * p)):
        every = itertools.product(*(list(orders_of_a_stage(m, most)) for most in held))
        best_s = min(filter(None, (order_makespan(orders, f, b) for orders in every)))
        assert even(schedule, p, m, forward_s=1.0, backward_s=2.0) == pytest.approx(best_s)
