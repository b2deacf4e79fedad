"""The audit finds a lost and a repeated sample for sure, whatever the run went through before."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.errors import ForeshardError
from foreshard.runtime.records.ledger import Ledger, audit, counting_lines, ledger_lines, merge

BATCH, RANKS, STEPS = 6, 3, 5
SPANS = (range(0, 1), range(1, 4), range(4, 6))


def index(position: int) -> int:
    """Ten samples, in another order each pass."""
    turn, place = divmod(position, 10)
    return (place * 3 + turn) % 10


@contextmanager
def folder() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as name:
        yield [Path(name) / f"rank-{rank}.jsonl" for rank in range(RANKS)]


def train(ledgers: list[Ledger], step: int, generation: int, writers: list[int], committers: list[int]):
    """One step: some ranks write what they trained, some come out of the vote."""
    base = step * BATCH
    for rank in writers:
        ledgers[rank].trained(step, generation, [range(base + SPANS[rank].start, base + SPANS[rank].stop)])
    for rank in committers:
        ledgers[rank].commit(step, generation)


ALL = list(range(RANKS))
SOME = st.lists(st.sampled_from(ALL), max_size=2, unique=True)
FATES = st.lists(st.one_of(st.just("done"), st.tuples(st.just("died"), SOME), st.integers(0, 3)), max_size=8)


def run(paths: list[Path], fates: list, committers: list[int]) -> None:
    """Steps that go well, ranks that die before the vote, falls back to an earlier step."""
    ledgers = [Ledger(path, rank, index) for rank, path in enumerate(paths)]
    step = generation = 0
    for fate in [*fates, *["done"] * STEPS * 9]:
        if isinstance(fate, tuple):
            train(ledgers, step, generation, fate[1], [])
            generation += 1
        elif isinstance(fate, int):
            step, generation = max(0, step - fate), generation + 1
            ledgers[generation % RANKS].rollback(step, generation)
        elif step < STEPS:
            train(ledgers, step, generation, ALL, committers)
            step += 1


def check(paths: list[Path], size: int | None = 10):
    return audit(paths, global_batch=BATCH, steps=STEPS, size=size)


def edit(path: Path, change) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


COMMITTERS = st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True)


@settings(max_examples=60, deadline=None)
@given(FATES, COMMITTERS)
def test_a_run_without_loss_has_none(fates: list, committers: list[int]) -> None:
    with folder() as paths:
        run(paths, fates, committers)
        found = check(paths)
        assert (found.steps, found.samples) == (STEPS, STEPS * BATCH)
        assert (found.lost, found.repeated, found.misread) == ((), (), ())


@settings(max_examples=60, deadline=None)
@given(FATES, COMMITTERS, st.integers(0, STEPS * BATCH - 1))
def test_a_lost_sample_is_found(fates: list, committers: list[int], victim: int) -> None:
    """Whichever it is: it is taken out of the line that counted it."""
    with folder() as paths:
        run(paths, fates, committers)
        kept = {json.dumps(line) for line in counting_lines(ledger_lines(paths))}

        def without(lines: list[dict]) -> list[dict]:
            for line in lines:
                if json.dumps(line) in kept:
                    left = [p for lo, hi in line["positions"] for p in range(lo, hi) if p != victim]
                    line["positions"] = [[p, p + 1] for p in left]
                    line["samples"] = [index(lo) for lo, _ in line["positions"]]
            return lines

        for path in paths:
            edit(path, without)
        found = check(paths)
        assert (found.lost, found.repeated) == ((victim,), ())
        assert found.samples == STEPS * BATCH - 1


@settings(max_examples=60, deadline=None)
@given(FATES, COMMITTERS, st.integers(0, STEPS * BATCH - 1), st.sampled_from(ALL))
def test_a_repeated_sample_is_found(fates: list, committers: list[int], victim: int, rank: int) -> None:
    with folder() as paths:
        run(paths, fates, committers)
        step = victim // BATCH
        generation = next(
            line["generation"] for line in counting_lines(ledger_lines(paths)) if line["step"] == step
        )
        Ledger(paths[rank], rank, index).trained(step, generation, [range(victim, victim + 1)])
        found = check(paths)
        assert (found.lost, found.repeated) == ((), (victim,))


def test_a_step_that_nobody_committed_is_lost() -> None:
    with folder() as paths:
        run(paths, [], ALL)
        for path in paths:
            edit(path, lambda lines: [line for line in lines if line.get("commit") != 2])
        found = check(paths)
        assert found.lost == tuple(range(2 * BATCH, 3 * BATCH))
        assert found.steps == STEPS - 1


def test_samples_of_steps_nobody_asked_for_are_told_apart() -> None:
    with folder() as paths:
        run(paths, [], ALL)
        assert audit(paths, global_batch=BATCH, steps=STEPS - 1).lost == ()
        more = audit(paths, global_batch=BATCH, steps=STEPS + 1)
        assert more.lost == tuple(range(STEPS * BATCH, (STEPS + 1) * BATCH))


def test_ranks_that_read_other_samples_are_found() -> None:
    """Another seed or another dataset on a host: positions are covered, by other samples."""
    with folder() as paths:
        run(paths, [("died", [1])], ALL)
        edit(paths[1], lambda lines: [{**lines[0], "samples": [7, 7, 7]}, *lines[1:]])
        assert set(check(paths, size=None).misread) == {1, 2, 3}
        assert check(paths).lost == ()


def test_a_sample_twice_in_a_pass_is_found() -> None:
    with folder() as paths:
        run(paths, [], ALL)
        edit(paths[0], lambda lines: [{**lines[0], "samples": [index(5)]}, *lines[1:]])
        assert check(paths, size=None).misread == ()
        assert check(paths).misread == (5,)


def test_a_line_torn_by_a_kill_takes_no_other_with_it() -> None:
    with folder() as paths:
        run(paths, [], ALL)
        whole = paths[1].read_bytes()
        paths[1].write_bytes(whole + b'{"step": 5, "gener')
        again = Ledger(paths[1], 1, index)
        again.trained(5, 1, [range(30, 36)])
        again.commit(5, 1)
        assert audit(paths, global_batch=BATCH, steps=6, size=10).lost == ()
        paths[1].write_bytes(b"\xff\xfe" + whole)
        assert check(paths).lost == tuple(range(1, 4)), "a line that cannot be read proves nothing"


def test_the_merged_file_has_every_sample_once_in_order() -> None:
    with folder() as paths:
        run(paths, [("died", [0, 1]), "done", "done", 1], [2])
        out = paths[0].parent / "samples.jsonl"
        merge(paths, out)
        lines = [json.loads(text) for text in out.read_text().splitlines()]
        covered = [p for line in lines for lo, hi in line["positions"] for p in range(lo, hi)]
        assert covered == list(range(STEPS * BATCH))


def test_empty_spans_leave_no_line() -> None:
    with folder() as paths:
        Ledger(paths[0], 0).trained(0, 0, [range(3, 3)])
        assert not paths[0].exists()


class Kept:
    """What a rendezvous keeps for a rank."""

    def __init__(self, lines=()):
        self.lines = list(lines)

    def keep(self, data):
        self.lines.append(data)

    def clear(self):
        self.lines.clear()

    def left(self):
        return list(self.lines)


def test_a_full_disk_loses_no_sample(tmp_path, disk) -> None:
    path, copies = tmp_path / "rank-0.jsonl", Kept()
    ledger = Ledger(path, 0, index, size=10, backup=copies)
    for step in range(STEPS):
        disk.room = 20 if step in (1, 2) else None
        if step == 3:
            assert ledger.file.waiting == 4 and len(copies.lines) == 4
            ledger.flush()
            assert copies.lines == []
        ledger.trained(step, 0, [range(step * BATCH, step * BATCH + BATCH)])
        ledger.commit(step, 0)
    assert (check([path]).lost, check([path]).repeated, check([path]).misread) == ((), (), ())


def test_a_checkpoint_is_refused_while_lines_wait(tmp_path, disk) -> None:
    ledger = Ledger(tmp_path / "rank-0.jsonl", 0)
    disk.room = 0
    ledger.commit(0, 0)
    with pytest.raises(OSError, match=r"1 lines of rank-0\.jsonl wait: No space left"):
        ledger.flush()


def test_a_rank_killed_while_its_lines_wait_loses_none(tmp_path, disk) -> None:
    """Its next process writes them; what had reached the disk before it died does not come twice."""
    path, copies = tmp_path / "rank-0.jsonl", Kept()
    first = Ledger(path, 0, backup=copies)
    first.trained(0, 0, [range(6)])
    disk.room = 0
    first.commit(0, 0)
    first.trained(1, 0, [range(6, 12)])
    disk.room = None
    with path.open("ab") as file:
        file.write(copies.lines[0] + b"\n")  # killed in the middle of writing them
    again = Ledger(path, 0, backup=copies)
    assert copies.lines == []
    again.commit(1, 0)
    found = audit([path], global_batch=6, steps=2)
    assert (found.steps, found.samples, found.lost, found.repeated) == (2, 12, (), ())
    assert len(path.read_text().splitlines()) == 4


def test_too_many_waiting_lines_stop_the_run_and_say_which(tmp_path, disk) -> None:
    ledger = Ledger(tmp_path / "rank-0.jsonl", 0, kept_bytes=300)
    ledger.trained(0, 0, [range(6)])
    disk.room = 0
    with pytest.raises(
        ForeshardError, match=r"No space left.* at most 300 bytes .* of steps 1 to \d+\. .*--resume"
    ) as found:
        for step in range(1, 100):
            ledger.trained(step, 0, [range(step * 6, step * 6 + 6)])
            ledger.commit(step, 0)
    assert found.value.exit_code == 1
    assert ledger.file.waiting < 10


def test_a_dataset_of_another_length_on_a_rank_is_found(tmp_path) -> None:
    paths = [tmp_path / "rank-0.jsonl", tmp_path / "rank-1.jsonl"]
    for rank, (path, size) in enumerate(zip(paths, (10, 11), strict=True)):
        ledger = Ledger(path, rank, index, size=size)
        ledger.trained(0, 0, [range(rank * 3, rank * 3 + 3)])
        ledger.commit(0, 0)
    found = audit(paths, global_batch=6, steps=1)
    assert (found.lost, found.repeated, found.misread) == ((), (), (3, 4, 5))
