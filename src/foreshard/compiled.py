"""Functions of a module that call each other, compiled by numba where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

from foreshard.errors import ExtraMissingError

MIN_COMPILED_TASKS = 500
"""Programs with fewer tasks run sooner in plain Python than numba is imported (about a second)."""


@cache
def loops(module: str, compiled: bool, *, allocates: bool = False) -> Any:
    """Return the functions of a module, compiled or as they are.

    A compiled function finds its callees in its globals, so that all are compiled in one copy of them.

    Parameters
    ----------
    allocates : bool
        Whether the functions make arrays. Where none is made, none needs a count of references: these took
        nine tenths of the time.

    Raises
    ------
    ExtraMissingError
        If `compiled` and numba is not installed.
    """
    plain = import_module(module)
    if not compiled:
        return plain
    try:
        import numba
    except ImportError as error:
        raise ExtraMissingError(
            "compiled execution needs numba", key="compiled", fix="Install foreshard[fast]"
        ) from error
    names: dict[str, Any] = dict(vars(plain))
    options: dict[str, Any] = {} if allocates else {"inline": "always", "_nrt": False}
    compile_one: Callable[[Any], Any] = numba.njit(cache=True, nogil=True, **options)
    for name, value in vars(plain).items():
        if isinstance(value, FunctionType) and value.__module__ == module:
            names[name] = compile_one(FunctionType(value.__code__, names, name))
    return SimpleNamespace(**names)


@cache
def allocating_loops(module: str) -> Any:
    """Return `loops` that make arrays, compiled where numba is installed, with Ctrl-C raised as such."""
    found = loops(module, has_numba(), allocates=True)
    return SimpleNamespace(
        **{name: stoppable(value) for name, value in vars(found).items() if callable(value)}
    )


def has_numba() -> bool:
    """Return whether numba is installed."""
    return find_spec("numba") is not None


def is_worth_compiling(num_tasks: int) -> bool:
    """Return whether a program is large enough to compile for, where numba is installed."""
    return num_tasks >= MIN_COMPILED_TASKS and has_numba()


def stoppable(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with Ctrl-C raised as such; compiled code makes it the cause of a SystemError."""

    def call(*arguments: Any) -> Any:
        try:
            return loop(*arguments)
        except SystemError as error:
            cause: BaseException | None = error
            while isinstance(cause, SystemError):  # one hides another
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise

    return call
