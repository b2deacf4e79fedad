"""What a plan means to the engines: who takes which samples, sums which gradients, uses which links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.predict import predict
from foreshard.predict.assumptions import assumptions
from foreshard.predict.batch import PlannedRun, build_batch, stage_rows
from foreshard.predict.memory import plan_memory
from foreshard.predict.placement import (
    boundaries,
    crosses_node,
    domain_block,
    layer_replicas,
    link_domains,
    stage_workers,
    sync_width,
)
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.plan_file import parse_plan

ENGINES = ("analytical", "graph")
MODEL = api.load_model("llama3-8b")
LAST = MODEL.num_layers + 2
HOMOGENEOUS = api.load_cluster("2x8xh100-sxm")
MIXED = api.load_cluster("1x4xa100-sxm-80gb+1x4xv100-sxm-32gb@100Gb/s")


def stage(ranks, layers=((0, LAST),), **options):
    return Stage(ranks=tuple(ranks), layers=layers, **({"zero": 0} | options))


def plan(*groups, **options):
    total = sum(group.share for group in groups)
    return Plan(**({"global_batch": total, "seq_len": 2048, "precision": "fp16"} | options), groups=groups)


def case(made, cluster=HOMOGENEOUS, model=MODEL):
    return PlannedRun(model=model, cluster=cluster, plan=made, framework=load_framework("megatron-core"))


def seconds(made, cluster=HOMOGENEOUS, engine="graph", model=MODEL):
    constants = replace(TrainingConstants(), jitter=0.0)
    return predict(model, cluster, made, engine=engine, constants=constants, timeline=False).step_time_s


def workers(group, cluster):
    return [(w.node_group, w.share, w.rank) for w in stage_workers(cluster, group, group.stages[0])]


def test_a_micro_batch_is_split_evenly_over_inner_data_parallel_ranks():
    one = Group(share=8, micro_batch=8, stages=(stage(range(8), tp=2),))
    assert workers(one, HOMOGENEOUS) == [(0, 2.0, 0)]


@pytest.mark.parametrize(("micro_batch", "share"), [(1, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (9, 3.0)])
def test_what_does_not_divide_is_priced_at_the_larger_part(micro_batch, share):
    group = Group(share=micro_batch, micro_batch=micro_batch, stages=(stage(range(4)),))
    assert workers(group, HOMOGENEOUS) == [(0, share, 0)]


def test_rank_shares_of_equal_devices_are_paced_by_the_largest():
    group = Group(share=8, micro_batch=4, stages=(stage(range(6), tp=2, rank_shares=(1, 3, 0)),))
    assert workers(group, HOMOGENEOUS) == [(0, 3.0, 2)]


def test_devices_and_shares_of_a_mixed_stage_are_told_apart():
    group = Group(share=8, micro_batch=8, stages=(stage((2, 3, 4, 5), rank_shares=(3, 3, 2, 0)),))
    assert workers(group, MIXED) == [(0, 3.0, 2), (1, 2.0, 4)]


@pytest.mark.parametrize("engine", ENGINES)
def test_fewer_samples_for_the_slow_devices_of_a_stage_save_time(engine):
    """Reading R2: shares after speed beat equal shares, and the other way round is worse than both."""
    times = {
        shares: seconds(
            plan(Group(share=64, micro_batch=8, stages=(stage((2, 3, 4, 5), rank_shares=shares),))),
            MIXED,
            engine,
        )
        for shares in ((3, 3, 1, 1), (2, 2, 2, 2), (1, 1, 3, 3))
    }
    assert times[3, 3, 1, 1] < times[2, 2, 2, 2] < times[1, 1, 3, 3]


def test_the_fullest_rank_of_a_mixed_stage_is_its_small_device():
    group = Group(share=8, micro_batch=8, stages=(stage((2, 3, 4, 5), zero=1),))
    memory, parts = plan_memory(case(plan(group), MIXED))
    assert memory.peak_rank == 4 and parts.peak.shape == (1,)
    assert memory.capacity_bytes == MIXED.nodes[1].device.capacity_bytes


def test_a_large_share_may_make_the_large_device_the_fullest():
    shares = (15, 15, 1, 1)
    group = Group(share=32, micro_batch=32, stages=(stage((2, 3, 4, 5), rank_shares=shares, zero=3),))
    even = replace(group, stages=(stage((2, 3, 4, 5), zero=3),))
    uneven_memory, even_memory = (plan_memory(case(plan(g), MIXED))[0] for g in (group, even))
    assert even_memory.peak_rank == 4 and uneven_memory.peak_rank == 2


def test_gradients_of_a_layer_are_summed_over_all_ranks_that_hold_it():
    whole = Group(share=8, stages=(stage((0, 1, 2, 3)),))
    cut = Group(share=8, stages=(stage((4, 5), ((0, 10),)), stage((6,), ((10, LAST),))))
    made = plan(whole, cut)
    replicas = layer_replicas(made, MODEL.num_layers)
    assert replicas.shape == (LAST,) and set(replicas[:10]) == {6.0} and set(replicas[10:]) == {5.0}
    assert [sync_width(s, replicas) for s in cut.stages] == [6.0, 5.0] and sync_width(
        whole.stages[0], replicas
    ) == 6


def test_virtual_stages_count_once_for_each_layer():
    first, second = stage((0,), ((0, 9), (17, 26))), stage((1,), ((9, 17), (26, LAST)))
    group = Group(share=8, schedule="interleaved", stages=(first, second))
    assert set(layer_replicas(plan(group), MODEL.num_layers)) == {1.0}


def test_stages_with_equal_layers_but_different_replicas_are_different_rows():
    """Two groups cut differently: the middle stages of the first reduce over different numbers of ranks."""
    cuts = ((0, 9), (9, 17), (17, 25), (25, LAST))
    one = Group(share=8, stages=tuple(stage((i,), (cut,)) for i, cut in enumerate(cuts)))
    other = Group(share=8, stages=(stage((4,), ((0, 17),)), stage((5, 6), ((17, LAST),))))
    rows = [row for row in stage_rows(case(plan(one, other))) if row.group == 0]
    assert [(row.stages, row.rank.dp) for row in rows] == [((0,), 2.0), ((1,), 2.0), ((2,), 3.0), ((3,), 3.0)]


def test_states_are_cut_inside_a_group_only():
    """Groups hold whole copies: two groups of four ranks keep twice the states of one group of eight."""
    halves = plan(*(Group(share=8, stages=(stage(range(i, i + 4), zero=3),)) for i in (0, 4)))
    whole = plan(Group(share=16, micro_batch=2, stages=(stage(range(8), zero=3),)))
    for made, shard in ((halves, 4.0), (whole, 8.0)):
        assert {row.rank.shard for row in stage_rows(case(made))} == {shard}
        assert {row.rank.dp for row in stage_rows(case(made))} == {8.0}
    optimizer = [plan_memory(case(made))[1].optimizer[0] for made in (halves, whole)]
    assert optimizer[0] == pytest.approx(2 * optimizer[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_of_one_rank_equal_one_group_without_sharding(engine):
    dp, width = 4, 2
    groups = [
        Group(share=6, micro_batch=2, stages=(stage(range(d * width, (d + 1) * width), tp=width),))
        for d in range(dp)
    ]
    inner = Group(share=24, micro_batch=8, stages=(stage(range(dp * width), tp=width),))
    assert seconds(plan(*groups), engine=engine) == pytest.approx(
        seconds(plan(inner), engine=engine), rel=1e-9
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_slower_group_sets_the_step(engine):
    def made(a100_share, v100_share):
        return plan(
            Group(share=a100_share, stages=(stage((0, 1, 2, 3), tp=4),)),
            Group(share=v100_share, stages=(stage((4, 5, 6, 7), tp=4),)),
        )

    even, after_speed, one_less = (seconds(made(*s), MIXED, engine) for s in ((32, 32), (45, 19), (45, 18)))
    assert after_speed < even
    assert one_less < after_speed, "the V100s still set the pace"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_last_micro_batch_costs_its_part(engine):
    """12 samples in micro-batches of 8: between 8 and 16, close to one and a half."""
    eight, twelve, sixteen = (
        seconds(plan(Group(share=share, micro_batch=8, stages=(stage((0,)),))), engine=engine)
        for share in (8, 12, 16)
    )
    assert eight < twelve < sixteen
    assert twelve - eight == pytest.approx(0.5 * (sixteen - eight), rel=0.1)


def test_a_short_last_micro_batch_rounds_up_on_data_parallel_ranks():
    group = Group(share=13, micro_batch=8, stages=(stage(range(4)),))  # 2 samples a rank, then ceil(5 / 4)
    batch = build_batch([case(plan(group))], TrainingConstants())
    assert batch.pipeline.num_micro_batches.item() == 2.0
    group = Group(share=11, micro_batch=8, stages=(stage(range(4)),))  # 3 samples: one rank idles
    batch = build_batch([case(plan(group))], TrainingConstants())
    assert batch.pipeline.num_micro_batches.item() == 1.5


@pytest.mark.parametrize("engine", ENGINES)
def test_idle_nodes_cost_neither_money_nor_time(engine):
    made = plan(Group(share=8, stages=(stage(range(8), tp=8),)), precision="bf16")
    small, large = api.load_cluster("1x8xh100-sxm"), HOMOGENEOUS
    busy, idle = (predict(MODEL, c, made, engine=engine, usd_per_device_hour=1.0) for c in (small, large))
    assert idle.step_time_s == pytest.approx(busy.step_time_s)
    assert idle.cost.usd_per_step == pytest.approx(busy.cost.usd_per_step)
    assert idle.mfu == pytest.approx(busy.mfu) and idle.energy_j_per_step == pytest.approx(
        busy.energy_j_per_step
    )
    assert any("8 of 16 devices are idle" in text for text in idle.assumptions)


@pytest.mark.parametrize("engine", ENGINES)
def test_stages_of_different_width_run(engine):
    wide, narrow = stage(range(4), ((0, 28),), tp=4), stage((4,), ((28, LAST),))
    uneven = seconds(plan(Group(share=16, stages=(wide, narrow))), engine=engine)
    even = seconds(plan(Group(share=16, stages=(stage((0,), ((0, 28),)), narrow))), engine=engine)
    assert uneven < even


def test_link_domains_of_a_mixed_cluster():
    assert link_domains(MIXED).tolist() == [0] * 4 + [1] * 4
    assert link_domains(HOMOGENEOUS).tolist() == [0] * 8 + [1] * 8
    rack = api.load_cluster("4x4xgb200-nvl72")
    assert set(link_domains(rack).tolist()) == {0}, "nodes of one NVLink domain share links"
    bridged = api.load_cluster("2x4xrtx-3090")
    assert link_domains(bridged).tolist() == [0] * 4 + [1] * 4, "PCIe inside a node is no network"


@pytest.mark.parametrize(
    ("here", "there", "crosses"),
    [
        ((0, 1), (2, 3), False),
        ((6, 7), (8, 9), True),
        ((4, 5, 6, 7), (8,), True),
        ((0, 1, 8, 9), (2, 3, 10, 11), False),  # each rank's neighbour is on its own node
        ((0, 1, 8, 9), (2, 3, 4, 5), True),
        ((0, 8), (1, 2, 9, 10), False),  # one rank feeds two
        (tuple(range(8)), tuple(range(8, 16)), True),
    ],
)
def test_messages_cross_nodes_where_any_rank_and_its_neighbour_do(here, there, crosses):
    domains = link_domains(HOMOGENEOUS)
    assert crosses_node(stage(here), stage(there), domains) is crosses
    assert crosses_node(stage(there), stage(here), domains) is crosses


def pipelined(ranks_of_stages, **options):
    count = len(ranks_of_stages)
    cuts = np.linspace(0, LAST, count + 1).astype(int).tolist()
    stages = tuple(stage(r, ((a, b),)) for r, a, b in zip(ranks_of_stages, cuts[:-1], cuts[1:], strict=True))
    return Group(share=8, stages=stages, **options)


def test_the_worst_boundary_counts_wherever_it_is():
    """Only the last of three boundaries leaves the node."""
    inside, last_leaves = pipelined([(0,), (1,), (2,), (3,)]), pipelined([(5,), (6,), (7,), (8,)])
    crossing = [
        build_batch([case(plan(group))], TrainingConstants()).pipeline.ends_cross.item()
        for group in (inside, last_leaves)
    ]
    assert crossing == [0.0, 1.0]
    for engine in ENGINES:
        assert seconds(plan(inside), engine=engine) < seconds(plan(last_leaves), engine=engine)


def test_virtual_stages_send_from_the_last_stage_to_the_first():
    group = pipelined([(0,), (1,), (2,)])
    assert [(a.ranks, b.ranks) for a, b in boundaries(group)] == [((0,), (1,)), ((1,), (2,))]
    first, second = stage((0,), ((0, 9), (17, 26))), stage((1,), ((9, 17), (26, LAST)))
    looped = Group(share=8, schedule="interleaved", stages=(first, second))
    assert [(a.ranks, b.ranks) for a, b in boundaries(looped)] == [((0,), (1,)), ((1,), (0,))]


def test_the_network_behind_the_nodes_counts():
    slow = replace(HOMOGENEOUS, network=replace(HOMOGENEOUS.network, oversubscription=8.0))
    made = plan(Group(share=16, micro_batch=16, stages=(stage(range(16)),)))
    for engine in ENGINES:
        assert seconds(made, slow, engine) > seconds(made, HOMOGENEOUS, engine)


def test_a_large_plan_of_many_groups_is_lowered_quickly():
    cluster = api.load_cluster("64x8xh100-sxm")
    groups = [
        Group(share=4, stages=tuple(stage((8 * g + s,), cut) for s, cut in enumerate(_eight_cuts())))
        for g in range(64)
    ]
    made = plan(*groups, precision="bf16")
    batch = build_batch([case(made, cluster)], TrainingConstants())
    assert batch.multiplicity.shape[1] == 64 and float(batch.multiplicity.sum()) == 512.0


def _eight_cuts():
    edges = [0, 5, 9, 13, 17, 21, 25, 29, LAST]
    return [((a, b),) for a, b in pairwise(edges)]


def test_states_of_experts_are_cut_inside_a_group_only():
    """Two groups of 4 ranks, 2 expert ranks each: 4 replicas of an expert in all, 2 of them in a group."""
    from foreshard.predict.tasks.collectives import expert_replicas, shards_of

    model = api.load_model("mixtral-8x7b")
    last = model.num_layers + 2
    groups = [
        Group(share=4, stages=(stage(range(i, i + 4), ((0, last),), zero=1, ep=2),), micro_batch=4)
        for i in (0, 4)
    ]
    rank = build_batch([case(plan(*groups), model=model)], TrainingConstants()).machine.rank
    assert expert_replicas(rank).tolist() == [[4.0, 4.0]]
    assert shards_of(expert_replicas(rank), rank).tolist() == [[2.0, 2.0]]
    whole = Group(share=8, stages=(stage(range(8), ((0, last),), zero=1, ep=2),), micro_batch=8)
    rank = build_batch([case(plan(whole), model=model)], TrainingConstants()).machine.rank
    assert shards_of(expert_replicas(rank), rank).tolist() == [[4.0]]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_optimizer_of_a_fast_group_starts_after_the_gradients_of_the_slow_one(engine):
    """A group that ends early but updates on its host ends the step: it waits for all gradients."""
    slow = Group(share=32, stages=(stage((0, 1, 2, 3), tp=4),))
    times = [
        seconds(plan(slow, Group(share=1, stages=(stage((4,), offload=offload),))), engine=engine)
        for offload in ("none", "optimizer")
    ]
    alone = [
        predict(
            MODEL, HOMOGENEOUS, plan(Group(share=1, stages=(stage((4,), offload=offload),))), engine=engine
        )
        for offload in ("none", "optimizer")
    ]
    later = alone[1].time_breakdown_s["optimizer"] - alone[0].time_breakdown_s["optimizer"]
    assert times[1] - times[0] > 0.8 * later > 0.0


@pytest.mark.parametrize("framework", ["megatron-bridge@26.06", "megatron-core"])
def test_experts_have_replicas_even_where_dense_weights_have_none(framework):
    """With dp 1 and tp 8, eight ranks hold the same experts: their gradients meet in overlapped buckets."""
    model, cluster = api.load_model("mixtral-8x7b"), api.load_cluster("1x8xh100-sxm")
    for micro_batches in (1, 2):
        got = api.predict(model, cluster, tp=8, seq_len=1024, global_batch=micro_batches, framework=framework)
        assert got.time_breakdown_s["data_comm"] > 0.0


def test_tensor_ranks_on_different_nodes_are_slower():
    """The same plan with every tensor rank on another node talks over the network."""
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("8x8xh100-sxm")

    def step(ranks):
        stage = {"ranks": ranks, "layers": [[0, model.num_layers + 2]], "tp": 8}
        group = {"share": 64, "micro_batch": 8, "sp": True, "stages": [stage]}
        plan = parse_plan({"global_batch": 64, "seq_len": 4096, "groups": [group]})
        return api.predict(model, cluster, plan, engine="analytical").time_breakdown_s["tensor_comm"]

    near, far = step(list(range(64))), step([n * 8 + i for i in range(8) for n in range(8)])
    assert far > 3 * near


def test_replicas_on_different_nodes_sync_over_the_network():
    """Two pipelines, a node each: their gradients cross the network however few ranks hold a stage."""
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("2x8xh100-sxm")
    spans = [[0, 5], *([4 * i + 1, 4 * i + 5] for i in range(1, 7)), [29, 34]]

    def group(first):
        stages = [{"ranks": [first + i], "layers": [span], "zero": 0} for i, span in enumerate(spans)]
        return {"share": 8, "micro_batch": 1, "stages": stages}

    plan = parse_plan({"global_batch": 16, "seq_len": 2048, "groups": [group(0), group(8)]})
    made = api.predict(model, cluster, plan, engine="analytical")
    held = 4 * (model.num_params / 8)  # bytes of fp32 gradients a rank reduces, about
    assert made.time_breakdown_s["data_comm"] > 0.5 * held / 50e9


@pytest.mark.parametrize(
    ("cluster", "block"),
    [
        ("64x4xgb200-nvl72", 64),
        ("18x4xgb200-nvl72", 72),
        ("36x4xgb200-nvl72", 72),
        ("2x4xgb200-nvl72", 8),
        ("3x8xh100-sxm", 8),
        ("2x4xt4", 4),
    ],
)
def test_a_job_takes_equal_blocks_of_the_link_domains(cluster, block):
    assert domain_block(api.load_cluster(cluster).nodes[0]) == block


@pytest.mark.parametrize(
    ("micro_batch", "share", "said"),
    [
        (2, 8, None),
        (3, 8, "the last of 3 micro-batches of a group is short: 2 of 3 samples"),
        (16, 8, "the only micro-batch of a group is short: 8 of 16 samples"),
    ],
)
def test_a_short_micro_batch_is_said_once(micro_batch, share, said):
    groups = [
        Group(share=share, micro_batch=micro_batch, stages=(stage((rank,)),), schedule="1f1b")
        for rank in (0, 1)
    ]
    told = [text for text in assumptions(case(plan(*groups))) if "short" in text]
    assert [text.partition(";")[0] for text in told] == ([said] if said else [])


def nic_shares(made, cluster):
    """NIC rates that messages of each run of stages have, GB/s."""
    rows = stage_rows(case(made, cluster))
    return [row.link.nic_bytes_per_s / row.link.nic_sharers / 1e9 for row in rows]


def chain(first, width, count, **options):
    """A pipeline of equal stages of so many tensor ranks each."""
    cuts = [0, *(4 * i for i in range(1, count)), LAST]
    return tuple(
        stage(range(first + i * width, first + (i + 1) * width), layers=(pair,), tp=width, **options)
        for i, pair in enumerate(pairwise(cuts))
    )


@pytest.mark.parametrize(
    ("written", "width", "share"),
    [
        ("10Gb/s", 1, 1.25),  # one card, which the one rank that sends over a boundary has to itself
        ("10Gb/s", 2, 1.25 / 2),
        ("10Gb/s", 4, 1.25 / 4),
        ("2x5Gb/s", 1, 1.25 / 2),
        ("10Gb/s/gpu", 1, 1.25),
        ("400Gb/s", 1, 50 / 4),  # too fast for one card: each device has its own
    ],
)
def test_ranks_that_send_at_once_share_the_cards_of_their_node(written, width, share):
    cluster = api.load_cluster(f"2x4xv100-sxm-16gb@{written}")
    made = plan(Group(share=8, micro_batch=1, stages=chain(0, width, 8 // width)))
    assert nic_shares(made, cluster) == pytest.approx([share] * len(nic_shares(made, cluster)))


def test_pipelines_side_by_side_share_the_card_of_their_nodes():
    cluster = api.load_cluster("2x4xv100-sxm-16gb@10Gb/s")
    stages = [
        (stage((here,), layers=((0, 16),)), stage((there,), layers=((16, LAST),)))
        for here, there in ((0, 4), (1, 5), (2, 3))  # the last stays in its node
    ]
    made = plan(*(Group(share=4, micro_batch=1, stages=own) for own in stages))
    assert nic_shares(made, cluster)[:4] == [pytest.approx(1.25 / 2)] * 4


def test_a_message_alone_takes_its_bytes_over_the_whole_card():
    """One rank a node sends: 4x the share of a device, whichever engine prices it."""
    cluster, slower = (api.load_cluster(f"2x4xv100-sxm-16gb@{rate}") for rate in ("10Gb/s", "10Gb/s/gpu"))
    made = plan(Group(share=32, micro_batch=1, stages=chain(0, 1, 8)))
    for engine in ENGINES:
        assert seconds(made, cluster, engine) == pytest.approx(seconds(made, slower, engine), rel=1e-9)


def test_what_is_assumed_of_a_card_is_said_where_it_matters():
    cluster = api.load_cluster("2x4xv100-sxm-16gb@10Gb/s")
    deep = case(plan(Group(share=8, micro_batch=1, stages=chain(0, 1, 8))), cluster)
    wide = case(plan(Group(share=8, micro_batch=1, stages=chain(0, 4, 2))), cluster)
    said = [any("one card" in line for line in assumptions(run)) for run in (deep, wide)]
    assert said == [True, False]
