"""How owners sum buckets: by the backend's all-reduce, or in a thread by a named algorithm and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from foreshard.comm.compression.methods import compression_method
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.selection import BACKEND, ScheduleSelection, all_reduce_selection
from foreshard.errors import SpecError
from foreshard.runtime.engine.bucket_order import AgreedOrder
from foreshard.runtime.engine.bucket_urgency import bucket_urgency
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.membership.wire import PeerLost
from foreshard.runtime.records.durable_jsonl import OnEvent
from foreshard.runtime.run_settings import Options
from foreshard.runtime.state.buckets import Bucket
from foreshard.transport.all_reduce import AllReduce, ScheduledAllReduce
from foreshard.transport.compression.compressor import Compressor, SumRanks, WarmUp
from foreshard.transport.compression.registry import MakeCompressor, compressor_of


class BucketSum(Protocol):
    """Sums buckets of the same owners.

    `agrees` says that owners may begin buckets in different orders; else they begin them in one.
    """

    agrees: bool

    def begin(self, bucket: Bucket) -> Any:
        """Return work whose `wait` returns when the bucket holds the sum."""

    def close(self) -> None:
        """Break off what is under way: a peer is gone."""


class BackendSum:
    """The all-reduce of the backend."""

    agrees = False

    def __init__(self, group: Any):
        self._group = group

    def begin(self, bucket: Bucket) -> Any:
        """Begin an all-reduce of the bucket."""
        return self._group.allreduce([bucket.flat])

    def close(self) -> None:
        """Leave it to the end of the group."""


class BackgroundSum:
    """Sums one bucket after another in a thread, which alone uses the group.

    With an `order` the most urgent bucket that waits is next, else that which began first.
    """

    def __init__(self, group: PeerGroup, sums: Callable[[Bucket], None], order: AgreedOrder | None = None):
        self._group, self._sums, self._order = group, sums, order
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums")
        self._last: Future[None] | None = None
        self.agrees = order is not None

    def begin(self, bucket: Bucket) -> AwaitedSum:
        """Let the thread sum the bucket when it is its turn."""
        if self._order is None:
            self._last = done = self._thread.submit(self._sums, bucket)
        else:
            done = self._order.add(bucket)
            self._last = self._thread.submit(self._sum_next, self._order)
        return AwaitedSum(done, self._group)

    def _sum_next(self, order: AgreedOrder) -> None:
        try:
            bucket, done = order.next()
        except BaseException as error:
            order.fail(error)
            raise
        try:
            self._sums(bucket)
        except BaseException as error:
            done.set_exception(error)
            order.fail(error)
            raise
        done.set_result(None)

    def close(self) -> None:
        """Break the connections if the thread still waits on them, and end it."""
        if self._order is not None:
            self._order.fail(PeerLost("sums of gradients are broken off"))
        if self._last is not None and not self._last.done():
            self._group.cut()
        self._thread.shutdown(wait=True, cancel_futures=True)


class AwaitedSum:
    """A sum that a thread computes."""

    def __init__(self, future: Future[None], group: PeerGroup):
        self._future, self._group = future, group

    def wait(self) -> None:
        """Wait until it is done; raises `PeerLost` as the thread does."""
        with self._group.waiting():
            self._future.result()


class BucketSums:
    """Connects owners by the algorithm and the compression that a run or its plan names.

    The first plan has to be one that the algorithm can sum. Later ones follow losses and changes: where the
    owners are then too few or too many for it, the backend sums; what compression has left out until then is
    dropped. Both are said as events.

    The trainer sets the step of `warm_up`.
    """

    def __init__(self, options: Options, on_event: OnEvent):
        self.warm_up = WarmUp(options.compress_after)
        self._urgency = None if options.bucket_order is None else bucket_urgency(options.bucket_order)
        self._selection: ScheduleSelection | None = None
        self._make = None if options.compress is None else compressor_of(compression_method(options.compress))
        self._on_event = on_event
        self._is_first_plan = True

    def select(self, collectives: str | None) -> None:
        """Sum the plan that is connected next by this algorithm; None for the backend's all-reduce.

        `collectives` is as `schedule_selection` reads an all-reduce.
        """
        self._selection = None if collectives is None else all_reduce_selection(collectives)

    def plan_connected(self) -> None:
        """Note that the owners of a plan are connected."""
        self._is_first_plan = False

    def connect(self, group: PeerGroup, buckets: Sequence[Bucket]) -> BucketSum:
        """Return what sums the buckets of a group, which are in the order of the backward."""
        if self._selection is None and self._make is None:
            return BackendSum(group)
        _check_on_host(group)
        schedule = None if self._selection is None else self._schedule(group, self._selection)
        if schedule is None and self._make is None:
            return BackendSum(group)
        peers = group.in_background()
        order = None if self._urgency is None else AgreedOrder(peers, buckets, self._urgency)
        all_reduce = None if schedule is None else ScheduledAllReduce(schedule, group.place, peers)
        if self._make is None:
            assert all_reduce is not None
            return BackgroundSum(group, _whole(all_reduce), order)
        if not self._is_first_plan and group.place == 0:
            text = f"ranks {list(group.ranks)} compress anew: what was left out of their gradients is dropped"
            self._on_event("compression", text)
        ranks = SumRanks(peers, group.place, len(group.ranks), all_reduce)
        return BackgroundSum(group, _compressed(self._make, ranks, self.warm_up), order)

    def _schedule(self, group: PeerGroup, selection: ScheduleSelection) -> Schedule | None:
        """Return the schedule of the owners; None where there is none, after the first plan."""
        try:
            return selection.schedule_for(len(group.ranks))
        except SpecError as error:
            if self._is_first_plan:
                raise
            if group.place == 0:
                text = f"ranks {list(group.ranks)} sum by the backend's all-reduce: {error.what}"
                self._on_event("collective", text, algorithm=selection.name)
            return None


def _check_on_host(group: PeerGroup) -> None:
    if group.uses_nccl:
        raise SpecError(
            "gradients on accelerators",
            key="collectives, --compress",
            rule="Schedules and compressed sums are executed in host memory, over gloo",
            fix=f"Take --collectives {BACKEND} without --compress, or add --device cpu",
        )


def _whole(all_reduce: AllReduce) -> Callable[[Bucket], None]:
    return lambda bucket: all_reduce(bucket.flat)


def _compressed(make: MakeCompressor, ranks: SumRanks, warm_up: WarmUp) -> Callable[[Bucket], None]:
    """Return what sums buckets, each by a compressor of its own that keeps what it has left out."""
    compressors: dict[int, Compressor] = {}

    def total(bucket: Bucket) -> None:
        if id(bucket) not in compressors:
            compressors[id(bucket)] = make(tuple(gradient.shape for gradient in bucket.gradients), warm_up)
        compressors[id(bucket)].sum(bucket.flat, ranks)

    return total
