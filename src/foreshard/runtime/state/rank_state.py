"""What a rank holds: modules of its layers, one optimizer over them, gradients in flat buckets.

Every tensor that could move to another rank has a key (kind, layer, name): the value of a parameter, a
buffer, or an entry of a parameter's optimizer state. Keys are the same on every rank, under every plan and in
a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.runtime.job.job import Job
from foreshard.runtime.state.buckets import Bucket, Gradient, cut_in_buckets
from foreshard.runtime.state.layout import RankLayout
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import Parameters
from foreshard.runtime.state.shard_keys import ParameterKey, ShardKey, Shards, TensorKey
from foreshard.runtime.state.slices import WHOLE, Interval, common, parse_name, slice_name, within
from foreshard.runtime.state.zero import restore_storage
from foreshard.runtime.tensor.draws import TensorDraws
from foreshard.runtime.tensor.ranks import TensorRanks
from foreshard.runtime.tensor.sequence import SequenceLayer
from foreshard.runtime.tensor.split import check_by_element, cut_module

Part = tuple[int, int]
"""(index, degree): which of how many tensor-parallel parts of a layer's weights a rank holds."""


class RankState:
    """The layers of one rank with all their state.

    `held` is there at the step that is trained next. `kept` is the part of it that survives an update that is
    cut off half way: what other ranks update is lost until they have sent it.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        device: torch.device,
        parameters: Parameters,
    ):
        self.job, self.rank, self.device, self.parameters = job, rank, device, parameters
        self.bucket_bytes: int | None = None
        """From which on a bucket is full, when gradients are arranged next; None for `BUCKET_BYTES`."""
        self.held: Shards = frozenset()
        self.kept: Shards = frozenset()
        self.modules: dict[int, nn.Module] = {}
        self.buckets: list[Bucket] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.updated: dict[ParameterKey, nn.Parameter] = {}
        self.ranks = TensorRanks()
        self.draws = TensorDraws(job, parameters.splits, self.ranks)
        self._optimizer_state: dict[ParameterKey, dict[str, Any]] = {}
        self._tied = tuple(tuple(group) for group in job.tied)
        self._names: dict[int, tuple[str, ...]] = {}
        self._parts: dict[int, Part] = {}
        self._next_parts: dict[int, Part] = {}
        self._arrived: list[tuple[TensorKey, Tensor]] = []

    # -- parameters and their names -------------------------------------------------------------------------

    def trainable_names(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's parameters that are trained."""
        if layer not in self._names:
            module = self.modules[layer] if layer in self.modules else self.job.layer(layer)
            self._names[layer] = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        return self._names[layer]

    def parameter(self, layer: int, name: str) -> nn.Parameter:
        """Return a parameter by any of its names, if a layer that uses it is held."""
        layer, name = self._held_names((layer, name))[0]
        return self.modules[layer].get_parameter(name)

    def first_name(self, key: ParameterKey) -> ParameterKey:
        """Return the key under which a parameter is known: of tied ones the first."""
        return min(self._all_names(key))

    def _all_names(self, key: ParameterKey) -> tuple[ParameterKey, ...]:
        return next((group for group in self._tied if key in group), (key,))

    def _held_names(self, key: ParameterKey) -> list[ParameterKey]:
        """Return the names that a parameter has in the layers held."""
        return [(layer, name) for layer, name in self._all_names(key) if layer in self.modules]

    def _share(self, key: ParameterKey, held: ParameterKey) -> None:
        """Let a layer use the parameter that another layer holds."""
        owner, _, leaf = key[1].rpartition(".")
        setattr(self.modules[key[0]].get_submodule(owner), leaf, self.modules[held[0]].get_parameter(held[1]))

    def _tie(self) -> None:
        for group in self._tied:
            held = [key for key in group if key[0] in self.modules]
            for key in held[1:]:
                self._share(key, held[0])

    def _tie_new(self, new: int) -> None:
        """Let a new layer use the trained parameters that it shares with layers held."""
        for group in self._tied:
            own = [key for key in group if key[0] == new]
            others = [key for key in group if key[0] != new and key[0] in self.modules]
            if own and others:
                self._share(own[0], others[0])

    # -- a change of plan -----------------------------------------------------------------------------------

    def build(self, layout: RankLayout) -> None:
        """Make the layers of a layout that are not held yet, as the job's seed makes them.

        Layers that are held in other parts stay as they are until `arrange`; tensors that arrive for them
        wait until then.
        """
        layers = layout.layers_of(self.rank)
        part = (layout.seats[self.rank].tensor, layout.stage_of(self.rank).tp) if layers else (0, 1)
        self._arrived = []
        self._next_parts = {layer: part for layer in layers if layer in self.parameters.splits}
        for layer in layers:
            if layer not in self.modules:
                self._make(layer)
                self._tie_new(layer)

    def _make(self, layer: int) -> None:
        module = self.job.layer(layer)
        index, degree = self._next_parts.get(layer, (0, 1))
        if degree > 1:
            cut_module(module, self.parameters.splits[layer], self.ranks, index, degree)
        if isinstance(module, SequenceLayer):
            module.ranks = self.ranks
        self.modules[layer], self._parts[layer] = module.to(self.device), (index, degree)

    def arrange(self, layout: RankLayout, sharding: OptimizerSharding) -> None:
        """Adopt a layout whose shards have arrived: drop other layers, tie, make buckets and the optimizer.

        `sharding` says who updates what, and which ranks keep the sum of a gradient.
        """
        self.held = sharding.shards(self.rank)
        updated = {shard[1:] for shard in self.held if shard[0] == "state"}
        self.kept = frozenset(shard for shard in self.held if shard[0] != "value" or shard[1:] in updated)
        self.keep_optimizer_state()
        self.ranks.sequence = layout.cuts_sequence(self.rank)
        self._recut()
        layers = set(layout.layers_of(self.rank))
        self.modules = {layer: module for layer, module in sorted(self.modules.items()) if layer in layers}
        self._parts = {layer: self._parts[layer] for layer in self.modules}
        self._tie()
        own = sorted({self.first_name((i, name)) for i in self.modules for name in self.trainable_names(i)})
        self._make_buckets(own, sharding)
        updates = set(sharding.updated(self.rank)) if layers else set()
        self.updated = {key: self.parameter(*key) for key in own if key in updates}
        self._make_optimizer()

    def _changes_part(self, layer: int) -> bool:
        """Return whether a layer that is held is about to be held in another part."""
        return layer in self._next_parts and self._parts.get(layer) != self._next_parts[layer]

    def _recut(self) -> None:
        """Hold layers in the parts of the new layout, from what stays of them and what has arrived."""
        layers = [layer for layer in self.modules if self._changes_part(layer)]
        staying = [pair for layer in layers for pair in self._staying(layer)]
        for layer in layers:
            for name in self.trainable_names(layer):
                if (layer, name) in self.parameters.cuts:
                    self._optimizer_state.pop(self.first_name((layer, name)), None)
            self._make(layer)
        self._tie()
        arrived, self._arrived = self._arrived, []
        for key, tensor in [*staying, *arrived]:
            self.put(key, tensor)

    def _staying(self, layer: int) -> list[tuple[TensorKey, Tensor]]:
        """Return what stays of a layer: the slices that lie in the old part and in the new one."""
        found = self.tensors_of(("frame", layer, ""))
        for name in self.trainable_names(layer):
            key = self.first_name((layer, name))
            lo, hi, of = common(self.interval(key), self._interval_of(key, self._next_parts[layer]))
            kinds = ["value"] if self.parameter(*key).untyped_storage().size() > 0 else []
            kinds += ["state"] if key in self.parameters.cuts else []
            for kind in kinds:
                for i in range(lo, hi):
                    found += self.tensors_of((kind, key[0], slice_name(key[1], i, of)))
        return found

    def interval(self, key: ParameterKey) -> Interval:
        """Return which part of a parameter is held."""
        return self._interval_of(key, self._parts[self._held_names(key)[0][0]])

    def _interval_of(self, key: ParameterKey, part: Part) -> Interval:
        index, degree = part
        return (index, index + 1, degree) if self.parameters.degree(key, degree) > 1 else WHOLE

    # -- tensors by key -------------------------------------------------------------------------------------

    def tensors_of(self, shard: ShardKey) -> list[tuple[TensorKey, Tensor]]:
        """Return the tensors of a shard: a parameter's value, its optimizer state, or a layer's frame.

        Call `keep_optimizer_state` before.
        """
        kind, layer, name = shard
        if kind == "frame":
            module = self.modules[layer]
            parameters = module.named_parameters()
            frozen = [(("frozen", layer, n), p.data) for n, p in parameters if not p.requires_grad]
            return [*frozen, *((("buffer", layer, n), b) for n, b in _persistent_buffers(module))]
        key = (layer, parse_name(name)[0])
        if kind == "value":
            return [(shard, self._slice(layer, name, self.parameter(*key).data))]
        return [
            (("state", layer, f"{name}/{entry}"), self._slice(layer, name, _as_tensor(value)))
            for entry, value in sorted(self._optimizer_state.get(key, {}).items())
            if value is not None
        ]

    def _slice(self, layer: int, name: str, held: Tensor) -> Tensor:
        """Return the slice that a name means of the part that is held."""
        whole, index, num = parse_name(name)
        if num == 1 or held.dim() == 0:
            return held
        cut, part = self.parameters.cuts[layer, whole], (index, index + 1, num)
        return cut.taken(held, *within(part, self.interval((layer, whole))))

    def put(self, key: TensorKey, tensor: Tensor) -> None:
        """Replace a tensor, or a slice of it; entries of optimizer state are added."""
        kind, layer, name = key
        if kind == "frozen":
            _copy(self.modules[layer].get_parameter(name).data, tensor, (layer, name))
            return
        if kind == "buffer":
            _copy(self.modules[layer].get_buffer(name), tensor, (layer, name))
            return
        owner, _, entry = name.rpartition("/") if kind == "state" else (name, "", "")
        names = self._held_names((layer, parse_name(owner)[0]))
        if any(self._changes_part(held) for held, _ in names):
            self._arrived.append((key, tensor))
        elif kind == "state":
            self._put_state((layer, parse_name(owner)[0]), owner, entry, tensor)
        else:
            for held, own in names:
                parameter = self.modules[held].get_parameter(own)
                restore_storage(parameter)
                self._fill(parameter.data, (layer, parse_name(owner)[0]), owner, tensor)

    def _put_state(self, key: ParameterKey, owner: str, entry: str, tensor: Tensor) -> None:
        state = self._optimizer_state.setdefault(key, {})
        if tensor.dim() == 0 or (parse_name(owner)[2] == 1 and self.interval(key) == WHOLE):
            state[entry] = tensor.clone()
            return
        if entry not in state:
            state[entry] = torch.zeros_like(self.parameter(*key), dtype=tensor.dtype)
        self._fill(state[entry], key, owner, tensor)

    def _fill(self, held: Tensor, key: ParameterKey, name: str, tensor: Tensor) -> None:
        """Copy the slices of a tensor that lie in the part that is held."""
        _, index, num = parse_name(name)
        given, own = (index, index + 1, num), self.interval(key)
        if given == own == WHOLE:
            _copy(held, tensor, key)
            return
        cut, both = self.parameters.cuts[key], common(given, own)
        cut.fill(held, *within(both, own), cut.taken(tensor, *within(both, given)))

    # -- gradients and optimizer ----------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Set all gradients to zero and point the parameters at their buckets."""
        for bucket in self.buckets:
            bucket.clear()

    def _make_buckets(self, own: list[ParameterKey], sharding: OptimizerSharding) -> None:
        """Make buckets of the gradients that the same ranks sum; all these ranks cut them alike."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)  # views of the buckets before
        alike: dict[tuple[tuple[int, ...], str], list[Gradient]] = {}
        for key in own:
            for name in sharding.names(self.rank, key):
                owners = sharding.summed_by(name)
                if self.rank in owners:
                    found = alike.setdefault((owners, str(self.parameter(*key).dtype)), [])
                    found.append(self._gradient(name, sharding))
        self.buckets = []
        for (owners, _), gradients in sorted(alike.items()):
            gradients.sort(key=lambda gradient: gradient.name)
            parts = cut_in_buckets(gradients, self.bucket_bytes)
            self.buckets += [self._bucket(owners, part) for part in parts]
        self.zero_gradients()

    def _bucket(self, owners: tuple[int, ...], gradients: list[Gradient]) -> Bucket:
        sizes, dtype = [g.flat.numel() for g in gradients], gradients[0].parameter.dtype
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        for gradient, part in zip(gradients, flat.split(sizes), strict=True):
            gradient.flat = part
        keys = [(layer, parse_name(name)[0]) for layer, name in (g.name for g in gradients)]
        layers = frozenset(layer for key in keys for layer, _ in self._held_names(key))
        return Bucket(owners, flat, gradients, layers)

    def _gradient(self, name: ParameterKey, sharding: OptimizerSharding) -> Gradient:
        """Return the gradient of a parameter or a slice, with a placeholder for its place in a bucket."""
        whole, index, num = parse_name(name[1])
        key = name[0], whole
        parameter, adds = self.parameter(*key), sharding.adds(self.rank, key)
        part = within((index, index + 1, num), self.interval(key))
        count = parameter.numel() * (part[1] - part[0]) // part[2]
        size = torch.empty(count, dtype=parameter.dtype, device="meta")
        if part[:2] == (0, part[2]):
            return Gradient(name=name, parameter=parameter, flat=size, adds=adds)
        cut = self.parameters.cuts[key]
        return Gradient(name=name, parameter=parameter, flat=size, cut=cut, part=part, adds=adds)

    def keep_optimizer_state(self) -> None:
        """Keep the optimizer's state by name: parameters are about to change ranks."""
        if self.optimizer is None:
            return
        for key, parameter in self.updated.items():
            state = self.optimizer.state.get(parameter)
            if state:
                self._optimizer_state[key] = dict(state)

    def _make_optimizer(self) -> None:
        self._optimizer_state = {k: state for k, state in self._optimizer_state.items() if k in self.updated}
        names = self.job.names
        named = [(names.get(key, f"{key[0]}.{key[1]}"), p) for key, p in self.updated.items()]
        self.optimizer = self.job.optimizer(named) if named else None
        if self.optimizer is None:
            return
        if any(self.interval(key) != WHOLE for key in self.updated):
            check_by_element(self.optimizer, self.job.path)
        for key, state in self._optimizer_state.items():
            parameter = self.updated[key]
            self.optimizer.state[parameter] = {
                name: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state.items()
            }  # counts stay where the optimizer keeps them, on the host


def _copy(held: Tensor, tensor: Tensor, key: ParameterKey) -> None:
    """Copy a whole tensor, which may come from the checkpoint of another job."""
    if held.shape != tensor.shape:
        raise SpecError(
            f"the checkpoint has shape {list(tensor.shape)}, the job has {list(held.shape)}",
            key=f"layers.{key[0]}.{key[1]}",
            rule="A run goes on with the layers it began with",
            fix="Resume with the job that wrote it, or give another --out",
        )
    held.copy_(tensor)


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def _as_tensor(value: Any) -> Tensor:
    """Return a state entry as a tensor; optimizers keep counts as plain numbers too."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
