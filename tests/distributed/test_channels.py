"""Stage messages where a group keeps one order for all it carries, as NCCL does, and knows no tags."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import gradients, rehearse, worst_error
from small_jobs import gpt
from small_plans import ALONE, PLANS

from foreshard.graph.pipeline_schedules import Op, stage_order
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.exchange import channels_of
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.state.layout import layout_of


class InOrder:
    """A group of two ranks whose messages meet in the order of their posting: tags are dropped."""

    def __init__(self, group: Any):
        self._group = group

    def send(self, tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        return self._group.send(tensors, place, 0)

    def recv(self, tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        return self._group.recv(tensors, place, 0)


class OwnDevices(FixedMembership):
    """Ranks that say they have accelerators of their own, connected by groups that keep order."""

    def owns_devices(self) -> bool:
        return True

    def group(self, ranks: tuple[int, ...], name: str) -> Any:
        made = super().group(ranks, name)
        return InOrder(made) if name.startswith(("forward-", "backward-")) else made


@pytest.mark.parametrize("plan", [name for name, plan in PLANS.items() if len(plan.ranks) > 1])
def test_gradients_are_those_of_one_process_without_tags(plan: str) -> None:
    expected = rehearse(gpt(torch.float64), ALONE, steps=1, after=gradients)[0][1]
    found = rehearse(
        gpt(torch.float64), PLANS[plan], steps=1, after=gradients, ranks=range(4), membership=OwnDevices
    )
    assert worst_error(found, expected) <= 1e-14


class DeviceClock(Clock):
    """The clock of a device that works later: who asks it waits, and must be seen to wait."""

    def __init__(self, waits: threading.local):
        self._waits = waits
        self.asked: list[bool] = []

    def seconds(self, mark: Any) -> float:
        self.asked.append(getattr(self._waits, "depth", 0) > 0)
        return super().seconds(mark)


@pytest.mark.parametrize("plan", ["four stages", "even replicas", "alone"])
def test_who_waits_for_the_device_is_not_busy(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may wait for peers: a rank beside a slow one would be found to hang."""
    waits, waiting = threading.local(), Progress.waiting

    @contextmanager
    def counted(progress: Progress, ranks: Sequence[int] = ()) -> Iterator[None]:
        waits.depth = getattr(waits, "depth", 0) + 1
        with waiting(progress, ranks):
            yield
        waits.depth -= 1

    monkeypatch.setattr(Progress, "waiting", counted)
    found = rehearse(
        gpt(torch.float64),
        {**PLANS, "alone": ALONE}[plan],
        steps=2,
        membership=OwnDevices,
        clock=lambda: DeviceClock(waits),
        after=lambda trainer: trainer.context.clock.asked,
    )
    assert all(len(asked) > 2 and all(asked) for _, asked in found.values()) or len(found) == 1


SHAPES = [
    (schedule, stages, batches, chunks)
    for schedule, stages, batches, chunks in itertools.product(
        ("gpipe", "1f1b", "zb-h1", "interleaved"), (2, 3, 4, 8), (1, 2, 3, 4, 8, 16, 24), (1, 2, 3)
    )
    if (chunks > 1) == (schedule == "interleaved") and (chunks == 1 or batches % stages == 0)
]


@pytest.mark.parametrize(("schedule", "stages", "batches", "chunks"), SHAPES)
def test_a_channel_is_sent_and_received_in_one_order(
    schedule: str, stages: int, batches: int, chunks: int
) -> None:
    """And every action gets its message: ranks that only wait for their channels come to the end."""
    orders = [
        order.tolist()
        for order in stage_order(schedule, num_stages=stages, num_micro_batches=batches, num_chunks=chunks)
    ]
    under_way: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    last, at = stages * chunks - 1, [0] * stages

    def act(stage: int) -> bool:
        op, chunk, batch = orders[stage][at[stage]]
        virtual, backward = chunk * stages + stage, op != Op.FORWARD
        source, target = (virtual + 1, virtual - 1) if backward else (virtual - 1, virtual + 1)
        if op != Op.BACKWARD_WEIGHT:
            if 0 <= source <= last:
                channel = under_way.get((source % stages, stage, backward), [])
                if not channel:
                    return False
                assert channel.pop(0) == (virtual, batch)
            if 0 <= target <= last:
                under_way.setdefault((stage, target % stages, backward), []).append((target, batch))
        at[stage] += 1
        return True

    while any([act(s) for s in range(stages) if at[s] < len(orders[s])]):
        pass
    assert at == [len(order) for order in orders]
    assert not any(under_way.values())


def test_ranks_open_channels_in_one_order() -> None:
    """Each rank waits for the other end of one channel after another: none of them waits for ever."""
    for plan in PLANS.values():
        todo = {rank: [c for c in channels_of(layout_of(plan)) if rank in c[:2]] for rank in plan.ranks}
        while any(todo.values()):
            ready = {c for own in todo.values() for c in own[:1] if todo[c[0]][:1] == todo[c[1]][:1] == [c]}
            assert ready
            for source, target, _ in ready:
                todo[source].pop(0)
                todo[target].pop(0)
