"""What a rank holds: modules of its layers, one optimizer over them, gradients in one flat buffer a segment.

Everything that could move to another rank is an *item*: the value of a parameter, a buffer, or the
optimizer's state of a parameter, keyed by (kind, layer, name). Items have the same names on every rank,
under every plan and in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.runtime.job.job import Job
from foreshard.runtime.state.buckets import Bucket, Gradient
from foreshard.runtime.state.layout import RankLayout, Segment, segments_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import Parameters
from foreshard.runtime.state.shard_keys import Held, Item, Key
from foreshard.runtime.state.slices import WHOLE, Interval, common, parsed, sliced, within
from foreshard.runtime.tensor.draws import TensorDraws
from foreshard.runtime.tensor.ranks import TensorRanks
from foreshard.runtime.tensor.sequence import SequenceLayer
from foreshard.runtime.tensor.split import check_by_element, cut_module

Place = tuple[int, int]
"""Which of how many parts of a layer's weights a rank holds."""


class RankState:
    """The layers of one rank with all their state.

    Parameters
    ----------
    job : Job
    rank : int
    device : torch.device
    parameters : Parameters

    Attributes
    ----------
    held, kept : frozenset of pieces
        What is there at the step that is trained next, and what of that outlives an update cut off half way:
        what other ranks update is theirs until they have sent it.
    """

    def __init__(self, job: Job, rank: int, device: torch.device, parameters: Parameters):
        self.job, self.rank, self.device, self.parameters = job, rank, device, parameters
        self.held: Held = frozenset()
        self.kept: Held = frozenset()
        self.modules: dict[int, nn.Module] = {}
        self.buckets: list[Bucket] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.updated: dict[Key, nn.Parameter] = {}
        self.ranks = TensorRanks()
        self.draws = TensorDraws(job, parameters.splits, self.ranks)
        self._states: dict[Key, dict[str, Any]] = {}
        self._tied = tuple(tuple(group) for group in job.tied)
        self._names: dict[int, tuple[str, ...]] = {}
        self._places: dict[int, Place] = {}
        self._next: dict[int, Place] = {}
        self._arrived: list[tuple[Item, Tensor]] = []

    def trainable_names(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's parameters that are trained."""
        if layer not in self._names:
            module = self.modules[layer] if layer in self.modules else self.job.layer(layer)
            self._names[layer] = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        return self._names[layer]

    def build(self, layout: RankLayout) -> None:
        """Make the layers of a layout that are not held yet, as the job's seed makes them.

        Layers that are held but in other parts stay as they are until `arrange`; what arrives for them
        waits.
        """
        layers = layout.layers_of(self.rank)
        place = (layout.seats[self.rank].tensor, layout.stage_of(self.rank).tp) if layers else (0, 1)
        self._arrived = []
        self._next = {layer: place for layer in layers if layer in self.parameters.splits}
        for layer in layers:
            if layer not in self.modules:
                self._make(layer)
                self._tie_to_held(layer)

    def _make(self, layer: int) -> None:
        module = self.job.layer(layer)
        index, degree = self._next.get(layer, (0, 1))
        if degree > 1:
            cut_module(module, self.parameters.splits[layer], self.ranks, index, degree)
        if isinstance(module, SequenceLayer):
            module.ranks = self.ranks
        self.modules[layer], self._places[layer] = module.to(self.device), (index, degree)

    def interval(self, layer: int, name: str) -> Interval:
        """Return which part of a parameter is held."""
        return self._interval_at((layer, name), self._places[self._names_of((layer, name))[0][0]])

    def _interval_at(self, key: Key, place: Place) -> Interval:
        index, degree = place
        return (index, index + 1, degree) if self.parameters.degree(key, degree) > 1 else WHOLE

    def items_of(self, piece: Item) -> list[tuple[Item, Tensor]]:
        """Return the tensors of a piece: a parameter's value, its optimizer state, or a layer's frame.

        `remember` first: the state is the one remembered. An entry of a state is ('state', layer,
        'NAME/KEY').
        """
        kind, layer, name = piece
        if kind == "value":
            return [(piece, self._taken(layer, name, self.parameter(layer, parsed(name)[0]).data))]
        if kind == "state":
            state = self._states.get((layer, parsed(name)[0]), {})
            return [
                (("state", layer, f"{name}/{key}"), self._taken(layer, name, _as_tensor(value)))
                for key, value in sorted(state.items())
                if value is not None
            ]
        module = self.modules[layer]
        frozen = [(("frozen", layer, n), p.data) for n, p in module.named_parameters() if not p.requires_grad]
        return [*frozen, *((("buffer", layer, n), b) for n, b in _persistent_buffers(module))]

    def _taken(self, layer: int, name: str, held: Tensor) -> Tensor:
        """Return the slice that a name means of what is held of it."""
        whole, index, num = parsed(name)
        if num == 1 or held.dim() == 0:
            return held
        cut, part = self.parameters.cuts[layer, whole], (index, index + 1, num)
        return cut.taken(held, *within(part, self.interval(layer, whole)))

    def put(self, item: Item, tensor: Tensor) -> None:
        """Replace a tensor, or a slice of it; of a state, also one that was not there."""
        kind, layer, name = item
        owner, _, entry = name.rpartition("/") if kind == "state" else (name, "", "")
        key = layer, parsed(owner)[0]
        if kind in ("state", "value") and any(self._recuts(held) for held, _ in self._names_of(key)):
            self._arrived.append((item, tensor))
        elif kind == "state":
            self._put_state(key, owner, entry, tensor)
        elif kind == "value":
            for holder, own in self._names_of(key):
                parameter = self.modules[holder].get_parameter(own)
                _make_room(parameter)
                self._fill(parameter.data, key, owner, tensor)
        elif kind == "frozen":
            _copy(self.modules[layer].get_parameter(name).data, tensor, (layer, name))
        else:
            _copy(self.modules[layer].get_buffer(name), tensor, (layer, name))

    def _put_state(self, key: Key, owner: str, entry: str, tensor: Tensor) -> None:
        state = self._states.setdefault(key, {})
        if tensor.dim() == 0 or (parsed(owner)[2] == 1 and self.interval(*key) == WHOLE):
            state[entry] = tensor.clone()
            return
        if entry not in state:
            state[entry] = torch.zeros_like(self.parameter(*key), dtype=tensor.dtype)
        self._fill(state[entry], key, owner, tensor)

    def _fill(self, held: Tensor, key: Key, name: str, tensor: Tensor) -> None:
        """Copy what a tensor has of what is held."""
        _, index, num = parsed(name)
        given, own = (index, index + 1, num), self.interval(*key)
        if given == own == WHOLE:
            _copy(held, tensor, key)
            return
        cut, both = self.parameters.cuts[key], common(given, own)
        cut.fill(held, *within(both, own), cut.taken(tensor, *within(both, given)))

    def _names_of(self, key: tuple[int, str]) -> list[tuple[int, str]]:
        """Return the names a parameter has in the layers held."""
        group = next((group for group in self._tied if key in group), (key,))
        return [(layer, name) for layer, name in group if layer in self.modules]

    def arrange(self, layout: RankLayout, deal: OptimizerSharding) -> None:
        """Take the place that a layout gives: drop other layers, tie, make buckets and the optimizer.

        Parameters
        ----------
        layout : RankLayout
        deal : OptimizerSharding
            Who updates what, and which ranks keep the sum of a gradient.
        """
        self.held = deal.pieces(self.rank)
        updated = {piece[1:] for piece in self.held if piece[0] == "state"}
        self.kept = frozenset(piece for piece in self.held if piece[0] != "value" or piece[1:] in updated)
        self.remember()
        self.ranks.sequence = layout.cuts_sequence(self.rank)
        self._recut()
        kept = set(layout.layers_of(self.rank))
        self.modules = {layer: module for layer, module in sorted(self.modules.items()) if layer in kept}
        self._places = {layer: self._places[layer] for layer in self.modules}
        self._tie()
        held = sorted(
            {self.first_name(layer, n) for layer in self.modules for n in self.trainable_names(layer)}
        )
        self._fill_buckets(
            segments_of({name: deal.summed_by(name) for key in held for name in deal.names(self.rank, key)}),
            deal,
        )
        updates = set(deal.updated(self.rank)) if kept else set()
        self.updated = {key: self.parameter(*key) for key in held if key in updates}
        self._states = {key: state for key, state in self._states.items() if key in self.updated}
        self._make_optimizer()

    def _recuts(self, layer: int) -> bool:
        """Return whether a layer that is held is to be held in other parts."""
        return layer in self._next and self._places.get(layer) != self._next[layer]

    def _recut(self) -> None:
        """Hold layers in the parts that `build` was told: what stays of them, and what has arrived."""
        layers = [layer for layer in self.modules if self._recuts(layer)]
        kept = [item for layer in layers for item in self._staying(layer)]
        for layer in layers:
            for name in self.trainable_names(layer):
                if (layer, name) in self.parameters.cuts:
                    self._states.pop(self.first_name(layer, name), None)
            self._make(layer)
        self._tie()
        arrived, self._arrived = self._arrived, []
        for item, tensor in [*kept, *arrived]:
            self.put(item, tensor)

    def _staying(self, layer: int) -> list[tuple[Item, Tensor]]:
        """Return what is held of a layer and stays, in slices of the old parts and the new."""
        found = self.items_of(("frame", layer, ""))
        for name in self.trainable_names(layer):
            key = self.first_name(layer, name)
            is_cut = key in self.parameters.cuts
            lo, hi, of = common(self.interval(*key), self._interval_at(key, self._next[layer]))
            there = self.parameter(*key).untyped_storage().size() > 0
            for kind in ("value",) * there + ("state",) * is_cut:
                for i in range(lo, hi):
                    found += self.items_of((kind, key[0], sliced(key[1], i, of)))
        return found

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
            bucket.clear()

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

    def _fill_buckets(self, segments: Sequence[Segment], deal: OptimizerSharding) -> None:
        self.buckets = []
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)  # views of buckets of the place before
        for segment in segments:
            if self.rank not in segment.owners:
                continue
            dtypes = {name: self.parameter(name[0], parsed(name[1])[0]).dtype for name in segment.names}
            for dtype in sorted(set(dtypes.values()), key=str):
                names = tuple(name for name in segment.names if dtypes[name] == dtype)
                self.buckets.append(self._bucket(Segment(owners=segment.owners, names=names), dtype, deal))
        self.zero_gradients()

    def _bucket(self, segment: Segment, dtype: torch.dtype, deal: OptimizerSharding) -> Bucket:
        gradients = [self._gradient(name, deal) for name in segment.names]
        flat = torch.zeros(sum(one.flat.numel() for one in gradients), dtype=dtype, device=self.device)
        offset = 0
        for one in gradients:
            one.flat = flat[offset : offset + one.flat.numel()]
            offset += one.flat.numel()
        keys = [(layer, parsed(name)[0]) for layer, name in segment.names]
        layers = frozenset(layer for key in keys for layer in self._users(key))
        return Bucket(segment, flat, gradients, layers)

    def _gradient(self, name: Key, deal: OptimizerSharding) -> Gradient:
        """Return the place of a parameter's gradient, or of a slice's, without one in a bucket yet."""
        whole, index, num = parsed(name[1])
        key = name[0], whole
        parameter, adds = self.parameter(*key), deal.adds(self.rank, key)
        part = within((index, index + 1, num), self.interval(*key))
        size = torch.empty(parameter.numel() * (part[1] - part[0]) // part[2], device="meta")
        if part[:2] == (0, part[2]):
            return Gradient(parameter=parameter, flat=size, adds=adds)
        cut = self.parameters.cuts[key]
        return Gradient(parameter=parameter, flat=size, cut=cut, part=part, adds=adds)

    def _users(self, key: tuple[int, str]) -> list[int]:
        """Return the layers held that use a parameter."""
        group = next((group for group in self._tied if key in group), (key,))
        return [layer for layer, _ in group if layer in self.modules]

    def _make_optimizer(self) -> None:
        parameters = list(self.updated.values())
        self.optimizer = self.job.optimizer(parameters) if parameters else None
        if self.optimizer is None:
            return
        if any(self.interval(*key) != WHOLE for key in self.updated):
            check_by_element(self.optimizer, self.job.path)
        for key, parameter in self.updated.items():
            if key in self._states:
                self.optimizer.state[parameter] = {
                    name: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                    for name, value in self._states[key].items()
                }  # counts stay where the optimizer keeps them, on the host


def _copy(held: Tensor, tensor: Tensor, key: Key) -> None:
    """Copy a whole tensor, which may be another job's."""
    if held.shape != tensor.shape:
        shapes = f"what was kept has shape {list(tensor.shape)}, the job's has {list(held.shape)}"
        raise SpecError(
            shapes,
            key=f"layers.{key[0]}.{key[1]}",
            rule="A run goes on with the layers it began with",
            fix="Resume with the job that wrote it, or give another --out",
        )
    held.copy_(tensor)


def _make_room(parameter: nn.Parameter) -> None:
    """Give a parameter storage; it may be one whose storage is given away between uses."""
    storage = parameter.untyped_storage()
    if storage.size() == 0:
        storage.resize_(parameter.numel() * parameter.element_size())


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _as_tensor(value: Any) -> Tensor:
    """Return a state entry as a tensor; optimizers keep counts as plain numbers too."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
