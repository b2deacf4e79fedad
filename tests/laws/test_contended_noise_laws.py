"""Laws of steps whose ranks differ while their transfers share a network."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.event.engine import simulated
from foreshard.predict.event.noise import NoisyStep
from foreshard.sim.contended_replicas import contended_end_s, num_copies
from foreshard.sim.contention import MAX_PHASES, Phases, SharedNetwork
from foreshard.sim.replicas import ALL, EACH, SET, before_of, last_end_s, order_of
from foreshard.spec.variation import Noise

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, runs

CLUSTERS = (
    "1x8xh100-sxm",
    "2x8xh100-sxm",
    "2x8xl40s@100Gb/s",
    str(Path(__file__).parent / "two_racks.toml"),
)
SWITCHES = st.fixed_dictionaries(
    {name: st.booleans() for name in ("grad_overlap", "param_gather_overlap", "p2p_overlap", "tp_overlap")}
)
RUNS = runs(seqs=(1024,), clusters=CLUSTERS)


def noisy_of(run, comm, most=2000) -> NoisyStep:
    model, cluster, plan, _ = built(run)
    plan = replace(plan, comm=comm)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    step = simulated(case, build_batch([case], TrainingConstants()), network="flow", compiled=False)
    noisy = NoisyStep.of(case, step.step, step.times, step.shared, compiled=False)
    assume(num_copies(noisy.replicated, step.shared.phases) <= most)
    return noisy


class Drawn:
    """Seconds that each pass of each rank computes longer, the same whenever they are asked for."""

    def __init__(self, noisy: NoisyStep, seed: int):
        rng = np.random.default_rng(seed)
        self.added = {
            task: rng.exponential(0.3, (1, *noisy.replicated.shape(task))) * noisy.computed_s[task]
            for task in range(noisy.replicated.program.num_tasks)
        }

    def __call__(self, task: int) -> np.ndarray:
        return self.added[task]


def contended_s(noisy: NoisyStep, added_s, phases=None, network=None) -> float:
    return contended_end_s(
        noisy.replicated,
        phases or noisy.shared.phases,
        network or noisy.shared.network,
        added_s,
        noisy.times.start_s,
        steps=1,
        compiled=False,
    )[0]


@settings(max_examples=6, deadline=None)
@given(RUNS, SWITCHES)
def test_ranks_that_are_alike_take_as_long_as_the_one_that_stands_for_them(run, comm):
    noisy = noisy_of(run, comm)
    alike = contended_s(noisy, lambda _: np.zeros((1, 1, 1)))
    assert alike == pytest.approx(noisy.times.makespan_s, rel=1e-9)


@settings(max_examples=5, deadline=None)
@given(RUNS, SWITCHES, st.integers(0, 9))
def test_without_shared_links_it_is_what_replicas_find(run, comm, seed):
    noisy = noisy_of(run, comm)
    program, drawn = noisy.replicated.program, Drawn(noisy, seed)
    phases = Phases.alone(program)
    together = last_end_s(
        noisy.replicated,
        lambda task: program.duration_s[task] + drawn(task),
        noisy.times.start_s,
        steps=1,
    )
    alone = contended_s(noisy, drawn, phases, SharedNetwork())
    assert alone == pytest.approx(together[0], rel=1e-12)


def every_rank_s(noisy: NoisyStep, drawn) -> float:
    """Return the end of the same step, its copies written one by one: the oracle."""
    program, together = noisy.replicated.program, noisy.replicated.together
    phases, network, before = noisy.shared.phases, noisy.shared.network, before_of(program)
    capacity: list[float] = []
    own: dict[tuple[int, int], int] = {}
    copies = {g: int(np.prod(shape)) for g, shape in noisy.replicated.ranks.items()}
    width = {g: shape[1] for g, shape in noisy.replicated.ranks.items()}
    routes = list(network.routes)
    weight = network.alone_bytes_per_s()
    builder = FlowProgramBuilder(np.empty(0))

    def resource(one: int, copy: int) -> int:
        key = one, -1 if network.of_all[one] else copy
        if key not in own:
            own[key] = len(capacity)
            capacity.append(network.left_bytes_per_s[one])
        return own[key]

    ended: dict[tuple[int, int], int] = {}
    for task in order_of(before, noisy.times.start_s):
        group = int(program.group[task])
        count = copies[group]
        met = {EACH: 1, SET: width[group], ALL: count}[int(together[task])]
        last: dict[int, int] = {}
        for copy in range(count):
            ready = []
            for one in before[task].tolist():
                others = range(copies[int(program.group[one])])
                if program.group[one] == group:
                    others = [o for o in others if o // met == copy // met]
                ready += [ended[one, other] for other in others]
            at = [builder.compute(0.0, after=ready)]
            mine = np.flatnonzero(phases.task == task)
            share = phases.computed_s[mine]
            share = share / share.sum() if share.sum() > 0.0 else np.eye(len(mine))[0]
            added = np.broadcast_to(drawn(task)[0], noisy.replicated.shape(task)).ravel()
            longer = share * (added[copy] if len(added) == count else 0.0)
            beside: list[int] = []
            for phase, more in zip(mine.tolist(), longer.tolist(), strict=True):
                delay, route = float(phases.delay_s[phase]) + more, int(phases.route[phase])
                if route < 0:
                    made = builder.compute(delay, after=at)
                else:
                    resources, usage = routes[route]
                    way = builder.route(
                        [resource(one, copy) for one in resources],
                        [
                            part / count if network.of_all[one] else part
                            for one, part in zip(resources, usage, strict=True)
                        ],
                    )
                    made = builder.send(
                        way,
                        float(phases.num_bytes[phase]),
                        latency_s=delay,
                        after=at,
                        weight=float(weight[route]),
                    )
                if phases.beside[phase]:
                    beside.append(made)
                else:
                    at, beside = [made, *beside], []
            last[copy] = builder.compute(0.0, after=at)
        for copy in range(count):
            ended[task, copy] = builder.compute(
                0.0, after=[last[other] for other in range(count) if other // met == copy // met]
            )
    builder.capacity_bytes_per_s = np.array(capacity)
    return simulate(builder.build(), compiled=False).makespan_s


@settings(max_examples=5, deadline=None)
@given(RUNS, SWITCHES, st.integers(0, 9))
def test_copies_are_those_written_one_by_one(run, comm, seed):
    noisy = noisy_of(run, comm, most=800)
    drawn = Drawn(noisy, seed)
    assert contended_s(noisy, drawn) == pytest.approx(every_rank_s(noisy, drawn), rel=1e-9)


@settings(max_examples=5, deadline=None)
@given(RUNS, SWITCHES)
def test_slower_ranks_never_shorten_a_step_and_a_seed_is_a_step(run, comm):
    noisy = noisy_of(run, comm, most=1000)
    rank = noisy.case.plan.groups[0].stages[-1].ranks[-1]
    slow = [float(noisy.seconds(Noise(slow={rank: factor}))[0]) for factor in (1.0, 1.5, 3.0)]
    assert slow[0] == pytest.approx(noisy.times.makespan_s, rel=1e-9)
    assert all(later >= before * (1.0 - 1e-9) for before, later in pairwise(slow))
    few = Noise(jitter=0.05, slow={rank: 1.5}, seeds=2, seed=3)
    assert noisy.contention(few) == "every step"
    most = 10_000 * num_copies(noisy.replicated, noisy.shared.phases) > MAX_PHASES
    assert noisy.contention(Noise(jitter=0.05, seeds=10_000)) == ("once" if most else "every step")
    assert noisy.seconds(few).tobytes() == noisy.seconds(few).tobytes()
