"""Faults of the user's own code, told with their file and line, and apart from those of peers.

What torch.distributed raises when a peer is gone is a RuntimeError, and so is a product of matrices that do
not fit. The first is survived, the second must end the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foreshard.errors import ForeshardError, SpecError

OWN_RULE = "The job's own code must run"
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent.parent)
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")
_PIPELINING = str(Path(_DISTRIBUTED) / "pipelining")  # backwards of the job's layers; talks to nobody


@contextmanager
def own_code(part: str, path: str | None = None, *, rule: str = OWN_RULE) -> Iterator[None]:
    """Turn what the body raises into the user's error.

    Parameters
    ----------
    part : str
        Of the job that the body runs, as 'loss' or 'layer 3'.
    path : str, optional
        File of the job.
    rule : str
        What the part has to do.

    Raises
    ------
    SpecError
        With the line of the job's file, or of the file that the fault came from.
    """
    try:
        with in_file(path):
            yield
    except ForeshardError:
        raise
    except (Exception, SystemExit) as error:
        if _is_foreign(error):
            raise
        raise fault_of(error, part, path, rule=rule) from error


@contextmanager
def in_file(path: str | None) -> Iterator[None]:
    """Say in which file a fault of the job is, where who found it does not know."""
    try:
        yield
    except ForeshardError as error:
        error.file = error.file or path
        raise


def fault_of(error: BaseException, part: str, path: str | None = None, *, rule: str) -> SpecError:
    """Return an exception of the user's code as an error that says where it came from."""
    file, line = _place(error, path)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line = error.filename, error.lineno
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    where = f" in line {line}" if line else ""
    if path is not None and file is not None and Path(file).resolve() != Path(path).resolve():
        where = f" in {file}, line {line}"
    first = text.splitlines()[0] if text else "no message"
    fix = f"Correct that line, or what {part} is given" if line else f"Correct {part}, or what it is given"
    what = f"{type(error).__name__}{where}: {first}"
    return SpecError(what, file=path or file, key=part, rule=rule, fix=fix)


def _place(error: BaseException, path: str | None) -> tuple[str | None, int | None]:
    """Return file and line of the deepest frame that is the user's: of the job, else of no library here."""
    frames = traceback.extract_tb(error.__traceback__)
    if path is not None:
        job = Path(path).resolve()
        own = [f for f in frames if Path(f.filename).resolve() == job]
        if own:
            return own[-1].filename, own[-1].lineno
    others = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, "<"))]
    return (others[-1].filename, others[-1].lineno) if others else (path, None)


def _is_foreign(error: BaseException) -> bool:
    """Return whether an exception is not the user's: a peer is gone, or torch ends a recomputation by it."""
    if type(error).__module__ == "torch.utils.checkpoint":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename if frames else ""
    inside = last.startswith(_DISTRIBUTED) and not last.startswith(_PIPELINING)
    return isinstance(error, torch.distributed.DistError) or inside or "gloo" in str(error).lower()
