"""Priorities by intensity, few priority classes, and paths chosen in the order of intensity (Crux).

Source: Cao et al., Crux (SIGCOMM 2024), from its abstract and summaries: intensity I = W / t with the work W
of an iteration and the time t that its bytes take on the most loaded link; priority k I; jobs of high
intensity choose their paths first; few hardware classes. The correction k is our own: the part of the
transfers that computation does not hide. Classes keep the order of intensity here, where Crux samples several
orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreshard.comm.jobs.demand import Choice, JobDemand

NUM_CLASSES = 8
"""Priorities that switches and NICs tell apart: the classes of 802.1p and of InfiniBand's virtual lanes."""
_LEAST_EXPOSED = 0.05
"""Of a job's transfers; hidden ones keep the order of intensity among themselves."""


def intensities(demands: Sequence[JobDemand], choices: Sequence[Choice]) -> np.ndarray:
    """Return k W / t of each job, shape (jobs,): device seconds for each second on the most loaded link."""
    found = np.full(len(demands), np.inf)
    for i, (demand, choice) in enumerate(zip(demands, choices, strict=True)):
        transfer_s = demand.transfer_s(choice)
        if transfer_s > 0.0:
            exposed_s = demand.iteration_s(choice) - demand.job.compute_s
            part = max(exposed_s / float(demand.phase_times_s(choice).sum()), _LEAST_EXPOSED)
            found[i] = part * demand.job.work_device_s / transfer_s
    return found


def chosen_paths(demands: Sequence[JobDemand]) -> list[Choice]:
    """Return a path for every transfer: jobs of high intensity choose first, the least loaded path each.

    Load is the part of the time that a resource is busy if every job iterates as it would alone.
    """
    hashed = [demand.hashed for demand in demands]
    order = np.argsort(-intensities(demands, hashed), kind="stable")
    found, busy = list(hashed), np.zeros(0)
    for job in order.tolist():
        demand = demands[job]
        capacity = demand.capacity_bytes_per_s
        busy = busy if len(busy) else np.zeros(len(capacity))
        seconds = demand.iteration_s(demand.hashed)
        choice = list(demand.hashed)
        for transfer in np.argsort(-demand.num_bytes, kind="stable").tolist():
            options = demand.options[transfer]
            more = demand.num_bytes[transfer] / capacity / seconds
            loads = [
                sorted((busy[list(path.resources)] + more[list(path.resources)]).tolist(), reverse=True)
                for path in options
            ]
            choice[transfer] = min(range(len(options)), key=loads.__getitem__)
            taken = list(options[choice[transfer]].resources)
            busy[taken] += more[taken]
        found[job] = tuple(choice)
    return found


def priorities(
    demands: Sequence[JobDemand], choices: Sequence[Choice], num_classes: int = NUM_CLASSES
) -> list[int]:
    """Return the priority class of each job, the highest intensity in the highest class."""
    order = np.argsort(-intensities(demands, choices), kind="stable").tolist()
    loads = [
        demand.phase_loads(choice).sum(axis=0) / demand.capacity_bytes_per_s
        for demand, choice in zip(demands, choices, strict=True)
    ]
    contention = {
        (i, j): float(np.minimum(loads[order[i]], loads[order[j]]).max(initial=0.0))
        for i in range(len(order))
        for j in range(i + 1, len(order))
    }
    classes = compressed(contention, len(order), num_classes)
    found = [0] * len(order)
    for place, job in enumerate(order):
        found[job] = classes[place]
    return found


def compressed(contention: Mapping[tuple[int, int], float], num_jobs: int, num_classes: int) -> list[int]:
    """Return classes of jobs in a given order, so that the contention inside classes is least.

    Parameters
    ----------
    contention : mapping of (int, int) to float
        Of jobs i < j, seconds that they would share on a link.
    num_jobs, num_classes : int

    Returns
    -------
    list of int
        Class of each job, never rising; the last class is 0.

    Examples
    --------
    >>> compressed({(0, 1): 5.0, (0, 2): 1.0, (1, 2): 2.0}, 3, 2)
    [1, 0, 0]
    """
    inside = np.zeros((num_jobs + 1, num_jobs + 1))
    for start in range(num_jobs):
        for stop in range(start + 1, num_jobs + 1):
            last = sum(contention.get((i, stop - 1), 0.0) for i in range(start, stop - 1))
            inside[start, stop] = inside[start, stop - 1] + last
    least = np.full((num_classes + 1, num_jobs + 1), np.inf)
    least[0, 0], cut = 0.0, np.zeros((num_classes + 1, num_jobs + 1), dtype=np.int64)
    for level in range(1, num_classes + 1):
        for stop in range(num_jobs + 1):
            costs = least[level - 1, : stop + 1] + inside[: stop + 1, stop]
            cut[level, stop] = int(np.argmin(costs))
            least[level, stop] = costs[cut[level, stop]]
    found, stop = [0] * num_jobs, num_jobs
    level = int(np.argmin(least[:, num_jobs]))
    for number in range(level):
        start = int(cut[level - number, stop])
        found[start:stop] = [number] * (stop - start)
        stop = start
    return found
