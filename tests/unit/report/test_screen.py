import io
import re

import pytest

from foreshard.report.explain_screen import explanations
from foreshard.report.plain import render
from foreshard.report.plan_words import plan_line
from foreshard.report.screen import Screen, Table
from foreshard.report.summary import prediction_screen
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


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("verb", ["devices", "models", "clusters"])
def test_names_of_the_catalogs_stay_whole(verb, width, monkeypatch):
    from importlib import import_module

    from foreshard.catalog.devices import devices
    from foreshard.catalog.instances import instances
    from foreshard.catalog.models import models

    shown = []
    module = import_module(f"foreshard.cli.{verb}")
    monkeypatch.setattr(module, "give", lambda data, screen: shown.append(screen()))
    module.command.callback(None)
    text = re.sub(r"\x1b\[[0-9;]*m", "", drawn(shown[0], width))
    assert max(map(len, text.splitlines())) <= width and "\u2026" not in text
    words = set(text.split())
    assert set({"devices": devices, "models": models, "clusters": instances}[verb]()) <= words


def test_a_narrow_terminal_leaves_spare_columns_out_and_says_so():
    rows = (("a" * 30, "b" * 30, "c" * 30),)
    made = Table(title="", columns=("n", "v", "w"), rows=rows, spare=("w", "v"))
    assert "too narrow" not in drawn(Screen(tables=(made,)), 100)
    text = drawn(Screen(tables=(made,)), 80)
    assert "b" * 30 in text and "c" * 30 not in text and "too narrow for w;" in text
    assert "c" * 30 in render(Screen(tables=(made,))), "a pipe has room for everything"


def test_when_nothing_helps_it_is_said(answered):
    assert "no single change tried wins" in render(prediction_screen(answered[1], ()))
    assert "no single change" not in render(prediction_screen(answered[1]))


def test_stages_are_compared_only_where_they_differ(answered):
    from dataclasses import replace

    memory = answered[1].memory
    several = render(prediction_screen(answered[1]))
    assert re.search(r"stages take [\d.]+ to [\d.]+ GiB", several)
    one = replace(memory, per_stage_peak_bytes=((memory.peak_bytes,),))
    assert "stages take" not in render(prediction_screen(replace(answered[1], memory=one)))
    alike = replace(memory, per_stage_peak_bytes=((memory.peak_bytes,) * 4,))
    assert "GiB each" in render(prediction_screen(replace(answered[1], memory=alike)))


def test_the_whole_run_has_a_duration(answered):
    from dataclasses import replace

    text = render(prediction_screen(replace(answered[1], run_time_s=30 * 86400.0)))
    assert re.search(r"whole run 30.0 days, [\d.]+ [kMG]Wh, \$", text)
    assert "samples/s" in text
