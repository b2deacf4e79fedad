"""Compilation of loops by numba, with Ctrl-C raised as KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreshard.errors import ExtraMissingError


def compiled(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled; the caller keeps it.

    Raises
    ------
    ExtraMissingError
        Without numba.
    """
    try:
        import numba
    except ImportError:
        raise ExtraMissingError(
            "planning mixed devices needs numba",
            key="numba",
            rule="It ships with the extra `plan`",
            fix="pip install 'foreshard[plan]'",
        ) from None
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
