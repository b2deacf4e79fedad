"""Decode untrusted TOML and JSON into frozen dataclasses, with errors that name file, key, rule and fix.

One generic decoder over dataclass type hints. Written by hand rather than with pydantic: these files are
small, pydantic costs 0.09 s of import on a command that must end within 0.6 s, and its messages would have
to be rewritten anyway.

Field types understood: ``bool int float str None``, ``Literal``, unions with None, ``tuple[X, ...]``,
``tuple[X, Y]``, ``list[X]``, ``Mapping[str, X]``, nested dataclasses, and ``Annotated`` with markers:

- ``Unit("bytes_per_s")``: the value is a string with a unit, read by `foreshard.units.parse`;
- ``Range(low, high)``: inclusive limits of a number;
- ``Size(low, high)``: inclusive limits of the length of a string or sequence;
- ``Grammar(read)``: the value has a notation of its own, which a function reads.

`whole` and `one_of` check single values, of flags and of Python callers, with the same errors.
"""

from __future__ import annotations

import json
import math
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from foreshard import quantity, units
from foreshard.errors import SpecError, unknown
from foreshard.words import hint, spelled

T = TypeVar("T")

# A cluster or plan of a million devices is far smaller; more is a wrong file.
MAX_FILE_BYTES = 64 * 2**20
# Longer values are cut in messages.
_MAX_CHARS = 64
_MAX_WHY = 80  # of what a parser says
_SEE_SCHEMA = "See 'foreshard schema'"


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


@dataclass(frozen=True, slots=True)
class Grammar:
    """Marks a value that a function reads: called as ``read(value, key=..., file=...)``, it may raise."""

    read: Callable[..., Any]


def shown(value: Any) -> str:
    """Return a value as an error message quotes it: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no repr
        return f"a very long {type(value).__name__}"


def _quoted(value: Any) -> Any:
    """Return a value as the error object carries it: the value itself where JSON can hold it in a line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    if isinstance(value, bool) or value is None or (isinstance(value, int) and abs(value) < 10**18):
        return value
    return shown(value)


def invalid(
    value: Any, rule: str, *, key: str, name: str = "", fix: str | None = None, file: str | None = None
) -> SpecError:
    """Return the error of a value that breaks a rule, to be raised."""
    text = json.dumps(value) if file and (value is None or isinstance(value, bool)) else shown(value)
    what = f"{text} is not a valid {name}" if name else f"{text} is not valid"
    return SpecError(what, file=file, key=key or None, value=_quoted(value), rule=rule, fix=fix)


def whole(
    value: Any, low: int = 1, high: int = 2**31, *, key: str, name: str = "", file: str | None = None
) -> int:
    """Return the value if it is a whole number in a range; True and 2.0 are not."""
    if type(value) is int and low <= value <= high:
        return value
    rule = f"Must be {low}" if low == high else f"Must be a whole number from {low} to {high}"
    raise invalid(value, rule, key=key, name=name, file=file)


def check_amount(key: str, value: Any, *, zero: bool = False, optional: bool = True) -> None:
    """Refuse what is no finite number above 0, or at least 0 with `zero`.

    None stands for not asked where the amount is `optional`.
    """
    if value is None and optional:
        return
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 <= value < 1e30 or (value == 0 and not zero):
        rule = f"Must be a finite number {'of at least' if zero else 'above'} 0"
        raise invalid(value, rule, key=key, name=key.strip("-"), fix="Leave it out, or give a number")


def one_of(
    value: Any,
    known: Sequence[Any],
    *,
    key: str,
    name: str = "",
    file: str | None = None,
    exact: bool = False,
) -> Any:
    """Return the known value that this one is, of words in any spelling unless `exact`.

    The error has the nearest word as its fix.
    """
    value = value if exact else spelled(value, known)
    if any(type(value) is type(word) and value == word for word in known):
        return value
    words = [word for word in known if isinstance(word, str)]
    fix = hint(value[:_MAX_CHARS], words) if isinstance(value, str) else None
    listed = ", ".join(map(str, known))
    rule = f"Must be one of {listed}" if len(known) > 1 else f"Must be {listed}"
    raise invalid(value, rule, key=key, name=name, fix=fix, file=file)


def read_text(path: str | Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a UTF-8 file, or say why it cannot be read."""
    name = str(path)
    rule = f"Input is a UTF-8 text file of at most {quantity.size(max_bytes)}"
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


def parse_toml(text: str, *, file: str | None = None, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the keys of a TOML text, at least one unless it may be empty; errors say line and column."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        what = f"not valid TOML: {why:.{_MAX_WHY}}"
        raise SpecError(what, file=file, rule="The file must be TOML 1.0", fix="Correct that place") from None
    if not tables and not may_be_empty:
        raise _empty(file)
    return tables


def _empty(file: str | None) -> SpecError:
    return SpecError("the file is empty", file=file, rule="A file holds at least one key", fix=_SEE_SCHEMA)


def parse_json(text: str, *, file: str | None = None) -> Any:
    """Return the value of a JSON text; empty texts, NaN, infinities and repeated keys are errors."""
    if not text.strip():
        raise _empty(file)
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        what = f"not valid JSON: {why:.{_MAX_WHY}}"
        fix = "Correct that place, or check for a truncated file"
        raise SpecError(what, file=file, rule="The file must be JSON (RFC 8259)", fix=fix) from None


def load_written(cls: type[T], path: str | Path, *, key: str, fix: str) -> tuple[T, Any]:
    """Return a JSON file that a program has written, as an instance of a dataclass and as it is.

    Keys that the dataclass lacks are left alone: a later release may write more. `key` is the option that
    names the file, `fix` says which program writes such files.
    """
    try:
        data = parse_json(read_text(path), file=str(path))
        return _Decoder(str(path), strict=False).value(cls, data, ""), data
    except SpecError as error:
        error.key, error.fix = error.key or key, fix
        raise


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:_MAX_CHARS]!r} appears twice in one object")
        found[key] = value
    return found


def decode(cls: type[T], data: Any, *, file: str | None = None, key: str = "") -> T:
    """Return plain TOML or JSON data as an instance of a dataclass.

    Fields, types, markers and defaults of the dataclass are the schema; unknown keys are errors. `key` is the
    dotted key of `data` inside the file.
    """
    return _Decoder(file).value(cls, data, key)


def plain(value: Any) -> Any:
    """Return what JSON holds of a value: dataclasses and mappings as objects, tuples as lists."""
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _number(limit: float) -> str:
    """Write a limit as a file would: whole numbers below a million million in full."""
    return str(int(limit)) if abs(limit) < 10**12 and limit == int(limit) else f"{limit:g}"


def _limits(low: float, high: float) -> str:
    """Write an inclusive range, of which an end may be open."""
    if math.isinf(high):
        return f"of at least {_number(low)}"
    return f"from {_number(low)} to {_number(high)}"


def _length(size: Size, what: str) -> str:
    """Write what a text or a list must be, of an inclusive range of its length."""
    if size.low == 1 and math.isinf(size.high):
        return f"a {what} that is not empty"
    return f"a {what} of a length {_limits(size.low, size.high)}"


_SCALARS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    NoneType: "null",
}


class _Decoder:
    """Walks a type and a value together; `strict`: unknown keys are errors, which name the file."""

    def __init__(self, file: str | None, *, strict: bool = True):
        self.file, self.strict = file, strict

    def wrong(self, key: str, value: Any, expected: str) -> SpecError:
        return invalid(value, f"Must be {expected}", key=key, fix=_SEE_SCHEMA, file=self.file)

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
        for marker in markers:
            if isinstance(marker, Grammar):
                return marker.read(data, key=key, file=self.file)
        unit = next((marker for marker in markers if isinstance(marker, Unit)), None)
        found: Any = self.quantity(unit.dimension, data, key) if unit else self.value(kind, data, key)
        for marker in markers:
            if isinstance(marker, Range) and not marker.low <= found <= marker.high:
                expected = f"{_SCALARS[kind]} {_limits(marker.low, marker.high)}"
                expected += f" {unit.dimension.replace('_per_', '/')}" if unit else ""
                raise self.wrong(key, data, expected)
            if isinstance(marker, Size) and not marker.low <= len(found) <= marker.high:
                raise self.wrong(key, data, _length(marker, "text" if kind is str else "list"))
        return found

    def quantity(self, dimension: str, data: Any, key: str) -> float:
        try:
            return units.parse(data, dimension)
        except SpecError as error:
            error.file, error.key, error.value = self.file, key or None, _quoted(data)
            raise

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
        try:
            return one_of(data, choices, key=key, file=self.file, exact=True)
        except SpecError as error:
            error.fix = error.fix or _SEE_SCHEMA
            raise

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
        raise self.wrong(key, data, _SCALARS.get(kind, getattr(kind, "__name__", str(kind))))

    def sequence(self, origin: Any, args: tuple[Any, ...], data: Any, key: str) -> Any:
        if not isinstance(data, list | tuple):
            raise self.wrong(key, data, "a list")
        kinds: Sequence[Any] = args
        if origin is not tuple or args[1:] == (Ellipsis,):
            if _all_plain(args[0], data):
                return list(data) if origin is list else tuple(data)
            kinds = args[:1] * len(data)
        if len(data) != len(kinds):
            raise self.wrong(key, data, f"a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, data, strict=True))
        made = (self.value(kind, item, f"{key}[{i}]") for i, (kind, item) in pairs)
        return list(made) if origin is list else tuple(made)

    def mapping(self, name_kind: Any, kind: Any, data: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(data, dict):
            raise self.wrong(key, data, "a table (in JSON an object)")
        known = get_args(name_kind) if get_origin(name_kind) is Literal else None
        for name in data:
            if known is not None and name not in known:
                raise self.unknown(name, known, key)
        names = {name: self.value(name_kind, name, _join(key, name)) for name in data}
        return {names[name]: self.value(kind, item, _join(key, name)) for name, item in data.items()}

    def table(self, cls: Any, data: Any, key: str) -> Any:
        if not isinstance(data, dict):
            raise self.wrong(key, data, "a table (in JSON an object)")
        known = {field.name: field for field in fields(cls) if field.init}
        for name in data:
            if name not in known and self.strict:
                raise self.unknown(name, tuple(known), key)
        hints, made = _hints(cls), {}
        for name, field in known.items():
            if name in data:
                made[name] = self.value(hints[name], data[name], _join(key, name))
            elif field.default is MISSING and field.default_factory is MISSING:
                what = f"missing key {name!r}"
                rule = "This key is required"
                raise SpecError(what, file=self.file, key=_join(key, name), rule=rule, fix=f"Add {name!r}")
        return cls(**made)

    def unknown(self, name: Any, known: tuple[str, ...], key: str) -> SpecError:
        text = name[:_MAX_CHARS] if isinstance(name, str) else shown(name)
        where, leave = _join(key, text), "Leave it out"
        return unknown("key", text, known, key=where, file=self.file, rule="Known keys:", otherwise=leave)


def _all_plain(kind: Any, data: Sequence[Any]) -> bool:
    """Return whether all are numbers of the type, in its range: lists of ranks and of seconds are long."""
    low, high = -math.inf, math.inf
    if get_origin(kind) is Annotated:
        kind, *markers = get_args(kind)
        if len(markers) == 1 and isinstance(markers[0], Range):
            low, high = markers[0].low, markers[0].high
    return kind in (int, float) and all(
        type(number) is kind and low <= number <= high and abs(number) < math.inf for number in data
    )


def _join(key: str, name: Any) -> str:
    text = str(name)[:_MAX_CHARS]
    return f"{key}.{text}" if key else text
