"""Tensor parallelism of a traced module: which weights ranks can share out, and what each rank then does.

A product whose input is whole on every rank has its weight split by columns, so that its output is split; the
split is followed through the operations that can work on parts (activations, heads of attention, views) until
a product multiplies along it: that weight is split by rows, and the ranks' results are summed. Tables of an
embedding are split by rows too, convolutions by channels. Where an operation needs the tensor whole, the
weights that the split began with stay whole on every rank.

Source
------
Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3; sums of the same input's gradients are made
once, after adding what each reader gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreshard.profile.tracing.constants import place_of
from foreshard.profile.tracing.operations import storage_of, tensors_of
from foreshard.profile.tracing.recorder import Applied
from foreshard.profile.tracing.split_dims import FinerError, SplitDim, UnsplitError, joined


@dataclass(slots=True, eq=False)
class Unsummed:
    """A tensor of which every rank holds a summand."""

    starts: frozenset[int]
    made: int  # the operation that made it
    summed: bool = False  # whether the ranks have summed it since


Held = SplitDim | Unsummed | None
"""How ranks hold a tensor; None: whole."""
Rule = Callable[["Splitting", Applied], Held | Sequence[Held]]


@dataclass(slots=True, kw_only=True)
class Weight:
    """A parameter or buffer."""

    given: Any
    dims: tuple[int | None, ...]  # which of its dimensions those of a view are; None: repeated


@dataclass(slots=True)
class Splitting:
    """One pass after another over the operations of a trace, until all weights that can be split are."""

    steps: Sequence[Applied]  # of the forward, then of the backward
    num_forward: int
    weights: Sequence[Any]  # parameters and buffers
    # whether values of a tensor follow from nothing given: tables of positions are not split
    fixed: Callable[[Any], bool]
    # what modules returned, by its gradient: ranks take their parts of gradients of what is split
    gradient_of: Mapping[Any, Any]
    degree: int  # ranks that share out
    splits: dict[int, SplitDim] = field(default_factory=dict)  # of weights, by storage
    # weights that were tried in vain, and why, by storage
    whole: dict[int, str] = field(default_factory=dict)
    # (step whose result is summed, bytes) of the sums over ranks
    sums: list[tuple[int, float]] = field(default_factory=list)
    # what of each step's tensors is split, by the tensor's id
    held: list[dict[int, SplitDim]] = field(default_factory=list)
    # of tables that were read, by the index and the table's rows
    lookups: dict[Any, SplitDim] = field(default_factory=dict)
    # of tensors that were copied into, and their shapes, by storage: torch writes gradients of views so
    copied: dict[int, tuple[SplitDim, tuple[int, ...]]] = field(default_factory=dict)
    _parts: dict[int, int] = field(default_factory=dict)
    _followed: dict[int, int] = field(default_factory=dict)
    _states: dict[Any, Held] = field(default_factory=dict)
    _views: dict[Any, Weight] = field(default_factory=dict)
    _now: dict[int, SplitDim] = field(default_factory=dict)
    _grown: set[int] = field(default_factory=set)
    _at: int = 0

    def solve(self, rules: Mapping[str, Rule], otherwise: Rule) -> None:
        """Follow splits through all operations until no weight changes.

        A pass in which a weight turns out to stay whole makes the others follow anew.
        """
        while True:
            before = dict(self.splits)
            if not self._pass(rules, otherwise):
                self.splits.clear()
            elif self.splits == before:
                return

    def _pass(self, rules: Mapping[str, Rule], otherwise: Rule) -> bool:
        """Go through the operations once; return whether every split was carried through."""
        self._states, self.sums, self.held, self.lookups, self.copied = {}, [], [], {}, {}
        self._followed = dict(self._parts)
        self._views = {
            place_of(weight): Weight(given=weight, dims=tuple(range(weight.dim()))) for weight in self.weights
        }
        carried = True
        for at, step in enumerate(self.steps):
            self._at = at
            if not carried and self.in_backward:
                break  # what the forward gives up shows in it as well
            self._now, made = {}, tensors_of(step.out)
            try:
                states = self._applied(step, rules, otherwise)
            except UnsplitError as error:
                carried = self._leave_whole(error.starts, str(error)) and carried
                states = [None] * len(made)
            except FinerError as error:
                carried = self._refine(error) and carried
                states = [None] * len(made)
            for tensor, state in zip(made, states, strict=True):
                place = place_of(tensor)
                if state is None and self.in_backward and place in self.gradient_of:
                    state = self._part_of(self.gradient_of[place])
                # by both: what the backward kept is another object, a repeated square lies as its transpose
                self._states[place] = self._states[id(tensor)] = state
                if isinstance(state, SplitDim):
                    self._now[id(tensor)] = state
            self.held.append(self._now)
        self._now = {}
        return carried

    def _applied(self, step: Applied, rules: Mapping[str, Rule], otherwise: Rule) -> Sequence[Held]:
        """Return how ranks hold what an operation makes."""
        name = name_of(step.func)
        read = tensors_of((*step.args, *step.kwargs.values()))
        made = tensors_of(step.out)
        self._follow(name, step, read, made)
        states = {id(tensor): state for tensor in read if (state := self.state(tensor)) is not None}
        if not states and name not in STARTING:
            return [None] * len(made)
        for tensor in read:
            state = states.get(id(tensor))
            if isinstance(state, SplitDim):
                self._now[id(tensor)] = state
            elif isinstance(state, Unsummed) and not self._adds(name, step):
                self.sum(tensor, state)
        if any(isinstance(state, Unsummed) for state in states.values()) and self._adds(name, step):
            starts = frozenset().union(*(state.starts for state in states.values() if state))
            return [self.unsummed(starts)] if name == "add" else self._passed_on(states, made)
        if not self._now and name not in STARTING:
            return [None] * len(made)
        found = rules.get(name, otherwise)(self, step)
        return [found] if found is None or isinstance(found, SplitDim | Unsummed) else list(found)

    def _part_of(self, returned: Any) -> SplitDim | None:
        """Return the split of a gradient, which is that of what a module returned."""
        state = self.state(returned)
        return state if isinstance(state, SplitDim) else None

    def _passed_on(self, states: Mapping[int, Held], made: Sequence[Any]) -> list[Held]:
        """Return the same summands for each view of them."""
        state = next(state for state in states.values() if isinstance(state, Unsummed))
        return [state] * len(made)

    def _adds(self, name: str, step: Applied) -> bool:
        """Return whether an operation works on summands: a view, or a sum of them.

        In the backward what is whole may be added before ranks sum: gradients of one tensor come one by one.
        """
        if name in _VIEWS:
            return True
        if name != "add" or step.kwargs.get("alpha", 1) != 1:
            return False
        operands = [self.state(value) for value in step.args[:2] if hasattr(value, "dim")]
        if len(operands) < 2 or any(isinstance(state, SplitDim) for state in operands):
            return False
        if step.args[0].shape != step.args[1].shape:
            return False
        return self.in_backward or all(isinstance(state, Unsummed) for state in operands)

    @property
    def in_backward(self) -> bool:
        """Whether the current operation is of the backward."""
        return self._at >= self.num_forward

    def state(self, tensor: Any) -> Held:
        """Return how ranks hold a tensor before the current operation."""
        if id(tensor) in self._now:
            return self._now[id(tensor)]
        place = place_of(tensor)
        state = self._states.get(id(tensor) if id(tensor) in self._states else place)
        if isinstance(state, Unsummed) and state.summed:
            return None
        if state is None and place in self._views:
            weight = self._views[place]
            split = self.splits.get(storage_of(weight.given))
            return split and replace(split, dim=weight.dims.index(split.dim))
        return state

    def split(self, tensor: Any) -> SplitDim | None:
        """Return the split of a tensor that the current operation reads."""
        return self._now.get(id(tensor))

    def sum(self, tensor: Any, state: Unsummed) -> None:
        """Let the ranks sum a tensor that the current operation reads."""
        if not state.summed:
            self.sums.append((state.made, float(tensor.numel() * tensor.element_size())))
        state.summed = True

    def add_sum(self, num_bytes: float) -> None:
        """Note a sum over ranks within the current operation."""
        self.sums.append((self._at, float(num_bytes)))

    def unsummed(self, starts: frozenset[int]) -> Unsummed:
        """Return what the current operation makes where every rank makes a summand."""
        return Unsummed(starts, self._at)

    def weight(self, tensor: Any) -> Weight | None:
        """Return the weight that a tensor is a view or a cast of."""
        return self._views.get(place_of(tensor))

    def start(self, tensor: Any, dim: int) -> SplitDim | None:
        """Split a weight that is whole along a dimension, if it can be."""
        weight = self.weight(tensor)
        along = None if weight is None else weight.dims[dim]
        if weight is None or along is None or self.in_backward:
            return None
        storage = storage_of(weight.given)
        parts = self._parts.get(storage, 1)
        size, rest = divmod(tensor.shape[dim], parts)
        if storage in self.whole:
            return None
        if rest or size % self.degree:
            self.whole[storage] = f"{tensor.shape[dim]} is no multiple of {self.degree * parts}"
            return None
        split = SplitDim(dim=dim, outer=parts, size=size, starts=frozenset({storage}))
        self.splits[storage] = replace(split, dim=along)
        self._now[id(tensor)] = split
        return split

    def give(self, tensor: Any, split: SplitDim) -> None:
        """Split a tensor that is whole as an operation needs it.

        A weight is split for good. Ranks take their parts of other tensors, whose gradients would have to be
        put together again: where there is one, the tensor is needed whole.
        """
        weight = self.weight(tensor)
        along = None if weight is None else weight.dims[split.dim]
        if weight is not None and along is not None:
            self.splits[storage_of(weight.given)] = replace(split, dim=along)
        elif not self.in_backward and self._trained(tensor):
            raise UnsplitError("it meets a tensor that is whole", split.starts)
        self._now[id(tensor)] = split

    def join(self, tensors: Sequence[Any], rank: int) -> SplitDim:
        """Return the split of tensors that are broadcast to `rank` dimensions, all of them split alike."""
        found: SplitDim | None = None
        for tensor in tensors:
            split = self.split(tensor)
            if split is not None:
                moved = replace(split, dim=split.dim + rank - tensor.dim())
                found = moved if found is None else joined(found, moved, self.degree)
        assert found is not None
        for tensor in tensors:
            dim = found.dim - rank + tensor.dim()
            if self.split(tensor) is None and dim >= 0 and tensor.shape[dim] > 1:
                self.give(tensor, replace(found, dim=dim))
        return found

    def _follow(self, name: str, step: Applied, read: Sequence[Any], made: Sequence[Any]) -> None:
        """Note a view or a cast of a weight, and what depends on one that is trained."""
        if not self.in_backward and any(self._trained(tensor) for tensor in read):
            self._grown |= {id(tensor) for tensor in made if tensor.is_floating_point()}
        weight = self.weight(read[0]) if len(made) == 1 and read else None
        moved = None if weight is None else _moved(name, weight.dims, read[0], made[0], step.args[1:])
        if weight is not None and moved is not None:
            self._views[place_of(made[0])] = Weight(given=weight.given, dims=moved)

    def _trained(self, tensor: Any) -> bool:
        return tensor.requires_grad or id(tensor) in self._grown

    def _leave_whole(self, starts: frozenset[int], why: str) -> bool:
        name = name_of(self.steps[self._at].func)
        for storage in starts:
            self.whole.setdefault(storage, f"{name}: {why}")
        return False

    def _refine(self, error: FinerError) -> bool:
        """Let weights be split within each of so many parts from the next pass on.

        Every reader of a tensor asks for it in the pass that finds it. Weights that are split so already and
        still cut across ranks stay whole.
        """
        differs = any(self._parts.get(storage, error.parts) != error.parts for storage in error.starts)
        if differs or error.starts <= self._followed.keys():
            return self._leave_whole(error.starts, "it is cut in two ways")
        self._parts |= dict.fromkeys(error.starts, error.parts)
        return False


def name_of(func: Any) -> str:
    """Return the operator's name, as torch calls it; that in place is the same."""
    if isinstance(func, str):
        return func
    return str(func.overloadpacket).removeprefix("aten.").rstrip("_")


def _moved(
    name: str, dims: tuple[int | None, ...], old: Any, new: Any, args: Sequence[Any]
) -> tuple[int | None, ...] | None:
    """Return which dimension of a weight each one of a view of it is; None if it is no such view."""
    if name in ("t", "transpose"):
        order = list(range(len(dims)))
        a, b = args[:2] if args else (0, -1)
        order[a], order[b] = order[b], order[a]
        return tuple(dims[dim] for dim in order)
    if name == "permute":
        return tuple(dims[dim] for dim in args[0])
    if name == "expand":
        return (*[None] * (new.dim() - old.dim()), *dims)
    if name in ("_to_copy", "detach", "alias", "clone", "lift_fresh") or (
        name in ("view", "_unsafe_view") and old.shape == new.shape
    ):
        return dims
    return None


_VIEWS = frozenset(
    ("view", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "squeeze", "detach", "alias")
)
STARTING = frozenset(
    ("mm", "addmm", "bmm", "convolution", "embedding", "embedding_dense_backward", "as_strided")
)
"""Operations whose weight, or whose result, may be split though nothing that they read is."""
