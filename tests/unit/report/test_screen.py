import io
import re

import pytest

from foreshard.report.explain import explanations
from foreshard.report.plain import render
from foreshard.report.screen import Screen, Table
from foreshard.report.summary import plan_line, prediction_screen
from foreshard.report.terminal import bar, show


def drawn(screen, width, **settings):
    from rich.console import Console

    out = io.StringIO()
    show(screen, Console(file=out, width=width, force_terminal=True, highlight=False, **settings))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_no_line_is_wider_than_the_terminal(answered, width):
    text = drawn(prediction_screen(answered[1], (), explanations(*answered[:2])), width)
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= width


def test_no_color_means_no_colour(answered, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", drawn(prediction_screen(answered[1]), 100))


def test_brackets_in_text_are_not_markup(answered):
    screen = Screen(tables=(Table(title="[bold]", columns=("a",), rows=(("[red]x[/red]",),)),))
    assert "[red]x[/red]" in drawn(screen, 80) and "[red]x[/red]" in render(screen)


def test_numbers_stand_right_words_left():
    screen = Screen(tables=(Table(title="", columns=("n", ">v"), rows=(("a", "1"), ("bb", "222"))),))
    assert render(screen).splitlines() == ["n     v", "a     1", "bb  222"]


def test_bar_lengths():
    assert bar(0.0) == "" and bar(1.0, 4) == "████" and bar(0.5, 4) == "██" and bar(7.0, 4) == "████"


def test_the_plan_line_says_every_degree_in_use(answered):
    line = plan_line(answered[1].plan)
    for words in (
        "tp 2",
        "pp 4",
        "dp 2",
        "micro-batch 1",
        "global batch 32",
        "seq 8192",
        "bf16",
        "zero 1",
        "sp",
    ):
        assert words in line
