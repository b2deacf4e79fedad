"""How a verb answers: a table on a terminal, plain text in a pipe, one JSON object under --json."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import click

from foreshard.errors import ForeshardError, SpecError
from foreshard.file_replacement import replace_file
from foreshard.report.screen import Screen

NOTHING_FITS = 3
"""Exit code of a run that does not fit."""
# A list of numbers over several lines; a string of JSON holds no line break, so none can be mistaken for it.
_NUMBERS = re.compile(r"\[\n[\s\d,.eE+-]*\]")


def answering(command: click.Command, output: str = "Also write the JSON object to a file.") -> None:
    """Add --json, -o and --no-color to a verb; `give` reads them, the verb does not see them."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_keep, **settings)

    command.params += [
        option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        option("-o", "--output", metavar="FILE", help=output),
        option("--no-color", is_flag=True, help="No colour on a terminal (also NO_COLOR=1)."),
    ]


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if param.name == "output" and value:
        must_be_writable(value)
    ctx.meta[f"foreshard.{param.name}"] = value
    return value


def must_be_writable(path: str) -> None:
    """Raise, before a search or a run, for a file that could not be written after it."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        wrong = errno.EISDIR
    elif not os.path.isdir(folder):
        wrong = errno.ENOENT if not os.path.exists(folder) else errno.ENOTDIR
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        wrong = errno.EACCES
    else:
        return
    raise cannot_write(path, OSError(wrong, os.strerror(wrong)))


def wants_json() -> bool:
    """Return whether --json was given."""
    return bool(click.get_current_context().meta.get("foreshard.as_json"))


def give(data: dict[str, Any], screen: Callable[[], Screen]) -> None:
    """Print the answer; `screen` is only asked for when people read it."""
    meta = click.get_current_context().meta
    if meta.get("foreshard.output"):
        write_text(meta["foreshard.output"], dump(data) + "\n")
    if wants_json():
        click.echo(dump(data))
    elif sys.stdout.isatty():
        from rich.console import Console

        from foreshard.report.terminal import show

        show(screen(), Console(highlight=False, no_color=True if meta.get("foreshard.no_color") else None))
    else:
        from foreshard.report.plain import render

        click.echo(render(screen()), nl=False)


def write_text(path: str, text: str) -> int:
    """Write a file the user named and return its bytes, or say why not; the old one stays then."""
    try:
        return replace_file(path, text)
    except OSError as error:
        raise cannot_write(path, error) from None


def save(path: str, what: str, write: Callable[[], int]) -> None:
    """Write a file the user named by a function that returns its bytes, and say where it is."""
    try:
        size = write()
    except OSError as error:
        raise cannot_write(path, error) from None
    say(f"{what}: {path} ({size / 1e6:.2f} MB)")


def save_page(path: str, text: str) -> None:
    """Write an HTML report, and say where it is."""
    save(path, "report", lambda: replace_file(path, text))


def cannot_write(path: str, error: OSError) -> ForeshardError:
    """Return the error for a file that cannot be written: bad input, or the system's where a disk is full."""
    what = f"cannot write: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return ForeshardError(what, file=path, fix="Make room, or give a path on another disk")
    return SpecError(what, file=path, rule="Files are written where asked", fix="Give a writable path")


def say(text: str) -> None:
    """Print a line that is not the answer (standard error, on a terminal wrapped at words)."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        words = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(words.fill(line) for line in text.splitlines())
    click.echo(text, err=True)


def dump(data: dict[str, Any]) -> str:
    """Return the object as JSON, number lists on one line, infinities and NaN (which JSON lacks) as null."""
    text = json.dumps(_finite(data), indent=2, ensure_ascii=True, allow_nan=False)
    return _NUMBERS.sub(
        lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)  # also numpy scalars
    return number if math.isfinite(number) else None
