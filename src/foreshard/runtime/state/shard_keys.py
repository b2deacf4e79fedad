"""Names of everything that a rank can hold: the same on every rank, under every plan, and in a checkpoint."""

from __future__ import annotations

ParameterKey = tuple[int, str]
"""(layer, name) of a parameter, or of a slice of one (see `slices`)."""
TensorKey = tuple[str, int, str]
"""(kind, layer, name) of a tensor that moves.

Kinds: 'value' of a trained parameter, 'frozen' parameter, 'buffer', 'state' of the optimizer, whose name is
``PARAMETER/ENTRY``.
"""
ShardKey = tuple[str, int, str]
"""(kind, layer, name) of what is held or not held as one.

('frame', layer, '') stands for the buffers and frozen parameters of a layer, ('value', layer, name) for a
trained parameter or a slice of one, ('state', layer, name) for its optimizer state.
"""
Shards = frozenset[ShardKey]
"""What a rank holds, or should hold, at the step that training continues from."""
