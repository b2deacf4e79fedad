"""Checkpoints: whole or not there, by any partition, safe to read, and what happens when the disk is full."""

import errno
import json
import os
import pickle
import random
import resource
import subprocess
import threading

import pytest
import torch
import torch.distributed as dist

from foreshard.errors import SpecError
from foreshard.runtime.checkpoint import format
from foreshard.runtime.checkpoint.folders import latest, prune
from foreshard.runtime.checkpoint.format import Attempt, CheckpointFault, damage_of, load, read_meta
from foreshard.runtime.checkpoint.other_formats import export_run


def save(folder, *, before=lambda: None, rank=0, group=None, lead=True, **given):
    attempt = Attempt(folder, rank=rank, group=group, lead=lead, **given)
    attempt.write(before)
    attempt.finish()


def items(*layers, seed=0):
    made = torch.Generator().manual_seed(seed)
    return {
        key: value
        for layer in layers
        for key, value in (
            (f"layers.{layer}.weight", torch.randn(3, 4, generator=made)),
            (f"optimizer.{layer}.weight.exp_avg", torch.randn(3, 4, generator=made, dtype=torch.float64)),
            (f"optimizer.{layer}.weight.step", torch.tensor(float(layer))),
            (f"buffers.{layer}.seen", torch.arange(layer + 1)),
        )
    }


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def on_ranks(number, body):
    """Run body(rank, group) on threads that share a group; return what each gave or raised."""
    store, told = dist.HashStore(), {}

    def run(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        try:
            told[rank] = body(rank, dist.ProcessGroupGloo(store, rank, number, options))
        except Exception as error:
            told[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    wanted = items(0, 1, 2)
    save(tmp_path, step=7, tensors=wanted, meta={"plan": {"a": 1}, "seed": 3})
    assert latest(tmp_path) == 7
    assert same(load(tmp_path, 7), wanted)
    meta = read_meta(tmp_path, 7)
    assert (meta["step"], meta["plan"], meta["seed"], list(meta["parts"])) == (7, {"a": 1}, 3, ["rank-0"])


def test_any_partition_reads_what_another_wrote(tmp_path):
    """Three ranks write layers 0-1, 2 and nothing; a reader takes layer 1 and 2."""
    cuts = {0: items(0, 1), 1: items(2, seed=1), 2: {}}

    def body(rank, group):
        save(tmp_path, step=4, tensors=cuts[rank], meta={}, rank=rank, group=group, lead=rank == 0)

    told = on_ranks(3, body)
    assert told == {0: None, 1: None, 2: None}
    found = load(tmp_path, 4, lambda key: key.split(".")[1] in "12")
    assert same(found, {k: v for k, v in (cuts[0] | cuts[1]).items() if k.split(".")[1] in "12"})


def test_an_attempt_that_was_cut_off_has_no_name_and_leaves_nothing_in_the_next(tmp_path):
    """A rank died while it wrote step 5 with others; those left write the same step without it."""
    save(tmp_path, step=3, tensors=items(0), meta={})
    torn = tmp_path / "step-0000000005.part"
    torn.mkdir(parents=True)
    (torn / "rank-9.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == 3
    save(tmp_path, step=5, tensors=items(0, seed=1), meta={})
    assert latest(tmp_path) == 5
    assert list(read_meta(tmp_path, 5)["parts"]) == ["rank-0"]
    assert same(load(tmp_path, 5), items(0, seed=1))
    assert not (tmp_path / "step-0000000005" / "rank-9.safetensors").exists()


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    save(tmp_path, step=2, tensors=items(0), meta={})
    save(tmp_path, step=2, tensors=items(0, seed=5), meta={})
    assert same(load(tmp_path, 2), items(0, seed=5))
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000002"]


def test_prune_keeps_the_newest_and_removes_what_was_torn(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step=step, tensors=items(0), meta={})
    for name in ("step-0000000004.part", "step-0000000011.part", "step-0000000002.old", "notes"):
        (tmp_path / name).mkdir()
    prune(tmp_path, keep=2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["notes", "step-0000000002", "step-0000000010", "step-0000000011.part"]
    assert latest(tmp_path) == 10


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    (tmp_path / "step-0000000001").mkdir()
    assert latest(tmp_path) is None
    with pytest.raises(SpecError, match="cannot be read"):
        read_meta(tmp_path, 1)


def test_a_rank_that_cannot_write_stops_all_and_leaves_nothing(tmp_path, monkeypatch):
    """The disk of one rank is full: all hear of it, the checkpoint before is kept, the next one works."""
    save(tmp_path, step=1, tensors=items(0), meta={})
    written = format.write_tensors

    def full(path, tensors):
        if "layers.1.weight" in tensors:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, tensors)

    def body(rank, group):
        save(tmp_path, step=2, tensors=items(rank), meta={}, rank=rank, group=group, lead=rank == 0)

    def read_only(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(format, "write_tensors", full)
    with monkeypatch.context() as remounted:  # in the middle of a save: a rank may not remove its file either
        remounted.setattr(format.Path, "unlink", read_only)
        told = on_ranks(2, body)
    assert all(isinstance(error, CheckpointFault) for error in told.values())
    assert "No space left" in str(told[1]) and "another rank" in str(told[0])
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001"]
    monkeypatch.setattr(format, "write_tensors", written)
    assert on_ranks(2, body) == {0: None, 1: None}
    assert latest(tmp_path) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_says_how_much_is_short(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this kernel mounts no tmpfs")
    try:
        save(disk, step=1, tensors=items(0), meta={})
        with pytest.raises(CheckpointFault, match=r"need 1048576 bytes, \d+ are free, \d+ bytes short"):
            save(disk, step=2, tensors={"layers.0.weight": torch.zeros(1 << 18)}, meta={})
        assert [p.name for p in disk.iterdir()] == ["step-0000000001"]
        assert same(load(disk, 1), items(0))
        save(disk, step=3, tensors=items(0), meta={})
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_files_are_those_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wanted = items(0, 1) | {"layers.2.flags": torch.tensor([True, False]), "layers.2.none": torch.zeros(0, 3)}
    wanted["layers.2.half"] = torch.randn(5).bfloat16()
    save(tmp_path, step=1, tensors=wanted, meta={})
    assert same(safetensors.load_file(tmp_path / "step-0000000001" / "rank-0.safetensors"), wanted)
    assert same(load(tmp_path, 1), wanted)


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_byte_anywhere_is_noticed(tmp_path, seed):
    draw = random.Random(seed)
    save(tmp_path, step=1, tensors=items(0, 1), meta={})
    assert damage_of(tmp_path, 1) is None
    path = tmp_path / "step-0000000001" / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data if seed % 2 else data[: draw.randrange(len(data))])
    assert "rank-0.safetensors" in damage_of(tmp_path, 1)
    assert damage_of(tmp_path, 1, place=1, size=2) is None, "another rank looks at this file"


@pytest.mark.parametrize("size", [0, 7, 8, 40])
def test_a_file_that_is_cut_off_or_lies_is_refused(tmp_path, size):
    save(tmp_path, step=1, tensors=items(0), meta={})
    path = tmp_path / "step-0000000001" / "rank-0.safetensors"
    whole = path.read_bytes()
    for data in (whole[:size], b"\xff" * 64, pickle.dumps(os.mkdir), whole.replace(b"F32", b"F64")):
        path.write_bytes(data)
        with pytest.raises(SpecError, match="cannot be read"):
            load(tmp_path, 1)
    path.unlink()
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path, 1)


def test_a_list_of_files_that_lies_is_refused(tmp_path):
    save(tmp_path, step=1, tensors=items(0), meta={})
    place = tmp_path / "step-0000000001"
    for parts in (None, {"../rank-0": ""}, {"rank-0": "", "rank-1": ""}, "rank-0"):
        (place / "meta.json").write_text(json.dumps({"step": 1, "parts": parts}))
        with pytest.raises(SpecError):
            load(tmp_path, 1)
    (place / "meta.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path, 1)


@pytest.mark.parametrize("target", ["safetensors", "dcp"])
def test_an_export_that_the_disk_does_not_take_leaves_the_one_before(tmp_path, target):
    save(tmp_path / "ckpt", step=1, tensors=items(0, 1), meta={})
    out = tmp_path / "out"
    assert export_run(tmp_path, target, out) == 1
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    save(tmp_path / "ckpt", step=2, tensors=items(0, 1, seed=1), meta={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export_run(tmp_path, target, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert export_run(tmp_path, target, out) == 2
    assert {file.name for file in out.iterdir()} == before.keys()


def test_a_checkpoint_with_a_damaged_description_is_left_for_the_one_before(tmp_path):
    """One bit makes another seed, another cut of a parameter or another key: the text still parses."""
    facts = {
        "plan": {"global_batch": 4},
        "seed": 3,
        "loss_scale": [64.0, 7],
        "config": {"eps": 1e-05, "é": None},
    }
    for step in (1, 2):
        save(tmp_path / "ckpt", step=step, tensors=items(0), meta=facts)
    path = tmp_path / "ckpt" / "step-0000000002" / "meta.json"
    text, meta = path.read_bytes(), read_meta(tmp_path / "ckpt", 2)
    for bit in range(0, 8 * len(text), 5):
        path.write_bytes(text[: bit // 8] + bytes([text[bit // 8] ^ 1 << bit % 8]) + text[bit // 8 + 1 :])
        try:
            assert read_meta(tmp_path / "ckpt", 2) == meta, "it was a space"
        except SpecError as error:
            assert "cannot be read" in str(error) and error.file == str(path)
    path.write_bytes(text.replace(b'"seed": 3', b'"seed": 8'))
    assert export_run(tmp_path, "safetensors", tmp_path / "out") == 1
