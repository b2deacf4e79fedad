"""The plan for those who are left: every layer once per pipeline, every sample once, nobody who is gone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.errors import InfeasibleError, SpecError
from foreshard.runtime.membership.plan_repair import repaired, taken_over
from foreshard.runtime.state.layout import check_runnable, layout_of
from foreshard.spec.plan_file import parse_plan


def plan_of(*groups, **more):
    told = [
        {
            "share": share,
            "stages": [{"ranks": ranks, "layers": layers, **rest} for ranks, layers, rest in stages],
            **settings,
        }
        for share, settings, stages in groups
    ]
    batch = sum(group["share"] for group in told)
    return parse_plan({"global_batch": batch, "seq_len": 8, "precision": "fp32", "groups": told, **more})


TWO = plan_of(
    (6, {}, [([0], [[0, 3]], {}), ([1], [[3, 8]], {})]),
    (2, {}, [([2], [[0, 6]], {}), ([3], [[6, 8]], {})]),
)


def test_nobody_gone_changes_nothing():
    assert repaired(TWO, [0, 1, 2, 3, 7]) is TWO


def test_a_lost_stage_goes_to_its_neighbour_and_samples_follow_the_ranks():
    left = repaired(TWO, [0, 2, 3])
    assert [stage.layers for stage in left.groups[0].stages] == [((0, 8),)]
    assert [group.share for group in left.groups] == [
        5,
        3,
    ]  # 6/2 of the samples for 1 and 2 of 2 ranks: 3 to 2


def test_a_lost_pipeline_is_dropped():
    left = repaired(TWO, [2, 3])
    assert [group.share for group in left.groups] == [8]
    assert left.ranks == (2, 3)


def test_a_gap_in_the_middle_is_split_by_what_its_neighbours_hold():
    plan = plan_of((4, {}, [([0], [[0, 2]], {}), ([1], [[2, 8]], {}), ([2], [[8, 12]], {})]))
    assert [stage.layers for stage in repaired(plan, [0, 2]).groups[0].stages] == [((0, 4),), ((4, 12),)]


def test_shares_inside_a_stage_are_filled_up():
    plan = plan_of((8, {"micro_batch": 4}, [([0, 1, 2], [[0, 8]], {"rank_shares": [2, 1, 1], "zero": 0})]))
    assert repaired(plan, [0, 1]).groups[0].stages[0].rank_shares == (3, 1)


def test_a_shard_never_spans_more_ranks_than_there_are():
    plan = plan_of((8, {"micro_batch": 4}, [([0, 1, 2], [[0, 8]], {"zero": 1, "shard_size": 3})]))
    layout_of(plan)
    layout_of(repaired(plan, [0, 2]))


def test_interleaved_chunks_are_cut_anew_without_a_stage():
    chunks = {"schedule": "interleaved"}
    plan = plan_of((8, chunks, [([0], [[0, 2], [4, 6]], {}), ([1], [[2, 4], [6, 8]], {})]))
    left = repaired(plan, [1]).groups[0]
    assert (left.schedule, left.stages[0].layers) == ("1f1b", ((0, 8),))


def test_interleaved_rounds_that_no_longer_come_out_even_are_not_interleaved():
    chunks = {"schedule": "interleaved"}
    plan = plan_of(
        (2, chunks, [([0], [[0, 2], [4, 6]], {}), ([1], [[2, 4], [6, 8]], {})]),
        (1, {}, [([2], [[0, 8]], {})]),
    )
    left = repaired(plan, [0, 1])
    assert (left.groups[0].share, left.groups[0].schedule) == (3, "1f1b")
    assert [stage.layers for stage in left.groups[0].stages] == [((0, 4),), ((4, 8),)]
    check_runnable(left)


def test_nobody_left_is_infeasible():
    with pytest.raises(InfeasibleError, match="no rank of the plan"):
        repaired(TWO, [9])


def test_idle_ranks_take_the_seats_of_all_who_are_gone():
    assert sorted(taken_over(TWO, [5, 6, 7, 8, 9, 10]).ranks) == [5, 6, 7, 8, 9, 10][: len(TWO.ranks)]
    some_left, too_few = [TWO.ranks[0], 20, 21, 22, 23, 24], [20]
    assert taken_over(TWO, some_left) == TWO == taken_over(TWO, too_few)


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_chunks_that_cannot_be_run_in_rounds_are_refused_before_ranks_begin(micro_batch):
    stages = [([0], [[0, 2], [4, 6]], {}), ([1], [[2, 4], [6, 8]], {})]
    told = plan_of((4, {"schedule": "interleaved", "micro_batch": micro_batch}, stages))
    if micro_batch == 2:
        layout_of(told)
        return
    with pytest.raises(SpecError, match="interleaved groups of 2 micro-batches") as caught:
        layout_of(told)
    assert caught.value.key == "groups[0].schedule"


@st.composite
def plans(draw):
    layers, rank, groups = draw(st.integers(4, 12)), 0, []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3)))
        micro_batch, stages = draw(st.integers(1, 4)), []
        for lo, hi in zip([0, *cuts], [*cuts, layers], strict=True):
            ranks = list(range(rank, rank + draw(st.integers(1, 3))))
            rank += len(ranks)
            shares = None
            if draw(st.booleans()):
                places = draw(
                    st.lists(st.integers(0, len(ranks) - 1), min_size=micro_batch, max_size=micro_batch)
                )
                shares = [places.count(place) for place in range(len(ranks))]
            stages.append((ranks, [[lo, hi]], {"rank_shares": shares}))
        groups.append((draw(st.integers(1, 20)), {"micro_batch": micro_batch}, stages))
    plan = plan_of(*groups)
    return plan, draw(st.sets(st.sampled_from(plan.ranks), min_size=1))


@settings(max_examples=150, deadline=None)
@given(plans())
def test_whoever_is_left_gets_every_layer_and_every_sample_once(case):
    plan, alive = case
    left = repaired(plan, alive)
    layers = layout_of(plan).num_layers
    assert set(left.ranks) <= alive and len(set(left.ranks)) == len(left.ranks)
    assert sum(group.share for group in left.groups) == plan.global_batch
    assert layout_of(left).num_layers == layers
    for group in left.groups:
        assert group.share > 0
        spans = sorted(span for stage in group.stages for span in stage.layers)
        assert [lo for lo, _ in spans] == [0, *(hi for _, hi in spans[:-1])] and spans[-1][1] == layers
        for stage in group.stages:
            assert stage.rank_shares is None or sum(stage.rank_shares) == group.micro_batch
    check_runnable(left)
    assert parse_plan(left.to_dict()) == left


def test_ranks_that_compute_together_stay_or_go_together():
    plan = plan_of(
        (8, {"micro_batch": 4}, [([0, 1, 2, 3], [[0, 8]], {"tp": 2, "rank_shares": [3, 1], "zero": 1})])
    )
    left = repaired(plan, [0, 2, 3]).groups[0].stages[0]
    assert (left.ranks, left.tp, left.rank_shares) == ((2, 3), 2, (4,))
    narrow = repaired(plan, [0, 3]).groups[0].stages[0]
    assert (narrow.ranks, narrow.tp, narrow.rank_shares) == ((0, 3), 2, None), "two rows' halves are one row"
    four = plan_of((8, {}, [([0, 1, 2, 3], [[0, 8]], {"tp": 4})]))
    assert [(s.ranks, s.tp) for s in repaired(four, [0, 2, 3]).groups[0].stages] == [((0, 2), 2)]
    assert [(s.ranks, s.tp) for s in repaired(four, [3]).groups[0].stages] == [((3,), 1)]
    for alive in ([0, 2, 3], [0, 3], [1], [0, 1, 2]):
        check_runnable(repaired(plan, alive))
        layout_of(repaired(four, alive))
