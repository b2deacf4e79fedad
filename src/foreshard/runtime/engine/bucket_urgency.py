"""How urgent each bucket of gradients is, as a run states it; read without torch, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foreshard.errors import SpecError, unknown
from foreshard.spec.codec import Range, decode, parse_json, read_text

if TYPE_CHECKING:
    from foreshard.runtime.state.buckets import Bucket

KEY = "--bucket-order"
BACKWARD, FORWARD = "backward", "forward"
Urgency = Callable[["Bucket"], int]
"""Of a bucket: the lowest goes first, of equal ones the first to be complete in a backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrderFile:
    """What the file of an order holds: layers, the most urgent first; those left out come after them."""

    schema_version: Annotated[int, Range(1, 1)]
    layers: tuple[Annotated[int, Range(0)], ...]


def bucket_urgency(text: str) -> Urgency | None:
    """Return the urgency of buckets that a text means; None for the order of the backward.

    Parameters
    ----------
    text : str
        ``backward``, ``forward`` (what the next forward needs first), or the path of a `LayerOrderFile`.
    """
    if text == BACKWARD:
        return None
    if text == FORWARD:
        return lambda bucket: min(bucket.layers)
    if Path(text).suffix.lower() != ".json":
        rule = f"It is {BACKWARD}, {FORWARD}, or a file of layers that ends in .json"
        raise unknown("order", text, (BACKWARD, FORWARD), key=KEY, rule=rule)
    layers = decode(LayerOrderFile, parse_json(read_text(text), file=text), file=text).layers
    if len(set(layers)) < len(layers):
        twice = next(layer for at, layer in enumerate(layers) if layer in layers[:at])
        rule = "Each layer has one place in the order"
        raise SpecError(f"layer {twice} twice", file=text, key="layers", value=twice, rule=rule)
    place = {layer: at for at, layer in enumerate(layers)}
    return lambda bucket: min(place.get(layer, len(layers)) for layer in bucket.layers)
