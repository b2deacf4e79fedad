"""Jobs drawn by a rule and a seed.

The rule: some kinds of job are drawn first, each with seconds of computation (log-uniform) and the part of a
lone iteration that its ring all-reduce takes (uniform). Each job is of a kind, has a number of ranks and of
iterations (uniform), and arrives after an exponential gap. It gets ranks at random among those that are free
at its arrival if every job ran alone; where they do not suffice, those that are free first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreshard.comm.jobs.demand import demands_of
from foreshard.comm.jobs.job import IterationPhase, TrainingJob, collective_transfers
from foreshard.comm.jobs.trace import DrawTable
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError


def drawn_jobs(draw: DrawTable, topology: Topology, *, file: str | None = None) -> tuple[TrainingJob, ...]:
    """Return the jobs that a rule draws for a topology, in the order of their arrival."""
    if max(draw.ranks) > topology.num_ranks:
        raise SpecError(
            f"jobs of {max(draw.ranks)} ranks",
            file=file,
            key="draw.ranks",
            value=max(draw.ranks),
            rule=f"The fabric has {topology.num_ranks} devices",
        )
    rng = np.random.default_rng(draw.seed)
    kinds = [
        (float(np.exp(rng.uniform(*np.log(draw.compute)))), float(rng.uniform(*draw.communication)))
        for _ in range(draw.kinds)
    ]
    free_s, arrival_s, jobs = np.zeros(topology.num_ranks), 0.0, []
    for number in range(draw.jobs):
        kind = int(rng.integers(draw.kinds))
        size = int(rng.choice(draw.ranks))
        count = int(rng.integers(draw.iterations[0], draw.iterations[1] + 1))
        ranks = _placed(free_s, arrival_s, size, rng)
        job = TrainingJob(
            name=f"{number}-kind{kind}",
            ranks=ranks,
            phases=_phases(topology, ranks, *kinds[kind]),
            num_iterations=count,
            arrival_s=arrival_s,
        )
        jobs.append(job)
        alone_s = demands_of(topology, [job])[0].bound_s()
        begin_s = max(arrival_s, float(free_s[list(ranks)].max()))
        free_s[list(ranks)] = begin_s + alone_s * count
        arrival_s += float(rng.exponential(draw.mean_gap)) if draw.mean_gap else 0.0
    return tuple(jobs)


def _placed(free_s: np.ndarray, now_s: float, size: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return ranks for a job, ascending."""
    mixed = rng.permutation(len(free_s))
    order = mixed[np.argsort(np.maximum(free_s[mixed], now_s), kind="stable")]
    return tuple(sorted(order[:size].tolist()))


def _phases(
    topology: Topology, ranks: tuple[int, ...], compute_s: float, communication: float
) -> tuple[IterationPhase, ...]:
    """Return one phase whose all-reduce takes a part of a lone iteration."""
    phase = IterationPhase(compute_s=compute_s)
    if not communication:
        return (phase,)
    unit = replace(phase, transfers=collective_transfers("all-reduce", 1e6, ranks))
    job = TrainingJob(name="", ranks=ranks, phases=(unit,), num_iterations=1)
    each_s = (demands_of(topology, [job])[0].bound_s() - compute_s) / 1e6
    size = compute_s * communication / (1.0 - communication) / each_s
    return (replace(phase, transfers=collective_transfers("all-reduce", size, ranks)),)
