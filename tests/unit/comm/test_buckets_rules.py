"""Rules that fill buckets, against published sizes, PyTorch itself and cases worked out by hand."""

import numpy as np
import pytest

from foreshard.comm.fusion.rules import (
    MIB,
    ddp_buckets,
    ddp_limits,
    horovod_buckets,
    merged_buckets,
)
from foreshard.comm.fusion.timeline import Gradients, bucket_times, exposed_s
from foreshard.errors import SpecError


def gradients(sizes, ready):
    names = tuple(map(str, range(len(sizes))))
    return Gradients(
        names=names,
        num_bytes=np.array(sizes, dtype=float),
        ready_s=np.array(ready, dtype=float),
        backward_s=float(ready[-1]),
    )


def resnet18():
    """Return the bytes of torchvision's ResNet-18 parameters (fp32) in the order of definition."""
    shapes = [64 * 3 * 49, 64, 64]
    inputs = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for block in range(2):
            shapes += [width * inputs * 9, width, width, width * width * 9, width, width]
            if block == 0 and stride != 1:
                shapes += [width * inputs, width, width]
            inputs = width
    return [4 * size for size in (*shapes, 512 * 1000, 1000)]


def sizes_of(bounds, sizes):
    return [sum(sizes[start:stop]) for start, stop in bounds]


# What NCCL was seen to reduce in the imagenet example: pytorch issue 48880 (the first bucket was 1 MiB then,
# whatever the cap).
@pytest.mark.parametrize(
    ("cap", "seen"),
    [(25, [2_052_000, 28_852_224, 15_853_824]), (35, [2_052_000, 38_297_600, 6_408_448])],
)
def test_ddp_on_the_imagenet_example(cap, seen):
    sizes = resnet18()[::-1]
    assert sizes_of(ddp_buckets(sizes, (MIB, cap * MIB)), sizes) == seen
    assert ddp_limits() == (MIB, 25 * MIB)


def test_a_cap_of_the_user_holds_for_the_first_bucket():
    assert ddp_limits(35) == (35 * MIB,)


@pytest.mark.parametrize("seed", range(10))
def test_ddp_is_what_pytorch_does(seed):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 400_000, size=60)
    limits = [MIB, int(rng.integers(1, 5) * MIB)]
    tensors = [torch.empty(int(count)) for count in counts]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    bounds = ddp_buckets([4 * int(count) for count in counts], limits)
    assert [list(range(*bound)) for bound in bounds] == indices


def test_horovod_fuses_what_is_ready_at_a_cycle():
    made = gradients([3, 3, 3, 9, 2], [0.1e-3, 0.2e-3, 0.3e-3, 1.0e-3, 1.1e-3])
    bounds, dispatch = horovod_buckets(made, threshold_bytes=6, cycle_s=1e-3)
    # At 1 ms: 3 + 3, then 3, and 9 that is larger than the threshold; at 2 ms: 2.
    assert bounds == ((0, 2), (2, 3), (3, 4), (4, 5))
    assert dispatch == pytest.approx((1e-3, 1e-3, 1e-3, 2e-3))
    times = bucket_times(made, bounds, lambda size: size * 1e-4, dispatch)
    assert times[0].start_s == pytest.approx(1e-3) and times[-1].ready_s == pytest.approx(2e-3)


def test_mg_wfbp_merges_what_has_to_wait_anyway():
    made = gradients([1, 1, 1, 1], [1.0, 1.2, 5.0, 5.4])

    def cost(size):
        return 0.5 + size

    # 1 waits .2 s for 2, less than the start-up of .5; 3 is ready after both are reduced; 4 comes .4 s later.
    assert merged_buckets(made, cost, 0.5) == ((0, 2), (2, 4))
    assert merged_buckets(made, cost, 0.1) == ((0, 1), (1, 2), (2, 3), (3, 4))


def test_mg_wfbp_merges_behind_a_busy_link():
    made = gradients([10, 1, 1], [1.0, 2.0, 3.0])
    # The first is on the wire until 11.1: both others are ready before they could start.
    assert merged_buckets(made, lambda size: 0.1 + size, 0.1) == ((0, 1), (1, 3))


def test_buckets_are_reduced_one_after_another():
    made = gradients([2, 2, 2], [1.0, 2.0, 3.0])
    times = bucket_times(made, ((0, 1), (1, 3)), lambda size: size)
    assert [(one.ready_s, one.start_s, one.end_s) for one in times] == [(1.0, 1.0, 3.0), (3.0, 3.0, 7.0)]
    assert exposed_s(made, times) == 4.0


@pytest.mark.parametrize("ready", [[], [2.0, 1.0]])
def test_gradients_out_of_order_are_refused(ready):
    with pytest.raises(SpecError, match="out of order"):
        Gradients(
            names=("a", "b")[: len(ready)],
            num_bytes=np.ones(len(ready)),
            ready_s=np.array(ready),
            backward_s=3.0,
        )
