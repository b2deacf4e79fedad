"""The library's own collectives swept between ranks of this machine; NCCL through a stand-in for devices."""

import pytest

torch = pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.interop.nccl_tests import read_nccl_tests
from foreshard.profile import link_times
from foreshard.profile.collective_sweep import SWEPT, Sweep, as_nccl_tests, local_sweep, sweep


class Work:
    def wait(self):
        return True


class World:
    """A process group that counts its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, given))
            return Work()

        return call


class Ranks:
    """One of several ranks on a device that waits are counted for."""

    def __init__(self, size):
        self.rank, self.size, self.device, self.world = 0, size, torch.device("cpu"), World()
        self.hosts, self.devices = ["a"] * size, ["cpu"] * size

    def group(self, ranks, name):
        return self.world


@pytest.mark.parametrize("collective", SWEPT)
def test_a_sweep_calls_the_collective_of_the_library_many_times_in_a_row(collective, monkeypatch):
    ranks, waits = Ranks(3), []
    monkeypatch.setattr(link_times, "_wait", waits.append)
    rows = sweep(ranks, collective, [1024, 10**8], repeats=2).rows
    # Whole floats for each of three ranks.
    assert [row["size_bytes"] for row in rows] == [1020, 99999996]
    assert all(row["time_s"] > 0 for row in rows)
    names = {
        "all-reduce": "allreduce",
        "broadcast": "broadcast",
        "all-gather": "_allgather_base",
        "reduce-scatter": "_reduce_scatter_base",
        "all-to-all": "alltoall_base",
    }
    own = [given for name, given in ranks.world.calls if name == names[collective]]
    turns = 4  # two that warm up, two that count
    meetings = 2 * turns * len(rows) if collective == "all-reduce" else 0
    assert len(own) == turns * (20 + 10) + meetings
    assert len(waits) == 2 * turns * len(rows)  # the device is waited for before and after every turn


def test_what_is_written_is_read_as_nccl_tests(tmp_path):
    rows = ({"size_bytes": 1024, "time_s": 2e-5}, {"size_bytes": 2**20, "time_s": 1e-4})
    hosts = ("a",) * 4 + ("b",) * 4
    swept = Sweep(collective="all-to-all", hosts=hosts, devices=("NVIDIA A100-SXM4-40GB",) * 8, rows=rows)
    run = read_nccl_tests(as_nccl_tests(swept))
    assert (run.num_ranks, run.num_hosts, run.device) == (8, 2, "NVIDIA A100-SXM4-40GB")
    assert run.collective == "all-to-all" and run.num_skipped == 0
    assert [row.time_s for row in run.rows] == pytest.approx([2e-5, 1e-4])
    assert run.rows[1].busbw_bytes_per_s == pytest.approx(2**20 / 1e-4 * 7 / 8, rel=1e-3)


def test_what_no_library_has_as_one_call():
    with pytest.raises(SpecError, match="no library has gather"):
        sweep(Ranks(2), "gather", [1024], repeats=1)


def test_every_rank_needs_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match="2 ranks on 1 GPUs"):
        local_sweep("all-reduce", 2, [1024], repeats=1, device="cuda")


def test_ranks_of_this_machine_are_swept_over_gloo():
    swept = local_sweep("all-gather", 2, [1024, 2048], repeats=1, device="cpu")
    rows = swept.rows
    assert len(set(swept.hosts)) == 1 and swept.devices == ("cpu", "cpu")
    assert [row["size_bytes"] for row in rows] == [1024, 2048] and all(row["time_s"] > 0 for row in rows)
