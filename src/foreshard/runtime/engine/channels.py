"""Which ranks send each other tensors under a plan: the directed pairs that need connections of their own."""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.runtime.engine.exchange import Channel
from foreshard.runtime.state.layout import RankLayout, micro_batches, samples_of
from foreshard.runtime.tensor.ranks import peers_of, ranks_of
from foreshard.spec.plan import Group, Stage


def channels_of(layout: RankLayout) -> list[Channel]:
    """Return the channels of all ranks, in the one order in which ranks open them.

    Every rank waits for the other end of its first channel in this order, so no ranks wait for each other
    in a circle.
    """
    found: set[Channel] = set()
    for group in layout.plan.groups:
        for source, target in _forward_pairs(group):
            found |= {(source, target, False), (target, source, True)}
    return sorted(found)


def _forward_pairs(group: Group) -> Iterator[tuple[int, int]]:
    """Yield the ranks of neighbouring virtual stages that hold the same samples of some micro-batch."""
    count = len(group.stages)
    for virtual in range(count * group.num_chunks - 1):
        ends = group.stages[virtual % count], group.stages[(virtual + 1) % count]
        for lo, hi in set(micro_batches(group)):
            for source, target in _shared_samples(*ends, hi - lo):
                yield from _tensor_pairs(group, *ends, source, target)


def _shared_samples(before: Stage, after: Stage, count: int) -> Iterator[tuple[int, int]]:
    """Yield the data-parallel parts of two stages that have samples in common."""
    for source, (lo, hi) in enumerate(samples_of(before, count)):
        for target, (first, last) in enumerate(samples_of(after, count)):
            if max(lo, first) < min(hi, last):
                yield source, target


def _tensor_pairs(
    group: Group, before: Stage, after: Stage, source: int, target: int
) -> Iterator[tuple[int, int]]:
    parts = group.sp and before.tp == after.tp > 1
    senders, receivers = (
        ranks_of(before.ranks, source, before.tp),
        ranks_of(after.ranks, target, after.tp),
    )
    for index, sender in enumerate(senders):
        for receiver in peers_of(receivers, index, before.tp, sends=True, parts=parts):
            yield sender, receiver
    for index, receiver in enumerate(receivers):  # gradients go back the same way between other ranks
        for sender in peers_of(senders, index, after.tp, sends=True, parts=parts):
            yield sender, receiver
