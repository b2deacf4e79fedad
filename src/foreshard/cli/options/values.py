"""The values that options take: whole numbers, amounts, known words, and several of them joined by commas."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import click

from foreshard.cli.options.answer import say
from foreshard.errors import SpecError
from foreshard.spec.plan import AUTO, MAX_UNITS, WHOLE_MODEL
from foreshard.units import amount, count, num_tokens, parse, ungrouped
from foreshard.words import hint, spelled, zero_level

# Counts are 32 bits wide; amounts end far above every token count and price.
MAX_COUNT = 2**31
MAX_AMOUNT = 1e30
MAX_BYTES = 2.0**60  # an exbibyte: no buffer is larger


class Count(click.ParamType):  # type: ignore[type-arg]
    """A whole number from `low` to `high`.

    With `thousand`, k and M stand for powers of it, as in 8k tokens of a sequence (1,024 each).
    """

    name = "N"

    def __init__(self, low: int = 1, high: int = MAX_COUNT, *, thousand: int | None = None):
        self.low, self.high, self.thousand = low, high, thousand

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail naming the range."""
        digits = ungrouped(str(value))
        number = Decimal(digits) if len(digits) < 40 and _WHOLE.fullmatch(digits) else Decimal("nan")
        if number.is_nan() and self.thousand is not None:
            number = Decimal(num_tokens(digits, thousand=self.thousand) or math.nan)
        if number.is_finite() and self.low <= number <= self.high and number == number.to_integral_value():
            return int(number)
        what = f"{str(value)[:40]!r} is not a whole number from {self.low} to {self.high}"
        usual = "8192 or 8k" if self.thousand else max(self.low, min(self.high, 8))
        example = f". Write it like {usual}"
        if digits.lower() == "auto":
            by = " --to-target" if param is not None and param.name == "global_batch" else ""
            example = f". Write a number; 'foreshard plan{by}' finds the best one"
        if re.search(r"tok(en)?s?$", digits.lower()):
            example = ". It is no number of tokens: samples are tokens over the length of a sequence"
        self.fail(what + (_suffix_hint(digits) or example), param, ctx)


_WHOLE = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE]\+?[0-9]{1,3})?")


def _suffix_hint(text: str) -> str:
    """Return how to write a number with a letter for thousands, which can mean 1000 or 1024."""
    meant = [f"{number:.0f}" for number in (count(text), count(text, thousand=1024)) if number is not None]
    return f". Write it like {' or '.join(dict.fromkeys(meant))}" if meant and text[-1:].isalpha() else ""


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A finite number above zero, or from `low` to `high`; of a dimension also with a unit, as 5 min.

    With `zero` it may be 0. `unit` is the one of numbers without a unit. Tokens and dollars may be counted in
    k, M, B and T.
    """

    name = "X"

    def __init__(
        self,
        low: float = 0.0,
        high: float = MAX_AMOUNT,
        *,
        dimension: str | None = None,
        unit: str | None = None,
        zero: bool = False,
    ):
        self.low, self.high, self.dimension, self.unit = low, high, dimension, unit or dimension
        self.zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        read = amount(str(value), self.dimension, self.unit)
        number = math.nan if read is None else read
        if (number > 0 or (self.zero and number == 0)) and self.low <= number <= self.high:
            return number
        hint = (
            _suffix_hint(ungrouped(str(value)))
            if self.dimension is None
            else f". Write it like {self._example}"
        )
        limits = (
            f"from {self.low:g} to {self.high:g}"
            if self.low
            else "of at least zero"
            if self.zero
            else "above zero"
        )
        if self.dimension in ("usd", "usd_per_h") and re.search(r"eur|€|gbp|£|cny|¥|jpy", str(value).lower()):
            hint = ". Write it in USD: rates of exchange are not known here"
        self.fail(f"{str(value)[:40]!r} is not a number {limits}{hint}", param, ctx)

    @property
    def _example(self) -> str:
        return "2e9 or 2B" if self.dimension == "tokens" else f"5 or '5 {self.unit}'"


class ByteCount(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes above zero: whole bytes as a number, or with a unit as 64KiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the bytes, or fail."""
        text, number = ungrouped(str(value)), math.nan
        with suppress(ValueError, OverflowError):
            number = float(text)
        if math.isnan(number):
            with suppress(SpecError):
                number = parse(text, "bytes")
        if 1 <= number <= MAX_BYTES and number == int(number):
            return number
        bare = re.fullmatch(r"([0-9.]+)\s*([kmgt])", text, re.IGNORECASE)
        if bare:
            size = f"{bare[1]}{bare[2].upper()}"
            self.fail(f"{text[:40]!r} has no unit. Write {size}iB or {size}B", param, ctx)
        self.fail(f"{str(value)[:40]!r} is not a number of bytes from 1. Write it like 64KiB", param, ctx)


class Level(Count):
    """A ZeRO level, also as `zero_level` reads it."""

    name = "0-3"

    def __init__(self) -> None:
        super().__init__(0, 3)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the level, or fail naming the levels."""
        level, text = zero_level(str(value)), str(value).lower()
        if level is not None:
            return level
        what = f"{str(value)[:40]!r} is not a ZeRO level from 0 to 3"
        hint = ". Write 3 (FULL_SHARD) or 2 (SHARD_GRAD_OP)" if "fsdp" in text else ""
        hint = ". Write 3, with --shard-size N for shards of N ranks" if "hybrid" in text else hint
        self.fail(what + hint, param, ctx)


LEAST_BARE_BYTES = 2**16
"""Numbers without a unit below it are MiB or elements to whoever writes them, not bytes of a bucket."""


class BucketSize(ByteCount):
    """Bytes of a bucket of gradients, or `auto`."""

    name = "SIZE|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the bytes or the word, or fail."""
        text = str(value).strip()
        if text.lower() == AUTO:
            return AUTO
        if text.isdecimal() and int(text[:9]) < LEAST_BARE_BYTES:
            self.fail(f"{text[:40]!r} has no unit. Write it like {text[:9]}MiB", param, ctx)
        return int(super().convert(value, param, ctx))


class Wrap(Count):
    """Blocks that FSDP gathers as one unit, or `model`."""

    name = "BLOCKS|model"

    def __init__(self) -> None:
        super().__init__(1, MAX_UNITS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number or the word, or fail."""
        text = str(value).strip()
        if text.lower() == WHOLE_MODEL:
            return WHOLE_MODEL
        if not text[:1].isdecimal():
            self.fail(f"{text[:40]!r} is no number of blocks. Write it like 4, or {WHOLE_MODEL}", param, ctx)
        return super().convert(value, param, ctx)


class Several(click.ParamType):  # type: ignore[type-arg]
    """Values of one kind with commas between them; each counts once."""

    def __init__(self, one: click.ParamType) -> None:  # type: ignore[type-arg]
        self.one, self.name = one, f"{one.name},.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the values in order, or fail naming the one that is wrong."""
        parts = str(value).split(",")
        return tuple(dict.fromkeys(self.one.convert(part.strip(), param, ctx) for part in parts))


class Counts(Several):
    """Whole numbers joined by commas, as a rising tuple."""

    def __init__(self, one: click.ParamType) -> None:  # type: ignore[type-arg]
        self.one, self.name = one, "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, or fail naming the range."""
        if isinstance(value, tuple):
            return value
        span = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-|\.\.|:)\s*([0-9]{1,9})\s*", str(value))
        if span and param is not None:
            flag = max(param.opts, key=len).lstrip("-")
            fix = f"Write --min-{flag} {span[1]} --max-{flag} {span[2]}, or the values with commas"
            self.fail(f"{str(value)[:40]!r} is a range. {fix}", param, ctx)
        return tuple(sorted(super().convert(value, param, ctx)))


class Text(click.ParamType):  # type: ignore[type-arg]
    """Any text; a path that begins with ~, also after a name and =, begins with the user's home.

    Shells expand ``--out ~/run`` but neither ``--out=~/run`` nor a value of the environment or of --config.
    """

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        before, equals, path = str(value).rpartition("=")
        return before + equals + (os.path.expanduser(path) if path.startswith("~") else path)


class FrameworkLabel(click.ParamType):  # type: ignore[type-arg]
    """A framework, with @ and a release or without: the catalog's spelling of a name written in any case.

    Another name that means one framework is replaced by it, and said.
    """

    name = "NAME[@RELEASE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the label; whether there is such a framework is for the catalog to say."""
        name, at, release = str(value).strip().partition("@")
        from foreshard.catalog.frameworks import alias_of

        plain = re.sub(r"[\s_]+", "-", name.strip().lower())
        ours, unless = alias_of(plain)
        if ours != plain:
            say(f"framework {plain}: taken as {ours}" + (f" ({unless})" if unless else ""))
        return ours + at + release.strip()


class Margin(click.ParamType):  # type: ignore[type-arg]
    """A probability of at least 0 and below 1, also in percent; off is 0."""

    name = "P"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the probability, or fail."""
        text, number = str(value).strip().lower(), math.nan
        if text in ("off", "none"):
            return 0.0
        with suppress(ValueError):
            number = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
        if 0.0 <= number < 1.0:
            return number
        what = f"{str(value)[:40]!r} is not a probability of at least 0 and below 1"
        self.fail(f"{what}. Write 0.95 or 95%, or off for plans that may fill the memory.", param, ctx)


class Word(click.ParamType):  # type: ignore[type-arg]
    """One of the known words, in any case; another fails with the one that was likely meant."""

    name = "WORD"

    def __init__(self, *known: str):
        self.known = known

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the words as --help shows them."""
        return f"[{'|'.join(self.known)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word in its own spelling, or fail naming the known ones."""
        text = str(spelled(value, self.known))
        if text in self.known:
            return text
        fix = hint(text[:40], self.known) or ""
        self.fail(f"{text[:40]!r} is not one of {', '.join(self.known)}.{fix and f' {fix}'}", param, ctx)


class Words(click.ParamType):  # type: ignore[type-arg]
    """Words joined by commas, as a tuple in their order; any words when none are known.

    Words of `alone` stand by themselves and are returned as they are, one word as it is where `single`.
    `load` returns the known words where they are costly to import.
    """

    def __init__(
        self,
        *known: str,
        alone: tuple[str, ...] = (),
        single: bool = False,
        load: Callable[[], Iterable[str]] | None = None,
    ):
        self.known, self.alone, self.single, self.load = known, alone, single, load
        self.name = "words"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the words as --help shows them."""
        if self.alone or self.load or not self.known:
            return "|".join((*self.alone, "NAME,NAME"))
        return f"[{','.join(self.known)}]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[str, ...]:
        """Return the words, or fail naming the known ones."""
        if isinstance(value, tuple) or value in self.alone:
            return value  # type: ignore[no-any-return]
        words = tuple(word.strip() for word in str(value).split(","))
        known = (*self.known, *(self.load() if self.load else ()))
        if known:
            word_type = Word(*(self.alone if len(words) == 1 else ()), *known)
            words = tuple(word_type.convert(word, param, ctx) for word in words)
        if len(set(words)) < len(words):
            self.fail(f"{str(value)[:40]!r} names a word twice", param, ctx)
        return words[0] if self.single and len(words) == 1 else words
