"""Functions of a module that call each other, compiled by numba where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any

from foreshard.errors import ExtraMissingError

MIN_COMPILED_TASKS = 500
"""Programs with fewer tasks run sooner in plain Python than numba is imported (about a second)."""


@cache
def loops(module: str, compiled: bool) -> Any:
    """Return the functions of a module, compiled or as they are.

    A compiled function finds its callees in its globals, so that all are compiled in one copy of them.

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
    # Nothing is allocated inside, so arrays need no counts of references: they took nine tenths of the time.
    options: dict[str, Any] = {"cache": True, "nogil": True, "inline": "always", "_nrt": False}
    compile_one: Callable[[Any], Any] = numba.njit(**options)
    for name, value in vars(plain).items():
        if isinstance(value, FunctionType) and value.__module__ == module:
            names[name] = compile_one(FunctionType(value.__code__, names, name))
    return SimpleNamespace(**names)


def is_worth_compiling(num_tasks: int) -> bool:
    """Return whether a program is large enough to compile for, where numba is installed."""
    from importlib.util import find_spec

    return num_tasks >= MIN_COMPILED_TASKS and find_spec("numba") is not None
