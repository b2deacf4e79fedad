"""Records the operations of one forward and one backward, and where modules end in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foreshard.profile.tracing.constants import Constants
from foreshard.profile.tracing.operations import Call, calls_of, tensors_of
from foreshard.profile.tracing.repeats import Repeats


@dataclass(slots=True, kw_only=True)
class End:
    """A module that has returned one tensor.

    Attributes
    ----------
    at : int
        Forward operations before it.
    storage : int
        Of its output.
    """

    name: str
    at: int
    storage: int
    num_bytes: float


@dataclass(slots=True)
class Recorder:
    """What a forward and a backward did, in order.

    Attributes
    ----------
    constants : frozenset of int
        Storages of parameters and buffers.
    channels_last : bool
        Layout of the images.
    forward, backward : list of list of Call
        Kernels of each operation.
    reads, writes : list of set of int
        Storages of each forward operation.
    ends : list of End
    turns : list of (int, int)
        (backward operations before, place of the end) where the gradient of a module's output is complete.
    saved : list of (int, int, float)
        (forward operations before, storage, bytes) of what forward keeps for backward.
    users : dict of int to list of int
        Forward operations that read each parameter or buffer, by storage.
    shapes : list of tuple
        Of every tensor that forward operations make.
    known : Constants
        Values that do not follow from inputs or parameters.
    repeats : Repeats
        Operations seen before.
    ran : set of str
        Modules that were called.
    sparse : bool
        Whether a gradient is sparse.
    """

    constants: frozenset[int]
    channels_last: bool = False
    forward: list[list[Call]] = field(default_factory=list)
    backward: list[list[Call]] = field(default_factory=list)
    reads: list[set[int]] = field(default_factory=list)
    writes: list[set[int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int, float]] = field(default_factory=list)
    users: dict[int, list[int]] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    known: Constants = field(default_factory=Constants)
    repeats: Repeats = field(default_factory=Repeats)
    ran: set[str] = field(default_factory=set)
    sparse: bool = False
    in_backward: bool = False
    # tensors whose storages are compared must not be freed and their place taken by others
    _alive: list[Any] = field(default_factory=list)

    def note(self, call: Call, read: Any, made: Any) -> None:
        """Add an operation that torch does not know as one."""
        self._add([call], read, made)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add an operation as torch calls it, and return what it makes."""
        read = (*args, *kwargs.values())
        key = self.repeats.key(func, args, kwargs)
        again = self.repeats.again(key)
        if again is None:
            out = func(*args, **kwargs)
            calls = list(calls_of(func, read, out, channels_last=self.channels_last))
            self.repeats.add(key, read, out, calls)
        else:
            out, calls = again
        self._add(calls, read, out)
        if not self.in_backward:
            self.known.add(func, args, kwargs, out)
        return out

    def _add(self, calls: list[Call], read: Any, made: Any) -> None:
        if self.in_backward:
            self.backward.append(calls)
            self.sparse |= any(tensor.layout is torch.sparse_coo for tensor in tensors_of(made))
            return
        self.forward.append(calls)
        self.reads.append(self._storages(read))
        self.writes.append(self._storages(made))
        self.shapes += [tuple(tensor.shape) for tensor in tensors_of(made)]
        for storage in self.reads[-1] & self.constants:
            self.users.setdefault(storage, []).append(len(self.reads) - 1)

    def _storages(self, values: Any) -> set[int]:
        tensors = tensors_of(values)
        self._alive.extend(tensors)
        return {storage_of(tensor) for tensor in tensors}

    def calls(self) -> Iterator[Call]:
        """Yield the kernels of forward and backward."""
        for calls in (*self.forward, *self.backward):
            yield from calls

    def keep(self, tensor: Any) -> Any:
        """Note what forward keeps for backward, except parameters and buffers."""
        storage = storage_of(tensor)
        # what a block that is recomputed keeps during the backward is not kept from the forward
        if storage not in self.constants and not self.in_backward:
            self._alive.append(tensor)
            self.saved.append((len(self.forward), storage, float(tensor.untyped_storage().nbytes())))
        return tensor

    def end(self, name: str, out: Any) -> None:
        """Note that a module has returned."""
        self.ran.add(name)
        if self.in_backward or not isinstance(out, torch.Tensor) or not out.requires_grad:
            return
        place = len(self.ends)
        size = float(out.numel() * out.element_size())
        self.ends.append(End(name=name, at=len(self.forward), storage=storage_of(out), num_bytes=size))
        out.register_hook(lambda _: self.turns.append((len(self.backward), place)))


def storage_of(tensor: Any) -> int:
    """Return a number that tensors of the same memory share."""
    return int(tensor.untyped_storage()._cdata)


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
            hook = child.register_forward_hook(lambda child, _, out: recorder.end(names[child], out))
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
