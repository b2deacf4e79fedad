"""The trainable parameters of a model: their sizes, the layers that use them, how they can be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from foreshard.runtime.job.job import Job
from foreshard.runtime.job.user_code import in_file
from foreshard.runtime.state.shard_keys import ParameterKey, ShardKey
from foreshard.runtime.state.slices import SliceCut, parse_name
from foreshard.runtime.tensor.sequence import SequenceLayer
from foreshard.runtime.tensor.split import LayerSplit, check_declared, split_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The trainable parameters of a model; tied ones are one, under the first of their names.

    Tensor-parallel ranks can cut the layers of `splits`. `shared` parameters are whole on each of these
    ranks, which computes a part of the gradient; `sequential` layers can run on a part of the sequence.
    `has_frozen` says whether the model also has parameters that are not trained.
    """

    sizes: dict[ParameterKey, int]
    users: dict[ParameterKey, tuple[int, ...]]
    splits: dict[int, LayerSplit] = field(default_factory=dict)
    cuts: dict[ParameterKey, SliceCut] = field(default_factory=dict)
    shared: frozenset[ParameterKey] = frozenset()
    sequential: frozenset[int] = frozenset()
    has_frozen: bool = False

    def degree(self, key: ParameterKey, degree: int) -> int:
        """Return into how many parts ranks of a tensor-parallel degree cut a parameter: `degree` or 1."""
        return self.splits[key[0]].degree(key[1], degree) if key in self.cuts else 1

    def weight(self, shard: ShardKey) -> float:
        """Return the cost of moving a shard: elements of its parameter, or of a slice of it."""
        name, _, num = parse_name(shard[2])
        return self.sizes.get((shard[1], name), 1) / num

    def of(self, layers: Iterable[int]) -> dict[ParameterKey, int]:
        """Return the sizes of the parameters that layers use."""
        held = set(layers)
        return {key: size for key, size in self.sizes.items() if held.intersection(self.users[key])}


def parameters_of(job: Job) -> Parameters:
    """Return the trainable parameters of a job's model, from modules without storage."""
    first = {name: min(group) for group in map(tuple, job.tied) for name in group}
    sizes: dict[ParameterKey, int] = {}
    users: dict[ParameterKey, list[int]] = {}
    splits: dict[int, LayerSplit] = {}
    sequential, names, has_frozen = [], set[str](), False
    for layer in range(job.num_layers):
        with torch.device("meta"):
            module = job.layer(layer)
        names.update(name for name, _ in module.named_modules() if name)
        if isinstance(module, SequenceLayer) and module.by_token:
            sequential.append(layer)
        with in_file(job.path):
            split = split_of(module, job.tensor_plan, [own for at, own in first if at == layer])
        if split is not None:
            splits[layer] = split
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                key = first.get((layer, name), (layer, name))
                sizes[key] = parameter.numel()
                users.setdefault(key, []).append(layer)
            has_frozen |= not parameter.requires_grad
    with in_file(job.path):
        check_declared(job.tensor_plan, names)
    return Parameters(
        sizes=sizes,
        users={key: tuple(layers) for key, layers in users.items()},
        splits=splits,
        cuts={(layer, name): cut for layer, split in splits.items() for name, cut in split.cuts.items()},
        shared=frozenset((layer, name) for layer, split in splits.items() for name in split.shared),
        sequential=frozenset(sequential),
        has_frozen=has_frozen,
    )
