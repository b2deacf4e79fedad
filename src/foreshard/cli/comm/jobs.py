"""`foreshard comm jobs FILE`: training jobs that share a fabric, under policies side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from foreshard import quantity
from foreshard.cli.comm.inputs import topology_at
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Count, Words
from foreshard.errors import SpecError
from foreshard.report.screen import Box, Screen, Table, table
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.comm.jobs.comparison import PolicyOutcome
    from foreshard.comm.jobs.job import TrainingJob
    from foreshard.comm.jobs.trace import JobsFile
    from foreshard.comm.topology.graph import Topology
    from foreshard.spec.cluster import Cluster

_BASE = "fair-share"
_FIGURES = (
    "mean_iteration_s",
    "p99_iteration_s",
    "mean_slowdown",
    "p99_slowdown",
    "makespan_s",
    "mean_completion_s",
)


def _policies() -> list[str]:
    from foreshard.comm.jobs.policies import POLICIES

    return list(POLICIES)


@verb_command("jobs")
@click.argument("file", metavar="[FILE]", default="shared-fabric")
@click.option("--policy", type=Words(load=_policies), help="Policies to run (default: all).")
@click.option("--seeds", type=Count(1, 1000), default=1, help="Of a draw: sets of jobs to draw and run.")
def command(file: str, policy: tuple[str, ...] | None, seeds: int) -> None:
    """Run training jobs that share a fabric, and compare how policies let them share it.

    FILE states jobs or a rule to draw them ('foreshard schema jobs'); without it the shipped one is run:
    16 jobs on 24 servers. Policies are max-min fair share, CASSINI's rotations, Crux's priorities and
    paths, and MLTCP's weights. The bound is what no policy beats: jobs without contention.

    \b
    foreshard comm jobs
    foreshard comm jobs shared-fabric --policy rotations,priorities --seeds 10 --json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.comm.jobs.comparison import compared
    from foreshard.comm.jobs.demand import demands_of
    from foreshard.comm.jobs.trace import load_jobs_file

    stated = load_jobs_file(file)
    if stated.draw is None and seeds > 1:
        rule, fix = "Seeds are those of a [draw] table", "Leave --seeds out"
        raise SpecError(f"{seeds} seeds of stated jobs", key="--seeds", value=seeds, rule=rule, fix=fix)
    where = _cluster_in(stated)
    try:
        topology, _ = topology_at(where, stated.rates)
    except SpecError as error:
        if error.file is None:
            error.file, error.key = stated.file, "cluster"
        raise
    names = list(dict.fromkeys([_BASE, *(policy or _policies())]))
    rounds = []
    for seed in range(seeds):
        jobs = _jobs(stated, topology, where, seed)
        try:
            rounds.append((jobs, compared(demands_of(topology, jobs), names)))
        except SpecError as error:
            error.file = error.file or stated.file
            raise
    data = _object(stated, topology, rounds)
    give(data, lambda: _screen(data, seeds))


def _cluster_in(stated: JobsFile) -> str:
    """Return the cluster that a jobs file names; a file lies beside it."""
    is_path = Path(stated.cluster).suffix.lower() in (".toml", ".json", ".xml", ".yml", ".yaml")
    return stated.path_of(stated.cluster) if is_path else stated.cluster


def _jobs(stated: JobsFile, topology: Topology, where: str, seed: int) -> tuple[TrainingJob, ...]:
    """Return the jobs of a file in the order of their arrival, drawn with the file's seed plus `seed`."""
    from foreshard.comm.jobs.draw import drawn_jobs

    if stated.draw is not None:
        draw = replace(stated.draw, seed=stated.draw.seed + seed)
        return drawn_jobs(draw, topology, file=stated.file)
    return tuple(sorted(_stated_jobs(stated, where, topology.num_ranks), key=lambda job: job.arrival_s))


def _stated_jobs(stated: JobsFile, where: str, num_ranks: int) -> Iterator[TrainingJob]:
    """Yield the jobs of a file on a cluster of so many ranks: those of phases, and those of models."""
    from foreshard.comm.jobs.trace import stated_job

    for i, job in enumerate(stated.jobs):
        if job.model is None and job.plan is None:
            yield stated_job(job, file=stated.file, key=f"jobs[{i}]", num_ranks=num_ranks)
        else:
            yield _planned_job(stated, i, where)


def jobs_beside(file: str, cluster: Cluster) -> tuple[TrainingJob, ...]:
    """Return the stated jobs of a jobs file beside a run (`--other-jobs`), which has to be of its cluster."""
    from foreshard import api
    from foreshard.comm.jobs.trace import load_jobs_file

    stated = load_jobs_file(file)
    if stated.draw is not None:
        rule, fix = "Jobs beside a run are stated one by one", "Give [[jobs]] tables"
        raise SpecError("a draw of jobs", file=stated.file, key="draw", rule=rule, fix=fix)
    where = _cluster_in(stated)
    theirs = api.load_cluster(where)
    if (theirs.nodes, theirs.links) != (cluster.nodes, cluster.links):
        what = f"jobs on {stated.cluster}, a run on {cluster.name}"
        rule, fix = "Jobs that share a network are on one cluster", "Name the same cluster in the jobs file"
        raise SpecError(what, file=stated.file, key="cluster", value=stated.cluster, rule=rule, fix=fix)
    return tuple(_stated_jobs(stated, where, cluster.num_devices))


def _planned_job(stated: JobsFile, index: int, where: str) -> TrainingJob:
    """Return the job of a model and a plan file."""
    from foreshard import api
    from foreshard.predict.job_profile import job_of_plan

    job, key = stated.jobs[index], f"jobs[{index}]"
    if job.model is None or job.plan is None or job.phases or job.ranks is not None:
        what = f"{job.name!r} has a {'model' if job.plan is None else 'plan'} and more, or alone"
        rule = "A job has ranks and phases, or a model and a plan"
        fix = "Give model and plan, and no ranks or phases"
        raise SpecError(what, file=stated.file, key=key, rule=rule, fix=fix)
    cluster, model = api.load_cluster(where), api.load_model(job.model)
    path = stated.path_of(job.plan)
    plan = api.load_plan(path)
    try:
        api.request(model, cluster, plan, plan_file=path).predict()
        return job_of_plan(
            job.name, model, cluster, plan, num_iterations=job.iterations, arrival_s=job.arrival
        )
    except SpecError as error:
        error.file = error.file or path
        raise


def _object(stated: JobsFile, topology: Topology, rounds: list[Any]) -> dict[str, Any]:
    """Return the answer: figures are means over the rounds, cuts have every round."""
    policies: dict[str, dict[str, Any]] = {}
    for name in rounds[0][1]:
        outcomes: list[PolicyOutcome] = [found[name] for _, found in rounds]
        bases: list[PolicyOutcome] = [found[_BASE] for _, found in rounds]
        cuts = [
            1.0 - own.mean_iteration_s / base.mean_iteration_s
            for own, base in zip(outcomes, bases, strict=True)
        ]
        policies[name] = {
            figure: float(np.mean([getattr(one, figure) for one in outcomes])) for figure in _FIGURES
        } | {"cut": float(np.median(cuts)), "cut_by_seed": cuts}
        if len(rounds) == 1:
            policies[name]["job_iteration_s"] = outcomes[0].job_iteration_s.tolist()
            policies[name]["job_end_s"] = outcomes[0].job_end_s.tolist()
    bound = policies.pop("bound")
    data: dict[str, Any] = {
        "schema_version": 1,
        "name": stated.name or Path(stated.file or "jobs").stem,
        "num_ranks": topology.num_ranks,
        "num_jobs": len(rounds[0][0]),
        "seeds": len(rounds),
        "policies": policies,
        "bound": bound,
    }
    if len(rounds) == 1:
        data["jobs"] = [_job_object(job) for job in rounds[0][0]]
    return data


def _job_object(job: TrainingJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "ranks": list(job.ranks),
        "iterations": job.num_iterations,
        "arrival_s": job.arrival_s,
        "compute_s": job.compute_s,
        "sent_bytes": sum(one.num_bytes for phase in job.phases for one in phase.transfers),
    }


def _screen(data: dict[str, Any], seeds: int) -> Screen:
    counted = f"{number_of(data['num_jobs'], 'job')} on {number_of(data['num_ranks'], 'device')}"
    header = f"{data['name']}: {counted}" + (f", {seeds} draws" if seeds > 1 else "")
    cuts = {name: found["cut"] for name, found in data["policies"].items() if name != _BASE}
    base, bound = data["policies"][_BASE], data["bound"]
    boxes = [
        Box(title="fair share", value=quantity.seconds(base["mean_iteration_s"]), note="mean iteration"),
        Box(
            title="bound",
            value=quantity.seconds(bound["mean_iteration_s"]),
            note="without contention: no policy is faster",
        ),
    ]
    if cuts:
        best = max(cuts, key=lambda name: cuts[name])
        boxes.insert(1, Box(title=best, value=f"{100 * cuts[best]:.1f} % shorter", note="the largest cut"))
    tables = [_policy_table(data, seeds)]
    if seeds == 1:
        tables.append(_job_table(data))
    notes = (
        "Iterations of all jobs count alike; slow-downs are over the bound of the job.",
        "Pairs of ranks of a collective send at once; shares of links are exact (max-min).",
    )
    return Screen(header=(header,), boxes=tuple(boxes), tables=tuple(tables), notes=notes)


def _policy_table(data: dict[str, Any], seeds: int) -> Table:
    from foreshard.comm.jobs.policies import POLICIES

    rows = []
    for name, found in (*data["policies"].items(), ("bound", data["bound"])):
        cut = [f"{100 * found['cut']:.1f} %"]
        if seeds > 1:
            low, high = (100 * float(np.percentile(found["cut_by_seed"], at)) for at in (10, 90))
            cut = [f"{cut[0]} ({low:.0f} to {high:.0f})"]
        rows.append(
            (
                name,
                *(quantity.seconds(found[key]) for key in ("mean_iteration_s", "p99_iteration_s")),
                "-" if name == _BASE else cut[0],
                *(quantity.digits(found[key]) for key in ("mean_slowdown", "p99_slowdown")),
                quantity.seconds(found["makespan_s"]),
                POLICIES[name].about if name in POLICIES else "no contention",
            )
        )
    columns = ("policy", ">mean", ">p99", ">cut", ">slow-down", ">its p99", ">makespan", "how")
    title = "Iterations by policy" + (": means over draws, median cut (10 to 90 %)" if seeds > 1 else "")
    return table(title, columns, rows, spare=("how", ">its p99"))


def _job_table(data: dict[str, Any]) -> Table:
    """Return the slow-down of each job under each policy."""
    bound = data["bound"]["job_iteration_s"]
    rows = [
        (
            job["name"],
            len(job["ranks"]),
            quantity.seconds(bound[i]),
            *(quantity.digits(found["job_iteration_s"][i] / bound[i]) for found in data["policies"].values()),
        )
        for i, job in enumerate(data["jobs"])
    ]
    columns = ("job", ">ranks", ">bound", *(f">{name}" for name in data["policies"]))
    return table("Slow-down of each job", columns, rows)
