"""Runs one step of one rank: the actions of its pipeline schedule, in order, on its own layers.

An action is a forward or a backward of one chunk for one micro-batch. Before it the rank receives what the
action needs, after it the rank sends what the action made; all waiting happens there. Gradients of all
samples are summed, so that nothing depends on how samples were cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foreshard.graph.pipeline_schedules import Op, stage_order
from foreshard.profile.batches import as_tuple, computing_in, handed, loss_input, moved
from foreshard.runtime.engine.exchange import Exchange, Peers, Span, check_sendable, peers_at
from foreshard.runtime.engine.gradient_sync import GradientSync
from foreshard.runtime.engine.randomness import Windows, sample_randomness
from foreshard.runtime.engine.split_backward import DelayedWeightGradient, input_half, weight_half
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.user_code import user_code
from foreshard.runtime.state.layout import RankLayout, micro_batches, samples_of, sends_parts
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.zero import ZeroExchange
from foreshard.runtime.trainer_context import TrainerContext


@dataclass(slots=True)
class StepSums:
    """The contribution of a rank to a step: sums over its samples, and its work.

    `loss` is divided by `count` once, after both have been summed over all ranks.
    """

    loss: float = 0.0
    count: float = 0.0
    work_s: float = 0.0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class _Action:
    """An action of the step and its marks on the clock."""

    name: str
    chunk: int
    batch: int
    began: Any
    ended: Any


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward on a chunk."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Tensor | None = None
    delayed: DelayedWeightGradient | tuple[list[Tensor], list[Tensor] | None] | None = None


class Executor:
    """Runs a rank's part of a step, with the rank's state arranged for the layout.

    Where each rank of the stage keeps a part of the parameters, `zero` gathers those of a chunk. `sync` sums
    the gradients of layers that have passed their last backward of the step.
    """

    def __init__(
        self,
        context: TrainerContext,
        layout: RankLayout,
        state: RankState,
        feed: Feed,
        exchange: Exchange,
        *,
        zero: ZeroExchange | None,
        sync: GradientSync,
    ):
        self.job, self.clock, self.device = context.job, context.clock, context.device
        self.on_action, self.phase, self.seed = context.on_action, context.phase, context.options.seed
        self.layout, self.rank, self.modules = layout, state.rank, state.modules
        self.feed, self.exchange, self.zero, self.sync = feed, exchange, zero, sync
        self.tensor, self.windows, rank = state.ranks, state.draws.windows, state.rank
        self.loss_scale = 1.0
        self.tensor.bytes_summed = [] if context.clock.virtual else None
        self.group, self.stage = layout.group_of(rank), layout.stage_of(rank)
        self.seat = layout.seats[rank]
        self.batches = micro_batches(self.group)
        self.order = stage_order(
            self.group.schedule,
            num_stages=len(self.group.stages),
            num_micro_batches=len(self.batches),
            num_chunks=self.group.num_chunks,
        )[self.seat.stage].tolist()
        if self.group.schedule == "zb-h1":  # takes seconds: before the first step, not in it
            import torch.distributed.pipelining._backward  # noqa: F401
        self._last_action = {
            chunk: number for number, (op, chunk, _) in enumerate(self.order) if op != Op.FORWARD
        }
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._done: list[_Action] = []
        self._losses: list[tuple[Tensor, Tensor | float]] = []

    @property
    def num_virtual(self) -> int:
        """Virtual stages of the pipeline."""
        return len(self.group.stages) * self.group.num_chunks

    def reads(self, step: int) -> list[range]:
        """Return the positions of the batches that this rank reads in a step, in order of its forwards."""
        if self.seat.stage not in (0, len(self.group.stages) - 1):
            return []
        found = [self._positions(step, batch) for op, _, batch in self.order if op == Op.FORWARD]
        return [positions for positions in dict.fromkeys(found) if len(positions)]

    def trained_in(self, step: int) -> list[range]:
        """Return the positions whose loss this rank computes in a step."""
        if self.seat.stage != len(self.group.stages) - 1 or self.seat.tensor:
            return []
        return [self._positions(step, batch) for batch in range(len(self.batches))]

    def _positions(self, step: int, batch: int) -> range:
        base = step * self.layout.plan.global_batch + self.layout.first_position(self.seat.group)
        lo, hi = self._span(batch)
        return range(base + self.batches[batch][0] + lo, base + self.batches[batch][0] + hi)

    def release(self) -> None:
        """Drop micro-batches in flight: their graphs hold this executor, and it holds connections."""
        self._in_flight.clear()

    def run(self, step: int) -> StepSums:
        """Run all actions of a step and return the sums."""
        sums = StepSums()
        self._in_flight.clear()
        self._done.clear()
        self._losses.clear()
        self.clock.start_step()
        self.feed.prefetch(self.reads(step))
        for number, (op, chunk, batch) in enumerate(self.order):
            self.phase("forward" if op == Op.FORWARD else "backward")
            if self.zero is not None:
                self.zero.before(chunk, backward=op != Op.FORWARD)
                if op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                    self.zero.await_all()  # no gradient of a layer's outputs tells when it is its turn
            span = self._span(batch)
            if span[0] < span[1]:
                if op == Op.FORWARD:
                    self._forward(step, chunk, batch, sums)
                elif op == Op.BACKWARD_WEIGHT:
                    self._backward_weight(chunk, batch, sums)
                else:
                    with self._summing(number, chunk):
                        self._backward(chunk, batch, sums, inputs_only=op == Op.BACKWARD_INPUT)
            if self.zero is not None:
                self.zero.after(chunk, summed=op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            if self._last_action.get(chunk) == number:
                self.sync.layers_done(frozenset(self._layers(chunk)))
        self.exchange.wait_for_sends()
        self._read_clock(sums)
        for total, count in self._losses:
            sums.loss += float(total)
            sums.count += float(count)
        return sums

    def _summing(self, number: int, chunk: int) -> AbstractContextManager[None]:
        """Sum gradients with peers as the body makes them, if it is the last backward of a chunk.

        ZeRO 2 brings them to the rank that keeps them first, and on a virtual clock no time passes in a
        backward that the sums could fill.
        """
        keeps_gradients = self.zero is not None and self.stage.zero >= 2
        if keeps_gradients or self.clock.virtual or self._last_action.get(chunk) != number:
            return nullcontext()
        return self.sync.last_backward(frozenset(self._layers(chunk)))

    def await_device(self) -> None:
        """Wait until the device has done what was begun, such as sums with peers."""
        with self.exchange.waiting_in_device():
            self.clock.seconds(self.clock.mark())

    def _read_clock(self, sums: StepSums) -> None:
        """Add up the time of the actions, and report them."""
        for action in self._done:
            with self.exchange.waiting_in_device():  # each action that has ended shows progress
                began_s, ended_s = self.clock.seconds(action.began), self.clock.seconds(action.ended)
            sums.work_s += ended_s - began_s
            if self.on_action is not None:
                self.on_action(action.name, action.chunk, action.batch, began_s, ended_s)

    # -- actions --------------------------------------------------------------------------------------------

    def _forward(self, step: int, chunk: int, batch: int, sums: StepSums) -> None:
        virtual, positions = self._virtual(chunk), self._positions(step, batch)
        data = None
        if virtual in (0, self.num_virtual - 1):
            with user_code("dataset", self.job.path):
                data = self.feed.batch(positions)
        if virtual == 0:
            with user_code("inputs", self.job.path):
                inputs = [moved(t, self.device) for t in as_tuple(self.job.inputs(data))]
        else:
            received = self._receive(virtual, virtual - 1, batch)
            inputs = [t.requires_grad_() if t.is_floating_point() else t for t in received]
        with self._work("forward", chunk, batch, sums):
            in_flight = _InFlight(inputs, self._run_layers(step, chunk, handed(inputs), positions))
            if virtual == self.num_virtual - 1:
                in_flight.loss = self._loss(in_flight.outputs, data)
        if in_flight.loss is None:
            self._send(in_flight.outputs, virtual, virtual + 1, batch)
        self._in_flight[chunk, batch] = in_flight

    def _loss(self, outputs: list[Tensor], data: Any) -> Tensor:
        precision = self.layout.plan.precision
        with computing_in(precision, self.device):
            total, count = self.job.loss(loss_input(outputs, precision), moved(data, self.device))
        if self.seat.tensor == 0:  # the other tensor-parallel ranks have the same loss
            self._losses.append((total.detach(), count))  # read at the end: each read waits for the device
        return total if self.loss_scale == 1.0 else total * self.loss_scale

    def _backward(self, chunk: int, batch: int, sums: StepSums, *, inputs_only: bool) -> None:
        virtual, in_flight = self._virtual(chunk), self._in_flight[chunk, batch]
        grads: list[Tensor] | None = None
        if in_flight.loss is not None:
            outputs = [in_flight.loss]
        else:
            outputs = [t for t in in_flight.outputs if t.is_floating_point()]
            grads = self._receive(virtual, virtual + 1, batch)
        inputs = [t for t in in_flight.inputs if t.is_floating_point() and t.requires_grad]
        with self._work("backward_input" if inputs_only else "backward", chunk, batch, sums):
            if inputs_only and inputs:
                in_flight.delayed = input_half(outputs, grads, inputs, self._weights(chunk))
                in_flight.outputs.clear()
            elif inputs_only:
                in_flight.delayed = (outputs, grads)
            else:
                _run_backward(outputs, grads)
        if virtual > 0:
            back = [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs]
            self._send(back, virtual, virtual - 1, batch)
        if not inputs_only:
            del self._in_flight[chunk, batch]

    def _backward_weight(self, chunk: int, batch: int, sums: StepSums) -> None:
        delayed = self._in_flight.pop((chunk, batch)).delayed
        assert delayed is not None
        with self._work("backward_weight", chunk, batch, sums):
            if isinstance(delayed, DelayedWeightGradient):
                weight_half(self._weights(chunk), delayed)
            else:
                _run_backward(*delayed)

    def infer(self, chunk: int, inputs: list[Tensor]) -> list[Tensor]:
        """Return what a chunk gives for whole samples, without gradients."""
        self.clock.begin()
        if self.zero is not None:
            self.zero.before(chunk, backward=False)
        with torch.no_grad():
            outputs = self._run_layers(0, chunk, inputs, range(len(inputs[0])), whole=True)
        if self.zero is not None:
            self.zero.after(chunk, summed=False)
        self.clock.end("evaluation", len(inputs[0]), len(self._layers(chunk)))
        self.tensor.advance_clock(self.clock)
        return outputs

    def _run_layers(
        self, step: int, chunk: int, inputs: Iterable[Tensor], positions: range, *, whole: bool = False
    ) -> list[Tensor]:
        layers = self._layers(chunk)
        values: Any = tuple(inputs)
        if self._cuts_sequence_at(chunk, -1, whole=whole):
            values = (self.tensor.scatter_sequence(values[0]), *values[1:])
        for lo, hi, again in _recomputed(self.stage.recompute, layers.start, layers.stop):

            def block(*given: Any, lo: int = lo, hi: int = hi) -> Any:
                for layer in range(lo, hi):
                    if self.zero is not None:
                        self.zero.await_layer(layer)
                    given = through(
                        self.modules[layer],
                        layer,
                        given,
                        positions,
                        seed=self.seed,
                        step=step,
                        windows=self.windows(layer, given),
                    )
                    is_last = layer == self.job.num_layers - 1
                    check_sendable(given, layer, samples=len(positions), is_last=is_last)
                    self.tensor.forget_input()
                    if self.zero is not None:
                        _await_in_backward(self.zero, layer, given)
                return given

            with computing_in(self.layout.plan.precision, self.device):
                values = (
                    checkpoint(block, *values, use_reentrant=False, preserve_rng_state=False)
                    if again
                    else block(*values)
                )
        if self._cuts_sequence_at(chunk, 1, whole=whole):
            values = (self.tensor.gather_sequence(values[0]), *values[1:])
        return list(values)

    def _weights(self, chunk: int) -> list[nn.Parameter]:
        modules = [self.modules[layer] for layer in self._layers(chunk)]
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    @contextmanager
    def _work(self, name: str, chunk: int, batch: int, sums: StepSums) -> Iterator[None]:
        layers, (lo, hi) = self._layers(chunk), self._span(batch)
        began = self.clock.mark()
        self.clock.begin()
        with user_code(f"{name} of layers {layers.start} to {layers.stop - 1}", self.job.path):
            yield
        self.clock.end(name, hi - lo, len(layers))
        self.tensor.advance_clock(self.clock)
        self._done.append(_Action(name, chunk, batch, began, self.clock.mark()))
        if name == "forward" and chunk == 0:
            sums.samples += hi - lo

    # -- neighbours -----------------------------------------------------------------------------------------

    def _send(self, tensors: list[Tensor], virtual: int, to: int, batch: int) -> None:
        """Send outputs to the next virtual stage, or gradients to the one before."""
        self.exchange.send(
            tensors,
            self._span(batch),
            self._peers(to, batch),
            route=self._route(virtual, to),
            tag=self._tag(virtual, to, batch),
        )

    def _receive(self, virtual: int, source: int, batch: int) -> list[Tensor]:
        """Receive inputs from the virtual stage before, or gradients from the next one."""
        return self.exchange.receive(
            self._span(batch),
            self._peers(source, batch),
            route=self._route(source, virtual),
            tag=self._tag(source, virtual, batch),
            device=self.device,
        )

    def _route(self, source: int, target: int) -> int:
        """Name a boundary and direction: even numbers go forward, odd ones backward."""
        return target * 2 + (source > target)

    def _tag(self, source: int, target: int, batch: int) -> int:
        return (target * len(self.batches) + batch) * 2 + (source > target)

    def _peers(self, virtual: int, batch: int) -> list[Peers]:
        lo, hi = self.batches[batch]
        return peers_at(self.group, self.seat, virtual, hi - lo)

    def _cuts_sequence_at(self, chunk: int, side: int, *, whole: bool) -> bool:
        """Return whether the sequence is whole in messages on a side of a chunk, but cut inside the chunk."""
        beside = self._virtual(chunk) + side
        is_inside = self.tensor.sequence and 0 <= beside < self.num_virtual
        other = self.group.stages[beside % len(self.group.stages)]
        return is_inside and (whole or not sends_parts(self.group, self.stage, other))

    def _virtual(self, chunk: int) -> int:
        return chunk * len(self.group.stages) + self.seat.stage

    def _layers(self, chunk: int) -> range:
        return range(*self.stage.layers[chunk])

    def _span(self, batch: int) -> Span:
        """Return which samples of a micro-batch this rank holds."""
        lo, hi = self.batches[batch]
        return samples_of(self.stage, hi - lo)[self.seat.inner]


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
    """Return the outputs of a layer for the samples at the positions."""
    with sample_randomness(seed=seed, step=step, layer=layer, positions=positions, windows=windows):
        return as_tuple(module(*values))


def _await_in_backward(zero: ZeroExchange, layer: int, outputs: tuple[Any, ...]) -> None:
    """Wait for the values of a layer when the gradient of an output comes: its own backward is next."""
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: zero.await_layer(layer))


def _run_backward(outputs: list[Tensor], grads: list[Tensor] | None) -> None:
    pairs = [(t, None if grads is None else grads[i]) for i, t in enumerate(outputs) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], None if grads is None else [g for _, g in pairs])


def _recomputed(rule: str, start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Return the layers as runs (first, past the last, whether the backward recomputes them)."""
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
