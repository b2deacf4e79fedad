"""What a rank holds: modules of its layers, one optimizer over them, gradients in one flat buffer a segment.

Everything that could move to another rank is an *item*: the value of a parameter, a buffer, or the
optimizer's state of a parameter, keyed by (kind, layer, name). Items have the same names on every rank,
under every plan and in a checkpoint.
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

Key = tuple[int, str]
Item = tuple[str, int, str]
"""(kind, layer, name): 'value' of a trained parameter, 'frozen' one, 'buffer', 'state' of the optimizer."""


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
                self._tie_to_held(layer)

    def items_of(self, piece: Item) -> list[tuple[Item, Tensor]]:
        """Return the tensors of a piece: a parameter's value, its optimizer state, or a layer's frame.

        `remember` first: the state is the one remembered. An entry of a state is ('state', layer,
        'NAME/KEY').
        """
        kind, layer, name = piece
        if kind == "value":
            return [(piece, self.parameter(layer, name).data)]
        if kind == "state":
            state = self._states.get((layer, name), {})
            return [
                (("state", layer, f"{name}/{key}"), _as_tensor(value))
                for key, value in sorted(state.items())
                if value is not None
            ]
        module = self.modules[layer]
        frozen = [(("frozen", layer, n), p.data) for n, p in module.named_parameters() if not p.requires_grad]
        return [*frozen, *((("buffer", layer, n), b) for n, b in _persistent_buffers(module))]

    def put(self, item: Item, tensor: Tensor) -> None:
        """Replace a tensor; of a state, also one that was not there."""
        kind, layer, name = item
        if kind == "state":
            owner, _, key = name.rpartition("/")
            self._states.setdefault((layer, owner), {})[key] = tensor.clone()
        elif kind == "value":
            for holder, own in self._names_of((layer, name)):
                _refill(self.modules[holder].get_parameter(own), tensor)
        elif kind == "frozen":
            self.modules[layer].get_parameter(name).data.copy_(tensor)
        else:
            self.modules[layer].get_buffer(name).copy_(tensor)

    def _names_of(self, key: tuple[int, str]) -> list[tuple[int, str]]:
        """Return the names a parameter has in the layers held."""
        group = next((group for group in self._tied if key in group), (key,))
        return [(layer, name) for layer, name in group if layer in self.modules]

    def arrange(
        self, layout: Layout, updates: Callable[[Key], bool], summed_by: Callable[[Key], tuple[int, ...]]
    ) -> None:
        """Take the place that a layout gives: drop other layers, tie, make buckets and the optimizer.

        Parameters
        ----------
        layout : Layout
        updates : callable of (layer, name)
            Whether this rank updates a parameter.
        summed_by : callable of (layer, name)
            The ranks that keep the sum of its gradients, rising.
        """
        self.remember()
        kept = set(layout.layers_of(self.rank))
        self.modules = {layer: module for layer, module in sorted(self.modules.items()) if layer in kept}
        self._tie()
        held = sorted(
            {self.first_name(layer, n) for layer in self.modules for n in self.trainable_names(layer)}
        )
        self._fill_buckets(segments_of({key: summed_by(key) for key in held}))
        self.updated = {key: self.parameter(*key) for key in held if updates(key)}
        self._states = {key: state for key, state in self._states.items() if key in self.updated}
        self._make_optimizer()

    def parameter(self, layer: int, name: str) -> nn.Parameter:
        """Return a parameter held; of tied ones any of the layers gives the same."""
        for key in (group for group in self._tied if (layer, name) in group):
            layer, name = next((held, own) for held, own in key if held in self.modules)
        return self.modules[layer].get_parameter(name)

    def first_name(self, layer: int, name: str) -> tuple[int, str]:
        """Return the name that a parameter goes by: of tied ones the first."""
        return min(next((group for group in self._tied if (layer, name) in group), ((layer, name),)))

    def zero_gradients(self) -> None:
        """Set all gradients to zero and point the parameters at their buckets."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            _point(bucket)

    def remember(self) -> None:
        """Keep the optimizer's state by name: parameters are about to change hands."""
        if self.optimizer is None:
            return
        for key, parameter in self.updated.items():
            state = self.optimizer.state.get(parameter)
            if state:
                self._states[key] = dict(state)

    def _tie_to_held(self, new: int) -> None:
        """Let a new layer use the parameters that it shares with layers held.

        Their values are the trained ones.
        """
        for group in self._tied:
            names = [name for layer, name in group if layer == new]
            others = [(layer, name) for layer, name in group if layer != new and layer in self.modules]
            if names and others:
                owner, _, leaf = names[0].rpartition(".")
                held = self.modules[others[0][0]].get_parameter(others[0][1])
                setattr(self.modules[new].get_submodule(owner), leaf, held)

    def _tie(self) -> None:
        for group in self._tied:
            held = [(layer, name) for layer, name in group if layer in self.modules]
            for layer, name in held[1:]:
                owner, _, leaf = name.rpartition(".")
                module = self.modules[layer].get_submodule(owner)
                setattr(module, leaf, self.modules[held[0][0]].get_parameter(held[0][1]))

    def _fill_buckets(self, segments: Sequence[Segment]) -> None:
        self.buckets = []
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)  # views of buckets of the place before
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
                f"optimizer(params) gave {type(self.optimizer).__name__}", file=self.job.path,
                key="optimizer",
                rule="It returns a torch.optim.Optimizer over the parameters it is given",
            )  # fmt: skip
        for key, parameter in self.updated.items():
            if key in self._states:
                self.optimizer.state[parameter] = {
                    name: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                    for name, value in self._states[key].items()
                }  # counts stay where the optimizer keeps them, on the host


def _point(bucket: Bucket) -> None:
    offset = 0
    for parameter in bucket.parameters:
        size = parameter.numel()
        parameter.grad = bucket.flat[offset : offset + size].view_as(parameter)
        offset += size


def _refill(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Replace a parameter's value; it may be one whose storage is given away between uses."""
    storage = parameter.untyped_storage()
    if storage.size() == 0:
        storage.resize_(parameter.numel() * parameter.element_size())
    parameter.data.copy_(tensor)


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _as_tensor(value: Any) -> Tensor:
    """Return a state entry as a tensor; optimizers keep counts as plain numbers too."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
