"""Several training jobs on one fabric: how long their iterations take when they share links.

Decides when each job may send, with which priority and weight, and over which of the equal-cost paths. A
topology and jobs (ranks, phases of computation and bytes) go in; one simulation of flows for each policy
comes out, with iteration times, slow-downs and the makespan, beside a bound without contention. A new policy
is an entry of ``policies.py``. Read ``job.py`` first, then ``demand.py``, ``run.py`` and ``policies.py``.
"""
