"""The jobs file: a fabric, and jobs that share it, stated one by one or drawn by a rule.

``comm/schema/jobs.toml`` describes the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from foreshard.comm.jobs.job import IterationPhase, TrainingJob, Transfer, collective_transfers
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import SpecError
from foreshard.spec import codec
from foreshard.spec.codec import Range, Size, Unit

SHIPPED = ("shared-fabric", "two-spines")
"""Jobs files that come with the package, by name."""
MAX_ITERATIONS = 10**6

Seconds = Annotated[float, Unit("s"), Range(0.0, 1e9)]
Bytes = Annotated[float, Unit("bytes"), Range(0.0, 1e18)]
Part = Annotated[float, Range(0.0, 0.99)]
Rank = Annotated[int, Range(0, 2**31)]
Iterations = Annotated[int, Range(1, MAX_ITERATIONS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTable:
    """One entry of ``transfers``."""

    source: Rank
    target: Rank
    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """One ``[[jobs.phases]]`` table: computation, then a collective or transfers."""

    compute: Seconds = 0.0
    collective: str | None = None
    size: Bytes | None = None
    algorithm: str | None = None
    ranks: Annotated[tuple[Rank, ...], Size(2)] | None = None
    transfers: tuple[TransferTable, ...] = ()
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """One ``[[jobs]]`` table: phases, or a model and its plan file."""

    name: Annotated[str, Size(1, 100)]
    ranks: Annotated[tuple[Rank, ...], Size(1)] | None = None
    iterations: Iterations
    arrival: Seconds = 0.0
    phases: tuple[PhaseTable, ...] = ()
    model: str | None = None
    plan: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTable:
    """The ``[draw]`` table: the rule by which jobs are drawn (see ``draw.py``)."""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    jobs: Annotated[int, Range(1, 1000)]
    kinds: Annotated[int, Range(1, 1000)]
    compute: tuple[Seconds, Seconds]
    communication: tuple[Part, Part]
    ranks: Annotated[tuple[Annotated[int, Range(2, 2**20)], ...], Size(1)]
    iterations: tuple[Iterations, Iterations]
    mean_gap: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsFile:
    """A jobs file as it stands."""

    name: str = ""
    cluster: str
    rates: Literal["datasheet", "fitted"] = "datasheet"
    jobs: tuple[JobTable, ...] = ()
    draw: DrawTable | None = None
    file: str | None = None

    def path_of(self, name: str) -> str:
        """Return where a file that the jobs file names lies: relative names are beside it."""
        return name if self.file is None else str(Path(self.file).parent / name)


def load_jobs_file(path: str) -> JobsFile:
    """Return a jobs file in TOML or JSON, or a shipped one by its name."""
    if path in SHIPPED:
        path = str(files("foreshard.comm.jobs").joinpath("data", f"{path}.toml"))
    text = codec.read_text(path)
    is_json = Path(path).suffix.lower() == ".json"
    data = codec.parse_json(text, file=path) if is_json else codec.parse_toml(text, file=path)
    if isinstance(data, dict) and "file" in data:
        raise SpecError(
            "unknown key 'file'", file=path, key="file", rule="Unknown keys are errors", fix="Leave it out"
        )
    found = replace(codec.decode(JobsFile, data, file=path), file=path)
    if bool(found.jobs) == (found.draw is not None):
        raise SpecError(
            "jobs and a draw" if found.jobs else "no jobs",
            file=path,
            key="jobs",
            rule="A file has [[jobs]] tables, or a [draw] table",
            fix="Leave one of them out" if found.jobs else "Add [[jobs]]",
        )
    names = [job.name for job in found.jobs]
    for i, name in enumerate(names):
        if name in names[:i]:
            what = f"two jobs are named {name!r}"
            raise SpecError(what, file=path, key=f"jobs[{i}].name", value=name, rule="Names of jobs differ")
    if found.draw is not None:
        _check_draw(found.draw, path)
    return found


def _check_draw(draw: DrawTable, file: str) -> None:
    """Refuse ranges whose ends are in the wrong order, and jobs that do not compute."""
    for key in ("compute", "communication", "iterations"):
        low, high = getattr(draw, key)
        if not low <= high or (key == "compute" and low <= 0.0):
            raise SpecError(
                f"from {low:g} to {high:g}",
                file=file,
                key=f"draw.{key}",
                value=low,
                rule="A range has two ends, the lower first" + (", above 0" if key == "compute" else ""),
            )


def stated_job(table: JobTable, *, file: str | None, key: str, num_ranks: int) -> TrainingJob:
    """Return the job of a table with phases.

    Raises
    ------
    SpecError
        With file and key, for phases that say nothing, and ranks that are not on the topology.
    """
    if table.ranks is None or not table.phases:
        raise SpecError(
            f"{table.name!r} has no {'ranks' if table.ranks is None else 'phases'}",
            file=file,
            key=key,
            rule="A job has ranks and phases, or a model and a plan",
            fix="Add them",
        )
    _check_ranks(table.ranks, num_ranks, file, f"{key}.ranks")
    job = TrainingJob(
        name=table.name,
        ranks=table.ranks,
        phases=tuple(
            _phase(phase, table.ranks, num_ranks, file, f"{key}.phases[{i}]")
            for i, phase in enumerate(table.phases)
        ),
        num_iterations=table.iterations,
        arrival_s=table.arrival,
    )
    if not job.compute_s and not any(phase.transfers for phase in job.phases):
        rule = "An iteration computes or sends"
        raise SpecError(f"{table.name!r} does nothing", file=file, key=f"{key}.phases", rule=rule)
    return job


def _check_ranks(ranks: Sequence[int], num_ranks: int, file: str | None, key: str) -> None:
    for rank in ranks:
        if rank >= num_ranks or len(set(ranks)) < len(ranks):
            rule = f"Ranks are 0 to {num_ranks - 1}, each once"
            raise SpecError(f"ranks {codec.shown(list(ranks))}", file=file, key=key, value=rank, rule=rule)


def _phase(
    table: PhaseTable, ranks: tuple[int, ...], num_ranks: int, file: str | None, key: str
) -> IterationPhase:
    """Return the phase of a table; errors name its keys."""
    if table.collective is None:
        if table.size is not None:
            rule = "A size is that of a collective"
            raise SpecError("a size alone", file=file, key=f"{key}.size", value=table.size, rule=rule)
        ends = [one for transfer in table.transfers for one in (transfer.source, transfer.target)]
        for rank in ends:
            if rank not in ranks:
                rule = "Transfers are between ranks of the job"
                raise SpecError(f"rank {rank}", file=file, key=f"{key}.transfers", value=rank, rule=rule)
        transfers = tuple(
            Transfer(source=one.source, target=one.target, num_bytes=one.size)
            for one in table.transfers
            if one.source != one.target and one.size > 0.0
        )
        return IterationPhase(compute_s=table.compute, transfers=transfers, overlaps=table.overlaps)
    name = codec.one_of(table.collective, COLLECTIVES, key=f"{key}.collective", file=file)
    if table.size is None or table.transfers:
        raise SpecError(
            f"{name} without a size" if table.size is None else f"{name} and transfers",
            file=file,
            key=f"{key}.size" if table.size is None else f"{key}.transfers",
            rule="A phase has a collective with its size, or transfers",
        )
    members = table.ranks or ranks
    _check_ranks(members, num_ranks, file, f"{key}.ranks")
    if not set(members) <= set(ranks) or len(members) < 2:
        rule = "A collective is one between two ranks of the job or more"
        raise SpecError(f"ranks {codec.shown(list(members))}", file=file, key=f"{key}.ranks", rule=rule)
    try:
        sends = collective_transfers(name, table.size, members, algorithm=table.algorithm)
    except SpecError as error:
        error.file, error.key = file, f"{key}.{error.key or 'algorithm'}"
        raise
    return IterationPhase(compute_s=table.compute, transfers=sends, overlaps=table.overlaps)
