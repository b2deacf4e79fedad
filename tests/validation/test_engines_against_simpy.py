"""A SimPy model of the ranks of one pipeline against the engines.

It takes the single tasks from the price table and knows Megatron's 1F1B loop: blocking messages that two
neighbours start together, gradient buckets on a stream of their own that slow the compute beside them,
one optimizer after all gradients. It shares no lowering, schedule or executor with the engines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simpy

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.event.engine import event_times
from foreshard.predict.graph.engine import graph_times
from foreshard.predict.graph.prices import group_prices
from foreshard.predict.tasks.collectives import gradient_sync_s
from foreshard.spec.plan import Group, Plan, Stage

CONSTANTS = replace(TrainingConstants(), jitter=0.0)
FORWARD, BACKWARD = 0, 1  # rows of the price table


class Pipeline:
    """The stages of one group as SimPy processes."""

    def __init__(self, prices, *, overlap: bool, contention: float, bucket_elements: float):
        self.env = simpy.Environment()
        self.prices, self.overlap, self.contention = prices, overlap, contention
        self.bucket_elements = bucket_elements
        self.num_stages, self.count = prices.num_stages, prices.num_micro_batches
        self.seconds = prices.op_s[:, :, 0, :]
        self.arrived: dict[tuple, simpy.Event] = {}
        self.gradients = [self.env.event() for _ in range(self.num_stages)]

    def run(self) -> float:
        self.done = self.env.all_of([self.env.process(self.stage(s)) for s in range(self.num_stages)])
        self.env.run(self.done)
        return self.env.now

    def event(self, *key) -> simpy.Event:
        return self.arrived.setdefault(key, self.env.event())

    def message(self, s: int, way: str, k: int, end: str):
        """One end of message k over the boundary after stage s: it lasts from when both ends are there."""
        mine, theirs = (
            self.event(s, way, k, end),
            self.event(s, way, k, "send" if end == "receive" else "receive"),
        )
        mine.succeed()
        yield mine & theirs
        yield self.env.timeout(self.prices.send_s[s])

    def call(self, *messages):
        yield self.env.all_of([self.env.process(self.message(*message)) for message in messages])

    def receive_forward(self, s, k):
        return [(s - 1, "f", k, "receive")] if s > 0 else []

    def send_forward(self, s, k):
        return [(s, "f", k, "send")] if s < self.num_stages - 1 else []

    def receive_backward(self, s, k):
        return [(s, "b", k, "receive")] if s < self.num_stages - 1 else []

    def send_backward(self, s, k):
        return [(s - 1, "b", k, "send")] if s > 0 else []

    def stage(self, s: int):
        warm = min(self.count, self.num_stages - 1 - s)
        for k in range(warm):
            yield from self.call(*self.receive_forward(s, k))
            yield from self.forward(s, k)
            yield from self.call(*self.send_forward(s, k))
        steady = self.count - warm
        if steady:
            yield from self.call(*self.receive_forward(s, warm))
        for i in range(steady):
            yield from self.forward(s, warm + i)
            yield from self.call(*self.send_forward(s, warm + i), *self.receive_backward(s, i))
            yield from self.backward(s, i)
            following = self.receive_forward(s, warm + i + 1) if i < steady - 1 else []
            yield from self.call(*self.send_backward(s, i), *following)
        for k in range(steady, self.count):
            yield from self.call(*self.receive_backward(s, k))
            yield from self.backward(s, k)
            yield from self.call(*self.send_backward(s, k))
        yield from self.finish(s)

    def forward(self, s, k):
        yield self.env.timeout(self.seconds[FORWARD, s, int(k == self.count - 1)])

    def backward(self, s, k):
        if k < self.count - 1:
            yield self.env.timeout(self.seconds[BACKWARD, s, 0])
            return
        # The last backward, bucket by bucket; a stream reduces them one at a time.
        units, busy_until = self.prices.units[s][0], 0.0
        for share, reduce_s in self.buckets(s):
            length = self.seconds[BACKWARD, s, 1] * share
            beside = min(max(0.0, busy_until - self.env.now), length) if self.overlap else 0.0
            yield self.env.timeout(length + self.contention * beside)
            busy_until = max(busy_until, self.env.now) + reduce_s
        assert len(units.params) > 0
        self.env.process(self.reduce(s, busy_until))

    def reduce(self, s, until):
        yield self.env.timeout(max(0.0, until - self.env.now))
        self.gradients[s].succeed()

    def buckets(self, s):
        """Pairs of (share of the backward, seconds of the reduction), last layer first."""
        units, machine = self.prices.units[s][0], self.prices.machines[s]
        whole = s > 0 or not self.overlap
        bucket, share, out = 0.0, 0.0, []
        for i in reversed(range(len(units.params))):
            bucket += units.params[i]
            share += units.backward[i]
            if (bucket >= self.bucket_elements and not whole) or i == 0:
                out.append((share, float(gradient_sync_s(np.array([bucket]), np.zeros(1), machine)[0][0])))
                bucket = share = 0.0
        return out

    def finish(self, s):
        yield self.env.all_of(self.gradients)
        yield self.env.timeout(self.prices.optimizer_s[s])


def plan_of(model, cuts: list[tuple[int, int]], *, tp: int, dp: int, count: int, overlap: bool) -> Plan:
    width = tp * dp
    stages = tuple(
        Stage(ranks=tuple(range(i * width, (i + 1) * width)), layers=(cut,), tp=tp, zero=0)
        for i, cut in enumerate(cuts)
    )
    group = Group(share=count * dp, stages=stages, micro_batch=dp, schedule="1f1b", sp=tp > 1)
    return Plan(
        global_batch=count * dp,
        seq_len=4096,
        groups=(group,),
        framework="megatron-core",
        comm={"grad_overlap": overlap, "param_gather_overlap": False},
    )


CASES = {
    "even": ([(0, 9), (9, 17), (17, 25), (25, 34)], 8, False),
    "long last stage": ([(0, 6), (6, 12), (12, 18), (18, 34)], 8, False),
    "long first stage, overlap": ([(0, 20), (20, 25), (25, 30), (30, 34)], 4, True),
    "alternating, overlap": ([(0, 14), (14, 17), (17, 30), (30, 34)], 6, True),
    "one stage, overlap": ([(0, 34)], 2, True),
}


@pytest.mark.parametrize("name", CASES)
def test_graph_is_what_simpy_simulates(name):
    case, simulated_s = simulated(*CASES[name])
    assert sum(graph_parts(case).values()) == pytest.approx(simulated_s, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_event_is_what_simpy_simulates(name):
    case, simulated_s = simulated(*CASES[name])
    batch = build_batch([case], CONSTANTS)
    parts, *_ = event_times(case, batch, network="closed-form", timeline=False, compiled=False)
    assert sum(parts.values()) == pytest.approx(simulated_s, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_within_three_percent_of_simpy(name):
    case, simulated_s = simulated(*CASES[name])
    assert float(step_times(build_batch([case], CONSTANTS)).total[0]) == pytest.approx(simulated_s, rel=0.03)


def graph_parts(case):
    return graph_times(case, build_batch([case], CONSTANTS), timeline=False)[0]


def simulated(cuts, count, overlap):
    """Return the case and the seconds that SimPy takes for its step."""
    model = api.load_model("llama3-8b")
    width = 16 if len(cuts) > 1 else 32
    cluster = api.load_cluster(f"{width * len(cuts) // 8}x8xh100-sxm@800Gb/s")
    plan = plan_of(model, cuts, tp=2, dp=width // 2, count=count, overlap=overlap)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    (prices,) = group_prices(case, build_batch([case], CONSTANTS))
    pipeline = Pipeline(
        prices,
        overlap=overlap,
        contention=CONSTANTS.fsdp_contention,
        bucket_elements=max(40e6, 1e6 * float(prices.machines[0].rank.dp)),
    )
    return case, pipeline.run()


class Sharded:
    """One rank of a fully sharded model: compute, and one wire that gathers ahead and scatters behind."""

    def __init__(self, prices, contention: float):
        self.env = simpy.Environment()
        self.wire = simpy.Resource(self.env)
        self.prices, self.pieces = prices, []
        units = prices.units[0][0]
        for k in range(prices.num_micro_batches):
            seconds = prices.op_s[:, 0, 0, int(k == prices.num_micro_batches - 1)]
            device = prices.device_s[:, 0, 0]  # what launches add to an op is not slowed
            for i in range(len(units.params)):
                self.add(
                    seconds[FORWARD] * units.forward[i],
                    device[FORWARD] * units.forward[i],
                    units.gather_s[i],
                    0.0,
                    units.copy_weights_s[i],
                    contention,
                )
            for i in reversed(range(len(units.params))):
                copies = units.copy_gradients_s[i] + units.copy_again_s[i]
                self.add(
                    seconds[BACKWARD] * units.backward[i],
                    device[BACKWARD] * units.backward[i],
                    units.regather_s[i],
                    units.scatter_s[i],
                    copies,
                    contention,
                )
        self.gathered = [self.env.event() for _ in range(len(self.pieces) + 2)]
        self.scattered = [self.env.event() for _ in self.pieces]

    def add(self, busy_s, device_s, gather_s, scatter_s, copies_s, contention):
        slowed = contention * min(device_s, gather_s + scatter_s)
        self.pieces.append((busy_s + copies_s + slowed, gather_s, scatter_s))

    def run(self) -> float:
        self.env.process(self.move(self.gathered[0], self.pieces[0][1]))
        self.env.process(self.move(self.gathered[1], self.pieces[1][1]))
        self.env.run(self.env.process(self.compute()))
        return self.env.now

    def move(self, done, seconds):
        if seconds > 0.0:
            with self.wire.request() as turn:
                yield turn
                yield self.env.timeout(seconds)
        done.succeed()

    def compute(self):
        for i, (seconds, _, scatter_s) in enumerate(self.pieces):
            yield self.gathered[i]
            if i >= 2:
                yield self.scattered[i - 2]  # one scatter may be on its way, a second waits for its buffer
            yield self.env.timeout(seconds)
            self.env.process(self.move(self.scattered[i], scatter_s))
            if i + 2 < len(self.pieces):
                self.env.process(self.move(self.gathered[i + 2], self.pieces[i + 2][1]))
        yield self.env.all_of(self.scattered)
        yield self.env.timeout(self.prices.optimizer_s[0])


@pytest.mark.parametrize("rate", ["3200Gb/s", "200Gb/s"])
def test_sharded_graph_is_what_simpy_simulates(rate):
    """Hidden behind compute on the fast network, the pace itself on the slow one."""
    model, cluster = api.load_model("llama3-8b"), api.load_cluster(f"4x8xh100-sxm@{rate}")
    plan = api.make_plan(model, cluster, seq_len=4096, global_batch=96, zero=3, framework="composer")
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    (prices,) = group_prices(case, build_batch([case], CONSTANTS))
    parts = graph_parts(case)
    assert sum(parts.values()) == pytest.approx(Sharded(prices, CONSTANTS.fsdp_contention).run(), rel=1e-9)
    exposed = parts["data_comm"] / sum(parts.values())
    assert exposed > 0.5 if rate == "200Gb/s" else exposed < 0.3
