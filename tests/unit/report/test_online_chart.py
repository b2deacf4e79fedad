"""Charts of a contest: round marks, labels apart, a legend that is not cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from foreshard.report.pages.line_chart import Line, chart


def labels(svg, anchor):
    found = re.findall(r'<text x="([-\d.]+)" y="[-\d.]+" text-anchor="(\w+)"[^>]*>([^<]*)</text>', svg)
    return [(float(at), text) for at, side, text in found if side == anchor]


@pytest.mark.parametrize(
    ("low", "high"), [(-0.6376, 0.8596), (0.0, 132.6), (0.0, 0.001), (0.0, 0.0), (-3, -1)]
)
def test_marks_are_round_and_hold_every_point(low, high):
    marks = [
        float(text)
        for _, text in labels(chart([Line(name="a", points=[(1, low), (2, high)])], x="x", y="y"), "end")
    ]
    steps = {round(b - a, 12) for a, b in pairwise(marks)}
    assert marks[0] <= min(low, 0) and marks[-1] >= high and 2 <= len(marks) <= 7
    assert len(steps) == 1 and f"{steps.pop():.0e}"[0] in "125"


def test_labels_that_would_lie_on_each_other_are_left_out():
    line = Line(name="a", points=[(x, 1.0) for x in (1, 3.9, 3.91, 8)])
    at = [across for across, text in labels(chart([line], x="slots", y="y"), "middle") if text != "slots"]
    assert len(at) == 3 and all(b - a >= 30 for a, b in pairwise(at))


def test_large_numbers_on_the_axis_are_written_out_and_not_cut():
    wide = chart([Line(name="a", points=[(1, -16.0), (2, 3.0)])], x="x", y="y", percent=True)
    found = labels(wide, "end")
    assert [text for _, text in found] == ["-2,000 %", "-1,500 %", "-1,000 %", "-500 %", "0 %", "500 %"]
    assert all(at - 6.2 * len(text) >= 0 for at, text in found)
