"""Lines reach their file in order, whatever the disk does meanwhile."""

import json

import pytest

from foreshard.errors import ForeshardError
from foreshard.runtime.records.durable_jsonl import DurableJsonl, flush_all, whole_lines


def numbers(path):
    return [line["n"] for line in whole_lines(path)]


def test_lines_wait_in_order_and_nothing_torn_is_left(tmp_path, disk):
    told, now_s = [], [0.0]
    lines = DurableJsonl(
        tmp_path / "a.jsonl", lambda kind, text, **facts: told.append((kind, facts)), now=lambda: now_s[0]
    )
    assert lines.add({"n": 0})
    for n, room in enumerate((0, 4, 9, 12), start=1):  # of 9 bytes a line
        disk.room, now_s[0] = room, float(n)
        lines.add({"n": n})
    assert numbers(lines.path) == [0, 1, 2] and lines.waiting == 2
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 3
    assert lines.blocked_s == 3.0 and lines.waiting_bytes == 18
    disk.room, now_s[0] = None, 9.0
    assert lines.add({"n": 5})
    assert numbers(lines.path) == [0, 1, 2, 3, 4, 5]
    assert [kind for kind, _ in told] == ["write blocked", "write resumed"]
    assert told[1][1]["after_s"] == 8.0


def test_a_disk_that_refuses_is_not_asked_for_every_line(tmp_path, disk):
    now_s = [0.0]
    lines = DurableJsonl(tmp_path / "a.jsonl", now=lambda: now_s[0])
    disk.room = 0
    lines.add({"n": 0})
    disk.room = None
    assert not lines.add({"n": 1})
    now_s[0] = 1.0
    assert lines.add({"n": 2}) and numbers(lines.path) == [0, 1, 2]


def test_a_line_that_another_process_left_torn_takes_no_other_with_it(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = DurableJsonl(path)
    lines.add({"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": ')
    lines.add({"n": 2})
    assert numbers(path) == [1, 2]


def test_a_file_torn_by_a_kill_is_gone_on_with(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n"')
    assert DurableJsonl(path).add({"n": 1})
    assert numbers(path) == [0, 1]


def test_the_end_waits_for_the_disk_and_says_what_is_missing(tmp_path, disk):
    lines = DurableJsonl(tmp_path / "a.jsonl")
    disk.room = 0
    for n in range(3):
        lines.add({"n": n})
    with pytest.raises(
        ForeshardError, match=r"a\.jsonl: 3 lines \(27 bytes\) are not written .*No space left"
    ) as found:
        flush_all([lines], 0.0)
    assert found.value.exit_code == 1 and "--resume" in found.value.fix
    disk.room = None
    flush_all([lines], 0.0)
    assert [json.loads(text)["n"] for text in lines.path.read_text().splitlines()] == [0, 1, 2]
