"""Loops that numba compiles where it is installed, and that Ctrl-C ends as it ends anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(loops: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function compiled, to be kept by the caller; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    return stoppable(numba.njit(cache=True, nogil=True)(loops))


def stoppable(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with Ctrl-C raised as such; compiled, it hides it as the cause of a SystemError."""

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
