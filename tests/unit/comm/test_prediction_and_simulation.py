"""`comm predict` and `comm simulate` agree where their assumptions do; elsewhere the difference is named."""

from dataclasses import replace

import pytest

from foreshard.api import load_cluster
from foreshard.comm.fabric import fabric_between
from foreshard.comm.flow.places import routing_of
from foreshard.comm.prediction import collective_s
from foreshard.comm.schedules.cost import RoundTraffic
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.topology.of_cluster import topology_of

ROUNDS_ONLY = {"launch_s": 0.0, "ramp": 0.0, "copy": 0.0}


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("cluster", ["1x8xa100-sxm-80gb", "1x4xh100-sxm", "1x8xh100-sxm"])
@pytest.mark.parametrize("size", [2**16, 2**24, 2**32])
def test_a_ring_without_launch_pipeline_and_copy_is_what_its_rounds_take(collective, cluster, size):
    loaded = load_cluster(cluster)
    ranks = loaded.num_devices
    topology = topology_of(loaded, rates="fitted")
    schedule = schedule_of(collective, "ring", ranks)
    route = routing_of(schedule, topology)
    rounds = RoundTraffic(schedule, topology, route).cost()
    fabric = fabric_between(loaded, range(ranks))
    # A simulation counts every link by what ring all-reduce reaches of it, and reduces nowhere but at ends.
    bare = replace(fabric, **ROUNDS_ONLY, gather_eff=fabric.ring_eff, in_network=0.0)
    found = float(collective_s(collective, size, ranks, bare))
    assert found == pytest.approx(rounds.time_s(size), rel=1e-3)
    assert float(collective_s(collective, size, ranks, replace(fabric, in_network=0.0))) > found
