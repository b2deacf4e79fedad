"""The layers of a job run as training runs them, each pass timed layer by layer.

A pass runs the whole chain, all forwards, then all backwards, then the update, so that caches are as cold as
they will be. Processor time of the thread is kept beside wall time: it is the steadier one on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foreshard.profile.batches import as_tuple, computing_in, handed, loss_input, moved

_WARM_UP = 2
"""Passes before the first that counts: caches, allocator and kernels selected at first use settle in them."""
_WARM_UP_AGAIN = 1
"""The same when a size comes up again: only the caches hold what another size has left."""
Seconds = tuple[float, float]
"""Processor time, wall time."""
Through = Callable[[nn.Module, int, tuple[Any, ...], range], tuple[Any, ...]]
"""(module, layer, values, positions) -> values: how the runtime runs a layer."""
Kept = list[tuple[tuple[Any, ...], tuple[Any, ...]]]
"""By layer, what its forward was given and what it made."""


class Trainable(Protocol):
    """What is profiled: a chain of layers with samples, a loss and an optimizer."""

    dataset: Any
    path: str | None
    tied: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    def layer(self, index: int) -> nn.Module:
        """Return a fresh module of a layer."""
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Return samples as a batch."""
        ...

    def inputs(self, batch: Any) -> Any:
        """Return what the first layer takes of a batch."""
        ...

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Any]:
        """Return the sum of the loss and what it is divided by."""
        ...

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer."""
        ...


class TimedPart(Protocol):
    """The layers as one of several ranks holds that compute them together, without the others."""

    modules: list[nn.Module]

    def through(
        self, module: nn.Module, layer: int, values: tuple[Any, ...], positions: range
    ) -> tuple[Any, ...]:
        """Return what the part of a layer makes of the values."""
        ...

    def summed(self) -> list[tuple[int, float]]:
        """Return the sums asked for since the last call: bytes, and which part of a ring."""
        ...

    def close(self) -> None:
        """Let go of what it took."""
        ...


class TimedChain:
    """Modules of all layers of a job, or a rank's part of each, on a device in a precision."""

    def __init__(
        self,
        job: Trainable,
        modules: list[nn.Module],
        through: Through,
        device: torch.device,
        precision: str = "fp32",
    ):
        self.job, self.modules, self.through, self.device = job, modules, through, device
        self.precision = precision
        self.update = _Update(job, modules)

    def timed(self, number: int, repeats: int, *, again: bool = False) -> tuple[dict[str, Any], float]:
        """Return a round of passes with so many samples, and what the loss counts of each sample."""
        batch = self._batch(number)
        sizes = self._sizes(batch, number)
        with computing_in(self.precision, self.device):
            _, count = self.job.loss(sizes.pop("output"), batch)
        warm_up = _WARM_UP_AGAIN if again else _WARM_UP
        passes = [self._one_pass(batch, number) for _ in range(repeats + warm_up)][warm_up:]
        fewer = max(1, repeats // 3) + 1
        row = {
            **sizes,
            "forward": [forward for forward, _, _ in passes],
            "backward": [backward for _, backward, _ in passes],
            "backward_input": [self._input_pass(batch, number) for _ in range(fewer)][1:],
            "update": [update for _, _, update in passes],
            "rounds": [repeats],
        }
        return row, float(count) / number

    def sums(self, part: TimedPart, number: int) -> dict[str, Any]:
        """Return, by layer, what ranks sum in a forward and in a backward: bytes a sample, part of a ring."""

        def asked() -> list[list[float]]:
            return [[size / number, ring] for size, ring in part.summed()]

        def through(
            module: nn.Module, layer: int, values: tuple[Any, ...], positions: range
        ) -> tuple[Any, ...]:
            made = part.through(module, layer, values, positions)
            forward.append(asked())
            return made

        forward: list[Any] = []
        backward: list[Any] = []
        part.summed()
        _, kept = self._forwards(self._batch(number), number, through)
        grads: list[Tensor] | None = None
        for given, made in _popped(kept):
            grads, _ = _backward(given, made, grads)
            backward.append(asked())
        return {"forward": forward, "backward": backward[::-1]}

    def bytes_by_layer(self) -> list[dict[str, float]]:
        """Return the bytes of each layer's parameters, trained and frozen ones."""

        def total(module: nn.Module, trained: bool) -> float:
            chosen = (p for p in module.parameters() if p.requires_grad == trained)
            return float(sum(p.numel() * p.element_size() for p in chosen))

        return [
            {"parameter_bytes": total(module, True), "frozen_bytes": total(module, False)}
            for module in self.modules
        ]

    def _batch(self, number: int) -> Any:
        dataset = self.job.dataset
        if hasattr(dataset, "__len__"):
            items = [dataset[i % len(dataset)] for i in range(number)]
        else:
            items = list(islice(dataset, number))
        return moved(self.job.collate(items), self.device)

    def _one_pass(self, batch: Any, number: int) -> tuple[list[Seconds], list[Seconds], Seconds]:
        """Run all forwards, all backwards and the update; return the seconds of each."""
        self.update.clear()
        forward, kept = self._forwards(batch, number, self.through)
        backward: list[Seconds] = []
        grads: list[Tensor] | None = None
        for given, made in _popped(kept):
            grads, seconds = _backward(given, made, grads)
            backward.append(seconds)
        return forward, backward[::-1], self.update.step(number)

    def _input_pass(self, batch: Any, number: int) -> list[Seconds]:
        """Run all forwards, then of each backward the part that the layer before waits for."""
        _, kept = self._forwards(batch, number, self.through)
        seconds: list[Seconds] = []
        grads: list[Tensor] | None = None
        for given, made in _popped(kept):
            inputs, pairs = _inputs(given), _pairs(made, grads)
            found: Sequence[Tensor | None] = [None] * len(inputs)
            clock = Stopwatch()
            if pairs and inputs:
                found = torch.autograd.grad([t for t, _ in pairs], inputs, _given(pairs), allow_unused=True)
            seconds.append(clock.read() if inputs else (0.0, 0.0))
            grads = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]
        return seconds[::-1]

    def _forwards(self, batch: Any, number: int, through: Through) -> tuple[list[Seconds], Kept]:
        """Return, by layer, the seconds of the forward, and what it was given and has made."""
        seconds: list[Seconds] = []
        kept: Kept = []
        values = as_tuple(self.job.inputs(batch))
        for layer, module in enumerate(self.modules):
            given = tuple(_leaf(value) for value in values) if layer else values
            clock = Stopwatch()
            with computing_in(self.precision, self.device):
                made = through(module, layer, handed(given), range(number))
                if layer == len(self.modules) - 1:
                    made = (self.job.loss(loss_input(made, self.precision), batch)[0],)
            seconds.append(clock.read())
            kept.append((given, made))
            values = tuple(value.detach() if isinstance(value, Tensor) else value for value in made)
        return seconds, kept

    def _sizes(self, batch: Any, number: int) -> dict[str, Any]:
        """Return, by layer, the bytes kept for the backward and the bytes handed on, and the output."""
        values, saved, boundary = as_tuple(self.job.inputs(batch)), [], []
        for layer, module in enumerate(self.modules):
            own = {p.untyped_storage().data_ptr() for p in module.parameters()}
            seen: dict[int, int] = {}

            def keep(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor its part
                storage = local.untyped_storage()
                if storage.data_ptr() not in own:
                    seen[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                given = tuple(_leaf(value) for value in values) if layer else values
                with computing_in(self.precision, self.device):
                    values = self.through(module, layer, handed(given), range(number))
            saved.append(float(sum(seen.values())))
            boundary.append(float(sum(t.numel() * t.element_size() for t in values if isinstance(t, Tensor))))
        return {
            "saved_bytes": saved,
            "boundary_bytes": boundary,
            "output": loss_input(values, self.precision),
        }


def _backward(
    given: tuple[Any, ...], made: tuple[Any, ...], grads: list[Tensor] | None
) -> tuple[list[Tensor], Seconds]:
    """Return the gradients of what a layer was given, and the seconds of its backward."""
    inputs, pairs = _inputs(given), _pairs(made, grads)
    clock = Stopwatch()
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], _given(pairs))
    seconds = clock.read()
    return [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs], seconds


def _popped(kept: Kept) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Yield the last first, and keep nothing of it: its graph goes as in training."""
    while kept:
        yield kept.pop()


def _inputs(given: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]


def _pairs(made: tuple[Any, ...], grads: list[Tensor] | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return what is differentiated, with the gradient that it gets."""
    outputs = [t for t in made if isinstance(t, Tensor) and t.is_floating_point()]
    return [(t, None if grads is None else grads[i]) for i, t in enumerate(outputs) if t.requires_grad]


def _given(pairs: list[tuple[Tensor, Tensor | None]]) -> list[Tensor] | None:
    return None if pairs[0][1] is None else [g for _, g in pairs if g is not None]


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


class _Update:
    """The optimizer over all parameters, with their gradients in one piece as the runtime has them."""

    def __init__(self, job: Trainable, modules: list[nn.Module]):
        self._by_layer = [[p for p in module.parameters() if p.requires_grad] for module in modules]
        parameters = [p for layer in self._by_layer for p in layer]
        self._optimizer = job.optimizer(parameters) if parameters else None
        self._flats: list[Tensor] = []
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for same in kinds.values():
            flat = torch.zeros(sum(p.numel() for p in same), dtype=same[0].dtype, device=same[0].device)
            for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                parameter.grad = part.view_as(parameter)
            self._flats.append(flat)
        self._values = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def clear(self) -> None:
        """Set the gradients to zero."""
        for flat in self._flats:
            flat.zero_()

    def step(self, samples: int) -> Seconds:
        """Update by the mean gradient and return the seconds; values are put back: passes are alike."""
        clock = Stopwatch()
        for flat in self._flats:
            flat.mul_(1.0 / samples)
        if self._optimizer is not None:
            self._optimizer.step()
        seconds = clock.read()
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
        return seconds

    def by_layer(self, updates: Sequence[Seconds]) -> list[dict[str, Any]]:
        """Return, by layer, its part of the seconds of the updates, by parameters, and its state's bytes."""
        whole = float(sum(p.numel() for layer in self._by_layer for p in layer)) or 1.0
        state = self._optimizer.state if self._optimizer is not None else {}
        found = []
        for parameters in self._by_layer:
            part = sum(p.numel() for p in parameters) / whole
            tensors = [t for p in parameters for t in state.get(p, {}).values() if isinstance(t, Tensor)]
            seconds = [[cpu * part, wall * part] for cpu, wall in updates]
            held = float(sum(t.numel() * t.element_size() for t in tensors))
            found.append({"seconds": seconds, "state_bytes": held})
        return found


class Stopwatch:
    """Processor and wall time since it was made."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()

    def read(self) -> Seconds:
        """Return seconds of both."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.thread_time() - self._cpu_s, time.perf_counter() - self._wall_s
