"""Laws of the event engine: where nothing is shared, it finds what the graph engine finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.graph.program import ProgramBuilder
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.event.engine import event_times, simulated
from foreshard.predict.event.jitter import slowest_of
from foreshard.predict.event.noise import NoisyStep
from foreshard.predict.graph.engine import graph_times, shared_times
from foreshard.sim import contention
from foreshard.sim.contention import Phases, SharedNetwork
from foreshard.sim.replicas import ALL, SET, last_end_s
from foreshard.spec.prediction import TIME_PARTS
from foreshard.spec.variation import TAILS, Noise

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, runs

SWITCHES = st.fixed_dictionaries(
    {name: st.booleans() for name in ("grad_overlap", "param_gather_overlap", "p2p_overlap", "tp_overlap")}
)


def priced(run, comm):
    model, cluster, plan, _ = built(run)
    plan = replace(plan, comm=comm)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    return case, build_batch([case], TrainingConstants())


@settings(max_examples=15, deadline=None)
@given(runs(), SWITCHES)
def test_without_contention_the_event_engine_is_the_graph_engine(run, comm):
    case, batch = priced(run, comm)
    events, _, classes, _ = event_times(case, batch, network="closed-form", timeline=False, compiled=False)
    graph, _ = graph_times(case, batch, timeline=False)
    assert tuple(events) == TIME_PARTS and classes == ()
    assert sum(events.values()) == pytest.approx(sum(graph.values()), rel=1e-9)
    for name, seconds in graph.items():
        assert events[name] == pytest.approx(seconds, abs=1e-9 * sum(graph.values())), name


@settings(max_examples=10, deadline=None)
@given(runs(), SWITCHES)
def test_with_contention_it_is_the_graph_engine_on_a_shared_network(run, comm):
    case, batch = priced(run, comm)
    events, _, classes, _ = event_times(case, batch, network="flow", timeline=False, compiled=False)
    graph, _, others = shared_times(case, batch, timeline=False, compiled=False)
    assert sum(events.values()) == pytest.approx(sum(graph.values()), rel=1e-9)
    assert [one.collective for one in classes] == [one.collective for one in others]


@settings(max_examples=6, deadline=None)
@given(runs(), SWITCHES)
def test_the_compiled_loop_is_the_plain_one(run, comm):
    case, batch = priced(run, comm)
    plain, fast = (simulated(case, batch, network="flow", compiled=way).times for way in (False, True))
    np.testing.assert_allclose(fast.end_s, plain.end_s, rtol=1e-12)


class Repeated:
    """Factors that are drawn for every rank by itself, and the slowest of each block of them."""

    def __init__(self, noisy: NoisyStep, noise: Noise, seed: int):
        self.noisy, self.noise, self.rng = noisy, noise, np.random.default_rng(seed)
        self.drawn: dict[int, np.ndarray] = {}

    def every(self, task: int) -> np.ndarray:
        """Return the factors of a pass, shape (sets, ranks of a set, ranks of a block)."""
        noisy, work = self.noisy, int(self.noisy.work[task])
        if work not in self.drawn:
            program = noisy.replicated.program
            passes = noisy.passes[int(program.group[task])]
            shape = (*noisy.replicated.shape(task), passes.block[int(program.stage[task])])
            self.drawn[work] = slowest_of(
                self.rng, 1, shape, jitter=self.noise.jitter, tail=self.noise.jitter_tail
            )
        return self.drawn[work]

    def seconds(self, task: int) -> np.ndarray:
        """Return the seconds of a task on every rank, shape (sets, ranks of a set, ranks of a block)."""
        times, computed_s = self.noisy.times, self.noisy.computed_s[task]
        alike_s = times.end_s[task] - times.start_s[task]
        if computed_s <= 0.0:
            return np.full((*self.noisy.replicated.shape(task), 1), alike_s)
        return alike_s + (self.every(task) - 1.0) * computed_s

    def folded(self, task: int) -> np.ndarray:
        return self.seconds(task).max(axis=2)[None]


def unfolded_s(noisy: NoisyStep, seconds) -> float:
    """Return the end of a step in which every rank is a resource of its own, by the event kernel."""
    program, replicated = noisy.replicated.program, noisy.replicated
    builder, ends = ProgramBuilder(), {}
    before = [program.indices[program.indptr[t] : program.indptr[t + 1]] for t in range(program.num_tasks)]
    todo = list(range(program.num_tasks))
    while todo:  # tasks of a resource keep their order; some wait for tasks with higher numbers
        rest = []
        for task in todo:
            shape = replicated.shape(task)
            blocked = any(int(one) not in ends for one in before[task])
            blocked = blocked or any(program.resource[task] == program.resource[other] for other in rest)
            if blocked:
                rest.append(task)
                continue
            own_s = seconds(task)
            ends[task] = np.empty(shape, dtype=np.int64)
            for place in np.ndindex(shape):
                after = []
                for one in before[task].tolist():
                    seen = ends[one]
                    if replicated.together[task] == ALL or program.group[one] != program.group[task]:
                        after += seen.ravel().tolist()
                    elif replicated.together[task] == SET:
                        after += seen[min(place[0], len(seen) - 1)].tolist()
                    else:
                        at = tuple(min(p, n - 1) for p, n in zip(place, seen.shape, strict=True))
                        after.append(int(seen[at]))
                parts = [
                    builder.add(f"{program.resource[task]} {place} {rank}", float(one), after)
                    for rank, one in enumerate(own_s[place])
                ]
                # Ranks of a block go on together.
                ends[task][place] = builder.add(f"{program.resource[task]} {place} end", 0.0, parts)
                for rank in range(max(b for p in noisy.passes.values() for b in p.block)):
                    builder.add(f"{program.resource[task]} {place} {rank}", 0.0, [int(ends[task][place])])
        todo = rest
    made = builder.build()
    count = made.num_tasks
    phases = Phases(
        task=np.arange(count),
        delay_s=made.duration_s,
        num_bytes=np.zeros(count),
        route=np.full(count, -1),
        beside=np.zeros(count, dtype=bool),
    )
    return contention.run(made, phases, SharedNetwork(), compiled=False).times.makespan_s


NOISES = st.builds(
    Noise,
    jitter=st.sampled_from([0.0, 0.05, 0.5]),
    jitter_tail=st.sampled_from(TAILS),
)


def noisy_case(run, comm):
    case, batch = priced(run, comm)
    step = simulated(case, batch, network="closed-form", compiled=False)
    return NoisyStep.of(case, step.step, step.times)


@settings(max_examples=12, deadline=None)
@given(runs(seqs=(1024,)), SWITCHES, NOISES, st.integers(0, 9))
def test_folded_ranks_take_as_long_as_every_rank_by_itself(run, comm, noise, seed):
    noisy = noisy_case(run, comm)
    widest = max(np.prod(p.shape) * max(p.block) for p in noisy.passes.values())
    assume(noisy.replicated.program.num_tasks * widest <= 4000)
    draws = Repeated(noisy, noise, seed)
    folded = last_end_s(noisy.replicated, draws.folded, noisy.times.start_s, steps=1)
    assert folded[0] == pytest.approx(unfolded_s(noisy, draws.seconds), rel=1e-12)
    if noise.jitter == 0.0:
        assert folded[0] == pytest.approx(noisy.times.makespan_s, rel=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_the_slowest_rank_is_drawn_as_the_largest_of_so_many(tail, num_ranks):
    rng, count = np.random.default_rng(1), 20_000
    at_once = slowest_of(rng, num_ranks, (count,), jitter=0.1, tail=tail)
    each = slowest_of(rng, 1, (count, num_ranks), jitter=0.1, tail=tail).max(axis=1)
    merged = np.sort(np.concatenate([at_once, each]))
    below = [np.searchsorted(np.sort(one), merged, side="right") / count for one in (at_once, each)]
    assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(2.0 / count)  # Kolmogorov-Smirnov, p = 0.001
    single = slowest_of(rng, 1, (400_000,), jitter=0.1, tail=tail)
    assert single.mean() == pytest.approx(1.0, abs=2e-3) and np.all(single > 0.0)
    if tail == "lognormal":
        assert single.std() == pytest.approx(0.1, rel=0.02)


@settings(max_examples=10, deadline=None)
@given(runs(seqs=(1024,)), SWITCHES)
def test_slow_ranks_and_more_jitter_never_shorten_a_step(run, comm):
    noisy = noisy_case(run, comm)
    rank = noisy.case.plan.groups[0].stages[-1].ranks[-1]
    alike_s = noisy.times.makespan_s
    slow = [noisy.seconds(Noise(slow={rank: factor}))[0] for factor in (1.0, 1.5, 3.0)]
    assert slow[0] == pytest.approx(alike_s, rel=1e-12) and slow == sorted(slow)
    assert slow[-1] <= 3.0 * alike_s * (1.0 + 1e-12)
    few = Noise(jitter=0.05, slow={rank: 1.5}, seeds=4, seed=3)
    assert noisy.seconds(few).tobytes() == noisy.seconds(few).tobytes()
