"""The output of nccl-tests of several releases, with what launchers and NCCL put between its lines."""

import pytest

from foreshard.errors import SpecError
from foreshard.interop.nccl_tests import read_nccl_tests

NEW = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 validate: 1
#
# Using devices
#  Rank  0 Group  0 Pid  11 on  node-a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11 on  node-b device  1 [0000:0b:00] NVIDIA H100 80GB HBM3
node-a:11:40 [0] NCCL INFO Connected all rings
#
#  out-of-place  in-place
#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
#  (B)  (elements)  (us)  (GB/s)  (GB/s)  (us)  (GB/s)  (GB/s)
  1048576  262144  float  sum  -1  25.40  41.28  41.28  0  24.90  42.11  42.11  0
  2097152  524288  float  sum  -1  1000  2.10  2.10  N/A  1001  2.10  2.10  N/A
node-a:11:11 [0] NCCL INFO comm 0x1 rank 0 nranks 2 - Destroy COMPLETE
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 21.69
"""
OLD = """\
#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error
#  (B)  (elements)  (us)  (GB/s)  (GB/s)  (us)  (GB/s)  (GB/s)
  8  2  float  sum  22.44  0.00  0.00  2e-07  21.90  0.00  0.00  2e-07
"""


def test_rows_and_where_they_were_measured():
    run = read_nccl_tests(NEW)
    assert (run.collective, run.num_ranks, run.num_hosts) == ("all-reduce", 2, 2)
    assert run.device == "NVIDIA H100 80GB HBM3" and run.num_skipped == 0
    first, second = run.rows
    assert first.size_bytes == 2**20
    assert first.time_s == pytest.approx(25.4e-6)
    assert first.algbw_bytes_per_s == first.busbw_bytes_per_s == pytest.approx(41.28e9)
    assert second.time_s == pytest.approx(1e-3)


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: "])
def test_labels_of_launchers_are_dropped(label):
    assert (
        read_nccl_tests("\n".join(label + line for line in NEW.splitlines())).rows
        == read_nccl_tests(NEW).rows
    )


def test_an_old_release():
    run = read_nccl_tests(OLD)
    assert (run.collective, run.num_ranks, run.rows[0].size_bytes) == (None, None, 8)
    assert run.rows[0].time_s == pytest.approx(22.44e-6)


@pytest.mark.parametrize("time", ["1e308", "nan", "inf", "-1", "1e999"])
def test_a_line_whose_numbers_are_none_is_counted(time):
    run = read_nccl_tests(OLD + OLD.splitlines()[-1].replace("22.44", time) + "\n")
    assert len(run.rows) == 1 and run.num_skipped == 1


def test_a_line_that_is_cut_is_counted():
    run = read_nccl_tests(OLD + "          16             4   float     sum    22.44    0.0\n")
    assert len(run.rows) == 1 and run.num_skipped == 1


@pytest.mark.parametrize(("text", "what"), [("", "no header"), (OLD.rsplit("\n", 2)[0], "no row")])
def test_a_file_without_rows_is_refused(text, what):
    with pytest.raises(SpecError, match=what):
        read_nccl_tests(text, "a.log")
