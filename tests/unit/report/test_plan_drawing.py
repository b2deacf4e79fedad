"""The plan drawn: every group, stage, layer and share is there, at its size."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from foreshard.advise.baseline_comparison import beyond
from foreshard.api import plan as best_plans
from foreshard.catalog.clusters import load_cluster
from foreshard.report.pages import plan_drawing
from foreshard.report.plan_screen import drawn, idle_words, plan_screen
from foreshard.report.plan_words import degrees, distinct_names, plan_line
from foreshard.spec.plan import Group, Plan, Stage

CLUSTER = load_cluster("1x4xa100-sxm-80gb+1x4xh100-sxm")


def stage(ranks, layers, **more):
    return Stage(ranks=tuple(ranks), layers=(tuple(layers),), **more)


@pytest.fixture
def plan():
    slow = Group(share=10, micro_batch=2, stages=(stage([0, 1], (0, 8), tp=2), stage([2], (8, 34))))
    fast = [Group(share=27, micro_batch=1, stages=(stage([r], (0, 34)),)) for r in (4, 5)]
    return Plan(global_batch=64, seq_len=1024, groups=(slow, *fast))


def svg(plan):
    text = plan_drawing.drawing(plan, CLUSTER)
    return ET.fromstring(re.search(r"<svg.*?</svg>", text, re.S)[0]), text


def test_equal_groups_are_drawn_once(plan):
    rows = plan_drawing.folded(plan, CLUSTER)
    assert [numbers for numbers, _ in rows] == [[0], [1, 2]]
    assert "2 groups, each" in svg(plan)[1]


def test_boxes_are_as_wide_as_their_layers(plan):
    picture, _ = svg(plan)
    groups = picture.findall("g")
    widths = [sum(float(r.get("width")) for r in g.findall("rect")) for g in groups]
    assert len(groups) == 3
    assert (widths[0] + 2) / (widths[1] + 2) == pytest.approx(8 / 26, rel=0.01)
    assert widths[2] + 2 == pytest.approx(widths[0] + widths[1] + 4, rel=0.01)


def advance_em(words):
    """Return how wide words are in DejaVu Sans, in em, by its horizontal metrics."""
    widths = {"m": 0.974, "w": 0.818, "+": 0.838, " ": 0.318, "-": 0.361, "s": 0.521, "x": 0.592, "a": 0.613}
    return sum(widths.get(letter, 0.636) for letter in words)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm", "mi300x", "v100-sxm-16gb"])
def test_names_of_devices_stay_inside_their_boxes(device):
    cluster = load_cluster(f"1x4x{device}+1x4xrtx-3090")
    for end in range(1, 30):
        cuts = (stage([0, 1, 2, 3], (0, end)), stage([4, 5, 6, 7], (end, 60)))
        one = Plan(global_batch=8, seq_len=1024, groups=(Group(share=8, micro_batch=1, stages=cuts),))
        picture = ET.fromstring(re.search(r"<svg.*?</svg>", plan_drawing.drawing(one, cluster), re.S)[0])
        for box in picture.findall("g"):
            right = max(float(r.get("x")) + float(r.get("width")) for r in box.findall("rect"))
            words = [t for t in box.findall("text") if t.text in (f"4 {device}", "4 rtx-3090")]
            assert all(float(t.get("x")) + 12 * advance_em(t.text) <= right for t in words), end


def test_every_stage_says_what_it_holds(plan):
    picture, text = svg(plan)
    titles = [one.find("title").text for one in picture.findall("g")]
    assert titles[0].splitlines() == ["stage 0: layers 0-7", "2 a100-sxm-80gb", "tp 2", "ranks 0-1"]
    assert "a100-sxm-80gb: 3 used" in text and "h100-sxm: 2 used" in text
    assert "10 of 64 samples" in text and "27 of 64 samples" in text


def test_kinds_of_devices_have_colours_of_their_own():
    shades = plan_drawing.colours(CLUSTER)
    assert len(set(shades.values())) == len(shades) == 2


def test_idle_devices_are_named_by_kind(plan):
    assert idle_words(plan, CLUSTER) == "1 of 4 a100-sxm-80gb, 2 of 4 h100-sxm"


def test_words_fold_equal_groups(plan):
    assert degrees(plan).startswith("1 x (tp 2/1 pp 2 dp 1") and " + 2 x (tp 1 pp 1 dp 1" in degrees(plan)
    rows = drawn(plan, CLUSTER).rows
    assert [row[0] for row in rows] == ["0", "0", "1-2"] and rows[2][2] == "4-5"


def test_options_that_kinds_of_groups_share_are_said_once(plan):
    said = "1 x (tp 2/1 pp 2 dp 1) + 2 x (tp 1 pp 1 dp 1) micro-batch 2 | 1 zero 1"
    assert degrees(plan) == said
    alone = replace(plan, groups=plan.groups[1:2])
    assert degrees(alone) == "tp 1 pp 1 dp 1 micro-batch 1 zero 1"
    pieces = replace(plan.groups[1], schedule="gpipe")
    assert degrees(replace(plan, groups=(plan.groups[0], pieces))).endswith("zero 1 1f1b | gpipe")


def test_many_groups_are_cut_and_counted():
    groups = tuple(Group(share=g + 1, micro_batch=1, stages=(stage([g], (0, 34)),)) for g in range(60))
    many = Plan(global_batch=sum(range(61)), seq_len=64, groups=groups)
    text = plan_drawing.drawing(many, load_cluster("8x8xh100-sxm"))
    assert "and 12 more kinds of groups" in text and text.count("<g>") == 48


def test_points_stay_inside_the_picture():
    text = plan_drawing.scatter([(1.0, 5.0, "a<b"), (2.0, 3.0, "c"), (2.0, 3.0, "d")], "x", "y")
    picture = ET.fromstring(text)
    width, height = map(float, picture.get("viewBox").split()[2:])
    for one in picture.findall("circle"):
        assert 0 < float(one.get("cx")) < width and 0 < float(one.get("cy")) < height


def test_plans_of_equal_degrees_are_distinct_names(plan):
    def of(shares, ranks, cut=8):
        groups = [
            Group(share=share, micro_batch=1, stages=(stage([a], (0, cut)), stage([b], (cut, 34))))
            for share, (a, b) in zip(shares, ranks, strict=True)
        ]
        return Plan(global_batch=sum(shares), seq_len=1024, groups=tuple(groups))

    names = distinct_names([of((3, 5), ((0, 4), (1, 5))), of((4, 4), ((0, 4), (1, 5)))])
    assert [name.split(") ")[1] for name in names] == [
        "micro-batch 1 zero 1 shares 3:5",
        "micro-batch 1 zero 1 shares 4:4",
    ]
    names = distinct_names([of((4, 4), ((0, 4), (1, 5))), of((4, 4), ((0, 4), (1, 5)), cut=9), plan])
    assert names[0].endswith("shares 4:4 layers 8:26") and names[1].endswith("layers 9:25")
    assert names[2] == degrees(plan)
    names = distinct_names([of((4, 4), ((0, 4), (1, 5))), of((4, 4), ((0, 5), (1, 4)))])
    assert len(set(names)) == 2 and "ranks" in names[0]


def test_the_line_of_a_plan_says_degrees_that_differ_by_stage(plan):
    assert "tp 2/1  pp 2  dp 1  micro-batch 2" in plan_line(plan)


@pytest.fixture
def joint():
    first = stage([0, 1, 4], (0, 8), rank_shares=(2, 2, 6))
    second = stage([2, 3], (8, 34), ep=2, recompute="full")
    return Plan(
        global_batch=64, seq_len=1024, groups=(Group(share=64, micro_batch=10, stages=(first, second)),)
    )


def test_every_degree_and_what_ranks_take_is_said_of_every_stage(joint):
    words = degrees(joint)
    assert words == "tp 1 pp 2 dp 3/2 ep 1/2 micro-batch 2/6/5 zero 1 recompute none/full"
    assert "micro-batch 2/6/5  global batch 64" in plan_line(joint)
    made = drawn(joint, CLUSTER)
    rows = [dict(zip(made.columns, row, strict=True)) for row in made.rows]
    assert [row["degrees"] for row in rows] == ["tp 1 dp 3", "tp 1 dp 2 ep 2"]
    assert [row["micro-batch"] for row in rows] == ["10 = 2 x 2 + 1 x 6", "10 = 2 x 5"]
    assert [row["recompute"] for row in rows] == ["", "full"]
    assert {row[">samples"] for row in rows} == {"64"}


def test_what_other_planners_do_not_know_is_named(plan, joint):
    assert beyond(plan, CLUSTER) == ""
    assert beyond(joint, CLUSTER).endswith("stages on two kinds of devices and experts cut over ranks.")


def test_a_search_says_what_it_assumed_of_the_network():
    cluster = load_cluster("2x1xrtx-3090")
    found = best_plans("gpt2", cluster, global_batch=8, micro_batch=1, pp=1, budget_s=1)
    said = found.plans[0].prediction.assumptions
    assert any("NIC 100 Gb/s" in text for text in said)
    counted = plan_screen(found, "gpt2", cluster)
    assert any(note == f"{len(said)} assumptions (--explain)." for note in counted.notes)
    explained = plan_screen(found, "gpt2", cluster, explained=True)
    assert [row[1] for row in explained.tables[-1].rows] == list(said)
    assert not any("assumptions" in note for note in explained.notes)


def test_groups_that_share_a_row_say_what_each_of_them_has(plan):
    rows = drawn(plan, CLUSTER).rows
    assert [row[0] for row in rows] == ["0", "0", "1-2"]
    assert "2 a100-sxm-80gb" in rows[0] and "10" in rows[0]
    assert "1 h100-sxm each" in rows[2] and "27 each" in rows[2]


def test_a_trade_off_has_round_numbers_on_its_axes():
    drawn = plan_drawing.scatter([(21.5, 1204.0, "a"), (33.0, 880.0, "b")], "step time, s", "$ per 1B tokens")
    texts = re.findall(r"<text[^>]*>([^<]*)", drawn)
    assert texts[2:] == ["22.5", "25", "27.5", "30", "32.5", "900", "1,000", "1,100", "1,200"]
    alone = re.findall(
        r"<text[^>]*>([^<]*)", plan_drawing.scatter([(2.0, 3.0, "a"), (2.0, 3.0, "b")], "x", "y")
    )
    assert alone == ["x", "y", "2", "3"]
