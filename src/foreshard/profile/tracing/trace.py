"""A torch module traced at two numbers of samples, and cut into a chain of layers."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.profile.tracing.attention import FusedAttention
from foreshard.profile.tracing.autocast import Autocast, regions_of_cuda
from foreshard.profile.tracing.dropout import FusedDropout
from foreshard.profile.tracing.operations import Call, channels_last, is_channels_last, storage_of
from foreshard.profile.tracing.rank_part import RankPart, all_of, part_of
from foreshard.profile.tracing.recorder import End, Recorder, recording
from foreshard.profile.tracing.recurrent import FusedRecurrence
from foreshard.spec.traced_module import Growth, Operation, TracedLayer, TracedModule, TracedPart
from foreshard.units import number_of

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
SAMPLES = (2, 3)
"""Sizes of the two traces; batch statistics need more than one sample."""
_RULE = "A module is traced on the meta device: no branch on values, no real device"
_ALIKE = (
    "Any number of samples runs the same operations: no loop or branch over samples, nothing kept of a call"
)
_BATCHED = "Write loops over samples as one operation, keep no tensors between calls, or profile it as a job"
_WAY_OUT = "Write it with fixed shapes and without branches on values, or profile it as a job"
Loss = Callable[[Any], Any]


@dataclass(slots=True, kw_only=True)
class _Run:
    """One trace: what was recorded, and where the chain is cut, as places among the recorded ends."""

    recorder: Recorder
    cuts: list[End]
    places: list[int]


def trace_module(
    module: Any,
    inputs: Any,
    *,
    loss: Loss | None = None,
    precision: str = "bf16",
    autocast: bool = False,
    degrees: Sequence[int] = (),
    training: bool = True,
    name: str = "",
    where: str = "module",
) -> TracedModule:
    """Return a module as a chain of layers with their operations.

    Parameters
    ----------
    module : torch.nn.Module
        On any device; a copy without values is traced.
    inputs : tensor, or tuple or dict of tensors
        Example inputs; the first dimension of every tensor counts the samples.
    loss : callable, optional
        Makes a scalar of what the module returns; by default the sum of its floating tensors.
    precision : {'fp32', 'tf32', 'fp16', 'bf16'}
        Of activations and products. In 16 bit the optimizer keeps values in 32 bit.
    autocast : bool
        In 16 bit the module stays in 32 bit and each operation is cast as automatic mixed precision does;
        otherwise the whole module is in 16 bit.
    degrees : sequence of int
        Numbers of ranks, above 1, that may compute each layer together; those by which nothing can be split
        have no part in what is returned.
    training : bool
        Without it the module runs forward alone, in evaluation and with all parameters frozen: one layer.
    name, where : str
        Of the module, and where it comes from, for messages.

    Raises
    ------
    SpecError
        If the module cannot run without values (it branches on data or needs a real device), or runs other
        operations for another number of samples.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        rule, fix = "A scripted module hides what it runs", "Give the module itself, before torch.jit.script"
        raise SpecError("the module is TorchScript", file=where, key="model", rule=rule, fix=fix)
    if precision not in DTYPES:
        rule = f"A module is traced in one of {', '.join(DTYPES)}"
        raise SpecError(f"no trace in {precision}", key="--dtype", value=precision, rule=rule, fix="Use one")
    narrow = DTYPES[precision]
    mixed = autocast and narrow is not torch.float32
    casts: set[torch.dtype] = set()
    options: dict[str, Any] = {"loss": loss, "where": where, "casts": casts, "keeps_backward": bool(degrees)}
    traced = partial(_runs, module, inputs, training=training, **options)
    try:
        meta, runs = traced(kept=torch.float32, whole=narrow) if mixed else traced(kept=narrow)
    except SpecError:
        if mixed or not casts:
            raise
    if casts and not mixed:  # its values stay in 32 bit, and its own regions of autocast say what does not
        _check_casts(casts, precision, where)
        mixed = True
        meta, runs = traced(kept=torch.float32)
    whole = [all_of(run.recorder) for run in runs]
    parts = {degree: _part(meta, runs, degree) for degree in degrees}
    return TracedModule(
        name=name or type(module).__name__,
        layers=_layers(meta, runs, whole),
        precision=precision,
        source=where,
        tied=_tied(meta, runs[0], whole[0]),
        casts_weights=training and not mixed,
        weight_bytes=4 if training or mixed else narrow.itemsize,
        reads_images=any(
            isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() >= 4
            for one in tree_leaves(inputs)
        ),
        assumptions=tuple(_assumptions(meta, runs[0], loss)),
        parts=parts,
    )


def _part(module: Any, runs: Sequence[_Run], degree: int) -> TracedPart:
    """Return a rank's part of the chain where so many ranks compute each layer together."""
    weights = {storage_of(tensor): (name, tensor) for name, tensor in module.named_parameters()}
    kept = [tensor for _, tensor in weights.values()] + list(module.buffers())
    parts = [part_of(run.recorder, kept, degree) for run in runs]
    one = parts[0].splitting
    assert one is not None
    assert all(part.splitting is not None and part.splitting.splits == one.splits for part in parts)
    return TracedPart(
        layers=_layers(module, runs, parts),
        tied=_tied(module, runs[0], parts[0]),
        split=tuple(name for storage, (name, _) in weights.items() if storage in one.splits),
        whole={weights[storage][0]: why for storage, why in one.whole.items() if storage not in one.splits},
    )


def _runs(
    module: Any,
    inputs: Any,
    *,
    training: bool,
    where: str,
    kept: torch.dtype,
    whole: torch.dtype | None = None,
    **options: Any,
) -> tuple[Any, list[_Run]]:
    """Trace a copy whose values are in `kept`, all of it within autocast to `whole`; options of `_run`."""
    try:
        meta = _without_values(module, kept).train(training)
        if not training:
            meta.requires_grad_(False)
    except Exception as error:
        raise _untraced(error, where) from error

    def run(samples: int) -> _Run:
        return _run(meta, _inputs(inputs, samples, kept), where=where, whole=whole, **options)

    runs = [run(samples) for samples in SAMPLES]
    if _compares_samples(*runs):
        runs.append(run(SAMPLES[-1] + 1))
    for more in runs[1:]:
        _check_alike(runs[0], more, where)
    return meta, runs


def _check_alike(few: _Run, more: _Run, where: str) -> None:
    """Raise SpecError where another number of samples runs other operations."""
    passes = [(run.recorder.forward, run.recorder.backward) for run in (few, more)]
    for kind, one, other in zip(("forward", "backward"), *passes, strict=True):
        made = [
            [(at, call.name) for at, done in enumerate(run) for call in done.calls] for run in (one, other)
        ]
        if len(one) != len(other) or made[0] != made[1]:
            raise _unlike(few, kind, made, where)
    if few.places != more.places:
        raise _unlike(few, "forward", [[], []], where)


def _unlike(few: _Run, kind: str, made: Sequence[Sequence[tuple[int, str]]], where: str) -> SpecError:
    """Return the error for operations, as (place, name), that part by name, or else by their views."""
    names = [[name for _, name in run] for run in made]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*names, strict=False)))
    found = [next(iter(run[same:]), "nothing more") for run in names]
    what = f"{SAMPLES[0]} and {SAMPLES[1]} samples run different operations"
    if found[0] != found[1]:
        place = made[0][same][0] if same < len(made[0]) else len(few.recorder.forward)
        before = [end.name for end in few.recorder.ends if end.at <= place]
        after = f" after {before[-1]!r}" if kind == "forward" and before else ""
        what += f": {found[0]} and {found[1]} in the {kind}{after}"
    return SpecError(what, file=where, key="model", rule=_ALIKE, fix=_BATCHED)


def _check_casts(dtypes: set[torch.dtype], precision: str, where: str) -> None:
    """Raise SpecError where a module's own regions of autocast compute in other than what was asked."""
    names = sorted(name for name, dtype in DTYPES.items() if dtype in dtypes)
    if dtypes != {DTYPES[precision]}:
        what = f"the module's torch.autocast computes in {' and '.join(names)}"
        rule = "A module with regions of autocast is traced in the one precision that they cast to"
        fix = f"Use --dtype {names[0]}" if len(names) == 1 else "Give all regions the same dtype"
        raise SpecError(what, file=where, key="--dtype", value=precision, rule=rule, fix=fix)


def _assumptions(module: Any, run: _Run, loss: Loss | None) -> Iterator[str]:
    if not module.training:
        yield "forward alone, in evaluation: no loss, no backward, no update"
    elif loss is None:
        yield "loss: the sum of all outputs"
    if run.recorder.known.finite:
        yield "values are finite where the module asks"
    if run.recorder.sparse:
        yield "sparse gradients are summed and applied as dense ones"
    synced = sum(isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules())
    if synced:
        yield (
            f"{number_of(synced, 'norm')} over all replicas (SyncBatchNorm), priced as those of one: "
            "their sums between devices are not timed"
        )


def _compares_samples(few: _Run, more: _Run) -> bool:
    """Return whether two sizes of one tensor or operation grow with samples: it grows with their square."""
    shapes = zip(few.recorder.shapes, more.recorder.shapes, strict=False)
    calls = zip(few.recorder.calls(), more.recorder.calls(), strict=False)
    sizes = ((one.sizes, other.sizes) for one, other in calls)
    return any(
        sum(a != b for a, b in zip(one, other, strict=False)) > 1 for one, other in chain(shapes, sizes)
    )


def _without_values(module: Any, dtype: Any) -> Any:
    """Return a copy on the meta device, floating parameters in a precision."""
    with torch.no_grad():
        memo = {id(tensor): _meta(tensor, dtype) for tensor in (*module.parameters(), *module.buffers())}
        return copy.deepcopy(module, memo)


def _meta(tensor: Any, dtype: Any) -> Any:
    """Return a tensor without values, a floating one in a precision; complex ones have no narrow kind."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    blank = torch.empty_like(tensor, device="meta", dtype=kept)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(blank, requires_grad=tensor.requires_grad)
    return blank


def _inputs(inputs: Any, samples: int, dtype: Any) -> Any:
    """Return inputs on the meta device with so many samples."""

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kept = dtype if value.is_floating_point() else value.dtype
        blank = torch.empty((samples, *value.shape[1:]), dtype=kept, device="meta")
        return channels_last(blank) if is_channels_last([value]) else blank

    return tree_map(made, inputs)


def _run(
    module: Any,
    inputs: Any,
    *,
    loss: Loss | None,
    where: str,
    casts: set[torch.dtype],
    whole: torch.dtype | None,
    keeps_backward: bool,
) -> _Run:
    constants = frozenset(storage_of(tensor) for tensor in (*module.parameters(), *module.buffers()))
    last = is_channels_last(module.parameters())
    recorder = Recorder(constants, last, keeps_backward, module.training)
    fused = FusedAttention(recorder.note), FusedRecurrence(recorder.note), FusedDropout()
    modes = (*fused, Autocast(casts))
    try:
        with (
            torch.device("meta"),
            recording(module, recorder),
            regions_of_cuda(modes),
            torch.compiler.set_stance("force_eager"),
            ExitStack() as stack,
        ):
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(torch.set_grad_enabled(module.training))
            with torch.autocast("cuda", whole) if whole else nullcontext():
                out = _called(module, inputs)
                score = (loss or _total)(out) if module.training else None
            recorder.in_backward = True
            if score is not None:
                score.backward()
        trained = (parameter for parameter in module.parameters() if parameter.grad is not None)
        recorder.gradients = {storage_of(parameter): parameter.grad for parameter in trained}
    except SpecError:
        raise
    except Exception as error:
        raise _untraced(error, where) from error
    finally:
        module.zero_grad(set_to_none=True)
    places = _cuts(recorder, {storage_of(p) for p in module.parameters() if p.requires_grad})
    return _Run(recorder=recorder, cuts=[recorder.ends[i] for i in places], places=places)


def _untraced(error: Exception, where: str) -> SpecError:
    message = str(error).partition("\n")[0][:200]
    what = f"the module does not run without values: {type(error).__name__}: {message}{_line_of(error)}"
    said = f"{error}{_line_of(error)}"
    reasons = shipped("untraced.toml", "foreshard.profile.tracing")["reasons"]
    known = (reason for reason in reasons if any(words in said for words in reason["says"]))
    reason = next(known, {"rule": _RULE, "fix": _WAY_OUT})
    return SpecError(what, file=where, key="model", rule=reason["rule"], fix=reason["fix"])


def _line_of(error: Exception) -> str:
    """Return the last line of the user's code, or of a library besides torch, that an error came through."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _called(module: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def _total(out: Any) -> Any:
    """Return the sum of all floating tensors that a module returns."""
    values = out.values() if hasattr(out, "values") and not isinstance(out, torch.Tensor) else (out,)
    leaves = [t for t in tree_leaves(tuple(values)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        raise SpecError(
            "the module returns no tensor that depends on its parameters",
            key="model",
            rule="A module returns at least one tensor with a gradient",
            fix="Return it; a reentrant checkpoint cuts the gradient unless its inputs have one",
        )
    return sum(leaf.sum() for leaf in leaves)


def _cuts(recorder: Recorder, trained: set[int]) -> list[int]:
    """Return the ends where one tensor with a gradient leads on, each operation counted at most once.

    Tensors that do not depend on a trained parameter (masks, tables of positions) may lead on beside it:
    whoever needs them makes them again.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    grown = set(trained)
    for i, (reads, writes) in enumerate(zip(recorder.reads, recorder.writes, strict=True)):
        for storage in reads:
            last[storage] = i
        if reads & grown:
            grown |= writes
        for storage in writes:
            first.setdefault(storage, i)
    needed = {
        storage: (first[storage], last.get(storage, -1)) for storage in grown - trained if storage in first
    }
    alone = _alone_at(needed, len(recorder.reads))
    found: dict[int, int] = {}
    for place, end in enumerate(recorder.ends):
        if 0 < end.at < len(recorder.reads) and alone[end.at] == end.storage:
            found.setdefault(end.at, place)
    return list(found.values())


def _alone_at(needed: dict[int, tuple[int, int]], num_operations: int) -> list[int | None]:
    """Return the storage made before each operation and read by it or later, where it is the only one."""
    starts: list[list[int]] = [[] for _ in range(num_operations + 1)]
    stops: list[list[int]] = [[] for _ in range(num_operations + 1)]
    for storage, (first, last) in needed.items():
        if last > first:
            starts[first + 1].append(storage)
            stops[last + 1 if last + 1 <= num_operations else num_operations].append(storage)
    alive: set[int] = set()
    found = []
    for i in range(num_operations + 1):
        alive.difference_update(stops[i])
        alive.update(starts[i])
        found.append(next(iter(alive)) if len(alive) == 1 else None)
    return found


def _bounds(run: _Run) -> list[int]:
    return [0, *(end.at for end in run.cuts), len(run.recorder.forward)]


def _layer_at(bounds: Sequence[int], at: int) -> int:
    """Return the layer of an operation, by its place in the forward."""
    layer = 0
    while layer + 2 < len(bounds) and bounds[layer + 1] <= at:
        layer += 1
    return layer


def _layers_of_backward(run: _Run) -> list[int]:
    """Return the layer of each backward operation; it begins when the gradient of its output is there."""
    layer_of = {place: layer for layer, place in enumerate(run.places)}
    turns = sorted((at, layer_of[place]) for at, place in run.recorder.turns if place in layer_of)
    current, found = len(run.places), []
    for i in range(len(run.recorder.backward)):
        while turns and turns[0][0] <= i:
            current = min(current, turns.pop(0)[1])
        found.append(current)
    return found


def _by_layer(layers: Sequence[int], count: int, values: Iterable[tuple[int, Any]]) -> list[list[Any]]:
    """Return values, each given with its operation, by the layer of that operation."""
    found: list[list[Any]] = [[] for _ in range(count)]
    for at, value in values:
        found[layers[at]].append(value)
    return found


def _kept(run: _Run, part: RankPart) -> list[dict[int, float]]:
    """Return the bytes of each storage that a layer keeps for its backward, where it is first kept."""
    bounds, seen = _bounds(run), set()
    found: list[dict[int, float]] = [{} for _ in range(len(run.cuts) + 1)]
    for at, tensor in run.recorder.saved:
        storage = storage_of(tensor)
        if storage not in seen:
            seen.add(storage)
            size = tensor.untyped_storage().nbytes() * part.share(tensor)
            found[_layer_at(bounds, at)][storage] = size
    return found


def _saved(run: _Run, part: RankPart) -> list[float]:
    """Return the bytes that each layer keeps for its backward."""
    return [sum(storages.values()) for storages in _kept(run, part)]


def _beside(run: _Run, part: RankPart) -> list[float]:
    """Return what the backward of each layer holds at most beyond what it kept, on a rank its part of it.

    Of a forward that none follows, what it holds.
    """
    whole = _kept(run, all_of(run.recorder))
    recorder = run.recorder
    layers = _layers_of_backward(run) if recorder.training else [0] * len(recorder.forward)
    more = recorder.lifetimes.beside(layers, whole, recorder.gradients.values())
    held = sum(_saved(run, all_of(recorder)))
    share = sum(_saved(run, part)) / held if held else 1.0
    return [size * share for size in more]


def _layers(module: Any, runs: Sequence[_Run], parts: Sequence[RankPart]) -> tuple[TracedLayer, ...]:
    """Return the chain as a rank computes it, of which each run's part says what that is."""
    one, count = runs[0], len(runs[0].cuts) + 1
    bounds = _bounds(one)
    of_forward = [layer for layer, (lo, hi) in enumerate(pairwise(bounds)) for _ in range(lo, hi)]
    of_backward = _layers_of_backward(one)

    def by_layer(layers: Sequence[int], values: Iterable[Iterable[tuple[int, Any]]]) -> list[Any]:
        """Return the values of every run, by layer."""
        return list(zip(*(_by_layer(layers, count, each) for each in values), strict=True))

    forwards = by_layer(of_forward, (_numbered(part.forward) for part in parts))
    backwards = by_layer(of_backward, (_numbered(part.backward) for part in parts))
    sums_forward = by_layer(of_forward, (part.sums_forward for part in parts))
    sums_backward = by_layer(of_backward, (part.sums_backward for part in parts))
    saved = list(zip(*map(_saved, runs, parts), strict=True))
    beside = list(zip(*map(_beside, runs, parts), strict=True))
    sizes = [[end.num_bytes for end in run.cuts] + [0.0] for run in runs]
    trained, frozen, buffers, unsummed = _elements(module, one, parts[0])
    modules = _modules(module, one)
    return tuple(
        TracedLayer(
            name=(one.cuts[i].name if i < len(one.cuts) else "output"),
            forward=_operations(*forwards[i]),
            backward=_operations(*backwards[i]),
            parameters=trained[i],
            frozen=frozen[i],
            buffers=buffers[i],
            saved_bytes=_growth(*saved[i]),
            boundary_bytes=_growth(*(size[i] for size in sizes)),
            beside_bytes=_growth(*beside[i]),
            modules=tuple(modules[i]),
            sums_forward=tuple(_growth(*each) for each in zip(*sums_forward[i], strict=True)),
            sums_backward=tuple(_growth(*each) for each in zip(*sums_backward[i], strict=True)),
            unsummed=unsummed[i],
            splits_boundary=i < len(one.cuts) and parts[0].is_split(one.cuts[i].out),
        )
        for i in range(count)
    )


def _numbered(kernels: Sequence[Sequence[Call]]) -> Iterator[tuple[int, Call]]:
    """Yield the operation of each kernel, and the kernel."""
    return ((at, call) for at, calls in enumerate(kernels) for call in calls)


def _owners(module: Any, run: _Run) -> list[tuple[Any, list[int]]]:
    """Return each parameter and buffer with the layers that read it; the first layer for those unread."""
    bounds = _bounds(run)
    found = []
    for tensor in (*module.parameters(), *module.buffers()):
        uses = run.recorder.users.get(storage_of(tensor), [])
        found.append((tensor, sorted({_layer_at(bounds, at) for at in uses}) or [0]))
    return found


def _modules(module: Any, run: _Run) -> list[list[str]]:
    """Return the largest modules that hold the parameters of each layer, and of no other."""
    layers_of = {id(tensor): layers for tensor, layers in _owners(module, run)}
    found: list[list[str]] = [[] for _ in range(len(run.cuts) + 1)]
    inside: list[str] = []
    for name, child in module.named_modules():
        layers = {layer for parameter in child.parameters() for layer in layers_of[id(parameter)]}
        held = any(name.startswith(outer) for outer in inside)
        if name in run.recorder.ran and len(layers) == 1 and not held:
            found[layers.pop()].append(name)
            inside.append(f"{name}.")
    return found


def _elements(module: Any, run: _Run, part: RankPart) -> tuple[list[int], ...]:
    """Return the elements of each layer: trained, frozen, of buffers, of summands of gradients."""
    trained, frozen, buffers, unsummed = ([0] * (len(run.cuts) + 1) for _ in range(4))
    for tensor, layers in _owners(module, run):
        kind = trained if tensor.requires_grad else frozen
        for layer in layers:
            (kind if isinstance(tensor, torch.nn.Parameter) else buffers)[layer] += part.elements(tensor)
        unsummed[layers[0]] += part.is_unsummed(tensor) * tensor.numel()
    return trained, frozen, buffers, unsummed


def _tied(module: Any, run: _Run, part: RankPart) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple(
        (tuple(layers), part.elements(tensor))
        for tensor, layers in _owners(module, run)
        if len(layers) > 1 and tensor.requires_grad
    )


def _operations(*runs: Sequence[Call]) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            name=calls[0].name,
            kind=calls[0].kind,
            wide=calls[0].wide,
            sizes=tuple(map(_growth, *(call.sizes for call in calls))),
            bytes=_growth(*(call.bytes for call in calls)),
            flops=_growth(*(call.flops for call in calls)),
            issued=_growth(*(call.issued for call in calls)),
        )
        for calls in zip(*runs, strict=True)
    )


def _growth(few: float, more: float, most: float | None = None) -> Growth:
    """Return the line through a number at both traced sizes, or the parabola through a third."""
    a, b = SAMPLES
    each, square = (more - few) / (b - a), 0.0
    if most is not None:
        square = (most - more - each) / (b + 1 - a)
        each -= square * (a + b)
    return Growth(few - a * (each + a * square), each, square)
