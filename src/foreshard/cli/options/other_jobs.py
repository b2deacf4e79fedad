"""`--other-jobs FILE`: jobs of a jobs file that run beside the one that is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.comm.jobs.job import TrainingJob
    from foreshard.spec.cluster import Cluster


def other_jobs(file: str, cluster: Cluster) -> tuple[TrainingJob, ...]:
    """Return the stated jobs of a jobs file, which has to be of the same cluster.

    Raises
    ------
    SpecError
    """
    from foreshard import api
    from foreshard.cli.comm.jobs import cluster_in, planned_job
    from foreshard.comm.jobs.trace import load_jobs_file, stated_job

    stated = load_jobs_file(file)
    if stated.draw is not None:
        rule, fix = "Jobs beside a run are stated one by one", "Give [[jobs]] tables"
        raise SpecError("a draw of jobs", file=stated.file, key="draw", rule=rule, fix=fix)
    where = cluster_in(stated)
    theirs = api.load_cluster(where)
    if (theirs.nodes, theirs.links) != (cluster.nodes, cluster.links):
        raise SpecError(
            f"jobs on {stated.cluster}, a run on {cluster.name}",
            file=stated.file,
            key="cluster",
            value=stated.cluster,
            rule="Jobs that share a network are on one cluster",
            fix="Name the same cluster in the jobs file",
        )
    return tuple(
        planned_job(stated, index, where)
        if job.model is not None or job.plan is not None
        else stated_job(job, file=stated.file, key=f"jobs[{index}]", num_ranks=cluster.num_devices)
        for index, job in enumerate(stated.jobs)
    )
