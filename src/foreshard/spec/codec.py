"""Decode untrusted TOML and JSON into frozen dataclasses, with errors that name file, key, rule and fix.

One generic decoder over dataclass type hints. Written by hand rather than with pydantic: these files are
small, pydantic costs 0.09 s of import on a command that must end within 0.6 s, and its messages would have
to be rewritten anyway.

Field types understood: ``bool int float str None``, ``Literal``, unions with None, ``tuple[X, ...]``,
``tuple[X, Y]``, ``list[X]``, ``Mapping[str, X]``, nested dataclasses, and ``Annotated`` with markers:

- ``Unit("bytes_per_s")``: the value is a string with a unit, read by `foreshard.units.parse`;
- ``Range(low, high)``: inclusive limits of a number;
- ``Size(low, high)``: inclusive limits of the length of a string or sequence.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from foreshard import units
from foreshard.errors import SpecError

T = TypeVar("T")

# A cluster or plan of a million devices is far smaller; more is a wrong file.
MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks a float that the file writes as a string with a unit."""

    dimension: str


@dataclass(frozen=True, slots=True)
class Range:
    """Marks the inclusive limits of a number."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Size:
    """Marks the inclusive limits of a length."""

    low: int = 0
    high: float = math.inf


def read_text(path: str | Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a UTF-8 file, or say why it cannot be read."""
    name = str(path)
    rule = f"Input is a UTF-8 text file of at most {units.format_bytes(max_bytes)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"cannot read the file: {why}", file=name, rule=rule, fix="Check the path") from None
    if len(data) > max_bytes:
        raise SpecError("the file is too large", file=name, rule=rule, fix="Pass a smaller file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"byte {error.start} is not UTF-8", file=name, rule=rule, fix="Save the file as UTF-8"
        ) from None


def parse_toml(text: str, *, file: str | None = None) -> dict[str, Any]:
    """Return the tables of a TOML text, of which there is one, or a SpecError with line and column."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SpecError(
            f"not valid TOML: {_clip(why)}",
            file=file,
            rule="The file must be TOML 1.0",
            fix="Correct that place",
        ) from None
    if not tables:
        raise _empty(file)
    return tables


def _empty(file: str | None) -> SpecError:
    return SpecError(
        "the file is empty",
        file=file,
        rule="A file says something",
        fix="Write it as 'foreshard schema' says",
    )


def parse_json(text: str, *, file: str | None = None) -> Any:
    """Return the value of a JSON text; no text, NaN, infinities and repeated keys are errors."""
    if not text.strip():
        raise _empty(file)
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SpecError(
            f"not valid JSON: {_clip(why)}",
            file=file,
            rule="The file must be JSON (RFC 8259)",
            fix="Correct that place",
        ) from None


def load_json(path: str | Path, *, key: str, fix: str) -> Any:
    """Return the value of a JSON file that a program has written.

    Parameters
    ----------
    path : str or Path
    key : str
        The option that names the file.
    fix : str
        Which program writes such files.

    Raises
    ------
    SpecError
    """
    try:
        return parse_json(read_text(path), file=str(path))
    except SpecError as error:
        error.key, error.fix = key, fix
        raise


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_clip(key)!r} appears twice in one object")
        found[key] = value
    return found


def decode(cls: type[T], data: Any, *, file: str | None = None, key: str = "") -> T:
    """Return plain TOML or JSON data as an instance of a dataclass.

    Parameters
    ----------
    cls : dataclass type
        Its fields, types, markers and defaults are the schema; unknown keys are errors.
    data : Any
        What `parse_toml` or `parse_json` returned.
    file : str, optional
        Name used in errors.
    key : str, optional
        Dotted key of `data` inside the file, used in errors.

    Raises
    ------
    SpecError
        With file, exact dotted key, value, rule and fix.
    """
    return _Decoder(file).value(cls, data, key)


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _number(limit: float) -> str:
    """Write a limit as a file would: whole numbers in full, up to where nobody counts digits."""
    return str(int(limit)) if abs(limit) < 10**9 and limit == int(limit) else f"{limit:g}"


def _clip(value: Any, chars: int = 80) -> str:
    """Show a value of unknown size in a message."""
    text = value if isinstance(value, str) else f"a {type(value).__name__}"
    if isinstance(value, bool | NoneType):
        text = json.dumps(value)
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**30):
        text = repr(value)
    return text if len(text) <= chars else text[: chars - 3] + "..."


class _Decoder:
    """Walks a type and a value together; holds the file name for errors."""

    def __init__(self, file: str | None):
        self.file = file

    def error(self, what: str, key: str, value: Any, rule: str, fix: str) -> SpecError:
        return SpecError(what, file=self.file, key=key or None, value=_clip(value), rule=rule, fix=fix)

    def wrong(self, key: str, value: Any, expected: str) -> SpecError:
        said = repr(_clip(value)) if isinstance(value, str) else _clip(value)
        return self.error(f"{said} is not {expected}", key, value, f"This must be {expected}", "Correct it")

    def value(self, kind: Any, data: Any, key: str) -> Any:
        """Return data as an instance of a type."""
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.marked(args[0], args[1:], data, key)
        if origin in (Union, UnionType):
            return self.union(args, data, key)
        if origin is Literal:
            return self.choice(args, data, key)
        if is_dataclass(kind):
            return self.table(kind, data, key)
        if origin in (tuple, list, Sequence):
            return self.sequence(origin, args, data, key)
        if origin in (dict, Mapping):
            return self.mapping(args[0], args[1], data, key)
        return data if kind is Any else self.scalar(kind, data, key)

    def marked(self, kind: Any, markers: tuple[Any, ...], data: Any, key: str) -> Any:
        unit = next((marker for marker in markers if isinstance(marker, Unit)), None)
        if unit is not None and data is None and NoneType in get_args(kind):
            return None
        found: Any = self.quantity(unit.dimension, data, key) if unit else self.value(kind, data, key)
        for marker in markers:
            if (
                isinstance(marker, Range)
                and isinstance(found, int | float)
                and not marker.low <= found <= marker.high
            ):
                limits = f"a number from {_number(marker.low)} to {_number(marker.high)}"
                limits += f" {unit.dimension.replace('_per_', '/')}" if unit else ""
                raise self.wrong(key, data, limits)
            if isinstance(marker, Size) and found is not None and not marker.low <= len(found) <= marker.high:
                raise self.wrong(key, data, f"of a length from {marker.low} to {marker.high:g}")
        return found

    def quantity(self, dimension: str, data: Any, key: str) -> float:
        try:
            return units.parse(data, dimension)
        except SpecError as error:
            raise self.error(error.what, key, data, error.rule or "", error.fix or "") from None

    def union(self, kinds: tuple[Any, ...], data: Any, key: str) -> Any:
        """Take None if allowed, else the one member whose outer shape fits, else the last member's error."""
        if data is None and NoneType in kinds:
            return None
        members = [kind for kind in kinds if kind is not NoneType]
        problems = []
        for kind in members:
            try:
                return self.value(kind, data, key)
            except SpecError as error:
                problems.append(error)
        raise max(problems, key=lambda error: len(error.key or ""))

    def choice(self, choices: tuple[Any, ...], data: Any, key: str) -> Any:
        if not any(type(data) is type(one) and data == one for one in choices):
            near = get_close_matches(data, choices, n=1) if isinstance(data, str) and len(data) < 100 else []
            listed = ", ".join(str(one) for one in choices)
            fix = f"Did you mean '{near[0]}'?" if near else "Use one of them"
            raise self.error(f"unknown value {_clip(data)!r}", key, data, f"Known values are {listed}", fix)
        return data

    def scalar(self, kind: Any, data: Any, key: str) -> Any:
        if kind is float and type(data) in (int, float):
            try:
                number = float(data)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
            raise self.wrong(key, data, "a finite number")
        if type(data) is kind:  # exact: a bool is no int
            return data
        names = {
            int: "an integer",
            float: "a number",
            str: "a string",
            bool: "true or false",
            NoneType: "null",
        }
        raise self.wrong(key, data, names.get(kind, getattr(kind, "__name__", str(kind))))

    def sequence(self, origin: Any, args: tuple[Any, ...], data: Any, key: str) -> Any:
        if not isinstance(data, list | tuple):
            raise self.wrong(key, data, "a list")
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if len(data) != len(args):
                raise self.error(
                    f"a list of {len(data)} is not a list of {len(args)}",
                    key,
                    data,
                    f"This must be a list of {len(args)}",
                    "Correct it",
                )
            return tuple(
                self.value(kind, one, f"{key}[{i}]")
                for i, (kind, one) in enumerate(zip(args, data, strict=True))
            )
        if args[0] is int and all(type(one) is int for one in data):  # rank lists are long
            return list(data) if origin is list else tuple(data)
        made = (self.value(args[0], one, f"{key}[{i}]") for i, one in enumerate(data))
        return list(made) if origin is list else tuple(made)

    def mapping(self, name_kind: Any, kind: Any, data: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(data, dict):
            raise self.wrong(key, data, "a table")
        inside = {self.value(name_kind, name, _join(key, name)): (name, one) for name, one in data.items()}
        return {name: self.value(kind, one, _join(key, shown)) for name, (shown, one) in inside.items()}

    def table(self, cls: Any, data: Any, key: str) -> Any:
        if not isinstance(data, dict):
            raise self.wrong(key, data, "a table")
        known = {field.name: field for field in fields(cls) if field.init}
        for name in data:
            if name not in known:
                raise self.unknown(name, list(known), key)
        hints, made = _hints(cls), {}
        for name, field in known.items():
            if name in data:
                made[name] = self.value(hints[name], data[name], _join(key, name))
            elif field.default is MISSING and field.default_factory is MISSING:
                raise self.error(
                    f"'{name}' is missing", _join(key, name), None, "This key is required", "Add it"
                )
        return cls(**made)

    def unknown(self, name: str, known: list[str], key: str) -> SpecError:
        near = get_close_matches(name[:100], known, n=1)
        fix = f"Did you mean '{near[0]}'?" if near else f"Known keys are {', '.join(known)}"
        return self.error(
            f"unknown key '{_clip(name)}'", _join(key, _clip(name)), name, "Unknown keys are errors", fix
        )


def _join(key: str, name: str) -> str:
    return f"{key}.{_clip(name)}" if key else _clip(name)
