"""Compilation of loops by numba where it is installed, with Ctrl-C raised as KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled, or as it is where numba is missing: the same result, more slowly."""
    try:
        import numba
    except ImportError:
        return loops
    return stoppable(numba.njit(cache=True, nogil=True)(loops))


def stoppable(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with Ctrl-C raised as such; compiled code makes it the cause of a SystemError."""

    def call(*arguments: Any) -> Any:
        try:
            return loops(*arguments)
        except SystemError as error:
            cause: BaseException | None = error
            while isinstance(cause, SystemError):  # one hides another
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise

    return call
