"""How each operation works on parts: what its result is split along, or that it needs a tensor whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from foreshard.profile.tracing.attention import ATTENTION
from foreshard.profile.tracing.constants import place_of
from foreshard.profile.tracing.operations import storage_of, tensors_of
from foreshard.profile.tracing.recorder import Applied
from foreshard.profile.tracing.recurrent import CELL, RECURRENCE
from foreshard.profile.tracing.split_dims import SplitDim, UnsplitError, picked, viewed
from foreshard.profile.tracing.splitting import Held, Rule, Splitting, name_of

_FLOAT_BYTES = 4  # of a maximum or a sum over classes


def by_element(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    """Elements are made of elements at the same place: whatever torch calls pointwise."""
    if torch.Tag.pointwise not in step.func.tags and name_of(step.func) not in _LIKE:
        raise UnsplitError("it needs the tensor whole", _starts(run, step))
    made = tensors_of(step.out)
    read = tensors_of((*step.args, *step.kwargs.values()))
    return [run.join(read, made[0].dim())] * len(made)


def _starts(run: Splitting, step: Applied) -> frozenset[int]:
    splits = [run.split(tensor) for tensor in tensors_of((*step.args, *step.kwargs.values()))]
    return frozenset().union(*(split.starts for split in splits if split))


def _only(run: Splitting, step: Applied, at: int = 0) -> SplitDim:
    split = run.split(step.args[at])
    if split is None:
        raise UnsplitError("it needs the tensor whole", _starts(run, step))
    return split


def _before(split: SplitDim, dim: int) -> SplitDim:
    """Return the split of a tensor that an operation needs whole from a dimension on."""
    if split.dim >= dim:
        raise UnsplitError("it needs the tensor whole", split.starts)
    return split


def _dim(tensor: Any, dim: int) -> int:
    return int(dim % max(tensor.dim(), 1))


def _product(run: Splitting, step: Applied, left: Any, right: Any) -> Held:
    """Multiply (..., m, k) by (..., k, n): split along m, n or what both have before, or summed over k."""
    a, b, rank = run.split(left), run.split(right), left.dim()
    if a is None and b is None:
        b = run.start(right, rank - 1)
        if b is None:
            return None
    inner = (rank - 1, rank - 2)  # of k, in left and right
    if a is not None and a.dim == inner[0]:
        if b is None:
            run.give(right, replace(a, dim=inner[1]))
        elif b.dim != inner[1] or b.outer != a.outer:
            raise UnsplitError("two splits that differ meet", a.starts | b.starts)
        return run.unsummed(a.starts | (b.starts if b else frozenset()))
    if b is not None and b.dim == inner[1]:
        if a is not None:
            raise UnsplitError("two splits that differ meet", a.starts | b.starts)
        run.give(left, replace(b, dim=inner[0]))
        return run.unsummed(b.starts)
    if a is not None and a.dim < rank - 2:
        if b is None:
            run.give(right, a)
        elif (b.dim, b.outer) != (a.dim, a.outer):
            raise UnsplitError("two splits that differ meet", a.starts | b.starts)
        return a
    if a is not None and b is not None:
        raise UnsplitError("two splits that differ meet", a.starts | b.starts)
    if b is not None and b.dim < rank - 2:
        run.give(left, b)
    return a or b


def _mm(run: Splitting, step: Applied) -> Held:
    return _product(run, step, step.args[0], step.args[1])


def _addmm(run: Splitting, step: Applied) -> Held:
    added, left, right = step.args[:3]
    made = _product(run, step, left, right)
    if isinstance(made, SplitDim) and added.dim() and run.split(added) is None:
        dim = made.dim - step.out.dim() + added.dim()
        if dim >= 0 and added.shape[dim] > 1:
            run.give(added, replace(made, dim=dim))
    return made


def _embedding(run: Splitting, step: Applied) -> Held:
    table, index = step.args[:2]
    split = run.split(table)
    sparse = len(step.args) > 4 and step.args[4]  # gradients of the rows that were read, in no order
    if split is None and run.split(index) is None and not run.fixed(index) and not sparse:
        split = run.start(table, 0)
    if split is None:
        return None
    if split.dim == 1:
        return replace(split, dim=step.out.dim() - 1)
    run.lookups[place_of(index), table.shape[0]] = split
    return run.unsummed(split.starts)


def _embedding_backward(run: Splitting, step: Applied) -> Held:
    gradient, index, rows = step.args[:3]
    split = run.split(gradient)
    if split is None:
        return run.lookups.get((place_of(index), rows))
    if split.dim != gradient.dim() - 1:
        raise UnsplitError("it needs the tensor whole", split.starts)
    return replace(split, dim=1)


def _view(run: Splitting, step: Applied) -> Held:
    return viewed(_only(run, step), step.args[0].shape, step.out.shape, run.degree)


def _expand(run: Splitting, step: Applied) -> Held:
    split = _only(run, step)
    return replace(split, dim=split.dim + step.out.dim() - step.args[0].dim())


def _transpose(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    pair = [_dim(tensor, dim) for dim in step.args[1:3]] or [0, 1]
    if split.dim in pair:
        return replace(split, dim=pair[1 - pair.index(split.dim)])
    return split


def _permute(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    return replace(split, dim=[_dim(tensor, dim) for dim in step.args[1]].index(split.dim))


def _unsqueeze(run: Splitting, step: Applied) -> Held:
    split = _only(run, step)
    return replace(split, dim=split.dim + (step.args[1] % step.out.dim() <= split.dim))


def _squeeze(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    dims = step.args[1] if len(step.args) > 1 else range(tensor.dim())
    dims = (dims,) if isinstance(dims, int) else dims
    gone = {_dim(tensor, dim) for dim in dims if tensor.shape[_dim(tensor, dim)] == 1}
    return replace(split, dim=split.dim - sum(dim < split.dim for dim in gone))


def _select(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    dim = _dim(tensor, step.args[1])
    if dim == split.dim:
        picked(
            split, tensor.shape[dim], step.args[2] % tensor.shape[dim], step.args[2] % tensor.shape[dim] + 1
        )
        raise UnsplitError("a slice cuts across ranks", split.starts)
    return replace(split, dim=split.dim - (dim < split.dim))


def _slice(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    given: list[Any] = [*step.args[1:], *(0, None, None, 1)[len(step.args) - 1 :]]
    dim, lo, hi, by = given
    if _dim(tensor, dim) != split.dim:
        return split
    length = tensor.shape[split.dim]
    if by != 1:
        raise UnsplitError("a slice with steps cuts across ranks", split.starts)
    lo, hi, _ = slice(lo, hi).indices(length)
    return picked(split, length, lo, hi)


def _pieces(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    """Split, or cut into pieces of stated sizes."""
    split, tensor, made = _only(run, step), step.args[0], tensors_of(step.out)
    dim = _dim(tensor, step.args[2] if len(step.args) > 2 else step.kwargs.get("dim", 0))
    if dim != split.dim:
        return [split] * len(made)
    ends = [0]
    for piece in made:
        ends.append(ends[-1] + piece.shape[dim])
    return [picked(split, tensor.shape[dim], lo, hi) for lo, hi in pairwise(ends)]


def _unbind(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    split, tensor = _only(run, step), step.args[0]
    dim = _dim(tensor, step.args[1] if len(step.args) > 1 else 0)
    if dim == split.dim:
        picked(split, tensor.shape[dim], 0, 1)
        raise UnsplitError("a slice cuts across ranks", split.starts)
    return [replace(split, dim=split.dim - (dim < split.dim))] * len(tensors_of(step.out))


def _cat(run: Splitting, step: Applied) -> Held:
    parts = list(step.args[0])
    dim = _dim(step.out, step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0))
    splits = [run.split(tensor) for tensor in parts]
    known = next(split for split in splits if split)
    if known.dim != dim:
        return run.join(parts, step.out.dim())
    blocks = [tensor.shape[dim] // known.outer for tensor in parts]
    alike = all(split and (split.dim, split.size) == (dim, known.size) for split in splits)
    if not alike or len(set(blocks)) > 1:
        raise UnsplitError("it joins tensors along the split", _starts(run, step))
    return replace(known, outer=sum(split.outer for split in splits if split))


def _stack(run: Splitting, step: Applied) -> Held:
    parts = list(step.args[0])
    split = run.join(parts, parts[0].dim())
    dim = (step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)) % step.out.dim()
    return replace(split, dim=split.dim + (dim <= split.dim))


def _select_backward(run: Splitting, step: Applied) -> Held:
    split, sizes, dim = _only(run, step), step.args[1], step.args[2]
    return replace(split, dim=split.dim + (dim % len(sizes) <= split.dim))


def _slice_backward(run: Splitting, step: Applied) -> Held:
    split, sizes, dim = _only(run, step), step.args[1], step.args[2] % len(step.args[1])
    if dim != split.dim:
        return split
    outer, rest = divmod(sizes[dim] * split.outer, step.args[0].shape[dim])
    if rest:
        raise UnsplitError("a slice cuts across ranks", split.starts)
    return replace(split, outer=outer)


def _reduce(run: Splitting, step: Applied) -> Held:
    """Sum, or take the mean, over dimensions."""
    split, tensor = _only(run, step), step.args[0]
    given = step.args[1] if len(step.args) > 1 else None
    dims = range(tensor.dim()) if not given and given != 0 else given
    dims = (dims,) if isinstance(dims, int) else dims
    gone = {_dim(tensor, dim) for dim in dims}
    if split.dim in gone:
        return run.unsummed(split.starts)
    kept = len(step.args) > 2 and step.args[2]
    return split if kept else replace(split, dim=split.dim - sum(dim < split.dim for dim in gone))


def _softmax(run: Splitting, step: Applied) -> Held:
    split, tensor = _only(run, step), step.args[0]
    if split.dim == _dim(tensor, step.args[1]):
        if name_of(step.func) != "_log_softmax":
            raise UnsplitError("it needs the tensor whole", split.starts)
        rows = tensor.numel() / tensor.shape[split.dim]
        run.add_sum(_FLOAT_BYTES * rows)  # the largest of all classes
        run.add_sum(_FLOAT_BYTES * rows)  # the sum of their exponentials
    return split


def _softmax_backward(run: Splitting, step: Applied) -> Held:
    split = run.join(step.args[:2], step.out.dim())
    if split.dim == _dim(step.out, step.args[2]) and name_of(step.func) != "_log_softmax_backward_data":
        raise UnsplitError("it needs the tensor whole", split.starts)
    return split  # the gradient of the classes' sum is that of the loss, which every rank has


def _nll(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    split, tensor = _only(run, step), step.args[0]
    if split.dim != (1 if tensor.dim() > 1 else 0):
        raise UnsplitError("it needs the tensor whole", split.starts)
    run.add_sum(_FLOAT_BYTES * tensor.numel() / tensor.shape[split.dim])  # of the class that is right
    return [None] * len(tensors_of(step.out))


def _nll_backward(run: Splitting, step: Applied) -> Held:
    return _only(run, step, 1)


def _norm(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    """Norms over the last dimensions: all dimensions before may be split."""
    split = _before(_only(run, step), step.args[0].dim() - len(step.args[1]))
    return [split] * len(tensors_of(step.out))


def _norm_backward(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    gradient, tensor, shape = step.args[:3]
    split = _before(run.join((gradient, tensor), tensor.dim()), tensor.dim() - len(shape))
    made = tensors_of(step.out)
    wanted = sum(map(bool, step.args[-1]))
    assert len(made) == wanted
    first = [split] if step.args[-1][0] else []
    return [*first, *(run.unsummed(split.starts) for _ in made[len(first) :])]


def _of_channels(run: Splitting, split: SplitDim, tensors: Sequence[Any]) -> None:
    """Split vectors of one number a channel."""
    for tensor in tensors:
        if tensor is not None and run.split(tensor) is None:
            run.give(tensor, replace(split, dim=0))


def _batch_norm(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    split = _only(run, step)
    if split.dim != 1:
        raise UnsplitError("it needs the tensor whole", split.starts)
    _of_channels(run, split, step.args[1:5])
    return [split, *[replace(split, dim=0)] * (len(tensors_of(step.out)) - 1)]


def _batch_norm_backward(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    split = run.join(step.args[:2], step.args[1].dim())
    if split.dim != 1:
        raise UnsplitError("it needs the tensor whole", split.starts)
    _of_channels(run, split, [value for value in step.args[2:7] if isinstance(value, torch.Tensor)])
    return [split if tensor.dim() > 1 else replace(split, dim=0) for tensor in tensors_of(step.out)]


def _convolution(run: Splitting, step: Applied) -> Held:
    data, weight, bias = step.args[:3]
    transposed, groups = step.args[6], step.args[8]
    a, b = run.split(data), run.split(weight)
    out, into = (1, 0) if transposed else (0, 1)
    if a is not None and a.dim != 1:
        raise UnsplitError("it needs the tensor whole", a.starts)
    if groups > 1:
        return _grouped(run, (a, b), weight, bias, groups)
    if a is None and b is None:
        b = run.start(weight, out)
    if a is None and b is None:
        return None
    if a is not None:
        if b is None:
            run.give(weight, replace(a, dim=into))
        elif (b.dim, b.outer) != (into, a.outer):
            raise UnsplitError("two splits that differ meet", a.starts | b.starts)
        return run.unsummed(a.starts)
    assert b is not None
    if b.dim != out:
        raise UnsplitError("it meets a tensor that is whole", b.starts)
    _of_channels(run, b, (bias,))
    return replace(b, dim=1)


def _grouped(
    run: Splitting, splits: tuple[SplitDim | None, SplitDim | None], weight: Any, bias: Any, groups: int
) -> Held:
    """Convolve each group by itself, of which every rank has as many."""
    a, b = splits
    if a is None:
        if b is not None:
            raise UnsplitError("it meets a tensor that is whole", b.starts)
        return None
    if groups % run.degree or a.outer > 1 or (groups % a.size and a.size % groups):
        raise UnsplitError(f"{groups} groups cut across ranks", a.starts)
    if b is None:
        run.give(weight, replace(a, dim=0, size=min(a.size, weight.shape[0])))
    _of_channels(run, a, (bias,))
    return a


def _convolution_backward(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    gradient, data, weight = step.args[:3]
    transposed, groups, mask = step.args[7], step.args[9], step.args[10]
    b, out = run.split(weight), 1 if transposed else 0
    if b is None:
        raise UnsplitError("it needs the tensor whole", _starts(run, step))
    rows = b.dim == out or groups > 1  # ranks have channels of the output
    if rows and run.split(gradient) is None:
        run.give(gradient, replace(b, dim=1))
    if (not rows or groups > 1) and run.split(data) is None:
        run.give(data, replace(b, dim=1))
    inputs: Held = run.unsummed(b.starts) if rows and groups == 1 else replace(b, dim=1)
    found = (inputs, b, replace(b, dim=0) if rows else None)
    return [state for state, wanted in zip(found, mask, strict=True) if wanted]


def _spatial(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    """Pool or resize the last two dimensions."""
    read = tensors_of((*step.args, *step.kwargs.values()))
    whole = [tensor for tensor in read if tensor.dim() == read[0].dim()]
    split = _before(run.join(whole, read[0].dim()), read[0].dim() - 2)
    return [split] * len(tensors_of(step.out))


def _attention(run: Splitting, step: Applied) -> Held | Sequence[Held]:
    """Attention as one kernel: heads, or what is before them, are split in all that it reads."""
    read = tensors_of(step.args)
    split = _before(run.join(read, read[0].dim()), read[0].dim() - 2)
    return [split] * len(tensors_of(step.out))


def _whole(run: Splitting, step: Applied) -> Held:
    raise UnsplitError("it needs the tensor whole", _starts(run, step))


def _blank(run: Splitting, step: Applied) -> Held:
    """Make a tensor of a stated shape, split as the one it is made after where that shape is its own."""
    split, shape = _only(run, step), step.args[0].shape
    alike = len(step.out.shape) > split.dim and step.out.shape[: split.dim + 1] == shape[: split.dim + 1]
    return split if alike else None


def _copy(run: Splitting, step: Applied) -> Held:
    split = run.join(step.args[:2], step.out.dim())
    run.copied[storage_of(step.out)] = split, tuple(step.out.shape)
    return split


def _strided(run: Splitting, step: Applied) -> Held:
    """Look at memory anew: split if all of it was written from a tensor that is."""
    split, shape = run.copied.get(storage_of(step.out), (None, ()))
    if split is None or prod(shape) != step.out.numel() or not step.out.is_contiguous():
        if run.split(step.args[0]) is not None:
            raise UnsplitError("it needs the tensor whole", _starts(run, step))
        return None
    return viewed(split, shape, step.out.shape, run.degree)


def _triangle(run: Splitting, step: Applied) -> Held:
    return _before(_only(run, step), step.out.dim() - 2)


_LIKE = frozenset(
    (
        *("_to_copy", "detach", "alias", "lift_fresh", "fill", "zero", "bernoulli"),
        *("native_dropout", "native_dropout_backward", "leaky_relu_backward", "elu_backward"),
        *("softplus_backward", "hardswish_backward", "hardsigmoid_backward"),
        *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
    )
)
"""By element, though torch does not call them pointwise."""
RULES: dict[str, Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "view": _view,
    "_unsafe_view": _view,
    "expand": _expand,
    "transpose": _transpose,
    "t": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _slice,
    "split": _pieces,
    "split_with_sizes": _pieces,
    "unsafe_split": _pieces,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "sum": _reduce,
    "mean": _reduce,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _spatial),
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward"), _spatial),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"), _spatial),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _spatial),
    "copy": _copy,
    "as_strided": _strided,
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"), _blank),
    ATTENTION: _attention,
    RECURRENCE: _whole,
    CELL: _whole,
}
