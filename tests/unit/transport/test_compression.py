"""Compressed sums: equal on all ranks, complete in the end, exact where nothing is left out."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

from foreshard.comm.compression.methods import compression_method
from foreshard.transport.compression.compressor import SumRanks, WarmUp
from foreshard.transport.compression.registry import compressor_of

SHAPES = ((24, 18), (7,), (10, 3, 4), (3, 3))
COUNT = 24 * 18 + 7 + 120 + 9
METHODS = ("powersgd:2", "topk:0.1", "onebit", "int8", "fp8")


@cache
def groups(size):
    """A gloo group of every rank, joined in threads."""
    store = dist.HashStore()

    def join(rank):
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def summed(method, gradients, steps=1):
    """Sum (ranks, steps, elements) by a method; what each rank has after every step, and what is left out."""
    size, members = len(gradients), groups(len(gradients))

    def run(rank):
        ranks = SumRanks(members[rank], rank, size)
        made, found = compressor_of(compression_method(method))(SHAPES, WarmUp()), []
        for step in range(steps):
            flat = gradients[rank][step].clone()
            made.sum(flat, ranks)
            found.append(flat)
        return torch.stack(found), made.error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def drawn(ranks, steps, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, steps, COUNT, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_arrives_and_what_is_left_out_are_the_gradients(method, size):
    """After any step: the sum of all updates plus what all ranks still hold is the sum of all gradients."""
    gradients = drawn(size, 4)
    found = summed(method, gradients, steps=4)
    for updates, _ in found:
        assert torch.equal(updates, found[0][0])
    left = sum(error for _, error in found)
    assert torch.allclose(found[0][0].sum(0) + left, gradients.sum((0, 1)), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("method", "worst"), [("int8", 0.02), ("fp8", 0.07), ("topk:1", 1e-12)])
def test_errors_of_a_single_sum(method, worst):
    """8 bits are exact to half a step of the largest number of a block, twice; all entries to rounding."""
    gradients = drawn(4, 1)
    total = gradients.sum((0, 1))
    assert float((summed(method, gradients)[0][0][0] - total).norm() / total.norm()) <= worst


def test_a_matrix_of_low_rank_is_found_by_the_power_method():
    """Equal gradients of rank 2 in every step: exact as soon as the subspace is known."""
    left, right = torch.randn(24, 2, dtype=torch.float64), torch.randn(2, 18, dtype=torch.float64)
    flat = torch.zeros(COUNT, dtype=torch.float64)
    flat[: 24 * 18] = (left @ right).reshape(-1)
    gradients = flat.expand(3, 2, COUNT)
    updates, _ = summed("powersgd:2", gradients, steps=2)[0]
    assert torch.allclose(updates[1], 3 * flat, atol=1e-8)


def test_small_parameters_are_summed_whole():
    gradients = drawn(3, 1)
    updates, _ = summed("powersgd:2", gradients)[0]
    total = gradients.sum((0, 1))
    assert torch.allclose(updates[0][24 * 18 : 24 * 18 + 7], total[24 * 18 : 24 * 18 + 7])
    assert torch.allclose(updates[0][-9:], total[-9:])


@pytest.mark.parametrize("method", METHODS)
def test_zero_gradients_stay_zero_and_do_not_stop_later_ones(method):
    gradients = torch.zeros(2, 3, COUNT, dtype=torch.float64)
    gradients[:, 2] = 1.0
    found = summed(method, gradients, steps=3)
    assert not found[0][0][:2].any() and found[0][0][2].any()


def test_half_precision_is_summed_in_full():
    gradients = drawn(2, 1).to(torch.bfloat16)
    updates, error = summed("int8", gradients)[0]
    assert updates.dtype == torch.bfloat16 and error.dtype == torch.float32
