"""Finds the parts of a causal language model of transformers: what comes before its blocks, and after them.

Not the model's type but its structure decides. The model runs a few tokens with a probe in the place of each
block: they must be called one after the other, each with nothing but the output of the one before and what
depends on no parameter (masks, rotary embeddings); the scores must depend on the last one only. Then blocks
can lie on different ranks. The model's own code calls them there, see `hf_split`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError

_TOKENS = 4
_WORDS = 7  # tokens that are told apart
_Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of the parts of a model.

    `path` leads from the model to the module that holds the `blocks`. Of its other modules with parameters
    those in `before` make the first block's input, `words` among them, and those in `after` the head's.
    `fixed` have no parameters and serve all blocks. The stream has `channels`; in code around a block it is
    the first of a tuple if `in_tuple`.
    """

    path: tuple[str, ...]
    blocks: str
    words: str
    head: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    in_tuple: bool = False
    channels: int = 0

    def inner(self, model: nn.Module) -> Any:
        """Return the module that holds the blocks."""
        return model.get_submodule(".".join(self.path))


class BlockStub:
    """Stands in the place of a block in the model's own code, and gives its input back.

    It has the numbers and words that the block has as attributes: code around blocks chooses masks by them.
    """

    def __init__(self, block: nn.Module, in_tuple: bool, call: _Call | None = None):
        plain = {key: value for key, value in vars(block).items() if isinstance(value, str | int | float)}
        self.__dict__.update(plain)
        self.in_tuple, self.call = in_tuple, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the call in this place gives, or the stream as it came."""
        stream = args[0] if args else kwargs.pop("hidden_states")
        if self.call is not None:
            stream = self.call(stream, *args[1:], **kwargs)
        return (stream,) if self.in_tuple else stream


class HeadStub:
    """Stands in the place of the head: another call, and its own attributes (the type of its weight)."""

    def __init__(self, head: nn.Module, call: _Call):
        self.head, self.call = head, call

    def __call__(self, given: Tensor) -> Any:
        """Return what the call gives."""
        return self.call(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)


class Unused(nn.Module):
    """Stands in the place of a module whose result is not used: passes its input, or adds nothing to it."""

    def forward(self, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a stream as it is; for positions and masks a zero."""
        if isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3:
            return given
        return torch.zeros((), device=given.device if isinstance(given, Tensor) else None)


def around(
    model: nn.Module, parts: Parts, stubs: Sequence[Any], modules: Mapping[str, Any], head: Any = None
) -> tuple[nn.Module, nn.Module]:
    """Return the model, and in it the module with blocks, with others in the places of blocks and parts.

    No part of the model itself is changed or held: only the code and the configuration are the model's.
    """
    chain = [_shell(model)]
    for name in parts.path:
        chain.append(_shell(chain[-1]._modules[name]))
        chain[-2]._modules[name] = chain[-1]
    chain[0]._modules[parts.head] = head if head is not None else Unused()
    holding: Any = chain[-1]._modules
    holding[parts.blocks] = list(stubs)
    for name in (*parts.before, *parts.after, *parts.fixed):
        holding[name] = modules.get(name, Unused())
    return chain[0], chain[-1]


def parts_of(model: nn.Module) -> Parts:
    """Return the parts of a model that can be split; others are refused with the reason."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        raise _refused(
            f"a {type(model).__name__} that is no nn.Sequential", kind, "it is not of transformers"
        )
    reasons = []
    for in_tuple in (False, True):
        try:
            return _probed(model, replace(_found(model), in_tuple=in_tuple))
        except _Unlike as error:
            reasons.append(str(error))
    raise _refused(f"a model of type {kind}", kind, reasons[0])


class _Unlike(Exception):
    """The model is no plain stack of blocks."""


def _refused(what: str, kind: str | None, why: str) -> SpecError:
    return SpecError(
        f"{what} cannot be split by itself: {why}",
        key="model",
        value=kind,
        rule="It is a causal language model of transformers: an embedding, a stack of blocks and a head",
        fix="Return a list of layers or an nn.Sequential from model()",
    )


def _found(model: Any) -> Parts:
    """Return where the blocks, the embedding of words and the head are."""
    number = getattr(model.config, "num_hidden_layers", None)
    lists = [
        name for name, part in model.named_modules() if type(part) is nn.ModuleList and len(part) == number
    ]
    lists = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(lists) != 1:
        raise _Unlike(f"it has {len(lists)} lists of {number} blocks")
    *path, blocks = lists[0].split(".")
    scores = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = [name for name, part in model.named_children() if part is scores and scores is not None]
    embedding = model.get_input_embeddings()
    words = [name for name, part in model.get_submodule(".".join(path)).named_children() if part is embedding]
    if not (path and heads and words):
        raise _Unlike("it has no head, or no embedding beside its blocks")
    outer = [model, *(model.get_submodule(".".join(path[:n])) for n in range(1, len(path)))]
    for at, (part, name) in enumerate(zip(outer, path, strict=True)):
        allowed = {name, heads[0]} if at == 0 else {name}
        odd = [n for n, p in part._modules.items() if n not in allowed and p is not None and _has_state(p)]
        if odd:
            raise _Unlike(f"it has other parts: {', '.join(sorted(odd))}")
    for part in (*outer, model.get_submodule(".".join(path))):
        own = [name for name, value in (part._parameters | part._buffers).items() if value is not None]
        if own:
            raise _Unlike(f"{type(part).__name__} has {', '.join(own)}")
    return Parts(path=tuple(path), blocks=blocks, words=words[0], head=heads[0])


def _has_state(part: nn.Module) -> bool:
    return any(True for _ in (*part.parameters(), *part.buffers()))


class _Probe:
    """Notes what blocks are called with, and what modules made before the first."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []
        self.given: list[list[Tensor]] = []
        self.made: list[Tensor] = []
        self.early, self.late = set[str](), set[str]()

    def called(self, stream: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(stream, Tensor) or stream.dim() != 3:
            raise _Unlike("its blocks do not take a tensor of (samples, tokens, channels)")
        if self.seen and stream is not self.seen[-1][1]:
            raise _Unlike("a block takes something else than what the one before it gives")
        self.given.append([t for value in (*args, *kwargs.values()) for t in _checked(value)])
        self.seen.append((stream, torch.zeros_like(stream, requires_grad=True)))
        return self.seen[-1][1]

    def hook(self, name: str) -> _Call:
        """Return a hook that notes when a module is called, and marks what it makes before the blocks."""

        def noted(module: nn.Module, args: Any, output: Any) -> Any:
            (self.late if self.seen else self.early).add(name)
            if self.seen or not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            self.made.append(output.detach().requires_grad_())
            return self.made[-1]

        return noted


def _checked(value: Any) -> list[Tensor]:
    """Return the tensors of an argument; raise for what may pass from block to block or has a gradient."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise _Unlike("its blocks share something that depends on parameters")
        return [value]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in _checked(each)]
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    if not plain and type(value).__name__ != "BlockMask":
        raise _Unlike(f"its blocks share a {type(value).__name__}")
    return []


def _probed(model: Any, parts: Parts) -> Parts:
    inner = parts.inner(model)
    others = {n: _with_values(p) for n, p in inner._modules.items() if n != parts.blocks and p is not None}
    scorer = _with_values(getattr(model, parts.head))
    holding = {n: p for n, p in others.items() if any(True for _ in p.parameters())}
    fixed = tuple(n for n, p in others.items() if n not in holding and not isinstance(p, nn.Dropout))
    drops = tuple(n for n, p in others.items() if n not in holding and n not in fixed)
    parts = replace(parts, before=(*holding, *drops), fixed=fixed)
    own: list[nn.Module] = list(getattr(inner, parts.blocks))
    ids = tokens(holding[parts.words], (2, _TOKENS))
    calls = []
    for padded in (False, True):
        probe = _Probe()
        stubs = [BlockStub(block, parts.in_tuple, probe.called) for block in own]
        whole, _ = around(model, parts, stubs, others, scorer)
        handles = [part.register_forward_hook(probe.hook(name)) for name, part in holding.items()]
        try:
            scores = _run(whole, ids, padded).logits
        finally:
            for handle in handles:
                handle.remove()
        _check_flow(probe, scores, len(own), holding)
        again = _Probe()
        stubs = [BlockStub(block, parts.in_tuple, again.called) for block in own]
        _, alone = around(model, parts, stubs, {name: others[name] for name in fixed})
        _run(alone, probe.seen[0][0].detach(), padded)
        if not _are_alike(probe.given, again.given):
            raise _Unlike("its blocks need the tokens")
        calls.append(probe)
    if calls[0].early != calls[1].early or calls[0].late != calls[1].late:
        raise _Unlike("a mask changes which parts it uses")
    before = tuple(name for name in holding if name in calls[0].early)
    after = tuple(name for name in holding if name not in before)
    channels = calls[0].seen[0][0].shape[-1]
    return replace(parts, before=(*before, *drops), after=after, channels=channels)


def _are_alike(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return [len(each) for each in one] == [len(each) for each in other] and all(
        all(map(torch.equal, mine, theirs)) for mine, theirs in zip(one, other, strict=True)
    )


def tokens(words: nn.Module, shape: tuple[int, int]) -> Tensor:
    """Return ids that an embedding knows, where its weights are."""
    weight = next(words.parameters())
    ids = torch.arange(shape[0] * shape[1], device=weight.device).reshape(shape)
    return ids % min(_WORDS, weight.shape[0])


def _with_values(part: nn.Module) -> nn.Module:
    """Return a part itself, or of one without values (on the meta device) a copy whose tensors are constant.

    Which parts depend on which does not depend on the values. One value stands for a whole tensor.
    """
    if not any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
        return part
    made = copy.deepcopy(part)
    for module in made.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    value = torch.ones((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return made


def _run(model: nn.Module, given: Tensor, padded: bool) -> Any:
    """Run a model on ids, or on a stream instead."""
    mask = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device) if padded else None
    if mask is not None:
        mask[0, -1] = 0
    stream = {"inputs_embeds": given} if given.is_floating_point() else {"input_ids": given}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return model(**stream, attention_mask=mask, use_cache=False)
    except _Unlike:
        raise
    except Exception as error:  # of code that nobody here knows: whatever it is, the model cannot be split
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise _Unlike(f"its code cannot do with other blocks ({said[:120]})") from error


def _check_flow(probe: _Probe, scores: Tensor, number: int, holding: Mapping[str, nn.Module]) -> None:
    if len(probe.seen) != number:
        raise _Unlike(f"{len(probe.seen)} of its {number} blocks are called")
    unused = sorted(set(holding) - probe.early - probe.late)
    if unused or probe.early & probe.late:
        odd = ", ".join(unused or sorted(probe.early & probe.late))
        raise _Unlike(f"it has other parts: {odd}")
    stream, outputs = probe.seen[0][0], [output for _, output in probe.seen]
    earlier = [value for value in (*probe.made, stream, *outputs[:-1]) if value.requires_grad]
    with torch.enable_grad():
        found = torch.autograd.grad(scores.float().sum(), [outputs[-1], *earlier], allow_unused=True)
    if found[0] is None or any(grad is not None for grad in found[1:]):
        raise _Unlike("its scores depend on more than the last block")


def _shell(part: Any) -> Any:
    """Return a module with the same code and configuration, and a table of parts of its own."""
    shell = copy.copy(part)
    shell._modules = dict(part._modules)
    return shell
