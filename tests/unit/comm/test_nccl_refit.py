"""Refitted constants of NCCL's own model: those that made the times are found again, all others stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard.api import load_cluster
from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import communicator_of
from foreshard.comm.nccl.constants import releases, shipped_constants
from foreshard.comm.nccl.constants_file import constants_text, read_constants
from foreshard.comm.nccl.estimates import estimate
from foreshard.comm.nccl.refit import NcclRun, labels_of, refit_nccl
from foreshard.errors import SpecError

SIZES = 2.0 ** np.arange(8, 34)
LL = "base_latency_us.ring.LL", "hop_latency_us.nvlink.ring.LL"


def run_of(cluster, ranks, own, *, label=None, collective="all-reduce", reached=1.0, release=""):
    """Times of a machine with constants of its own, labelled as forced or as NCCL picks."""
    comm = communicator_of(load_cluster(cluster), ranks, release=release)
    labels = (label,) * len(SIZES) if label else labels_of(collective, SIZES.tolist(), comm)
    real = replace(comm, constants=own)
    found = [estimate(collective, n, *which, real) for n, which in zip(SIZES, labels, strict=True)]
    times = [one.latency_s + n / (one.bytes_per_s * reached) for n, one in zip(SIZES, found, strict=True)]
    return NcclRun(
        collective=collective,
        communicator=comm,
        num_bytes=SIZES,
        time_s=np.array(times),
        labels=labels,
    )


def test_what_one_communicator_tells_is_found_and_the_rest_stays():
    own = {
        LL[0]: 9.0,
        LL[1]: 0.6 * 9.0 / 6.6,
        "ll_max.hopper.1": 100.0,
        "hop_latency_us.nvlink.nvls.Simple": 18.0,
    }
    found = refit_nccl([run_of("1x8xh100-sxm", 8, own)])
    assert found.constants == pytest.approx(own, rel=1e-4)
    assert found.shared == (LL,) and found.median_error < 1e-6 < found.median_error_before
    assert found.reached == pytest.approx({("nvls", "Simple"): 1.0}, rel=1e-4)


def test_several_numbers_of_ranks_take_latencies_apart():
    own = {LL[0]: 9.0, LL[1]: 0.45}
    runs = [run_of("1x8xh100-sxm", ranks, own, label=("ring", "LL")) for ranks in (2, 4, 8)]
    found = refit_nccl(runs)
    assert found.constants[LL[0]] == pytest.approx(9.0, rel=1e-4)
    assert found.constants[LL[1]] == pytest.approx(0.45, rel=1e-4)
    assert not found.shared


@pytest.mark.parametrize(
    ("label", "own"),
    [
        (("tree", "Simple"), {"tree_max.hopper.2": 30.0}),
        (("tree", "LL128"), {"tree_ll128_max.hopper.2": 20.0}),
        (("ring", "LL128"), {"ring_ll128_max.hopper.2": 22.0}),
        (
            ("nvls-tree", "Simple"),
            {
                "hop_latency_us.network.nvls-tree.Simple": 1.5 * 20.9,
                "hop_latency_us.nvlink.nvls-tree.Simple": 1.5 * 25.0,
            },
        ),
    ],
)
def test_constants_over_nodes(label, own):
    found = refit_nccl([run_of("2x8xh100-sxm", 16, own, label=label)])
    for name, value in own.items():
        assert found.constants[name] == pytest.approx(value, rel=1e-3)
    shipped = shipped_constants()
    others = {name: value / shipped[name] for name, value in found.constants.items() if name not in own}
    alike = [name for group in found.shared for name in group if set(group) & set(own)]
    assert all(factor == pytest.approx(1.0, rel=1e-3) for name, factor in others.items() if name not in alike)


def test_slow_channels_are_no_constant_and_leave_latencies_alone():
    found = refit_nccl([run_of("1x8xa100-sxm-80gb", 8, {}, label=("ring", "Simple"), reached=0.8)])
    assert found.reached == pytest.approx({("ring", "Simple"): 0.8}, rel=1e-4)
    shipped = shipped_constants()
    assert found.constants == pytest.approx({name: shipped[name] for name in found.constants}, rel=1e-4)


@pytest.mark.parametrize("release", ["", *releases()])
def test_the_constants_of_a_release_are_a_fixed_point(release):
    found = refit_nccl([run_of("2x8xh100-sxm", 16, {}, release=release)])
    shipped = shipped_constants(release)
    assert found.constants == pytest.approx({name: shipped[name] for name in found.constants}, rel=1e-6)


def test_too_few_sizes_move_nothing():
    run = run_of("1x8xh100-sxm", 8, {}, label=("ring", "LL"))
    short = replace(run, num_bytes=SIZES[:2], time_s=run.time_s[:2], labels=run.labels[:2])
    with pytest.raises(SpecError, match="too few sizes"):
        refit_nccl([short])
    assert refit_nccl([run, replace(short, labels=(("tree", "LL"),) * 2)]).few == (("tree", "LL"),)


def test_what_cannot_run_is_refused():
    with pytest.raises(SpecError, match="cannot run"):
        refit_nccl([replace(run_of("1x8xh100-sxm", 8, {}), labels=(("pat", "Simple"),) * len(SIZES))])
    comm = communicator_of(load_cluster("1x8xh100-sxm"), 8)
    with pytest.raises(SpecError, match="all-to-all"):
        labels_of("all-to-all", [1024.0], comm)


def test_a_file_keeps_constants_and_changes_the_pick(tmp_path):
    path = tmp_path / "own.toml"
    own = {"hop_latency_us.nvlink.nvls.Simple": 90.0}
    path.write_text(constants_text(own, measured_with="2.27.7", measured_on="here", shared=[("a", "b")]))
    read = read_constants(str(path))
    assert read.constants == own and (read.measured_with, read.measured_on) == ("2.27.7", "here")
    comm = communicator_of(load_cluster("1x8xh100-sxm"), 8)
    slow = replace(comm, constants=read.constants)
    assert nccl_choice("all-reduce", 2.0**21, comm).algorithm == "NVLS"
    assert nccl_choice("all-reduce", 2.0**21, slow).algorithm != "NVLS"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "empty"),
        ("[constants]", "based on"),
        ('based_on = "2.30.7"\nmore = 1\n[constants]', "unknown key"),
        ('based_on = "2.30.7"\n[constants]\n"ll_max.hoper.1" = 3.0', "ll_max.hopper.1"),
        ('based_on = "2.30.7"\n[constants]\n"ll_max.hopper.1" = 0', "above 0"),
        ('based_on = "2.30.7"\n[constants]\n"ll_max.hopper.1" = nan', "above 0"),
        ('based_on = "2.30.7"\n[constants]\n"ll_max.hopper.1" = true', "above 0"),
        ('based_on = "2.12"\n[constants]', "based on NCCL 2.12"),
        ("based_on", "TOML"),
    ],
)
def test_other_files_are_refused_with_the_cause(tmp_path, text, cause):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as raised:
        read_constants(str(path))
    assert cause in str(raised.value) and "own.toml" in str(raised.value)
