"""Of the buckets that wait, the most urgent is summed next: on all owners, as the scheduler's model says."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import gradients, rehearse, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.comm.fusion.priority import sends_in_order
from foreshard.errors import SpecError
from foreshard.runtime.engine import bucket_sums
from foreshard.runtime.engine.bucket_order import AgreedOrder
from foreshard.runtime.engine.bucket_urgency import bucket_urgency
from foreshard.runtime.engine.gradient_sync import GradientSync
from foreshard.runtime.gradient_sums import GradientSums, check_order
from foreshard.runtime.state.buckets import Bucket
from foreshard.runtime.trainer import Options
from foreshard.spec.plan import Plan

REPLICAS = PLANS["uneven replicas"]
OWNER: Any = SimpleNamespace(place=0, ranks=(0,))
"""The group of one that has nobody to tell."""


def buckets_of(layers: list[int]) -> list[Bucket]:
    return [Bucket((0, 1), torch.zeros(1), [], frozenset([layer])) for layer in layers]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_the_scheduler_s_model(seed: int) -> None:
    """Buckets become ready while others are sent; numbers are small, so that many of them tie."""
    draw = random.Random(seed)
    made = buckets_of([draw.randrange(6) for _ in range(12)])
    seconds = [draw.randrange(1, 6) for _ in made]
    ready = sorted((draw.randrange(20), number) for number in range(len(made)))
    urgency = [min(bucket.layers) for bucket in made]
    order = AgreedOrder(OWNER, made, lambda bucket: min(bucket.layers))
    found, now, added = [], 0, 0
    while len(found) < len(made):
        while added < len(ready) and ready[added][0] <= now:
            order.add(made[ready[added][1]])
            added += 1
        if added == len(found):
            now = ready[added][0]
            continue
        bucket, _ = order.next()
        number = next(at for at, one in enumerate(made) if one is bucket)
        now += seconds[number]
        found.append((number, now))
    assert found == list(sends_in_order(ready, seconds, urgency))


def summed(order: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], float]:
    """Layers of the buckets that each rank sums, where all wait behind the first one; the worst error."""
    done: list[list[int]] = []
    finishing, all_wait, finish = set(), threading.Event(), GradientSync.finish

    def finished(sync: GradientSync) -> None:
        finishing.add(id(sync))
        if len(finishing) == len(REPLICAS.ranks):
            all_wait.set()
        finish(sync)

    def noted(all_reduce: Any) -> Any:
        mine: list[int] = []
        done.append(mine)

        def total(bucket: Bucket) -> None:
            mine.append(min(bucket.layers))
            assert all_wait.wait(30)
            all_reduce(bucket.flat)

        return total

    monkeypatch.setattr(GradientSync, "finish", finished)
    monkeypatch.setattr(bucket_sums, "_whole", noted)
    job, options = JOBS["gpt"](torch.float64), Options(collectives="ring", bucket_bytes=1, bucket_order=order)
    found = rehearse(job, REPLICAS, steps=1, after=gradients, ranks=range(4), options=options)
    return done, worst_error(found, rehearse(job, ALONE, steps=1, after=gradients)[0][1])


def test_all_ranks_send_what_the_next_forward_needs_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_default, error = summed(None, monkeypatch)
    made = by_default[0]  # the weights of layer 7 are those of layer 0
    assert error <= 1e-14 and made == sorted(made, reverse=True) and set(made) == set(range(7))
    file = tmp_path / "order.json"
    file.write_text(json.dumps({"schema_version": 1, "layers": [3, 5]}))
    ready = [(float(at), at) for at in range(len(made))]
    for order, place in (("forward", {layer: layer for layer in range(8)}), (str(file), {3: 0, 5: 1})):
        model = sends_in_order(ready, [1e9] * len(made), [place.get(layer, 2) for layer in made])
        expected = [made[number] for number, _ in model]
        assert expected != made
        by_order, error = summed(order, monkeypatch)
        assert error <= 1e-14 and len(by_order) == 4
        assert all(found == expected for found in by_order)


def test_a_failure_ends_all_waiting() -> None:
    order = AgreedOrder(OWNER, buckets_of([0, 1]), lambda bucket: 0)
    first, second = order._buckets
    waits = order.add(first)
    order.fail(RuntimeError("gone"))
    for done in (waits, order.add(second)):
        with pytest.raises(RuntimeError, match="gone"):
            done.result(1)
    with pytest.raises(RuntimeError, match="gone"):
        order.next()


@pytest.mark.parametrize(
    ("plan", "sums", "order", "says"),
    [
        (REPLICAS, GradientSums(collectives="ring"), "sideways", "sideways"),
        (REPLICAS, GradientSums(), "forward", "sums by the backend"),
        (REPLICAS, GradientSums(collectives="backend"), "forward", "sums by the backend"),
        (PLANS["four stages"], GradientSums(collectives="ring"), "forward", "every layer is on one rank"),
    ],
)
def test_orders_that_do_not_apply_are_refused(plan: Plan, sums: GradientSums, order: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        check_order(plan, sums, order)
    assert caught.value.key == "--bucket-order" and caught.value.rule
    check_order(plan, sums, "backward")
    check_order(REPLICAS, GradientSums(compress="int8"), "forward")


def test_a_file_with_a_layer_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text(json.dumps({"schema_version": 1, "layers": [3, 3]}))
    with pytest.raises(SpecError, match="layer 3 twice"):
        bucket_urgency(str(file))
