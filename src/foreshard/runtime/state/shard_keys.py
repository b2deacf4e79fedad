"""What can be on one rank or another: parameters, pieces of what a rank holds, items that move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Key = tuple[int, str]
"""(layer, name) of a parameter."""
Item = tuple[str, int, str]
"""(kind, layer, name): 'value' of a trained parameter, 'frozen' one, 'buffer', 'state' of the optimizer.

The name is a parameter's or a slice's; of a state ``NAME/KEY``.
"""
Piece = tuple[str, int, str]
"""('frame', layer, ''): buffers and frozen parameters.

('value' or 'state', layer, name): of a trained parameter, or of a slice of one.
"""
Held = frozenset[Piece]
"""What a rank has, or is to have, at the step that training goes on from."""


def told(held: Held) -> list[list[Any]]:
    """Return pieces as JSON holds them."""
    return sorted(map(list, held))


def heard(data: Sequence[Sequence[Any]]) -> Held:
    """Return pieces from JSON."""
    return frozenset((str(kind), int(layer), str(name)) for kind, layer, name in data)
