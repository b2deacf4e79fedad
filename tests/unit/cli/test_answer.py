"""What is not the answer goes to standard error, on a terminal cut between words; files are written whole."""

import os
import resource
import sys

import pytest

from foreshard.cli.options.answer import say
from foreshard.cli.program import run
from foreshard.file_replacement import replace_file

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


@pytest.mark.parametrize("option", ["-o", "--report", "--trace"])
def test_a_write_that_fails_halfway_keeps_the_old_file_and_leaves_no_other(option, shell, tmp_path):
    file = tmp_path / "answer"
    file.write_text("old")
    low, high = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, high))  # a write past 100 bytes fails after the first 100
    try:
        got = shell("predict", "gpt2-medium", "1x1xh100-sxm", option, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (low, high))
    assert got.code != 0 and f"{file}: cannot write" in got.err
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_file_keeps_its_permissions_and_a_link_its_place(tmp_path):
    file, link = tmp_path / "plan.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    assert replace_file(link, "é") == 2
    assert link.is_symlink() and file.read_text("utf-8") == "é" and file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("old")
    before = file.stat().st_ino
    monkeypatch.setattr("os.access", lambda path, mode: path != str(file))  # opening it would refuse others
    replace_file(file, "new")
    assert file.stat().st_ino == before


def test_an_error_whose_answer_finds_no_room_is_said_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w", buffering=1))  # noqa: SIM115 - closed below
    code = run(["predict", "gpt2-medium", "1x1xh100-sxm", "--json"])
    sys.stdout.buffer.raw.close()
    assert code == 1 and "No space left" in capsys.readouterr().err
