"""Processor time of a controller's decision: median and worst step, warm, over sticky random states.

`decision` is all that an event costs in a run: estimates, queues, lessons, the slot, the second look at its
finalists with the micro-batches of a run, shares, the plan. `slot` is the search alone. All is run thrice
and the least of each taken: what is the same every time is ours, the rest is of other processes.

Run: python bench/bench_controller.py [steps] [workers ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from foreshard.control.controller import Controller
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.slot_search import solve_slot
from foreshard.control.slots import Budget, Chain, State
from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts
from foreshard.runtime.adaptive.pass_times import PassTimes, StepTiming
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan import Group, Plan, Stage

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
COUNTS = [int(one) for one in sys.argv[2:]] or [4, 8, 16, 64]
WARM_UP, BATCH, LAYERS, MICRO_BATCH = 50, 512, 34, 4
SHARED = 16
"""Samples of a micro-batch that several workers split, or more where they are more."""
REPEATS = 3
SPEEDS = {"fast": 4.0, "middling": 2.0, "slow": 1.0}


def made(workers: int) -> tuple[Chain, np.ndarray, StepTiming]:
    """Return a chain on workers of speeds 1, 2 and 4, their speeds, and what times finalists."""
    names = tuple(list(SPEEDS)[rank % len(SPEEDS)] for rank in range(workers))
    lab = Lab(
        clock="cpu",
        slow=(1.0,) * workers,
        devices=names,
        bandwidth_bytes_per_s=1e10,
        latency_s=1e-5,
        memory_bytes=(1.6e10,) * workers,
    )
    tables = {name: (layer(speed),) * LAYERS for name, speed in SPEEDS.items()}
    costs = MeasuredCosts(
        layers=tables["fast"],
        tables=tables,
        slow=dict.fromkeys(SPEEDS, 1.0),
        spread=(1.0, 1.0),
        clock="cpu",
        tokens_per_sample=1.0,
        path="",
    )
    passes, known = PassTimes.measured(costs, lab.cluster()), costs.layers
    chain = Chain(
        layer_s=passes.layer_s(MICRO_BATCH),
        boundary_bytes=np.array([2 * one.boundary_bytes_per_sample for one in known[:-1]]),
        sync_bytes=np.array([one.parameter_bytes for one in known]),
        state_bytes=np.array([2 * one.parameter_bytes + one.state_bytes for one in known]),
        saved_bytes=np.array([one.saved_bytes_per_sample for one in known]),
        memory_bytes=np.full(workers, 1.6e10),
    )
    speed = np.array([SPEEDS[name] for name in names])
    return chain, speed, StepTiming(passes, chain, MICRO_BATCH, BATCH)


def layer(speed: float) -> LayerCost:
    """Return what a layer costs on a device."""
    return LayerCost(
        forward_s=(0.001 / speed, 0.003 / speed),
        backward_s=(0.003 / speed, 0.006 / speed),
        backward_input_s=(0.0, 0.003 / speed),
        optimizer_s=0.0,
        parameter_bytes=2e7,
        state_bytes=1.2e8,
        saved_bytes_per_sample=1e7,
        boundary_bytes_per_sample=5e6,
    )


def state(speed: np.ndarray, slow: np.ndarray, rate: float, *, egress: bool) -> State:
    """Return the workers as they are now."""
    size = len(speed)
    site = np.arange(size) * 2 // size
    apart = site[:, None] != site[None, :]
    return State(
        speed=slow,
        available=np.ones(size, bool),
        bandwidth_bytes_per_s=np.where(apart, rate, 1e10),
        latency_s=np.where(apart, 1e-3, 1e-5),
        usd_per_h=speed,
        busy_w=np.full(size, 300.0),
        idle_w=np.full(size, 80.0),
        usd_per_byte=np.where(apart, 1e-11, 0.0) * egress,
        kg_per_j=np.full(size, 1e-7),
    )


class Days:
    """Sticky states: one worker at a time is four times slower, the link between sites swings tenfold."""

    def __init__(self, workers: int, levels: int = 6):
        self.rng, self._levels = np.random.default_rng(0), levels
        self.slow, self.rate = np.ones(workers), 1e9

    def turn(self) -> None:
        """Go on by a step; in one of ten something changes."""
        if self.rng.random() > 0.9:
            self.slow = np.ones(len(self.slow))
            self.slow[self.rng.integers(len(self.slow))] = 0.25
            self.rate = 1e9 * 10 ** -(self.rng.integers(self._levels) / (self._levels - 1))


def slots(workers: int, *, egress: bool, energy: bool) -> tuple[list[float], int]:
    """Return milliseconds of every slot and the number of groups in the end."""
    chain, speed, _ = made(workers)
    budgets = [Budget(name="money", kind="usd", limit=1.0)]
    if energy:
        budgets.append(Budget(name="energy", kind="joule", limit=1e4))
    memo, running, times, days = SearchCache(), None, [], Days(workers)
    for slot in range(STEPS + WARM_UP):
        days.turn()
        weights = {"money": float(days.rng.uniform(0, 300)), "energy": float(days.rng.uniform(0, 1e-3))}
        began = time.process_time()
        running = solve_slot(
            chain,
            state(speed, days.slow, days.rate, egress=egress),
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            time_weight=1.0,
            cost_weights=weights,
            budgets=budgets,
            running=running,
            cache=memo,
            max_stages=4,
        )
        if slot >= WARM_UP:
            times.append(1e3 * (time.process_time() - began))
    return times, len(running.structure.groups)


def replicas(workers: int) -> Plan:
    """Return the plan of a replica on every worker."""
    groups = tuple(
        Group(
            share=BATCH // workers,
            micro_batch=MICRO_BATCH,
            stages=(Stage(ranks=(rank,), layers=((0, LAYERS),)),),
        )
        for rank in range(workers)
    )
    return Plan(global_batch=BATCH, seq_len=1, groups=groups)


def joint(workers: int) -> Plan:
    """Return the plan of one pipeline of two stages, whose workers split every micro-batch."""
    half, middle = workers // 2, LAYERS // 2
    stages = (
        Stage(ranks=tuple(range(half)), layers=((0, middle),)),
        Stage(ranks=tuple(range(half, workers)), layers=((middle, LAYERS),)),
    )
    group = Group(share=BATCH, micro_batch=max(SHARED, half), stages=stages)
    return Plan(global_batch=BATCH, seq_len=1, groups=(group,))


def decisions(workers: int, *, longest: int, plan: Plan, closely: bool) -> tuple[list[float], int]:
    """Return milliseconds of every decision of a controller that is told steps, and its changes."""
    chain, speed, timed = made(workers)
    days, times = Days(workers), []
    controller = Controller(
        chain,
        state(speed, days.slow, days.rate, egress=True),
        plan,
        max_stages=longest,
        budgets=(Budget(name="money", kind="usd", limit=1.5e-3 * workers / 4),),
        timed=timed if closely else None,
    )
    for step in range(STEPS + WARM_UP):
        days.turn()
        event = measured(chain, state(speed, days.slow, days.rate, egress=True), controller, step)
        began = time.process_time()
        controller.on(event)
        if step >= WARM_UP:
            times.append(1e3 * (time.process_time() - began))
    return times, controller.reconfigurations


def measured(chain: Chain, now: State, controller: Controller, step: int) -> StepMeasured:
    """Return what a step under a controller's plan tells."""
    plan, reading = controller.plan, controller.reading
    structure, size = structure_of(plan, reading), plan.groups[0].micro_batch
    real = evaluate(chain, now, structure, shares_of(plan, reading), micro_batch=size, batch=BATCH)
    size, far = 2.0**30, chain.num_workers - 1
    rate, delay = float(now.bandwidth_bytes_per_s[0, far]), float(now.latency_s[0, far])
    return StepMeasured(
        step=step,
        time_s=real.time_s,
        relative_speed={worker: float(now.speed[worker]) for worker in structure.workers},
        costs={"money": real.costs["usd"]},
        link_s={(0, far): (size, size / rate + delay)},
    )


def tell(name: str, run: Callable[[], tuple[list[float], int]], what: str) -> None:
    """Run it and print a row."""
    ran = [run() for _ in range(REPEATS)]
    times = np.min([times for times, _ in ran], axis=0)
    print(
        f"{name}: median {np.median(times):7.2f} ms, p90 {np.quantile(times, 0.9):7.2f} ms, "
        f"worst {times.max():7.2f} ms, {ran[0][1]} {what}",
        flush=True,
    )


if __name__ == "__main__":
    for count in COUNTS:
        for egress, energy in ((False, False), (True, False), (True, True)):
            title = f"{count:3d} workers, slot, egress {egress!s:5}, energy {energy!s:5}"
            tell(title, partial(slots, count, egress=egress, energy=energy), "groups")
        for longest in (4, 1):
            title = f"{count:3d} workers, decision, stages up to {longest}"
            run = partial(decisions, count, longest=longest, plan=replicas(count), closely=True)
            tell(title, run, "changes")
        title = f"{count:3d} workers, decision, stages of several workers"
        tell(title, partial(decisions, count, longest=4, plan=joint(count), closely=False), "changes")
