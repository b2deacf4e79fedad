import gzip

import pytest

from foreshard.errors import SpecError
from foreshard.validation.tables import COLLECTIVE, KERNEL, layout_of, read_table

GEMM = "system,device,framework,dtype,m,n,k,latency_ms\nb200_sxm,NVIDIA B200,vllm,bfloat16,128,128,128,0.01\n"


def test_a_table_is_known_by_columns_and_gzip_is_the_same(tmp_path):
    plain = tmp_path / "any name.csv"
    plain.write_text(GEMM)
    packed = tmp_path / "any name.csv.gz"
    packed.write_bytes(gzip.compress(GEMM.encode()))
    a, b = read_table(plain), read_table(packed)
    assert (a.kind, a.layout, a.rows, a.ids, a.families) == (b.kind, b.layout, b.rows, b.ids, b.families)
    assert (a.kind, a.layout) == (KERNEL, "gemm")
    assert a.ids == ("any name-1",)
    assert a.families == ("b200_sxm",)


def test_families_come_from_system_device_or_gpu_else_the_stem(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "collective,gpu,num_gpus,data_size_mb,time_ms\nall_reduce,V100-16,4,1.0,0.5\nall_reduce,,4,1,1\n"
    )
    table = read_table(path)
    assert (table.kind, table.families) == (COLLECTIVE, ("V100-16", "t"))


@pytest.mark.parametrize(
    "columns",
    [
        "accelerator,vendor,fp16_tflops,mem_gb",
        "library,table,key1,key2,key3,value,unit",
        "time_ms,num_instances",
        "topology,chassis,output_buffer,solver_s",
        "set,gpu,job,scale_factor,steps_per_s",
    ],
)
def test_tables_without_measured_times_are_refused(columns):
    with pytest.raises(SpecError, match="not measured times") as caught:
        layout_of(columns.split(","), file="f.csv")
    assert caught.value.file == "f.csv"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.csv", b""),
        ("header.csv", GEMM.splitlines()[0].encode()),
        ("unknown.csv", b"a,b\n1,2\n"),
        ("ragged.csv", GEMM.encode() + b"1,2\n"),
        ("twice.csv", b"m,m\n1,2\n"),
        ("broken.csv.gz", b"\x1f\x8b\x08\x00nonsense"),
        ("cut.csv.gz", gzip.compress(GEMM.encode(), mtime=0)[:-12]),
        ("latin.csv", b"caf\xe9,b\n1,2\n"),
        ("nul.csv", b"a,b\n\x001,2\n"),
        ("huge.csv", b"a,b\n" + b"x" * 2_000_000 + b",2\n"),
    ],
)
def test_broken_files_name_themselves(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_table(path)
    assert name in caught.value.file


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(SpecError, match=r"none\.csv"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(SpecError):
        read_table(tmp_path)
