"""What is not the answer goes to standard error, on a terminal cut between words."""

import os

import pytest

from foreshard.cli.options.answer import say

TEXT = "ranks: measured are cpu-1x, cpu-2x and cpu-4x\n" + "x" * 30


@pytest.mark.parametrize(
    ("terminal", "shown"),
    [(False, TEXT + "\n"), (True, "ranks: measured are\ncpu-1x, cpu-2x and\ncpu-4x\n" + "x" * 30 + "\n")],
)
def test_lines_are_cut_between_words_on_a_terminal_only(terminal, shown, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    say(TEXT)
    assert capsys.readouterr().err == shown
