"""The file of a profile, as far as costs are fitted to it: seconds and bytes of every layer, and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from foreshard.predict.measured.costs import TiedLayers, check_tied
from foreshard.spec.codec import Range, Size, invalid, load_written
from foreshard.spec.plan import Precision

Number = Annotated[float, Range(0.0)]
Seconds = Annotated[tuple[Number, ...], Size(2, 2)]
"""Processor time, wall time."""
Passes = Annotated[tuple[tuple[Seconds, ...], ...], Size(1)]
"""[pass][layer]"""
_FIX = "Run foreshard profile again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the seconds depend on besides the layers."""

    job: str
    layers: Annotated[int, Range(1)]
    device: str
    processor: str
    accelerator: str
    precision: Precision = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTimes:
    """Passes with so many samples, and how many of them are of each round; bytes are by layer."""

    saved_bytes: tuple[Number, ...]
    boundary_bytes: tuple[Number, ...]
    forward: Passes
    backward: Passes
    backward_input: Passes
    rounds: tuple[Annotated[int, Range(1)], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Parameters of a layer, trained and frozen ones."""

    parameter_bytes: Number
    frozen_bytes: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUpdate:
    """A layer's part of the optimizer."""

    state_bytes: Number
    seconds: Annotated[tuple[Seconds, ...], Size(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedBytes:
    """What ranks sum in a pass, by layer."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedParts:
    """A rank's part of the layers; passes by number of samples."""

    sums: SummedBytes
    passes: Annotated[Mapping[str, SizeTimes], Size(1)]
    bytes: tuple[LayerBytes, ...]
    optimizer: tuple[LayerUpdate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLink:
    """Seconds of a message between ranks, or of a sum over them."""

    ranks: Annotated[tuple[int, ...], Size(2)]
    apart: bool
    bytes: Annotated[float, Range(1.0)]
    seconds: Annotated[tuple[Number, ...], Size(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLinks:
    """Links between the ranks at hand."""

    launch_s: Number
    messages: tuple[TimedLink, ...]
    sums: tuple[TimedLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """The whole file; passes by number of samples."""

    kind: Literal["profile"]
    schema_version: Literal[1]
    complete: Literal[True]
    date: str
    fingerprint: Fingerprint
    tokens_per_sample: Annotated[float, Range(1e-9)]
    passes: Annotated[Mapping[str, SizeTimes], Size(1)]
    bytes: tuple[LayerBytes, ...]
    optimizer: tuple[LayerUpdate, ...]
    tensor: Mapping[str, TimedParts] = field(default_factory=dict)
    links: TimedLinks | None = None
    tied: tuple[TiedLayers, ...] = ()


def load_profile(path: str) -> dict[str, Any]:
    """Return a profile that is complete, as its file holds it."""
    file, data = load_written(ProfileFile, path, key="--profile", fix=_FIX)
    count = file.fingerprint.layers
    check_tied(file.tied, count, path, _FIX)
    timed_layers: dict[str, ProfileFile | TimedParts] = {"": file}
    timed_layers |= {f"tensor.{degree}.": part for degree, part in file.tensor.items()}
    for where, timed in timed_layers.items():
        for size in timed.passes:
            if not (size.isascii() and size.isdecimal() and int(size)):
                rule = "Passes are by numbers of samples"
                raise invalid(size, rule, key=f"{where}passes", fix=_FIX, file=path)
        for key, layers in _by_layer(timed):
            if len(layers) != count:
                rule = f"It is a list for {count} layers"
                raise invalid(len(layers), rule, key=where + key, fix=_FIX, file=path)
        for size, times in timed.passes.items():
            _check_counts(times, f"{where}passes.{size}.", path)
    found: dict[str, Any] = data
    return found


def _check_counts(times: SizeTimes, where: str, path: str) -> None:
    """Raise where backwards are not as many as forwards, or rounds are of other passes than there are.

    Backwards to the inputs alone are timed by themselves, fewer times.
    """
    count = len(times.forward)
    if len(times.backward) != count:
        rule = f"It has the {count} passes of {where}forward"
        raise invalid(len(times.backward), rule, key=f"{where}backward", fix=_FIX, file=path)
    if times.rounds and sum(times.rounds) != count:
        rule = f"They sum to the {count} passes of {where}forward"
        raise invalid(list(times.rounds), rule, key=f"{where}rounds", fix=_FIX, file=path)


def _by_layer(timed: ProfileFile | TimedParts) -> Iterator[tuple[str, Sized]]:
    """Yield every list that has an entry for each layer, with its key."""
    for size, times in timed.passes.items():
        yield f"passes.{size}.saved_bytes", times.saved_bytes
        yield f"passes.{size}.boundary_bytes", times.boundary_bytes
        for phase in ("forward", "backward", "backward_input"):
            for i, layers in enumerate(getattr(times, phase)):
                yield f"passes.{size}.{phase}[{i}]", layers
    yield from (("bytes", timed.bytes), ("optimizer", timed.optimizer))
    if isinstance(timed, TimedParts):
        yield from (("sums.forward", timed.sums.forward), ("sums.backward", timed.sums.backward))
