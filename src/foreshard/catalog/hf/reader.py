"""Typed access to a Hugging Face ``config.json``: every bad key becomes a `SpecError` that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foreshard.catalog.model_dims import MAX_LAYERS
from foreshard.errors import SpecError

MAX_SIZE = 2**24  # widths, vocabularies, experts: above every published model by a wide margin
MAX_POSITIONS = 2**31  # a 32-bit index; published contexts end at 10 million

_ABSENT = object()


class Reader:
    """One configuration with the file it came from; null counts as absent, as in transformers."""

    __slots__ = ("assumptions", "config", "file", "name")

    def __init__(self, config: Mapping[str, Any], name: str, file: str | None):
        self.config, self.name, self.file = config, name, file
        self.assumptions: list[str] = []

    def error(self, key: str, value: Any, what: str, rule: str, fix: str | None = None) -> SpecError:
        """Return the error for one key."""
        return SpecError(what, file=self.file or self.name, key=key, value=value, rule=rule, fix=fix)

    def _find(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        if default is _ABSENT:
            spelled = " or ".join(keys)
            rule = f"This model_type needs {spelled}"
            if keys[0] == "model_type":
                rule = "A config.json of Hugging Face states its model_type"
            raise self.error(keys[0], None, f"missing key {keys[0]!r}", rule, f"Add {keys[0]}")
        return keys[0], default

    def _checked(self, key: str, value: Any, good: bool, what: str, rule: str) -> None:
        if not good:
            raise self.error(key, _short(value), f"{_short(value)} {what}", rule)

    def size(self, *keys: str, default: Any = _ABSENT, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return a whole number under the first of these keys that is present."""
        key, value = self._find(keys, default)
        self._checked(key, value, type(value) is int, "is not a whole number", "Sizes are integers")
        rule = f"{key} is between {minimum} and {maximum}"
        self._checked(key, value, minimum <= value <= maximum, "is out of range", rule)
        return int(value)

    def uniform_size(self, *keys: str) -> int:
        """Return a size that the file may also list for each layer, the same for all."""
        key, value = self._find(keys, _ABSENT)
        if not isinstance(value, list) or not value:
            return self.size(*keys)
        self._checked(
            key, value, value.count(value[0]) == len(value), "differ", f"{key} is one for all layers"
        )
        return Reader({key: value[0]}, self.name, self.file).size(key)

    def layers(self, *keys: str, **kwargs: Any) -> int:
        """Return a number of layers."""
        return self.size(*keys, maximum=MAX_LAYERS, **kwargs)

    def positions(self, *keys: str, default: int | None = None) -> int:
        """Return a sequence length; a default is recorded as an assumption."""
        length = self.size(*keys, default=_ABSENT if default is None else default, maximum=MAX_POSITIONS)
        if all(self.config.get(key) is None for key in keys):
            self.assumptions.append(f"{keys[0]} not stated: {length}")
        return length

    def value(self, reading: Any) -> Any:
        """Return a constant as it is, or what ``{ flag | fraction | size | layers = KEYS, ... }`` reads."""
        if not isinstance(reading, Mapping):
            return reading
        (kind, keys), *options = reading.items()
        return getattr(self, kind)(*keys, **dict(options))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        _, value = self._find((key,), default)
        self._checked(key, value, isinstance(value, bool), "is not true or false", "A switch is a boolean")
        return bool(value)

    def fraction(self, *keys: str, default: float = 0.0) -> float:
        """Return a number in [0, 1)."""
        key, value = self._find(keys, default)
        good = type(value) in (int, float) and 0 <= value < 1
        self._checked(key, value, good, "is not a rate", f"{key} is in [0, 1)")
        return float(value)

    def number(self, *keys: str, default: float) -> float:
        """Return a finite number."""
        key, value = self._find(keys, default)
        good = type(value) in (int, float) and math.isfinite(value)
        self._checked(key, value, good, "is not a number", f"{key} is a finite number")
        return float(value)

    def text(self, *keys: str, default: Any = _ABSENT) -> str:
        """Return a string."""
        key, value = self._find(keys, default)
        self._checked(key, value, isinstance(value, str), "is not a string", f"{key} is a name")
        return str(value)

    def spells_gelu(self, key: str, default: str) -> str:
        """Return the formula of GELU, where transformers has no kernel for the activation.

        Source
        ------
        transformers activations.py NewGELUActivation, FastGELUActivation.
        """
        value = self._find((key,), default)[1]
        return value if value in ("gelu_new", "gelu_fast") else ""

    def is_relu(self, key: str, default: str) -> bool:
        """Return whether the activation is ReLU."""
        return bool(self._find((key,), default)[1] == "relu")

    def list(self, key: str) -> list[Any] | None:
        """Return a list, or None when absent."""
        value: list[Any] | None = self.config.get(key)
        good = value is None or isinstance(value, list)
        self._checked(key, value, good, "is not a list", f"{key} is a list")
        return value

    def nested(self, key: str) -> Reader:
        """Return a reader of an object under `key` (an empty one when absent)."""
        _, value = self._find((key,), {})
        self._checked(key, value, isinstance(value, Mapping), "is not an object", f"{key} is an object")
        return Reader(value, self.name, self.file)

    def with_defaults(self, **defaults: int) -> Reader:
        """Return the reader with what the configuration leaves to transformers, each noted."""
        left_out = {key: value for key, value in defaults.items() if self.config.get(key) is None}
        stated = Reader({**self.config, **left_out}, self.name, self.file)
        stated.assumptions = [*self.assumptions, *(f"{key} not stated: {n}" for key, n in left_out.items())]
        return stated

    def heads(self, hidden: int, *keys: str) -> int:
        """Return a number of heads that divides the hidden size."""
        heads = self.size(*keys)
        if hidden % heads:
            rule = f"The hidden size {hidden} is a multiple of the heads unless head_dim is given"
            raise self.error(keys[0], heads, f"{heads} heads", rule)
        return heads

    def kv_heads(self, heads: int, *keys: str, default: int | None = None) -> int:
        """Return a number of key/value heads that divides the query heads."""
        kv_heads = self.size(*keys, default=default or heads)
        if heads % kv_heads:
            raise self.error(
                keys[0], kv_heads, f"{kv_heads} key/value heads", f"They divide the {heads} heads"
            )
        return kv_heads

    def layer_windows(self, num_layers: int, window: int) -> Sequence[int] | None:
        """Return the attention window of each layer as `layer_types` says, None where the file has none."""
        types = self.list("layer_types")
        if types is None:
            return None
        if len(types) != num_layers or any(not isinstance(entry, str) for entry in types):
            rule = f"layer_types names the attention of each of the {num_layers} layers"
            raise self.error("layer_types", _short(types), f"{len(types)} entries", rule)
        for entry in sorted(set(types) - {"full_attention", "sliding_attention"}):
            rule = "Modelled are full_attention and sliding_attention"
            self._checked("layer_types", entry, False, "is not modelled", rule)
        return [window * (entry == "sliding_attention") for entry in types]


def _short(value: Any) -> str:
    """Return the value as text, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
