import csv
import gzip
import os
import re
from pathlib import Path

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import device_assumption, devices, near_devices, normalise, resolve_device
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.spec.plan import PRECISIONS

MEASURED = Path(
    os.environ.get("FORESHARD_MEASURED", Path(__file__).resolve().parents[4] / "shared" / "measured" / "dev")
)
GIB = 2**30
# Columns that name a device; `system` names a host or a cluster and only sometimes a device.
DEVICE_COLUMNS = ("gpu", "gpu_model", "device", "accelerator", "instance_gpu")


def need(name):
    if not (MEASURED / name).exists():
        pytest.skip(f"{MEASURED / name} is not here")
    return MEASURED / name


def rows_of(path):
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100-SXM-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100-SXM5-80GB", "h100-sxm"),
        ("h100_sxm", "h100-sxm"),
        ("H100 80GB PCIe Gen5", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100-SXM5-96GB", "h100-sxm-96gb"),
        ("H100-94GB HBM2e (lower TDP)", "h100-sxm-94gb-hbm2e"),
        ("NVIDIA A100-SXM4-80GB (400W)", "a100-sxm-80gb"),
        ("NVIDIA_A100_80GB_PCIe", "a100-pcie-80gb"),
        ("A100-SXM-40GB (DGX A100)", "a100-sxm-40gb"),
        ("V100-SXM3-32GB (DGX-2)", "v100-sxm3-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("GB200-NVL72 (186GB)", "gb200-nvl72"),
        ("HGX GB200", "gb200-nvl72"),
        ("NVIDIA Blackwell GPU (GB200)", "gb200-nvl72"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200-sxm"),
        ("B200 192GB", "b200-sxm"),
        ("GB300-NVL72 (288GB)", "gb300-nvl72"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("Dell H200", "h200-sxm"),
        ("Dell H200 NVL", "h200-nvl"),
        ("AMD Instinct MI325X 256GB HBM3E DLC", "mi325x"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU-trillium", "tpu-v6e"),
        ("Intel Gaudi2", "gaudi-2"),
        ("Habana Gaudi", "gaudi"),
        ("Titan-RTX", "titan-rtx"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
    ],
)
def test_names_as_tables_write_them(written, name):
    assert resolve_device(written).name == name
    assert device_assumption(written) is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100", "a100-sxm-80gb"),
        ("V100 16G", "v100-sxm-16gb"),
        ("a100-40", "a100-sxm-40gb"),
        ("H100", "h100-sxm"),
    ],
)
def test_an_open_name_resolves_with_a_sentence_that_says_so(written, name):
    assert resolve_device(written).name == name
    assert "taken as" in device_assumption(written)


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "unstated",
        "TPU",
        "tpu",
        "Trainium",
        "SM90 (Hopper)",
        "Blackwell",
        "NVIDIA",
        "h100-sxn",
        "H300",
        "H100 32GB",
        "A100 B200",
        "RTX 3090 80GB",
        "2x A100 80GB SXM4",
        "T4 SXM",
        "CPU",
        "a" * 10_000,
        "\x00",
    ],
)
def test_a_name_of_no_device_is_an_error(written):
    with pytest.raises(SpecError) as caught:
        resolve_device(written)
    assert caught.value.rule and "foreshard devices" in caught.value.fix
    assert len(str(caught.value)) < 1000


def test_a_slip_of_the_pen_gets_the_device_suggested():
    with pytest.raises(SpecError, match=r"Did you mean 'h100-sxm'"):
        resolve_device("h100-sxn")


@pytest.mark.parametrize(
    ("cut", "whole"), [("h10", "h100-sxm"), ("b20", "b200-sxm"), ("v10", "v100-sxm-16gb")]
)
def test_a_name_cut_short_gets_the_device_that_begins_so(cut, whole):
    """`8xh10` was taken for `8xa10`, which is as near in letters."""
    assert near_devices(cut)[0] == whole
    with pytest.raises(SpecError, match=f"Did you mean '8x{whole}'"):
        load_cluster(f"8x{cut}")


def test_a_name_of_several_devices_names_them_all():
    with pytest.raises(SpecError) as caught:
        resolve_device("A100 HBM2")
    assert "'a100-pcie-40gb'" in caught.value.fix and "'a100-sxm-40gb'" in caught.value.fix


def test_every_canonical_name_is_normal_and_resolves_to_itself():
    for name, device in devices().items():
        assert device.name == name == normalise(name)
        assert resolve_device(name) is device
        assert resolve_device(name.upper()) is device


def test_every_alias_names_a_device():
    from foreshard.catalog.devices import _aliases

    for alias, name in _aliases()["exact"].items():
        assert resolve_device(alias).name == name
    for alias, (name, sentence) in _aliases()["assumed"].items():
        assert resolve_device(alias).name == name
        assert sentence in device_assumption(alias)


def test_every_unresolvable_name_is_an_error():
    for name in shipped("device_aliases.toml")["unresolvable"]:
        with pytest.raises(SpecError):
            resolve_device(name)


@pytest.mark.parametrize("name", devices())
def test_values_are_physical(name):
    device = devices()[name]
    assert device.peak_flops_per_s and all(1e11 < peak < 1e17 for peak in device.peak_flops_per_s.values())
    assert 2**30 < device.capacity_bytes <= device.memory_bytes < 1000 * GIB
    assert 1e11 < device.memory_bytes_per_s < 1e14
    assert device.link_bytes_per_s == 0 or 1e9 < device.link_bytes_per_s < 1e13
    assert bool(device.link) == (device.link_bytes_per_s > 0)
    assert device.vendor == device.vendor.lower() and device.arch == device.arch.lower()
    assert 2010 < device.year < 2030
    assert device.source


def test_known_values():
    h100 = devices()["h100-sxm"]
    assert h100.peak("bf16") == 989e12
    assert h100.peak("fp8") == 1979e12
    assert h100.memory_bytes == 80 * GIB
    assert h100.capacity_bytes == pytest.approx(79.21 * GIB)
    assert h100.link_bytes_per_s == 450e9 and h100.tdp_w == 700
    assert [name for name in PRECISIONS if devices()["v100-sxm-16gb"].supports(name)] == ["fp32", "fp16"]
    assert [name for name in PRECISIONS if devices()["b200-sxm"].supports(name)] == list(PRECISIONS)
    assert devices()["mi300x"].supports("fp8") and not devices()["mi300x"].supports("mxfp8")
    assert not devices()["t4"].supports("bf16")
    assert devices()["mi250x"].peak("fp32") == 95.7e12  # matrix rate


def test_halves_are_half_of_their_boards():
    for half, whole in [("k80", "k80-board"), ("mi250-gcd", "mi250"), ("mi250x-gcd", "mi250x")]:
        half, whole = devices()[half], devices()[whole]
        assert whole.memory_bytes == 2 * half.memory_bytes
        assert whole.memory_bytes_per_s == pytest.approx(2 * half.memory_bytes_per_s, rel=1e-3)
        assert whole.tdp_w == 2 * half.tdp_w
        for kind, peak in half.peak_flops_per_s.items():
            assert whole.peak_flops_per_s[kind] == pytest.approx(2 * peak)


def test_every_device_of_the_hardware_table_is_in_the_catalog_as_it_stands_there():
    for row in rows_of(need("hw_accelerators.csv")):
        device = resolve_device(row["accelerator"])
        for column, kind in [("bf16_tflops", "bf16"), ("fp16_tflops", "fp16"), ("fp8_tflops", "fp8")]:
            if row[column]:
                assert device.peak_flops_per_s[kind] == pytest.approx(float(row[column]) * 1e12)
            else:
                assert kind not in device.peak_flops_per_s
        assert device.memory_bytes == float(row["mem_gb"]) * GIB
        assert device.memory_bytes_per_s == float(row["mem_bw_gbps"]) * 1e9
        assert device.tdp_w == float(row["tdp_w"] or 0)
        assert device.verified == (not re.search("recalled|pre-release", row["verification"]))


def test_every_name_in_the_measured_tables_resolves_or_is_listed():
    need("hw_accelerators.csv")
    unknown = set()
    for path in sorted(MEASURED.glob("*.csv*")):
        found = {}
        for row in rows_of(path):
            # That table's `gpu` column holds captions; it is read by gpu_model.
            columns = ("gpu_model",) if path.name == "cnn_nvidia_dle.csv" else DEVICE_COLUMNS
            found.update((row[column], path.name) for column in columns if row.get(column))
        for name, table in found.items():
            if name in shipped("device_aliases.toml")["unresolvable"]:
                continue
            try:
                resolve_device(name)
            except SpecError:
                unknown.add((table, name))
    assert not unknown


def test_a_host_name_that_resolves_agrees_with_its_device_column():
    need("hw_accelerators.csv")
    pairs = set()
    for name in ("cnn_lambda_bench.csv", "kernel_aiconfigurator_moe.csv.gz", "cnn_mlperf_training.csv"):
        for row in rows_of(need(name)):
            device = row.get("gpu") or row.get("device") or row.get("accelerator")
            pairs.add((row["system"], device))
    compared = 0
    for system, device in pairs:
        try:
            host = resolve_device(system)
        except SpecError:
            continue
        if device_assumption(system) is None and device_assumption(device) is None:
            assert host is resolve_device(device)
            compared += 1
    assert compared > 10
