"""What other hardware would gain: changes of the cluster, and gains that never fall below nothing."""

from types import SimpleNamespace

import pytest

from foreshard.advise.sensitivity import changes, sensitivity
from foreshard.catalog.clusters import load_cluster
from foreshard.errors import InfeasibleError


def result(step, **more):
    best = SimpleNamespace(prediction=SimpleNamespace(step_time_s=step))
    return SimpleNamespace(plans=(best,), infeasible=None, interrupted=False, **more)


def test_each_kind_of_node_the_nic_and_memory():
    cluster = load_cluster("2x8xa100-sxm-80gb+1x8xh100-sxm")
    found = dict(changes(cluster))
    assert found["one node more of 8 a100-sxm-80gb"].nodes[0].count == 3
    assert found["one node more of 8 h100-sxm"].nodes[1].count == 2
    for nodes, same in zip(cluster.nodes, found["NICs twice as fast"].nodes, strict=True):
        assert same.nic_bytes_per_s == 2 * nodes.nic_bytes_per_s
    larger = found["20 % more device memory"].nodes[0].device
    assert larger.capacity_bytes == pytest.approx(1.2 * cluster.nodes[0].device.capacity_bytes)


def test_one_node_has_no_use_for_a_nic():
    assert not any("NIC" in name for name, _ in changes(load_cluster("1x8xh100-sxm")))


def test_gains_come_most_first_and_are_never_negative():
    steps = {"3x8xh100-sxm": 6.0}

    def search(cluster):
        if cluster.nodes[0].count == 3:
            return result(steps["3x8xh100-sxm"])
        return result(12.0)  # a short search that finds less than the plan at hand

    gains = sensitivity(search, load_cluster("2x8xh100-sxm"), result(9.0))
    assert [one.gain for one in gains] == [0.5, 0.0, 0.0]
    assert gains[0].change == "one node more of 8 h100-sxm" and gains[1].step_time_s == 9.0


def test_a_change_that_cannot_be_searched_says_why():
    def search(cluster):
        raise InfeasibleError("nothing fits")

    gains = sensitivity(search, load_cluster("1x8xh100-sxm"), result(9.0))
    assert all(one.gain is None and "nothing fits" in one.note for one in gains)
