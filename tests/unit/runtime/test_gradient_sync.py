"""Sums of gradients start inside the last backward, bucket by bucket, in the same order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.gradient_sync import GradientSync
from foreshard.runtime.state import buckets as buckets_module
from foreshard.runtime.state.buckets import Bucket, Gradient, cut_in_buckets


class Group:
    """Notes what it is asked to sum."""

    def __init__(self) -> None:
        self.summed: list[Any] = []

    def allreduce(self, tensors: list[Any]) -> Any:
        self.summed += tensors
        return self

    def wait(self) -> None:
        pass


def bucket(layer: int, *parameters: nn.Parameter) -> Bucket:
    flat = torch.zeros(sum(p.numel() for p in parameters))
    parts = flat.split([p.numel() for p in parameters])
    gradients = [
        Gradient(name=(layer, f"w{i}"), parameter=p, flat=part)
        for i, (p, part) in enumerate(zip(parameters, parts, strict=True))
    ]
    made = Bucket((0, 1), flat, gradients, frozenset([layer]))
    made.clear()
    return made


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(count)]


def test_a_bucket_starts_when_its_last_gradient_is_made() -> None:
    first, second, third = weights(3)
    own, group = [bucket(1, second, third), bucket(0, first)], Group()
    sync, at_first = GradientSync(own, lambda ranks, name: group, Clock()), []
    sync.begin()
    x = (torch.ones(3) * first).clone()
    x.register_hook(lambda grad: at_first.append(list(group.summed)))
    with sync.last_backward(frozenset([0, 1])):
        (x * second * third).sum().backward()
    assert [t is own[0].flat for t in at_first[0]] == [True], "before the backward of layer 0"
    assert [id(t) for t in group.summed] == [id(b.flat) for b in own]
    sync.layers_done(frozenset([0, 1]))
    sync.finish()
    assert len(group.summed) == 2
    (first * second * third).sum().backward()
    assert len(group.summed) == 2, "no hook stays"


def test_a_parameter_without_gradient_waits_for_the_end_and_keeps_the_order() -> None:
    first, second, unused = weights(3)
    own, group = [bucket(1, second, unused), bucket(0, first)], Group()
    sync = GradientSync(own, lambda ranks, name: group, Clock())
    sync.begin()
    with sync.last_backward(frozenset([0, 1])):
        (first * second).sum().backward()
    assert not group.summed, "the second bucket is complete, and waits for the first"
    sync.layers_done(frozenset([0, 1]))
    assert [id(t) for t in group.summed] == [id(b.flat) for b in own]


def test_a_layer_with_a_later_backward_is_not_summed_early() -> None:
    tied = weights(1)[0]
    own, group = [bucket(0, tied)], Group()
    own[0].layers = frozenset([0, 7])
    sync = GradientSync(own, lambda ranks, name: group, Clock())
    sync.begin()
    with sync.last_backward(frozenset([7])):
        tied.sum().backward()
    sync.layers_done(frozenset([7]))
    assert not group.summed
    with sync.last_backward(frozenset([0])):
        tied.sum().backward()
    assert len(group.summed) == 1 and own[0].flat.tolist() == [2.0] * 3


def test_buckets_are_cut_from_the_last_layer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 24)
    made = [Gradient(name=(i, "w"), parameter=w, flat=w.data) for i, w in enumerate(weights(5))]
    parts = cut_in_buckets(made)
    assert [[g.name[0] for g in part] for part in parts] == [[3, 4], [1, 2], [0]]
