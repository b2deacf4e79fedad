"""What is cut and what is refused; slices of a weight and their names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.errors import SpecError
from foreshard.runtime.job.job import Job
from foreshard.runtime.state.layout import layout_of
from foreshard.runtime.state.migration import moves_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import parameters_of
from foreshard.runtime.state.slices import (
    SliceCut,
    common,
    common_slice_counts,
    finer,
    parse_cut,
    parse_name,
    slice_name,
    within,
)
from foreshard.runtime.tensor.checks import check_split
from foreshard.runtime.tensor.split import check_by_element, split_of
from foreshard.spec.plan_file import parse_plan

PLAN = {"qkv": "column:3", "out": "row", "scale": "shared"}


class Block(nn.Module):
    """Twelve channels."""

    def __init__(self, plan: Any = None) -> None:
        super().__init__()
        self.qkv, self.out, self.scale = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(4)
        if plan is not None:
            self.tensor_plan = plan

    def forward(self, x: Any) -> Any:
        return x


def plan_of(*stages: tuple[list[int], int], zero: int = 0) -> Any:
    """A group per (ranks, tp), of one stage each."""
    groups = [
        {
            "share": 2,
            "micro_batch": 1,
            "zero": zero,
            "stages": [{"ranks": ranks, "layers": [[0, 2]], "tp": tp}],
        }
        for ranks, tp in stages
    ]
    return parse_plan({"global_batch": 2 * len(stages), "seq_len": 8, "precision": "fp32", "groups": groups})


def parameters(*layers: Any, **more: Any) -> Any:
    made = Job.of(list(layers), [0], lambda out, batch: (out, 1), lambda params: None, **more)
    return parameters_of(made)


def refused(plan: Any, *layers: Any, **more: Any) -> str:
    with pytest.raises(SpecError) as caught:
        check_split(layout_of(plan), parameters(*layers, **more))
    return str(caught.value)


@pytest.mark.parametrize("blocks", [(1,), (1, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_a_weight_are_the_weight(dim: int, blocks: tuple[int, ...]) -> None:
    cut, whole = SliceCut(dim=dim, blocks=blocks), torch.arange(24 * 24).view(24, 24)
    for num in (1, 2, 4):
        assert cut.divides(whole.shape, num)
        parts = [cut.taken(whole, i, i + 1, num) for i in range(num)]
        assert torch.equal(cut.joined(parts), whole)
        again = torch.zeros_like(whole)
        for i, part in enumerate(parts):
            cut.fill(again, i, i + 1, num, part)
        assert torch.equal(again, whole)
    half = cut.taken(whole, 1, 2, 2)
    assert torch.equal(cut.taken(half, 1, 2, 2), cut.taken(whole, 3, 4, 4)), "a part of a part"
    assert parse_cut(cut.to_dict()) == cut


def test_blocks_are_cut_each_by_itself() -> None:
    assert SliceCut(dim=0, blocks=(2, 1, 1)).taken(torch.arange(8), 1, 2, 2).tolist() == [2, 3, 5, 7]
    assert not SliceCut(dim=0, blocks=(2, 1, 1)).divides((8,), 4)


NO_CUTS = [
    {"dim": 0, "blocks": []},
    {"dim": -1, "blocks": [1]},
    {"dim": 0, "blocks": [0]},
    {"dim": True, "blocks": [1]},
    {"dim": 0, "blocks": ["1"]},
]


@pytest.mark.parametrize("told", NO_CUTS)
def test_what_is_no_cut_is_not_read(told: dict) -> None:
    with pytest.raises(ValueError, match="is not a cut"):
        parse_cut(told)


def test_intervals_against_sets_of_slices() -> None:
    intervals = [(lo, hi, of) for of in (1, 2, 3, 4) for lo in range(of) for hi in range(lo + 1, of + 1)]
    for one, other in itertools.product(intervals, intervals):
        fine = 12
        sets = [set(range(i[0] * fine // i[2], i[1] * fine // i[2])) for i in (one, other)]
        lo, hi, of = common(one, other)
        assert set(range(lo * fine // of, hi * fine // of)) == sets[0] & sets[1]
        if lo < hi:
            a, b, num = within((lo, hi, of), one)
            width = (one[1] - one[0]) / one[2]
            assert (a / num * width + one[0] / one[2], (b - a) / num * width) == pytest.approx(
                (lo / of, (hi - lo) / of)
            )


def test_names_of_slices() -> None:
    assert parse_name(slice_name("a.b", 2, 4)) == ("a.b", 2, 4)
    assert parse_name("odd@name") == ("odd@name", 0, 1)
    grain = common_slice_counts([("value", 0, "w@0/2"), ("value", 0, "w@2/3"), ("value", 0, "v")])
    assert grain == {(0, "w"): 6}
    assert list(finer([("value", 0, "w@1/2"), ("value", 0, "v")], grain)) == [
        *(("value", 0, f"w@{i}/6") for i in (3, 4, 5)),
        ("value", 0, "v"),
    ]


def test_moves_between_degrees_are_of_the_common_slices() -> None:
    held = {0: frozenset({("value", 0, "w@0/2")}), 1: frozenset({("value", 0, "w@1/2")}), 2: frozenset()}
    wanted = {r: frozenset({("value", 0, f"w@{r}/3")}) for r in range(3)}
    moves, missing = moves_of(held, wanted)
    assert not missing
    assert {(m.source, m.target, m.shards) for m in moves} == {
        (0, 1, (("value", 0, "w@2/6"),)),
        (1, 2, (("value", 0, "w@4/6"), ("value", 0, "w@5/6"))),
    }


def test_a_plan_names_weights_of_the_layer() -> None:
    split = split_of(Block(PLAN), {})
    assert split is not None
    assert split.cuts == {
        "qkv.weight": SliceCut(dim=0, blocks=(1, 1, 1)),
        "qkv.bias": SliceCut(dim=0, blocks=(1, 1, 1)),
        "out.weight": SliceCut(dim=1),
    }
    assert split.shared == {"scale.weight", "scale.bias"}
    nested = split_of(nn.Sequential(nn.Identity(), Block()), PLAN)
    assert nested is not None
    assert set(nested.roles) == {"1.qkv", "1.out", "1.scale"}
    assert split_of(nn.Linear(2, 2), PLAN) is None


def test_plans_that_say_nothing_sensible() -> None:
    roles = ("columns", "column:0", "column:1,x", "row:2", "gather:3", "")
    wrong = [
        *(({"qkv": role}, "no role") for role in roles),
        ({"nothing": "row"}, "no module 'nothing'"),
        ({"scale": "row"}, "a LayerNorm"),
        ({"qkv": "words"}, "a Linear"),
    ]
    for plan, text in wrong:
        with pytest.raises(SpecError, match=text):
            split_of(Block(plan), {})
    hooked = Block(PLAN)
    hooked.out.register_forward_hook(lambda *given: None)
    with pytest.raises(SpecError, match="a module with hooks"):
        split_of(hooked, {})


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    two = plan_of(([0, 1], 2))
    assert "no layer of groups[0].stages[0] has" in refused(two, Block(), Block())
    frozen = Block(PLAN)
    frozen.qkv.requires_grad_(False)
    assert "layer 1 cannot be cut: qkv.weight is frozen" in refused(two, Block(PLAN), frozen)
    twins = Block(PLAN), Block(PLAN)
    twins[1].out.weight = twins[0].out.weight
    assert "out.weight is used in more than one place" in refused(two, *twins)
    assert "tp 5 does not divide qkv.weight of layer 0: 36 in 3 block(s)" in refused(
        plan_of((list(range(5)), 5)), Block(PLAN), Block(PLAN)
    )
    check_split(layout_of(plan_of(([0], 1))), parameters(Block(), frozen))  # what is not cut may be anything
    check_split(layout_of(two), parameters(Block(PLAN), Block()))
    with pytest.raises(SpecError, match="tp 2 does not divide 3 ranks"):
        layout_of(plan_of(([0, 1, 2], 2)))


def test_optimizers_that_look_at_shapes_are_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    check_by_element(torch.optim.AdamW(weights))
    with pytest.raises(SpecError, match="Adafactor is not known"):
        check_by_element(torch.optim.Adafactor(weights))

    class Own(torch.optim.SGD):
        by_element = True

    check_by_element(Own(weights))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_slice_is_summed_and_updated_where_it_is_held(zero: int) -> None:
    """Groups of tp 2 (two parts of the data), 1 and 3: six slices, held once a part of the data."""
    plan = plan_of(([0, 1, 2, 3], 2), ([4], 1), ([5, 6, 7], 3), zero=zero)
    sharding = OptimizerSharding(layout_of(plan), parameters(Block(PLAN), Block(PLAN)))
    held: dict[Any, list[int]] = {}
    for rank in plan.ranks:
        for kind, *name in sharding.shards(rank):
            held.setdefault((kind, *name), []).append(rank)
    for index, group in enumerate([[(0, 2), (1, 3)], [(4,)], [(5,), (6,), (7,)]]):
        width = 6 // len(group)
        for part, ranks in enumerate(group):
            for i in range(part * width, (part + 1) * width):
                found = set(held["state", 0, f"qkv.weight@{i}/6"])
                mine = found & set(ranks)
                assert mine and not found & {r for other in group if other != ranks for r in other}
                assert len(mine) == (1 if zero and len(ranks) > 1 else len(ranks)), index
                summed = set(sharding.summed_by((0, f"qkv.weight@{i}/6"))) & set(ranks)
                assert summed == (mine if zero >= 2 else set(ranks))
    assert [sharding.adds(rank, (0, "out.bias")) for rank in range(8)] == [
        True,
        False,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert all(sharding.adds(rank, (0, name)) for rank in range(8) for name in ("qkv.weight", "scale.bias"))
