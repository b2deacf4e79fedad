"""The lab that the machine enforces; where root, kernel or tools are missing the tests of it are skipped.

`pytest -s` prints the measured rates and portions.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foreshard.errors import ForeshardError, SpecError
from foreshard.lab import network
from foreshard.lab.lab import Change, Lab
from foreshard.lab.network import LabNetwork, missing, remove_stale, unit_cores

LACKS = missing()
enforced = pytest.mark.skipif(LACKS is not None, reason=f"no lab in the wall clock here: {LACKS}")

SENDER = """
import os, socket, time
receives = "BLOCKS" not in os.environ
if receives:
    server = socket.create_server(("10.77.0.1", 7000))
    print("listening", flush=True)
    end, _ = server.accept()
    count, began, block = 0, None, bytearray(1 << 20)
    while got := end.recv_into(block):
        now = time.perf_counter()
        began = began or now
        count += got
    print(count / (now - began))
else:
    end = socket.create_connection(("10.77.0.1", 7000))
    for _ in range(int(os.environ["BLOCKS"])):
        end.sendall(bytes(1 << 17))
    end.close()
"""
BURNER = """
import os, time
began, work = time.perf_counter(), 0
while time.perf_counter() - began < 2.0:
    work += 1
print(time.process_time() / (time.perf_counter() - began))
"""


def lab_of(*slow, rate=25e6, changes=(), clock="wall", latency=5e-5):
    return Lab(
        clock=clock,
        slow=slow,
        devices=("cpu",) * len(slow),
        bandwidth_bytes_per_s=rate,
        latency_s=latency,
        changes=changes,
    )


def start(bed, rank, program, **env):
    words = [*bed.command(rank), sys.executable, "-c", program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | env)


def rate_of(bed, blocks):
    """Send blocks of 128 KiB from rank 1 to rank 0; return the bytes/s that arrive."""
    server = start(bed, 0, SENDER)
    try:
        assert server.stdout.readline() == "listening\n"
        sender = start(bed, 1, SENDER, BLOCKS=str(blocks))
        with sender:
            rate = float(server.stdout.readline())
            sender.wait(10)
        return rate
    finally:
        server.kill()
        server.wait(10)
        server.stdout.close()


def left_behind():
    mine = f"fs{os.getpid()}x*"
    tops = (network._GROUPS_V1, network._GROUPS_V2)
    return [*network._NAMES.glob(mine), *(p for top in tops for p in top.glob(f"foreshard-{mine}"))]


def test_portions_leave_a_fifth_of_the_cores_and_keep_the_ratios():
    assert unit_cores(lab_of(1, 2, 4, 8), 2) == pytest.approx(0.8 * 2 / 1.875)
    assert unit_cores(lab_of(1, 2, 4, 8), 64) == 1.0
    assert unit_cores(lab_of(0.5, 1), 64) == 0.5
    quick = (Change(at_step=3, rank=1, slow=0.25),)
    assert unit_cores(lab_of(1, 8, changes=quick), 2) == pytest.approx(min(0.25, 1.6 / 5))


def test_what_the_machine_cannot_enforce_is_refused():
    with pytest.raises(SpecError, match="needs no namespaces"):
        LabNetwork(lab_of(1, clock="cpu"))
    with pytest.raises(SpecError, match="delays are not made"):
        LabNetwork(lab_of(1, latency=5e-3))
    with pytest.raises(SpecError, match="delays are not made"):
        LabNetwork(lab_of(1, changes=(Change(at_step=1, latency=0.01),)))


def test_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root" in missing()


@enforced
@pytest.mark.parametrize(("rate", "blocks"), [(6.25e6, 40), (25e6, 160), (125e6, 800)])
def test_a_link_has_its_rate(rate, blocks):
    """Never above it by more than the bucket's first burst; below it where the cores are too busy to send."""
    with LabNetwork(lab_of(1, 1, rate=rate)) as bed:
        got = rate_of(bed, blocks)
    print(f"link of {rate * 8 / 1e6:.0f} Mb/s: {got * 8 / 1e6:.1f} Mb/s of payload")
    assert 0.5 * rate < got < 1.15 * rate
    assert not left_behind()


@enforced
def test_ranks_of_a_host_share_its_namespace_and_its_link():
    """Rank 1 is beside rank 0: what passes between them passes no link. Rank 2 has a host of its own."""
    two = replace(lab_of(1, 1, 1, rate=6.25e6), hosts=(0, 0, 1))
    with LabNetwork(two) as bed:
        assert bed.command(0)[-5:] == bed.command(1)[-5:] != bed.command(2)[-5:]
        assert rate_of(bed, 400) > 2 * 6.25e6
    assert not left_behind()


@enforced
def test_a_link_changes_while_it_lives(tmp_path):
    """The metrics tell of step 4, so the links become what they are from step 5 on."""
    slower = (Change(at_step=5, bandwidth=6.25e6),)
    metrics = tmp_path / "metrics.jsonl"
    with LabNetwork(lab_of(1, 1, rate=50e6, changes=slower)) as bed:
        metrics.write_text('{"step": 3}\n')
        bed.follow(metrics)
        before = rate_of(bed, 160)
        with metrics.open("a") as file:
            file.write('{"step": 4}\n{"step"')
        bed.follow(metrics)
        after = rate_of(bed, 40)
    assert before > 15e6
    assert after < 7.5e6


@enforced
def test_processors_are_shared_as_the_lab_says():
    """Four ranks burn at once: none gets more than its portion of a core, also not while all others wait.

    Less, where other processes keep the cores busy: what is asserted has to hold on any machine.
    """
    with LabNetwork(lab_of(1, 2, 4, 8)) as bed:
        burning = [start(bed, rank, BURNER) for rank in range(4)]
        got = [float(process.communicate(timeout=30)[0]) for process in burning]
        alone = float(start(bed, 3, BURNER).communicate(timeout=30)[0])
        wanted = [bed.unit_cores / slow for slow in (1, 2, 4, 8)]
    ratios = [f"{got[0] / have:.2f}" for have in got]
    print(f"cores wanted {wanted}, got {got}, ratios {ratios}, the slowest alone {alone}")
    for have, want in zip([*got, alone], [*wanted, wanted[3]], strict=True):
        assert 0.1 * want < have < 1.2 * want
    assert not left_behind()


@enforced
def test_nothing_is_left_behind_by_a_lab_that_fails(monkeypatch):
    monkeypatch.setattr(LabNetwork, "apply", lambda self, step: (_ for _ in ()).throw(ForeshardError("no")))
    here = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ForeshardError, match="no"):
        LabNetwork(lab_of(1, 1)).__enter__()
    assert not left_behind()
    assert os.readlink("/proc/thread-self/ns/net") == here


@enforced
def test_the_next_lab_removes_what_a_killed_one_left():
    program = (
        "import os, signal, sys\n"
        "from foreshard.lab.lab import Lab\n"
        "from foreshard.lab.network import LabNetwork\n"
        "lab = Lab(clock='wall', slow=(1.0, 2.0), devices=('a', 'a'),\n"
        "          bandwidth_bytes_per_s=1e7, latency_s=0)\n"
        "LabNetwork(lab).__enter__()\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    pid = done.stdout.strip()
    left = [p.name for p in network._NAMES.glob(f"fs{pid}x*")]
    assert len(left) == 3
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    remove_stale()
    assert not [p.name for p in network._NAMES.glob(f"fs{pid}x*")]
    tops = (network._GROUPS_V1, network._GROUPS_V2)
    assert not [p for top in tops for p in top.glob(f"foreshard-fs{pid}x*")]
