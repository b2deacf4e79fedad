"""Flags of a program in a launch script or a file of arguments.

Reads what scripts have in common: ``--flag value`` in any quotes, arrays and line continuations, comments,
and variables that are set to plain words. It runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from foreshard.errors import SpecError, did_you_mean
from foreshard.interop.importers.stated_run import inexpressible

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;#]*)", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """Flags by name with their values; the last one of a name counts, as in argparse."""

    values: dict[str, tuple[str, ...]]
    file: str

    def __contains__(self, flag: str) -> bool:
        """Return whether a flag is given."""
        return flag in self.values

    def word(self, flag: str, default: str | None = None) -> str | None:
        """Return the value of a flag."""
        if flag not in self.values:
            return default
        given = self.values[flag]
        if not given:
            raise self.invalid(flag, "Takes a value")
        if "$" in given[0]:
            fix = f"Write the value, or set the variable in {self.file}"
            raise self.invalid(flag, "Its variable is not set to a plain word in this file", fix)
        return given[0]

    def whole(self, flag: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return the value of a flag as a whole number."""
        word = self.word(flag)
        if word is None:
            return default
        if not re.fullmatch(r"-?\d+", word) or int(word) < least:
            raise self.invalid(flag, f"Must be a whole number of at least {least}")
        return int(word)

    def choice(self, flag: str, known: tuple[str, ...], default: str) -> str:
        """Return the value of a flag that takes one of some words."""
        word = self.word(flag, default)
        if word not in known:
            raise self.invalid(flag, f"Must be one of {', '.join(known)}", did_you_mean(str(word), known))
        return word

    def invalid(self, flag: str, rule: str, fix: str | None = None) -> SpecError:
        """Return the error of a flag's value, to be raised."""
        value, fix = " ".join(self.values.get(flag, ())), fix or "Correct it in the file"
        return SpecError(
            f"{value!r:.80} is not valid", file=self.file, key=flag, value=value, rule=rule, fix=fix
        )

    def cannot(self, flag: str, what: str) -> SpecError:
        """Return the error of a flag that no plan expresses, to be raised."""
        return inexpressible(what, file=self.file, key=flag, value=flag)


def read_flags(text: str, file: str) -> LaunchFlags:
    """Return the flags in a text."""
    text = _COMMENT.sub(r"\1", text.replace("\\\n", " "))
    known: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        known[name] = _expanded(value.strip("\"'"), known)
    values: dict[str, tuple[str, ...]] = {}
    for word in _words(text):
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word.partition("=")
            last = name.replace("_", "-")
            values[last] = (_expanded(value, known),) if sign else ()
        elif values:
            values[last] = (*values[last], _expanded(word, known))
    return LaunchFlags(values, file)


def _words(text: str) -> Iterator[str]:
    """Yield words without quotes and brackets; a quoted word without blanks stays one, with its signs."""
    for word in re.findall(r"'[^'\s]*'|\"[^\"\s]*\"|\$\{[^}]*\}|[^\s\"'()]+", text):
        yield word.strip("\"'")


def _expanded(word: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: _value(found, known), word)


def _value(found: re.Match[str], known: dict[str, str]) -> str:
    value = known.get(found[1] or found[3], found[2])
    return found[0] if value is None else value
