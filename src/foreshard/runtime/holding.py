"""What a rank holds: modules of its layers, one optimizer over them, gradients in one flat buffer a segment.

Everything that could move to another rank is an *item*: the value of a parameter, a buffer, or the optimizer's
state of a parameter, keyed by (kind, layer, name). Items have the same names on every rank, under every plan and
in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.runtime.job import Job
from foreshard.runtime.layout import Layout, Segment, segments_of

Item = tuple[str, int, str]
"""(kind, layer, name): 'value' of a parameter, 'buffer', or 'state' of the optimizer for a parameter."""


@dataclass(slots=True)
class Bucket:
    """The gradients of a segment, one after another in one tensor.

    Attributes
    ----------
    segment : Segment
    flat : Tensor, shape (elements,)
    parameters : list of Parameter
        In the order of `segment.names`; their `.grad` are views of `flat`.
    layers : frozenset of int
        That must have passed their last backward before the bucket is complete.
    """

    segment: Segment
    flat: Tensor
    parameters: list[nn.Parameter] = field(default_factory=list)
    layers: frozenset[int] = frozenset()


class Holding:
    """The layers of one rank with all their state.

    Parameters
    ----------
    job : Job
    rank : int
    device : torch.device
    """

    def __init__(self, job: Job, rank: int, device: torch.device):
        self.job, self.rank, self.device = job, rank, device
        self.modules: dict[int, nn.Module] = {}
        self.buckets: list[Bucket] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.updated: dict[tuple[int, str], nn.Parameter] = {}
        self._states: dict[tuple[int, str], dict[str, Any]] = {}
        self._tied = tuple(tuple(group) for group in job.tied)
        self._names: dict[int, tuple[str, ...]] = {}

    def trainable_names(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's parameters that are trained."""
        if layer not in self._names:
            module = self.modules[layer] if layer in self.modules else self.job.layer(layer)
            self._names[layer] = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        return self._names[layer]

    def build(self, layers: Iterable[int]) -> None:
        """Make the modules of layers that are not held yet, as the job's seed makes them."""
        for layer in layers:
            if layer not in self.modules:
                self.modules[layer] = self.job.layer(layer).to(self.device)

    def items(self) -> dict[Item, Tensor]:
        """Return every item held: values, buffers, and the optimizer's state as one entry per tensor.

        The state of a parameter appears as ('state', layer, 'NAME/KEY').
        """
        self._remember()
        found: dict[Item, Tensor] = {}
        for layer, module in sorted(self.modules.items()):
            for name, parameter in module.named_parameters():
                found["value", layer, name] = parameter.data
            for name, buffer in _persistent_buffers(module):
                found["buffer", layer, name] = buffer
        for (layer, name), state in sorted(self._states.items()):
            for key, value in sorted(state.items()):
                if value is not None:
                    found["state", layer, f"{name}/{key}"] = _as_tensor(value)
        return found

    def put(self, item: Item, tensor: Tensor) -> None:
        """Replace an item; of a state, also one that was not there."""
        kind, layer, name = item
        if kind == "state":
            owner, _, key = name.rpartition("/")
            self._states.setdefault((layer, owner), {})[key] = tensor.clone()
            return
        module = self.modules[layer]
        target = dict(module.named_parameters() if kind == "value" else module.named_buffers())[name]
        target.data.copy_(tensor)

    def arrange(self, layout: Layout, updates: Callable[[tuple[int, str]], bool] = lambda key: True) -> None:
        """Take the place that a layout gives: drop other layers, tie, make buckets and the optimizer.

        Parameters
        ----------
        layout : Layout
        updates : callable of (layer, name)
            Whether this rank updates a parameter; others are sent to it after the update.
        """
        self._remember()
        kept = set(layout.layers_of(self.rank))
        self.modules = {layer: module for layer, module in sorted(self.modules.items()) if layer in kept}
        self._tie()
        names = {layer: self.trainable_names(layer) for layer in self.modules}
        self._fill_buckets(segments_of(layout, names, self._tied))
        held = sorted(key for bucket in self.buckets for key in bucket.segment.names)
        self.updated = {key: self.parameter(*key) for key in held if updates(key)}
        self._states = {key: state for key, state in self._states.items() if key in self.updated}
        self._make_optimizer()

    def parameter(self, layer: int, name: str) -> nn.Parameter:
        """Return a parameter held; of tied ones any of the layers gives the same."""
        for key in (group for group in self._tied if (layer, name) in group):
            layer, name = next((held, own) for held, own in key if held in self.modules)
        return self.modules[layer].get_parameter(name)

    def zero_gradients(self) -> None:
        """Set all gradients to zero and point the parameters at their buckets."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            _point(bucket)

    def _remember(self) -> None:
        """Keep the optimizer's state by name: parameters are about to change hands."""
        if self.optimizer is None:
            return
        for key, parameter in self.updated.items():
            state = self.optimizer.state.get(parameter)
            if state:
                self._states[key] = dict(state)

    def _tie(self) -> None:
        for group in self._tied:
            held = [(layer, name) for layer, name in group if layer in self.modules]
            for layer, name in held[1:]:
                owner, _, leaf = name.rpartition(".")
                module = self.modules[layer].get_submodule(owner)
                setattr(module, leaf, self.modules[held[0][0]].get_parameter(held[0][1]))

    def _fill_buckets(self, segments: Sequence[Segment]) -> None:
        self.buckets = []
        for segment in segments:
            if self.rank not in segment.owners:
                continue
            parameters = [self.parameter(*key) for key in segment.names]
            for dtype in sorted({p.dtype for p in parameters}, key=str):
                chosen = [(k, p) for k, p in zip(segment.names, parameters, strict=True) if p.dtype == dtype]
                flat = torch.zeros(sum(p.numel() for _, p in chosen), dtype=dtype, device=self.device)
                part = Segment(owners=segment.owners, names=tuple(key for key, _ in chosen))
                layers = frozenset(layer for key, _ in chosen for layer in self._users(key))
                self.buckets.append(Bucket(part, flat, [p for _, p in chosen], layers))
        self.zero_gradients()

    def _users(self, key: tuple[int, str]) -> list[int]:
        """Return the layers held that use a parameter."""
        group = next((group for group in self._tied if key in group), (key,))
        return [layer for layer, _ in group if layer in self.modules]

    def _make_optimizer(self) -> None:
        parameters = list(self.updated.values())
        self.optimizer = self.job.optimizer(parameters) if parameters else None
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"optimizer(params) gave {type(self.optimizer).__name__}", file=self.job.path, key="optimizer",
                rule="It returns a torch.optim.Optimizer over the parameters it is given",
            )  # fmt: skip
        for key, parameter in self.updated.items():
            if key in self._states:
                self.optimizer.state[parameter] = dict(self._states[key])


def _point(bucket: Bucket) -> None:
    offset = 0
    for parameter in bucket.parameters:
        size = parameter.numel()
        parameter.grad = bucket.flat[offset : offset + size].view_as(parameter)
        offset += size


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _as_tensor(value: Any) -> Tensor:
    """Return a state entry as a tensor; optimizers keep counts as plain numbers too."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
