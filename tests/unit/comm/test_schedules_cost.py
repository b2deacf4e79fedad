"""Closed forms equal the textbook's on a full-bisection switch; what schedules move equals theory."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest

from foreshard.comm.schedules.cost import RoundTraffic
from foreshard.comm.schedules.registry import ALGORITHMS, algorithms_of, schedule_of
from foreshard.comm.schedules.ring import ring
from foreshard.comm.topology.graph import Edge, SharedResource, Topology, Vertex
from foreshard.errors import SpecError

ALPHA, BANDWIDTH, SIZE = 3e-6, 25e9, 1e7
BETA = 1.0 / BANDWIDTH


def star(num_ranks: int, shared: tuple[SharedResource, ...] = ()) -> Topology:
    """Return ranks around one switch; links 2 r and 2 r + 1 go from rank r and to it."""
    ranks = tuple(Vertex(name=f"rank {r}", kind="device") for r in range(num_ranks))
    ends = [(r, num_ranks) for r in range(num_ranks)]
    links = [
        Edge(
            source=a,
            target=b,
            bytes_per_s=BANDWIDTH,
            latency_s=ALPHA / 2,
            shared=tuple(range(len(shared))),
        )
        for rank, switch in ends
        for a, b in ((rank, switch), (switch, rank))
    ]
    return Topology(
        vertices=(*ranks, Vertex(name="switch", kind="switch")), links=tuple(links), shared=shared
    )


def through(source: int, target: int, channel: int) -> tuple[int, ...]:
    return (2 * source, 2 * target + 1)


def seconds(collective: str, algorithm: str, num_ranks: int, **options) -> float:
    schedule = schedule_of(collective, algorithm, num_ranks, **options)
    return RoundTraffic(schedule, star(num_ranks), through).cost().time_s(SIZE)


@pytest.mark.parametrize("p", [2, 3, 5, 8, 16])
def test_hockney_of_any_number_of_ranks(p):
    share, a, b = SIZE / p, ALPHA, BETA
    pieces = 4
    wanted = {
        ("all-reduce", "ring"): 2 * (p - 1) * (a + share * b),
        ("all-gather", "ring"): (p - 1) * (a + share * b),
        ("reduce-scatter", "ring"): (p - 1) * (a + share * b),
        ("all-reduce", "direct"): 2 * (p - 1) * (a + share * b),
        ("all-to-all", "direct"): (p - 1) * (a + share * b),
        ("all-gather", "bruck"): ceil(log2(p)) * a + (p - 1) * share * b,
        ("all-gather", "pat"): ceil(log2(p)) * a + (p - 1) * share * b,
        ("reduce-scatter", "pat"): ceil(log2(p)) * a + (p - 1) * share * b,
        ("broadcast", "binomial"): ceil(log2(p)) * (a + SIZE * b),
    }
    for (collective, algorithm), time_s in wanted.items():
        assert seconds(collective, algorithm, p) == pytest.approx(time_s, rel=1e-12), algorithm
    chain = (p - 2 + pieces) * (a + SIZE / pieces * b)
    assert seconds("broadcast", "ring", p, parts=pieces) == pytest.approx(chain, rel=1e-12)
    assert seconds("send", "chain", p, parts=pieces) == pytest.approx(chain, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32])
def test_hockney_of_powers_of_two(p):
    share, a, b, rounds = SIZE / p, ALPHA, BETA, log2(p)
    gather = rounds * a + (p - 1) * share * b
    assert seconds("all-reduce", "halving-doubling", p) == pytest.approx(2 * gather, rel=1e-12)
    assert seconds("all-gather", "recursive-doubling", p) == pytest.approx(gather, rel=1e-12)
    assert seconds("reduce-scatter", "recursive-halving", p) == pytest.approx(gather, rel=1e-12)
    bruck = rounds * a + p / 2 * rounds * share * b
    assert seconds("all-to-all", "bruck", p) == pytest.approx(bruck, rel=1e-12)


def test_two_trees_come_near_twice_the_size_over_bandwidth():
    """Sanders et al. 2009: 2 S b at full duplex with many pieces; one tree alone sends each byte to two."""
    p, parts = 16, 256
    time_s = seconds("all-reduce", "double-tree", p, parts=parts)
    bytes_s = time_s - 2 * (parts + 2 * log2(p)) * ALPHA
    assert bytes_s < 2.3 * SIZE * BETA


def test_a_shared_resource_bounds_a_round():
    schedule = ring("all-reduce", 4)
    free = RoundTraffic(schedule, star(4), through).cost()
    shared = star(4, (SharedResource(name="bus", bytes_per_s=BANDWIDTH),))
    bus = RoundTraffic(schedule, shared, through).cost()
    assert bus.s_per_byte == pytest.approx(4 * free.s_per_byte)
    assert (bus.bottleneck == 8).all()
    assert (bus.latency_s == free.latency_s).all()


def test_a_slow_link_is_named():
    topology = star(4)
    slow = Edge(source=2, target=4, bytes_per_s=BANDWIDTH / 10, latency_s=ALPHA / 2)
    links = (*topology.links[:4], slow, *topology.links[5:])
    slowed = Topology(vertices=topology.vertices, links=links)
    cost = RoundTraffic(ring("all-gather", 4), slowed, through).cost()
    assert cost.bottleneck.tolist() == [4, 4, 4]


def sent(schedule) -> np.ndarray:
    return np.bincount(schedule.source, weights=schedule.weight, minlength=schedule.num_places)


def got(schedule) -> np.ndarray:
    return np.bincount(schedule.target, weights=schedule.weight, minlength=schedule.num_places)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 12])
def test_what_each_rank_moves(p):
    full = (p - 1) / p
    for name in ("ring", "bidirectional-ring", "direct"):
        for collective, factor in (("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)):
            schedule = schedule_of(collective, name, p, channels=2)
            assert sent(schedule) == pytest.approx(factor * full)
            assert got(schedule) == pytest.approx(factor * full)
    for collective, name in (("all-gather", "bruck"), ("all-gather", "pat"), ("reduce-scatter", "pat")):
        assert sent(schedule_of(collective, name, p)) == pytest.approx(full)
    assert sent(schedule_of("all-to-all", "direct", p)) == pytest.approx(full)
    switch = schedule_of("all-reduce", "nvls", p)
    assert sent(switch)[:p] == pytest.approx(1.0) and got(switch)[:p] == pytest.approx(1.0)
    tree = schedule_of("all-reduce", "double-tree", p, parts=3)
    assert sent(tree).sum() == pytest.approx(2 * (p - 1)) and sent(tree).max() <= 2.0 + 1e-9


def test_uneven_shares_move_as_they_weigh():
    weights = [0.5, 0.25, 0.125, 0.125]
    schedule = schedule_of("reduce-scatter", "ring", 4, weights=weights)
    # of a share every rank but its owner sends one copy
    assert sent(schedule).sum() == pytest.approx(3.0)
    assert got(schedule).tolist() == pytest.approx([1 - weights[(r - 1) % 4] for r in range(4)])


@pytest.mark.parametrize("per_node", [2, 4])
def test_levels_cross_nodes_with_the_share_of_one_rank(per_node):
    p = 16
    nodes = p // per_node
    schedule = schedule_of("all-reduce", "hierarchical", p, per_node=per_node, parts=2)
    crosses = schedule.source // per_node != schedule.target // per_node
    per_rank = np.bincount(schedule.source[crosses], weights=schedule.weight[crosses], minlength=p)
    assert per_rank == pytest.approx(2 * (nodes - 1) / nodes / per_node)


@pytest.mark.parametrize("algorithm", ["two-step", "three-step", "rail"])
def test_ways_through_nodes_use_fewer_pairs_across(algorithm):
    p, size = 16, 4
    schedule = schedule_of("all-to-all", algorithm, p, per_node=size)
    crosses = schedule.source // size != schedule.target // size
    pairs = {*zip(schedule.source[crosses].tolist(), schedule.target[crosses].tolist(), strict=True)}
    nodes = p // size
    assert len(pairs) == (nodes * (nodes - 1) if algorithm == "three-step" else p * (nodes - 1))
    assert schedule.weight[crosses].sum() == pytest.approx((p - size) * p / p)
    if algorithm != "three-step":
        assert all(a % size == b % size for a, b in pairs)


def test_pieces_of_levels_overlap():
    """Many pieces of two levels take about the time of the slower level, not of the sum."""
    one, many = (
        int(schedule_of("all-reduce", "hierarchical", 8, per_node=4, parts=n).rounds().max()) + 1
        for n in (1, 8)
    )
    assert one == 3 + 2 + 3
    assert many < 8 * one / 2


def test_sharp_goes_through_leaves_and_root():
    schedule = schedule_of("all-reduce", "sharp", 8, per_node=4)
    assert schedule.num_places == 11
    assert schedule.num_sends == 2 * (8 + 2)
    assert int(schedule.rounds().max()) == 3


def test_a_ring_of_1024_ranks():
    schedule = ring("all-reduce", 1024)
    assert schedule.num_sends == 2 * 1023 * 1024
    assert schedule.waits_for(2_000_000).tolist() == [2_000_000 - 1024 - 1]


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "broadcast", "all-to-all", "send"])
def test_every_name_that_is_listed_makes_a_schedule(collective):
    for name in algorithms_of(collective):
        assert schedule_of(collective, name, 4, per_node=2).collective == collective
    assert set(algorithms_of(collective)) <= set(ALGORITHMS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("all-reduce", "rnig", 4, {}), "Did you mean 'ring'"),
        (("all-redcue", "ring", 4, {}), "Did you mean 'all-reduce'"),
        (("all-to-all", "ring", 4, {}), "Of all-to-all there are bruck, direct"),
        (("all-reduce", "ring", 1, {}), "at least 2 ranks"),
        (("all-reduce", "hierarchical", 8, {}), "at least two equal nodes"),
        (("all-reduce", "hierarchical", 8, {"per_node": 3}), "use ring, bidirectional-ring"),
        (("all-reduce", "hierarchical", 8, {"per_node": 8}), "at least two ranks"),
        (("all-reduce", "sharp", 8, {"per_node": 3}), "Nodes are equal"),
        (("broadcast", "ring", 4, {"root": 4}), "The root is one of"),
        (("all-reduce", "ring", 4, {"parts": 0}), "at least 1 part"),
        (("all-reduce", "ring", 4, {"channels": 0}), "at least 1 channel"),
        (("all-reduce", "double-tree", 2, {"weights": [0.5, 0.5]}), "Weights are for ring"),
        (("all-reduce", "ring", 2, {"weights": [0.5, 0.6]}), "together 1"),
        (("all-reduce", "ring", 2, {"weights": [1.0]}), "each of the 2 ranks"),
        (("broadcast", "ring", 2, {"weights": [0.5, 0.5]}), "equal chunks"),
        (("all-to-all", "direct", 2, {"weights": [0.5, 0.5]}), "2 x 2 matrix"),
        (("all-to-all", "bruck", 2, {"weights": [[0, 1], [1, 0]]}), "Weights are for direct"),
    ],
)
def test_what_no_algorithm_does_is_refused(call, words):
    collective, algorithm, num_ranks, options = call
    with pytest.raises(SpecError) as error:
        schedule_of(collective, algorithm, num_ranks, **options)
    assert words in str(error.value)
