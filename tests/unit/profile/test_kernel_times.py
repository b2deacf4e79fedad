"""Kernels timed into a table: resumed, refused elsewhere, and taken by --costs."""

import csv
import math

import pytest

from foreshard import api
from foreshard.cost.tables import ATTENTION, load_tables
from foreshard.errors import SpecError
from foreshard.profile.kernel_times import HEADER, KINDS, Bench, kernels_of, time_kernels


def work_s(sizes):
    """Return the seconds of a kernel on the device."""
    return 1e-12 * math.prod(sizes.values())


class Machine:
    """A device with a clock of its own: launches queue up and `wait` runs them, as CUDA does."""

    def __init__(self, name="NVIDIA H100 80GB HBM3"):
        self.seconds, self.queued, self.made = 0.0, 0.0, []
        self.bench = Bench(name=name, prepare=self.prepare, wait=self.wait, now=lambda: self.seconds)

    def prepare(self, op, sizes):
        self.made.append((op, *sizes.values()))

        def launch():
            self.seconds += 1e-6  # of the host
            self.queued += work_s(sizes)

        return launch

    def wait(self):
        self.seconds, self.queued = self.seconds + self.queued, 0.0


def timed(machine, out, sizes=(128, 256), kinds=("product",), **more):
    kernels = kernels_of(kinds, "cuda", sizes)
    return time_kernels(machine.bench, out, kernels, dtype="bf16", repeats=3, **more)


def rows_of(out):
    with out.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_every_product_of_the_grid_gets_the_seconds_of_one(tmp_path):
    out, told = tmp_path / "products.csv", []
    assert timed(Machine(), out, tell=told.append) == 8
    rows = rows_of(out)
    assert len(rows) == 8 and tuple(rows[0]) == HEADER and "1 of 8" in told[0]
    for row in rows:
        work = int(row["m"]) * int(row["n"]) * int(row["k"]) * 1e-12
        assert float(row["latency_ms"]) == pytest.approx(1e3 * (work + 1e-6), rel=1e-4)
    table = load_tables(str(out)).devices["h100-sxm", "16bit"]["product"]
    assert table.seconds(128.0, 256.0, 128.0) == pytest.approx(128 * 256 * 128 * 1e-12 + 1e-6, rel=1e-4)


def test_an_interrupted_table_goes_on_where_it_stopped(tmp_path):
    out, again = tmp_path / "products.csv", Machine()
    timed(Machine(), out)
    whole = out.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:4]) + lines[4][:-9], encoding="utf-8")  # stopped while a row was written
    assert timed(again, out) == 5
    sizes = [(128, 256, 256), (256, 128, 128), (256, 128, 256), (256, 256, 128), (256, 256, 256)]
    assert again.made == [("product", *size) for size in sizes]
    assert out.read_text(encoding="utf-8") == whole
    assert timed(Machine(), out) == 0
    assert timed(Machine(), out, sizes=(128, 512)) == 7  # a larger grid keeps what it has


@pytest.mark.parametrize("key", ["device", "dtype", "torch"])
def test_a_table_of_another_device_or_software_is_refused(tmp_path, key):
    out = tmp_path / "products.csv"
    timed(Machine(), out)
    rows = rows_of(out)
    rows[0][key] = "other"
    text = "\n".join([",".join(HEADER), *(",".join(row.values()) for row in rows)]) + "\n"
    out.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=f"a table of {key} 'other'") as caught:
        timed(Machine(), out)
    assert caught.value.key == key and "-o" in caught.value.fix
    assert out.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a,b\n1,2"])
def test_another_file_is_not_written_over(tmp_path, text):
    out = tmp_path / "notes.csv"
    out.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match="no table of timed kernels"):
        timed(Machine(), out)
    assert out.read_text(encoding="utf-8") == text


def test_the_processor_is_timed_and_a_missing_gpu_is_said(tmp_path, monkeypatch):
    import torch

    out = tmp_path / "products.csv"
    made = api.profile_kernels(str(out), sizes=(8, 16), kernels=["product"], repeats=1)
    assert made["timed"] == made["rows"] == 8 and len(rows_of(out)) == 8
    assert all(float(row["latency_ms"]) > 0 for row in rows_of(out))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="no CUDA device here"):
        api.profile_kernels(str(out), device="cuda")


def test_attention_and_streams_are_in_the_table_and_priced_by_it(tmp_path):
    out = tmp_path / "kernels.csv"
    count = timed(Machine(), out, kinds=KINDS)
    assert len(rows_of(out)) == count and timed(Machine(), out, kinds=KINDS) == 0
    tables = load_tables(str(out)).devices["h100-sxm", "16bit"]
    for table in (tables["attention"], tables["attention_backward"]):
        sizes = dict(zip(ATTENTION, (1, 16, 4, 1024, 128), strict=True))
        assert table.seconds(*sizes.values()) == pytest.approx(work_s(sizes) + 1e-6, rel=1e-4)
        assert math.isnan(table.seconds(1, 16, 8, 1024, 128)) and math.isnan(
            table.seconds(1, 16, 4, 128, 128)
        )
    assert tables["stream"].seconds(2.0**20) == pytest.approx(2**20 * 1e-12 + 1e-6, rel=1e-4)
    with pytest.raises(SpecError, match="unknown kind 'conv'"):
        kernels_of(["conv"], "cpu")


def test_the_processor_runs_each_kind(tmp_path, monkeypatch):
    few_experts = (("EXPERTS", (2,)), ("EXPERT_ROWS", (4,)), ("EXPERT_WIDTHS", (8,)))
    for name, few in (("HEADS", (4,)), ("LENGTHS", (16,)), ("BYTES", (3072,)), ("SIZES", (8,)), *few_experts):
        monkeypatch.setattr(f"foreshard.profile.kernel_times.{name}", {"cpu": few})
    out = tmp_path / "kernels.csv"
    made = api.profile_kernels(str(out), repeats=1)
    rows = rows_of(out)
    assert made["timed"] == len(rows) == 1 + 1 + 1 + 2 * 2 * 2
    assert all(float(row["latency_ms"]) > 0.0 for row in rows)
    tables = load_tables(str(out))
    (own,) = tables.devices.values()
    assert own["attention"].seconds(1, 4, 1, 16, 64) > 0.0 and own["stream"].seconds(3072.0) > 0.0
    assert own["experts"].seconds(2, 4, 8, 8) > 0.0


def test_products_of_experts_are_in_the_table_and_priced_by_it(tmp_path):
    from dataclasses import replace

    from foreshard.catalog.devices import resolve_device
    from foreshard.catalog.kernels import kernel_model
    from foreshard.cost.grouped import grouped_gemm_s

    out = tmp_path / "kernels.csv"
    timed(Machine(), out, kinds=("experts",))
    tables = load_tables(str(out))
    kernels = kernel_model(resolve_device("h100-sxm"), "bf16", costs=tables)
    inside = grouped_gemm_s(8 * 256, 8, 4096, 2048, kernels)
    # what runs at the power limit in training is slower than a kernel alone
    alone = replace(kernels, gemm_slower=1.0)
    expected = work_s({"experts": 8, "m": 256, "n": 4096, "k": 2048}) + 1e-6
    assert inside >= grouped_gemm_s(8 * 256, 8, 4096, 2048, alone)
    assert grouped_gemm_s(8 * 256, 8, 4096, 2048, alone) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_launch_multiplies_every_expert(dtype):
    import torch

    from foreshard.profile.kernel_times import bench_on

    sizes = {"experts": 3, "m": 4, "n": 8, "k": 16}
    run = bench_on("cpu", dtype).prepare("experts", sizes)
    held = {tuple(tensor.shape): tensor for tensor in (cell.cell_contents for cell in run.__closure__)}
    rows, weights = held[12, 16], held[3, 16, 8]
    expected = torch.bmm(rows.view(3, 4, 16), weights).flatten(0, 1)
    assert torch.allclose(run().float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_products_in_8_bit_are_in_a_table_of_their_own(tmp_path):
    import torch

    from foreshard.profile.kernel_times import bench_on

    run = bench_on("cpu", "fp8").prepare("product", {"m": 16, "n": 32, "k": 64})
    a, b = (cell.cell_contents for cell in run.__closure__ if getattr(cell.cell_contents, "ndim", 0) == 2)
    assert torch.allclose(run().float(), a.float() @ b.float(), rtol=1e-2, atol=0.1)
    out = tmp_path / "fp8.csv"
    made = api.profile_kernels(str(out), dtype="fp8", sizes=(16, 32), repeats=1)
    assert made["timed"] == 8 and {row["op"] for row in rows_of(out)} == {"product"}
    ((_, width),) = load_tables(str(out)).devices
    assert width == "fp8"
    with pytest.raises(SpecError, match="no kernel of stream in fp8"):
        api.profile_kernels(str(out), dtype="fp8", kernels=("stream",))
