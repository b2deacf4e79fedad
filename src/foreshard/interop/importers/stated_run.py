"""The run that a foreign configuration states, and how its values are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshard.errors import SpecError, did_you_mean

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRun:
    """A run as degrees and options."""

    # degrees and options by the names of `advise.request`; what the file leaves to model and cluster is not
    # in it
    choices: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # the file's key of a choice, which errors name
    num_blocks: int | None = None  # transformer blocks that the file states
    # blocks of each virtual stage in the order in which a sample passes them, where the file cuts them
    block_counts: tuple[int, ...] | None = None
    passes: int | None = None  # micro-batches of a step on each rank
    # copies of the sharded states among the ranks of dp x cp; 1 where all ranks share one
    shard_instances: int = 1
    num_devices: int | None = None  # devices that the file states
    unstated: tuple[str, ...] = ()  # options that files of this tool never state
    notes: tuple[str, ...] = ()  # what was assumed, and what the file sets that no plan states


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """A mapping of a configuration file whose values are checked as they are read.

    ``auto`` of transformers counts as absent: the trainer's arguments state it.
    """

    values: Mapping[str, Any]
    file: str
    path: str = ""

    def key(self, name: str) -> str:
        """Return the full name of a key."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """Return a value, None where it is absent, null or ``auto``."""
        value = self.values.get(name)
        return None if value in ("auto", "") else value

    def table(self, name: str) -> ConfigTable:
        """Return the mapping under a key, empty where it is absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.invalid(name, "Must be a table of keys and values")
        return ConfigTable(value, self.file, self.key(name))

    def whole(self, name: str, *, default: int | None = None, least: int = 1) -> int | None:
        """Return a whole number of at least `least`; numbers written as text count."""
        value = self.get(name)
        if value is None:
            return default
        try:
            number = int(value) if not isinstance(value, bool | float) else None
        except (TypeError, ValueError):
            number = None
        if number is None or number < least:
            raise self.invalid(name, f"Must be a whole number of at least {least}")
        return number

    def switch(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean; ``true`` and ``false`` as text count."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise self.invalid(name, "Must be true or false")

    def word(self, name: str, meanings: Mapping[str, Any], *, default: str) -> Any:
        """Return what a word means, in any case."""
        value = str(self.get(name) if self.get(name) is not None else default)
        known = {word.lower(): meaning for word, meaning in meanings.items()}
        if value.lower() not in known:
            raise self.invalid(name, f"Must be one of {', '.join(meanings)}", did_you_mean(value, meanings))
        return known[value.lower()]

    def unlike(self, defaults: Mapping[str, Any]) -> list[str]:
        """Return the full names of keys whose values are stated and not these defaults."""
        return [
            self.key(name)
            for name, usual in defaults.items()
            if self.get(name) is not None and _same_kind(self.get(name), usual) != usual
        ]

    def invalid(self, name: str, rule: str, fix: str | None = None) -> SpecError:
        """Return the error of a value, to be raised."""
        value = self.values.get(name)
        what, fix = f"{value!r:.80} is not valid", fix or "Correct it in the file"
        return SpecError(what, file=self.file, key=self.key(name), value=value, rule=rule, fix=fix)

    def cannot(self, name: str, what: str) -> SpecError:
        """Return the error of a setting that no plan expresses, to be raised."""
        return inexpressible(what, file=self.file, key=self.key(name), value=self.values.get(name))


def inexpressible(what: str, *, file: str, key: str, value: Any) -> SpecError:
    """Return the error of a setting that no plan expresses."""
    rule = "A plan states degrees, batch, precision, recompute, sharding, offload and overlap"
    fix = "Predict the run without it, and say so beside the answer"
    return SpecError(f"no plan expresses {what}", file=file, key=key, value=value, rule=rule, fix=fix)


def unread(*found: str) -> tuple[str, ...]:
    """Return the note on keys that change time or memory and no plan states."""
    return (f"Not predicted: {', '.join(found)}.",) if found else ()


def _same_kind(value: Any, usual: Any) -> Any:
    """Return a value as the kind of its default: numbers and switches may be written as text.

    Without a default, what is false or empty states nothing, nor does a table whose switch is off.
    """
    if usual is None:
        on = value.get("enabled", any(value.values())) if isinstance(value, Mapping) else value
        return value if on and str(on).lower() != "false" else None
    if isinstance(value, str) and isinstance(usual, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(value, str) and isinstance(usual, str):
        return value.lower()
    if isinstance(value, str) and isinstance(usual, int | float):
        try:
            return float(value)
        except ValueError:
            return value
    return value
