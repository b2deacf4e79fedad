"""How owners sum buckets: by the backend's all-reduce, or in a thread by a named algorithm."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from foreshard.comm.schedules.selection import AllReduceSelection, all_reduce_selection
from foreshard.errors import SpecError
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.records.durable_jsonl import OnEvent
from foreshard.runtime.state.buckets import Bucket
from foreshard.transport.all_reduce import ScheduledAllReduce


class BucketSum(Protocol):
    """Sums buckets of the same owners, in the order in which they begin."""

    def begin(self, bucket: Bucket) -> Any:
        """Return work whose `wait` returns when the bucket holds the sum."""

    def close(self) -> None:
        """Break off what is under way: a peer is gone."""


class BackendSum:
    """The all-reduce of the backend."""

    def __init__(self, group: Any):
        self._group = group

    def begin(self, bucket: Bucket) -> Any:
        """Begin an all-reduce of the bucket."""
        return self._group.allreduce([bucket.flat])

    def close(self) -> None:
        """Leave it to the end of the group."""


class BackgroundSum:
    """Sums one bucket after another in a thread, which alone uses the group."""

    def __init__(self, group: PeerGroup, sums: Callable[[Bucket], None]):
        self._group, self._sums = group, sums
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums")
        self._last: Future[None] | None = None

    def begin(self, bucket: Bucket) -> AwaitedSum:
        """Let the thread sum the bucket after those before it."""
        self._last = self._thread.submit(self._sums, bucket)
        return AwaitedSum(self._last, self._group)

    def close(self) -> None:
        """Break the connections if the thread still waits on them, and end it."""
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
    """Connects owners by the algorithm that a run names, for its whole length.

    The first plan has to be one that the algorithm can sum. Later ones follow losses and changes: where the
    owners are then too few or too many for it, the backend sums, which is said as an event.

    Parameters
    ----------
    collectives : str, optional
        As in `all_reduce_selection`.
    on_event : OnEvent
    """

    def __init__(self, collectives: str | None, on_event: OnEvent):
        self._selection = None if collectives is None else all_reduce_selection(collectives)
        self._on_event = on_event
        self._is_first_plan = True

    def plan_connected(self) -> None:
        """Note that the owners of a plan are connected."""
        self._is_first_plan = False

    def connect(self, group: PeerGroup) -> BucketSum:
        """Return what sums the buckets of a group."""
        if self._selection is None:
            return BackendSum(group)
        if group.uses_nccl:
            raise SpecError(
                "gradients on accelerators",
                key="--collectives",
                value=self._selection.name,
                rule="Schedules are executed in host memory, over gloo",
                fix="Leave it out, or add --device cpu",
            )
        return self._by_schedule(group, self._selection)

    def _by_schedule(self, group: PeerGroup, selection: AllReduceSelection) -> BucketSum:
        try:
            schedule = selection.schedule_for(len(group.ranks))
        except SpecError as error:
            if self._is_first_plan:
                raise
            text = f"ranks {list(group.ranks)} sum by the backend's all-reduce: {error.what}"
            self._on_event("collective", text, algorithm=selection.name)
            return BackendSum(group)
        all_reduce = ScheduledAllReduce(schedule, group.place, group.in_background())
        return BackgroundSum(group, lambda bucket: all_reduce(bucket.flat))
