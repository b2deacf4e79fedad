"""Errors of the user's own code: reported with file and line.

A run survives the loss of a peer, which `PeerGroup` raises as `PeerLost`; whatever else the job's code raises
ends it, be it of the same type or text.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.membership.wire import PeerLost

USER_RULE = "The job's own code must run"
_TORCH = str(Path(torch.__file__).parent)
_RUNTIME = str(Path(__file__).parent.parent)


@contextmanager
def user_code(part: str, path: str | None = None, *, rule: str = USER_RULE) -> Iterator[None]:
    """Turn exceptions of the body into errors that name the user's file and line.

    `part` is the part of the job that the body runs, as 'loss' or 'layer 3', `rule` what it has to keep. An
    error that did not come from the job's file has the file and the line where it came from.
    """
    try:
        with in_file(path):
            yield
    except (ForeshardError, PeerLost):
        raise
    except (Exception, SystemExit) as error:
        if type(error).__module__ == "torch.utils.checkpoint":  # stops a recomputation early
            raise
        raise user_error(error, part, path, rule=rule) from error


@contextmanager
def in_file(path: str | None) -> Iterator[None]:
    """Add the file of the job to errors of the body that name no file."""
    try:
        yield
    except ForeshardError as error:
        error.file = error.file or path
        raise


def user_error(error: BaseException, part: str, path: str | None = None, *, rule: str) -> SpecError:
    """Return an exception of the user's code as an error with its file and line."""
    file, line = _location(error, path)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line = error.filename, error.lineno
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    where = f" in line {line}" if line else ""
    if path is not None and file is not None and Path(file).resolve() != Path(path).resolve():
        where = f" in {file}, line {line}"
    first = text.splitlines()[0] if text else "no message"
    fix = f"Correct that line, or the input of {part}" if line else f"Correct {part}, or its input"
    what = f"{type(error).__name__}{where}: {first}"
    return SpecError(what, file=path or file, key=part, rule=rule, fix=fix)


def _location(error: BaseException, path: str | None) -> tuple[str | None, int | None]:
    """Return file and line of the deepest frame in the job's file, else outside of torch and foreshard."""
    frames = traceback.extract_tb(error.__traceback__)
    if path is not None:
        job = Path(path).resolve()
        own = [f for f in frames if Path(f.filename).resolve() == job]
        if own:
            return own[-1].filename, own[-1].lineno
    others = [f for f in frames if not f.filename.startswith((_TORCH, _RUNTIME, "<"))]
    return (others[-1].filename, others[-1].lineno) if others else (path, None)
