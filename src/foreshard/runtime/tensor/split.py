"""Cuts the weights of a layer over tensor-parallel ranks, by a plan that gives its modules roles.

A plan is a mapping of module names: ``{"qkv": "column:3", "out": "row"}``. `column` computes some of the
outputs on each rank, `row` takes some of the inputs and sums; between the two each rank computes alone (heads
of attention, channels of a feed-forward part). Modules without a role are held whole by every rank.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.errors import SpecError
from foreshard.runtime.state.slices import SliceCut
from foreshard.runtime.tensor.ranks import TensorRanks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BY_ELEMENT = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
"""Optimizers of torch that update every element by itself, so that they can update parts of a weight."""
RULE = "A role is column, column:BLOCKS (3, or sizes like 4096,1024,1024), row, gather, words or shared"
_WHERE_POSSIBLE = ("gather", "words")
"""Roles of weights that every rank holds whole where they cannot be cut: no other module is affected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a layer is cut.

    Attributes
    ----------
    roles : mapping of module name to role
        ``column[:BLOCKS]``; ``row``; ``gather``, a column whose outputs are gathered; ``words``, rows of an
        embedding; ``shared``, held whole by every rank and used for its part only.
    units : mapping of name to int
        Numbers that the degree has to divide (heads).
    divided : tuple of (module name, attribute)
        Numbers in the model's own code that are divided by the degree.
    draws_by_head : bool
        Whether random numbers are drawn in parts exactly for tensors of (sample, head, query, key).
    refused : str or None
        Why the layer cannot be cut.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    divided: tuple[tuple[str, str], ...] = ()
    draws_by_head: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """A layer's plan, resolved to the modules and parameters of the layer.

    `roles` has kind and blocks by module name, `cuts` and `shapes` are of the parameters that are cut; those
    that are `shared` are whole on every rank, where each computes a part of the gradient.
    """

    plan: TensorPlan
    roles: Mapping[str, tuple[str, tuple[int, ...]]]
    cuts: Mapping[str, SliceCut]
    shared: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]

    def degree(self, name: str, degree: int) -> int:
        """Return into how many parts ranks of a degree cut a parameter: `degree` or 1."""
        if name not in self.cuts:
            return 1
        may_stay = self.roles[name.rpartition(".")[0]][0] in _WHERE_POSSIBLE
        return 1 if may_stay and not self.cuts[name].divides(self.shapes[name], degree) else degree


def split_of(module: nn.Module, declared: Mapping[str, str], tied: Collection[str] = ()) -> LayerSplit | None:
    """Return how a layer is cut, or None where no plan names its modules.

    The module may be without storage. `declared` are the job's roles, for layers without a plan of their own;
    `tied` are the parameters of the layer that other layers use too.
    """
    own = getattr(module, "tensor_plan", None)
    plan = own if isinstance(own, TensorPlan) else TensorPlan(roles=own if own is not None else declared)
    if plan.refused is not None:
        return _refused(plan.refused)
    roles = {}
    for name, _ in module.named_modules():
        for role in [role for wanted, role in plan.roles.items() if name and _means(wanted, name)][:1]:
            roles[name] = _parse_role(role)
    for wanted in plan.roles if own is not None else ():
        if not any(_means(wanted, name) for name in roles):
            raise _no_module("the layer has no", wanted)
    if not roles:
        return None
    cuts, shared = _cuts(module, roles)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, why in _uncut(parameters, cuts, tied).items():
        owner = name.rpartition(".")[0]
        if roles[owner][0] not in _WHERE_POSSIBLE:
            return _refused(why)
        del roles[owner]
        cuts = {other: cut for other, cut in cuts.items() if other.rpartition(".")[0] != owner}
    shapes = {name: tuple(parameters[name].shape) for name in cuts}
    return LayerSplit(plan=plan, roles=roles, cuts=cuts, shared=shared, shapes=shapes) if roles else None


def check_declared(declared: Mapping[str, str], names: Collection[str]) -> None:
    """Raise for roles of a job that are none, or that no module of a layer has: they would be left out."""
    for wanted, role in declared.items():
        _parse_role(role)
        if not any(_means(wanted, name) for name in names):
            raise _no_module("no layer has a", wanted)


def _no_module(who: str, wanted: str) -> SpecError:
    return _unfit(f"{who} module {wanted!r}", wanted, "A plan names modules of the layers")


def _unfit(what: str, value: str, rule: str, fix: str | None = None) -> SpecError:
    return SpecError(what, key="tensor_plan", value=value, rule=rule, fix=fix)


def _uncut(
    parameters: Mapping[str, nn.Parameter], cuts: Mapping[str, SliceCut], tied: Collection[str]
) -> dict[str, str]:
    """Return the reason for each weight that should be cut but cannot be; one weight per module."""
    times = Counter(map(id, parameters.values()))
    found: dict[str, tuple[str, str]] = {}
    for name in cuts:
        frozen = not parameters[name].requires_grad
        if frozen or times[id(parameters[name])] > 1 or name in tied:
            why = "is frozen" if frozen else "is used in more than one place"
            found.setdefault(name.rpartition(".")[0], (name, f"{name} {why}"))
    return dict(found.values())


def _refused(why: str) -> LayerSplit:
    plan = TensorPlan(refused=why)
    return LayerSplit(plan=plan, roles={}, cuts={}, shared=frozenset(), shapes={})


def cut_module(module: nn.Module, split: LayerSplit, ranks: TensorRanks, index: int, degree: int) -> None:
    """Reduce a whole layer to part `index` of `degree`, in place."""
    for name, (kind, _) in split.roles.items():
        if kind == "shared" or split.degree(f"{name}.weight", degree) == 1:
            continue
        cuts = {leaf: split.cuts.get(f"{name}.{leaf}") for leaf in ("weight", "bias")}
        with torch.no_grad():
            part = _PARTS[kind](module.get_submodule(name), cuts, ranks, index, degree)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, part)
    for name, attribute in split.plan.divided:
        _divide(module.get_submodule(name), attribute, degree)


class _CutModule(nn.Module):
    """A module of whose weights a rank holds a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, SliceCut | None],
        ranks: TensorRanks,
        index: int,
        degree: int,
    ):
        super().__init__()
        self.ranks, self.index = ranks, index
        for name, cut in cuts.items():
            whole = getattr(module, name, None)
            if whole is None:
                self.register_parameter(name, None)
                continue
            value = whole.data if cut is None else cut.taken(whole.data, index, index + 1, degree).clone()
            self.register_parameter(name, nn.Parameter(value, requires_grad=whole.requires_grad))
        self.train(module.training)


class _CutLinear(_CutModule):
    """A linear layer of which a rank holds a part."""

    def __init__(self, module: nn.Module, *given: Any):
        super().__init__(module, *given)
        self.transposed = not isinstance(module, nn.Linear)

    def _product(self, x: DTensor, dim: int) -> DTensor:
        """Return the product with the weight, which is cut along a dimension of (outputs, inputs)."""
        weight = self.ranks.part(self.weight, 1 - dim if self.transposed else dim)
        return x @ weight if self.transposed else functional.linear(x, weight)  # type: ignore[return-value]


class ColumnLinear(_CutLinear):
    """Computes this rank's part of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, block by block."""
        out = self._product(self.ranks.replicated(x), 0).to_local()
        return out if self.bias is None else out + self.bias


class RowLinear(_CutLinear):
    """Takes this rank's part of the inputs; the outputs are whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products."""
        out = self.ranks.summed(self._product(self.ranks.part(x, -1), 1))
        return out if self.bias is None else out + self.bias


class GatheredLinear(_CutLinear):
    """Computes this rank's part of the outputs, and gathers all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        out = self._product(self.ranks.replicated(x), 0)
        if self.bias is not None:
            out = out + self.ranks.part(self.bias, 0)  # type: ignore[assignment]
        return self.ranks.gathered(out)


class VocabularyEmbedding(_CutModule):
    """Holds the vectors of a part of the vocabulary."""

    def __init__(self, module: nn.Embedding, *given: Any):
        super().__init__(module, *given)
        self.padding = module.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of token ids, whichever rank holds them."""
        rows = len(self.weight)
        own = ids - self.index * rows
        mine = (own >= 0) & (own < rows)
        padding = None if self.padding is None else self.padding - self.index * rows
        if padding is not None and not 0 <= padding < rows:
            padding = None
        found = functional.embedding(own.where(mine, 0), self.weight, padding)
        return self.ranks.summed(self.ranks.addend(found * mine.unsqueeze(-1)))


_PARTS: dict[str, Any] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "gather": GatheredLinear,
    "words": VocabularyEmbedding,
}


def _means(wanted: str, name: str) -> bool:
    """Return whether a name in a plan means a module: by its full name or the end of it."""
    return name == wanted or name.endswith(f".{wanted}")


def _parse_role(role: Any) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a role and the relative sizes of its blocks."""
    kind, _, rest = str(role).partition(":")
    sizes = rest.split(",") if rest else ["1"]
    plain = kind in ("row", "shared", "gather", "words") and not rest
    if not plain and (kind != "column" or not all(size.strip().isdecimal() and int(size) for size in sizes)):
        raise _unfit(f"{role!r} is no role", str(role), RULE)
    numbers = tuple(int(size) for size in sizes)
    return kind, (1,) * numbers[0] if len(numbers) == 1 else numbers


def _cuts(
    module: nn.Module, roles: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, SliceCut], frozenset[str]]:
    cuts: dict[str, SliceCut] = {}
    shared: list[str] = []
    for name, (kind, blocks) in roles.items():
        part = module.get_submodule(name)
        if kind == "shared":
            shared += [f"{name}.{own}" for own, _ in part.named_parameters()]
            continue
        if kind == "words":
            _check_embedding(part, name)
            cuts[f"{name}.weight"] = SliceCut(dim=0)
            continue
        first = _outputs_first(part, name)
        dim = 0 if (kind != "row") == first else 1
        cuts[f"{name}.weight"] = SliceCut(dim=dim, blocks=blocks)
        if kind != "row" and getattr(part, "bias", None) is not None:
            cuts[f"{name}.bias"] = SliceCut(dim=0, blocks=blocks)
    return cuts, frozenset(shared)


def _check_embedding(part: nn.Module, name: str) -> None:
    plain = type(part) is nn.Embedding and not (part._forward_hooks or part._forward_pre_hooks)
    if not plain or part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
        what = f"{name} is a {type(part).__name__}: its rows cannot be cut"
        rule = "An nn.Embedding without max_norm, scale_grad_by_freq, sparse and hooks"
        raise _unfit(what, name, rule, f"Leave {name} out of the plan")


def _outputs_first(part: nn.Module, name: str) -> bool:
    """Return whether a weight is (outputs, inputs), as in nn.Linear, or (inputs, outputs)."""
    kind = type(part)
    hooked = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
    if kind is nn.Linear and not hooked:
        return True
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" and not hooked:
        return False
    what = "a module with hooks" if hooked else f"a {kind.__name__}"
    rule = "What is cut is a plain nn.Linear, or the Conv1D of transformers"
    raise _unfit(
        f"{name} is {what}: it cannot be cut", name, rule, f"Leave {name} out of the plan, or use nn.Linear"
    )


def check_by_element(optimizer: torch.optim.Optimizer, path: str | None = None) -> None:
    """Raise for an optimizer that would update parts of a weight differently from the whole."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim.") and kind.__name__ in BY_ELEMENT
    if not known and not getattr(optimizer, "by_element", False):
        raise SpecError(
            f"{kind.__name__} is not known to update parts of a weight like the whole",
            file=path,
            key="optimizer",
            value=kind.__name__,
            rule=f"Where weights are cut (tp) every element is updated by itself: {', '.join(BY_ELEMENT)}",
            fix="Use tp 1, or set by_element = True on an optimizer that does",
        )


def _divide(part: nn.Module, attribute: str, degree: int) -> None:
    """Divide a number of the model's code; a number of its configuration in a copy of that."""
    owner, _, name = attribute.rpartition(".")
    if owner:
        setattr(part, owner, copy.copy(getattr(part, owner)))
        part = getattr(part, owner)
    setattr(part, name, getattr(part, name) // degree)
