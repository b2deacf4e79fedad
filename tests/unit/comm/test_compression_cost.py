"""Bytes and times of compressed sums, and the bandwidth below which they pay."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.comm.compression.cost import (
    LinearTime,
    compressed_time,
    crossover_bytes_per_s,
    exposed_s,
    plain_time,
)
from foreshard.comm.compression.methods import CompressionMethod, compression_method, wire_bytes
from foreshard.errors import SpecError

SHAPES = [(1024, 512), (512,)]
COUNT = 1024 * 512 + 512
NAMES = ("powersgd:4", "topk:0.01", "onebit", "int8", "fp8")


def test_bytes_by_hand():
    assert wire_bytes(compression_method("powersgd:4"), SHAPES, 8).summed == 4 * (4 * (1024 + 512) + 512)
    assert wire_bytes(compression_method("topk:0.01"), SHAPES, 8).gathered == 8 * math.ceil(COUNT * 0.01)
    assert wire_bytes(compression_method("onebit"), SHAPES, 8).gathered == COUNT // 8 + 8
    eight = wire_bytes(compression_method("int8"), SHAPES, 8)
    assert eight.exchanged == 8 * eight.gathered == pytest.approx(COUNT * 260 / 256, rel=5e-3)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_that_ranks_send(name):
    """The collectives that a compressor calls carry what the cost model counts."""
    torch = pytest.importorskip("torch")
    from foreshard.transport.compression.compressor import WarmUp
    from foreshard.transport.compression.registry import compressor_of

    class Counting:
        rank, size = 0, 4
        summed = gathered = exchanged = steps = 0

        def all_reduce(self, tensor):
            self.summed += tensor.numel() * 4
            self.steps += 1

        def all_gather(self, tensor):
            self.gathered += tensor.numel() * tensor.element_size()
            self.steps += 1
            return [tensor.clone() for _ in range(self.size)]

        def all_to_all(self, parts):
            self.exchanged += parts.numel() * parts.element_size()
            self.steps += 1
            return parts.clone()

    method, ranks = compression_method(name), Counting()
    shapes = ((64, 96), (64,), (3, 3))
    compressor_of(method)(shapes, WarmUp()).sum(torch.randn(64 * 96 + 64 + 9), ranks)
    wire = wire_bytes(method, shapes, 4)
    found = (ranks.summed, ranks.gathered, ranks.exchanged, ranks.steps)
    assert found == (wire.summed, wire.gathered, wire.exchanged, wire.steps)


@given(
    fixed=st.floats(0, 1),
    added=st.floats(1e-6, 1),
    moved=st.floats(1e3, 1e9),
    part=st.floats(0.001, 0.999),
)
def test_both_take_as_long_at_the_crossover(fixed, added, moved, part):
    plain, compressed = LinearTime(fixed, moved), LinearTime(fixed + added, moved * part)
    rate = crossover_bytes_per_s(plain, compressed)
    assert plain.at(rate) == pytest.approx(compressed.at(rate), rel=1e-6)
    assert compressed.at(rate / 2) < plain.at(rate / 2)
    assert compressed.at(rate * 2) > plain.at(rate * 2)


def test_gathers_grow_with_the_ranks_and_sums_do_not():
    def moved(name, ranks):
        return compressed_time(compression_method(name), SHAPES, ranks, 0.0, encode_s=0.0).num_bytes

    assert moved("onebit", 64) > 60 * moved("onebit", 2)
    assert moved("powersgd:4", 64) < 2 * moved("powersgd:4", 2)
    whole = plain_time(4.0 * COUNT, 64, 0.0)
    assert crossover_bytes_per_s(whole, LinearTime(0.0, 2 * whole.num_bytes)) == 0.0
    assert crossover_bytes_per_s(whole, LinearTime(0.0, 1.0)) == math.inf


def test_what_is_hidden_saves_nothing():
    assert exposed_s(0.3, 0.3) == 0.0 and exposed_s(0.3, 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "text", ["", "zip", "powersgd", "powersgd:0", "powersgd:2.5", "topk:0", "topk:nan", "int8:1"]
)
def test_bad_methods_are_refused(text):
    with pytest.raises(SpecError):
        compression_method(text)


def test_methods_print_as_they_are_written():
    assert [str(compression_method(name)) for name in NAMES] == list(NAMES)
    assert CompressionMethod("topk", 0.5) == compression_method("topk:0.5")
