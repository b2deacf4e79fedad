"""One step of one rank: the actions of its schedule, in order, on its own layers.

An action is a forward or a backward of one chunk for one micro-batch. Before it the rank receives what the
action needs, after it sends what it made; all waiting happens there. Gradients of all samples are summed,
so that nothing depends on how samples were cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foreshard.graph.schedules import Op, stage_order
from foreshard.profile.batches import as_tuple, moved
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.exchange import Exchange, Peer, Span, check_sendable
from foreshard.runtime.engine.randomness import Windows, sample_randomness
from foreshard.runtime.engine.split_backward import Delayed, input_half, weight_half
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.user_code import own_code
from foreshard.runtime.state.layout import RankLayout, micro_batches, samples_of
from foreshard.runtime.state.zero import Shards
from foreshard.runtime.tensor.ranks import TensorRanks, peers_of, ranks_of
from foreshard.spec.plan import Stage

Hook = Callable[[str], None]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class StepSums:
    """What a rank adds to a step.

    Sums over its samples of the loss and of what it is divided by, and its work.
    """

    loss: float = 0.0
    count: float = 0.0
    work_s: float = 0.0
    samples: int = 0


@dataclass(slots=True)
class _Passing:
    """A micro-batch between its forward and its backward on a chunk."""

    received: list[Tensor]
    made: list[Tensor]
    loss: Tensor | None = None
    delayed: Any = None
    grads: list[Tensor | None] = field(default_factory=list)


class Executor:
    """Runs a rank's part of a step.

    Parameters
    ----------
    job : Job
    feed : Feed
    layout : RankLayout
    rank : int
    modules : mapping of layer to module
    exchange : Exchange
    clock : Clock
    device : torch.device
    seed : int
        Of dropout.
    on_action : callable of (name, chunk, micro_batch, start_s, end_s), optional
    on_gradients : callable of frozenset of layers, optional
        Called when layers have passed their last backward of the step.
    shards : Shards, optional
        Brings the parameters of a chunk together where each rank of the stage keeps a part.
    tensor : TensorRanks, optional
        Those that compute the same samples together with this one.
    windows : callable of layer, optional
        What draws of a layer are parts of.
    """

    def __init__(
        self,
        job: Job,
        feed: Feed,
        layout: RankLayout,
        rank: int,
        modules: Mapping[int, nn.Module],
        exchange: Exchange,
        clock: Clock,
        *,
        device: torch.device,
        seed: int = 0,
        on_action: Callable[..., None] | None = None,
        on_gradients: Callable[[frozenset[int]], None] | None = None,
        phase: Hook = lambda name: None,
        shards: Shards | None = None,
        tensor: TensorRanks | None = None,
        windows: Callable[[int, tuple[Any, ...]], Windows | None] = lambda layer, given: None,
    ):
        self.job, self.feed, self.layout, self.rank = job, feed, layout, rank
        self.modules, self.exchange, self.clock = modules, exchange, clock
        self.device, self.seed, self.shards = device, seed, shards
        self.on_action, self.on_gradients, self.phase = on_action, on_gradients, phase
        self.loss_scale = 1.0
        self.tensor, self.windows = tensor or TensorRanks(), windows
        self.tensor.bytes_summed = [] if clock.virtual else None
        self.group, self.stage = layout.group_of(rank), layout.stage_of(rank)
        self.seat = layout.seats[rank]
        self.batches = micro_batches(self.group)
        self.order = stage_order(
            self.group.schedule,
            num_stages=len(self.group.stages),
            num_micro_batches=len(self.batches),
            num_chunks=self.group.num_chunks,
        )[self.seat.stage].tolist()
        if self.group.schedule == "zb-h1":  # before the first step, not in it
            import torch.distributed.pipelining._backward  # noqa: F401
        self._last_of = self._last_backward()
        self._passing: dict[tuple[int, int], _Passing] = {}

    @property
    def num_virtual(self) -> int:
        """Virtual stages of the pipeline."""
        return len(self.group.stages) * self.group.num_chunks

    def reads(self, step: int) -> list[range]:
        """Return the positions of the batches that this rank reads in a step.

        In the order of its forwards.
        """
        if self.seat.stage not in (0, len(self.group.stages) - 1):
            return []
        found = [self._positions(step, batch) for op, _, batch in self.order if op == Op.FORWARD]
        return [positions for positions in dict.fromkeys(found) if len(positions)]

    def trained_in(self, step: int) -> list[range]:
        """Return the positions whose loss this rank answers for in a step."""
        if self.seat.stage != len(self.group.stages) - 1 or self.seat.tensor:
            return []
        return [self._positions(step, batch) for batch in range(len(self.batches))]

    def _positions(self, step: int, batch: int) -> range:
        base = step * self.layout.plan.global_batch + self.layout.first_position(self.seat.group)
        lo, hi = self._span(self.stage, batch, self.seat.inner)
        return range(base + self.batches[batch][0] + lo, base + self.batches[batch][0] + hi)

    def release(self) -> None:
        """Let go of samples that are under way: their graphs hold this executor, and it holds connections."""
        self._passing.clear()

    def run(self, step: int) -> StepSums:
        """Run all actions of a step and return the sums.

        Raises
        ------
        RuntimeError
            From torch.distributed, when a peer is gone.
        """
        sums = StepSums()
        self._passing.clear()
        self.feed.prefetch(self.reads(step))
        for number, (op, chunk, batch) in enumerate(self.order):
            self.phase("forward" if op == Op.FORWARD else "backward")
            span = self._span(self.stage, batch, self.seat.inner)
            if self.shards is not None:
                self.shards.before(chunk)
            if span[0] < span[1]:
                positions = self._positions(step, batch)
                if op == Op.FORWARD:
                    self._forward(step, chunk, batch, span, positions, sums)
                elif op == Op.BACKWARD_WEIGHT:
                    self._backward_weight(chunk, batch, sums)
                else:
                    self._backward(chunk, batch, span, sums, inputs_only=op == Op.BACKWARD_INPUT)
            if self.shards is not None:
                self.shards.after(chunk, summed=op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            if self.on_gradients is not None and self._last_of.get(chunk) == number:
                start, stop = self.stage.layers[chunk]
                self.on_gradients(frozenset(range(start, stop)))
        self.exchange.settle()
        return sums

    def _forward(
        self, step: int, chunk: int, batch: int, span: Span, positions: range, sums: StepSums
    ) -> None:
        virtual = self._virtual(chunk)
        data = received = None
        if virtual in (0, self.num_virtual - 1):
            with own_code("dataset", self.job.path):
                data = self.feed.batch(positions)
        if virtual == 0:
            with own_code("inputs", self.job.path):
                received = [moved(t, self.device) for t in as_tuple(self.job.inputs(data))]
        else:
            received = self.exchange.receive(
                span,
                self._peers(virtual - 1, batch, sends=False),
                route=virtual * 2,
                tag=self._tag(virtual, batch, 0),
                device=self.device,
            )
            received = [t.requires_grad_() if t.is_floating_point() else t for t in received]
        with self._work("forward", chunk, batch, span, sums):
            made = self._through(step, chunk, received, positions)
            passing = _Passing(received, made)
            if virtual == self.num_virtual - 1:
                passing.loss = self._loss(made, data, sums)
        if passing.loss is None:
            self.exchange.send(
                made,
                span,
                self._peers(virtual + 1, batch, sends=True),
                route=(virtual + 1) * 2,
                tag=self._tag(virtual + 1, batch, 0),
            )
        self._passing[chunk, batch] = passing

    def _loss(self, made: list[Tensor], data: Any, sums: StepSums) -> Tensor:
        if self.layout.plan.precision == "fp16":  # sums over words leave its range
            made = [t.float() if t.dtype is torch.float16 else t for t in made]
        output = made[0] if len(made) == 1 else tuple(made)
        with self._precision():
            total, count = self.job.loss(output, moved(data, self.device))
        if self.seat.tensor == 0:  # the others have the same
            sums.loss += float(total.detach())
            sums.count += float(count)
        return total if self.loss_scale == 1.0 else total * self.loss_scale

    def _backward(self, chunk: int, batch: int, span: Span, sums: StepSums, *, inputs_only: bool) -> None:
        virtual, passing = self._virtual(chunk), self._passing[chunk, batch]
        grads: list[Tensor] | None = None
        if passing.loss is None:
            grads = self.exchange.receive(
                span,
                self._peers(virtual + 1, batch, sends=False),
                route=virtual * 2 + 1,
                tag=self._tag(virtual, batch, 1),
                device=self.device,
            )
        outputs = (
            [passing.loss] if passing.loss is not None else [t for t in passing.made if t.is_floating_point()]
        )
        inputs = [t for t in passing.received if t.is_floating_point() and t.requires_grad]
        delayed = inputs_only and bool(inputs)
        with self._work("backward_input" if inputs_only else "backward", chunk, batch, span, sums):
            if delayed:
                passing.delayed = input_half(outputs, grads, inputs, self._weights(chunk))
                passing.made.clear()
            elif inputs_only:
                passing.delayed = (outputs, grads)
            else:
                _run_backward(outputs, grads)
        if virtual > 0:
            back = [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs]
            self.exchange.send(
                back,
                span,
                self._peers(virtual - 1, batch, sends=True),
                route=(virtual - 1) * 2 + 1,
                tag=self._tag(virtual - 1, batch, 1),
            )
        if not inputs_only:
            del self._passing[chunk, batch]

    def _backward_weight(self, chunk: int, batch: int, sums: StepSums) -> None:
        passing = self._passing.pop((chunk, batch))
        span = self._span(self.stage, batch, self.seat.inner)
        with self._work("backward_weight", chunk, batch, span, sums):
            if isinstance(passing.delayed, Delayed):
                weight_half(self._weights(chunk), passing.delayed)
            else:
                _run_backward(*passing.delayed)

    def _through(self, step: int, chunk: int, received: list[Tensor], positions: range) -> list[Tensor]:
        start, stop = self.stage.layers[chunk]
        values: Any = tuple(received)
        if self._cuts_stream(chunk, -1):
            values = (self.tensor.own(values[0]), *values[1:])
        for lo, hi, again in _recomputed(self.stage.recompute, start, stop):

            def block(*given: Any, lo: int = lo, hi: int = hi) -> Any:
                for layer in range(lo, hi):
                    given = through(
                        self.modules[layer],
                        layer,
                        given,
                        positions,
                        seed=self.seed,
                        step=step,
                        windows=self.windows(layer, given),
                    )
                    last = layer == self.job.num_layers - 1
                    check_sendable(given, layer, samples=len(positions), is_last=last)
                    self.tensor.forget()
                return given

            with self._precision():
                values = (
                    checkpoint(block, *values, use_reentrant=False, preserve_rng_state=False)
                    if again
                    else block(*values)
                )
        if self._cuts_stream(chunk, 1):
            values = (self.tensor.together(values[0]), *values[1:])
        return list(values)

    def _cuts_stream(self, chunk: int, side: int) -> bool:
        """Return whether what comes from before a chunk, or goes behind it, is whole but not inside."""
        beside = self._virtual(chunk) + side
        inner = 0 <= beside < self.num_virtual
        return self.tensor.sequence and inner and not self._in_parts(beside)

    def _in_parts(self, virtual: int) -> bool:
        """Return whether messages to and from a virtual stage are parts of the sequence."""
        return self.tensor.sequence and self._stage(virtual).tp == self.stage.tp

    def _precision(self) -> AbstractContextManager[Any]:
        dtype = _HALF.get(self.layout.plan.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _weights(self, chunk: int) -> list[nn.Parameter]:
        start, stop = self.stage.layers[chunk]
        return [
            p for layer in range(start, stop) for p in self.modules[layer].parameters() if p.requires_grad
        ]

    @contextmanager
    def _work(self, name: str, chunk: int, batch: int, span: Span, sums: StepSums) -> Iterator[None]:
        start, stop = self.stage.layers[chunk]
        began_s = self.clock.now()
        self.clock.begin()
        with own_code(f"{name} of layers {start} to {stop - 1}", self.job.path):
            yield
        self.clock.end(name, span[1] - span[0], stop - start)
        self.tensor.meet(self.clock)
        ended_s = self.clock.now()
        sums.work_s += ended_s - began_s
        if name == "forward" and chunk == 0:
            sums.samples += span[1] - span[0]
        if self.on_action is not None:
            self.on_action(name, chunk, batch, began_s, ended_s)

    def _virtual(self, chunk: int) -> int:
        return chunk * len(self.group.stages) + self.seat.stage

    def _span(self, stage: Any, batch: int, inner: int) -> Span:
        lo, hi = self.batches[batch]
        return samples_of(stage, hi - lo)[inner]

    def _peers(self, virtual: int, batch: int, *, sends: bool) -> list[Peer]:
        stage = self._stage(virtual)
        lo, hi = self.batches[batch]
        return [
            Peer(rank=rank, span=span)
            for inner, span in enumerate(samples_of(stage, hi - lo))
            for rank in peers_of(
                ranks_of(stage.ranks, inner, stage.tp),
                self.seat.tensor,
                self.stage.tp,
                sends=sends,
                parts=self._in_parts(virtual),
            )
        ]

    def _stage(self, virtual: int) -> Stage:
        return self.group.stages[virtual % len(self.group.stages)]

    def _tag(self, virtual: int, batch: int, direction: int) -> int:
        return (virtual * len(self.batches) + batch) * 2 + direction

    def _last_backward(self) -> dict[int, int]:
        """Return the last action of each chunk; after it the chunk's gradients are complete."""
        return {chunk: number for number, (op, chunk, _) in enumerate(self.order) if op != Op.FORWARD}


def through(
    module: nn.Module,
    layer: int,
    values: tuple[Any, ...],
    positions: range,
    *,
    seed: int = 0,
    step: int = 0,
    windows: Windows | None = None,
) -> tuple[Any, ...]:
    """Return what a layer makes of the values for the samples at the positions."""
    with sample_randomness(seed=seed, step=step, layer=layer, positions=positions, windows=windows):
        return as_tuple(module(*values))


def _run_backward(outputs: list[Tensor], grads: list[Tensor] | None) -> None:
    pairs = [(t, None if grads is None else grads[i]) for i, t in enumerate(outputs) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], None if grads is None else [g for _, g in pairs])


def _recomputed(rule: str, start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Return the layers as runs (first, past the last, whether they run again in the backward)."""
    head, _, rest = rule.partition(":")
    if head == "none":
        return [(start, stop, False)]
    if head.startswith("every-"):
        every = int(head[6:])
        return [(layer, layer + 1, (layer - start) % every == every - 1) for layer in range(start, stop)]
    kind, _, count = rest.partition(":")
    if kind == "block":
        cut = min(start + int(count), stop)
        return [(layer, layer + 1, True) for layer in range(start, cut)] + [(cut, stop, False)] * (cut < stop)
    unit = int(count or 1)
    return [(lo, min(lo + unit, stop), True) for lo in range(start, stop, unit)]
