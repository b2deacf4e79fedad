"""Records the operations of one forward and one backward, and where modules end in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from foreshard.profile.tracing.constants import Constants
from foreshard.profile.tracing.lifetimes import Lifetimes
from foreshard.profile.tracing.operations import Call, calls_of, laid_out, storage_of, tensors_of
from foreshard.profile.tracing.repeats import Repeats


@dataclass(slots=True, kw_only=True)
class End:
    """A module that has returned one tensor."""

    name: str
    at: int  # forward operations before it
    out: Any  # its output

    @property
    def storage(self) -> int:
        """Of its output."""
        return storage_of(self.out)

    @property
    def num_bytes(self) -> float:
        """Of its output."""
        return float(self.out.numel() * self.out.element_size())


@dataclass(slots=True, kw_only=True)
class Applied:
    """An operation as it ran."""

    func: Any  # a name for what torch knows as several operations: attention, recurrent layers
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    calls: list[Call]  # its kernels


@dataclass(slots=True)
class Recorder:
    """What a forward and a backward did, in order."""

    constants: frozenset[int]  # storages of parameters and buffers
    channels_last: bool = False  # layout of the images
    keeps_backward: bool = False  # whether operations of the backward are kept with their tensors
    training: bool = True  # whether a backward follows
    # forward and backward: operations. Tensors of the forward live on, so that no other takes the place of
    # one whose storage is compared. Of the backward there are aliases: torch copies a gradient that somebody
    # else holds.
    forward: list[Applied] = field(default_factory=list)
    backward: list[Applied] = field(default_factory=list)
    # reads and writes: storages of each forward operation
    reads: list[set[int]] = field(default_factory=list)
    writes: list[set[int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    # (backward operations before, place of the end) where the gradient of a module's output is complete
    turns: list[tuple[int, int]] = field(default_factory=list)
    # (forward operations before, tensor) of what forward keeps for backward
    saved: list[tuple[int, Any]] = field(default_factory=list)
    # forward operations that read each parameter or buffer, by storage
    users: dict[int, list[int]] = field(default_factory=dict)
    # of every tensor that forward operations make
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    known: Constants = field(default_factory=Constants)  # values that do not follow from inputs or parameters
    repeats: Repeats = field(default_factory=Repeats)  # operations seen before
    ran: set[str] = field(default_factory=set)  # modules that were called
    gradients: dict[int, Any] = field(default_factory=dict)  # of parameters, by storage
    # of what modules returned, and that
    output_gradients: list[tuple[Any, Any]] = field(default_factory=list)
    sparse: bool = False  # whether a gradient is sparse
    # of what the backward makes and reads; of the forward where none follows
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    in_backward: bool = False
    _aliases: Any = field(default_factory=WeakTensorKeyDictionary)

    def note(self, name: str, call: Call, read: Any, made: Any) -> None:
        """Add an operation that torch does not know as one."""
        self._add(Applied(func=name, args=read, kwargs={}, out=made, calls=[call]))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add an operation as torch calls it, and return what it makes."""
        key = self.repeats.key(func, args, kwargs)
        again = self.repeats.again(key)
        if again is None:
            out = laid_out(func, args, func(*args, **kwargs))
            read = (*args, *kwargs.values())
            calls = list(calls_of(func, read, out, channels_last=self.channels_last))
            self.repeats.add(key, read, out, calls)
        else:
            out, calls = again
        self._add(Applied(func=func, args=args, kwargs=kwargs, out=out, calls=calls))
        if not self.in_backward:
            self.known.add(func, args, kwargs, out)
        return out

    def _add(self, done: Applied) -> None:
        if self.in_backward:
            self.sparse |= any(tensor.layout is torch.sparse_coo for tensor in tensors_of(done.out))
            self.lifetimes.add(len(self.backward), (*done.args, *done.kwargs.values()), done.out)
            self.backward.append(self._aliased(done))
            return
        if not self.training:
            self.lifetimes.add(len(self.forward), (*done.args, *done.kwargs.values()), done.out)
        self.forward.append(done)
        self.reads.append(self._storages((*done.args, *done.kwargs.values())))
        self.writes.append(self._storages(done.out))
        self.shapes += [tuple(tensor.shape) for tensor in tensors_of(done.out)]
        for storage in self.reads[-1] & self.constants:
            self.users.setdefault(storage, []).append(len(self.reads) - 1)

    def _aliased(self, done: Applied) -> Applied:
        """Return an operation with aliases of its tensors, or without them where they are not kept."""
        if not self.keeps_backward:
            return Applied(func=done.func, args=(), kwargs={}, out=None, calls=done.calls)
        args, kwargs, out = tree_map(self._alias, (done.args, done.kwargs, done.out))
        return Applied(func=done.func, args=args, kwargs=kwargs, out=out, calls=done.calls)

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value not in self._aliases:
            self._aliases[value] = value.detach()
        return self._aliases[value]

    def _storages(self, values: Any) -> set[int]:
        return {storage_of(tensor) for tensor in tensors_of(values)}

    def calls(self) -> Iterator[Call]:
        """Yield the kernels of forward and backward."""
        for done in (*self.forward, *self.backward):
            yield from done.calls

    def keep(self, tensor: Any) -> Any:
        """Note what forward keeps for backward, except parameters and buffers."""
        storage = storage_of(tensor)
        # what a block that is recomputed keeps during the backward is not kept from the forward
        if storage not in self.constants and not self.in_backward:
            self.saved.append((len(self.forward), tensor))
        return tensor

    def end(self, name: str, given: Any, out: Any) -> None:
        """Note that a module has returned, until when its caller holds what it was given."""
        self.ran.add(name)
        if not self.training:
            self.lifetimes.add(len(self.forward) - 1, given, ())
        if self.in_backward or not isinstance(out, torch.Tensor) or not out.requires_grad:
            return
        place = len(self.ends)
        self.ends.append(End(name=name, at=len(self.forward), out=out))

        def turn(gradient: Any) -> None:
            self.turns.append((len(self.backward), place))
            if self.keeps_backward:
                self.output_gradients.append((self._alias(gradient), out))

        out.register_hook(turn)


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles what a trace runs, and asking costs as much as an operation

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            known = self._recorder.known.scalar_of(args[0])
            if known is not None:
                return known
        return self._recorder.run(func, args, kwargs or {})


@contextmanager
def recording(module: Any, recorder: Recorder) -> Iterator[None]:
    """Record what runs inside, with the ends of the module's children."""
    names = {
        child: name
        for name, child in module.named_modules()
        if name and not isinstance(child, torch.jit.ScriptModule)  # takes no hooks
    }
    with ExitStack() as stack:
        for child in names:
            hook = child.register_forward_hook(
                lambda child, given, out: recorder.end(names[child], given, out)
            )
            stack.callback(hook.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
        stack.enter_context(_functions_open())
        stack.enter_context(_Operations(recorder))
        yield


@contextmanager
def _functions_open() -> Iterator[None]:
    """Let modes see what functions of ``torch.nn.functional`` call, rather than those functions whole.

    Such a function hands itself to a mode, which then runs it with the mode off: attention and autocast
    inside of ``multi_head_attention_forward`` would go unseen.
    """
    functions = torch.nn.functional
    names = [name for name in vars(functions) if name.startswith("has_torch_function")]
    kept = {name: getattr(functions, name) for name in names}
    for name in names:
        setattr(functions, name, lambda *_: False)
    try:
        yield
    finally:
        for name in names:
            setattr(functions, name, kept[name])
