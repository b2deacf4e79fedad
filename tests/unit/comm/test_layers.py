"""Layers are asked for by name and can be replaced."""

import pytest

from foreshard.catalog.fabrics import link_constants
from foreshard.comm.collectives import all_to_all_s, send_s
from foreshard.comm.fabric import fabric_from
from foreshard.comm.layers import CommTask, layer_of, register
from foreshard.errors import SpecError

FABRIC = fabric_from(
    link_constants("hopper-nvlink"),
    intra_bytes_per_s=450e9,
    domain=8,
    per_node=8,
    nic_bytes_per_s=400e9,
    nic_latency_s=5e-6,
    in_network=True,
)


def test_default_library_prices_every_kind():
    library = layer_of("collective-library")
    assert library.time_s("all_to_all", 1e6, 8, 1, FABRIC) == all_to_all_s(1e6, 8, 1, FABRIC)
    assert library.time_s("send", 1e6, 2, 8, FABRIC) == send_s(1e6, True, FABRIC)
    with pytest.raises(SpecError, match="broadcast"):
        library.time_s("gossip", 1e6, 8, 1, FABRIC)


def test_default_scheduler_issues_by_readiness():
    tasks = [CommTask(kind="all_reduce", num_bytes=1.0, num_ranks=2, ready_s=t) for t in (3.0, 1.0, 2.0)]
    assert [task.ready_s for task in layer_of("task-scheduler").order(tasks)] == [1.0, 2.0, 3.0]


def test_default_flows_share_equally():
    assert layer_of("flow-scheduler").shares(4).tolist() == [0.25] * 4


def test_another_implementation_is_found_by_name_and_leaves_the_default():
    marker = object()
    register("flow-scheduler", "marker", marker)
    assert layer_of("flow-scheduler", "marker") is marker
    assert layer_of("flow-scheduler") is not marker
    with pytest.raises(SpecError, match="equal-shares"):
        layer_of("flow-scheduler", "no-such")
    with pytest.raises(SpecError):
        register("no-such-layer", "x", marker)
