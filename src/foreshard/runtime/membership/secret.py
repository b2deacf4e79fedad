"""The secret that the ranks of a run share: a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from foreshard.errors import SpecError

VARIABLE = "FORESHARD_SECRET"
_PATIENCE_S = 60.0
"""How long ranks of torchrun wait for the secret that rank 0 writes: it loads torch first."""
_LEAST_BYTES = 16
"""128 bits: not to be guessed."""


def make_secret(path: Path) -> Path:
    """Return the path of a secret that only this user can read; it is made if it does not exist.

    A secret that others may read is refused, and a short one in the environment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    given = os.environ.get(VARIABLE)
    if given is None and path.exists():
        return checked_secret(path)  # ranks of a run under way may have read it already
    if given is not None and len(given.strip()) < _LEAST_BYTES:
        raise _short(VARIABLE, f'export {VARIABLE}="$(head -c 32 /dev/urandom | base64)"')
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # it may be somebody else's file, or a link to elsewhere
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(given or secrets.token_hex(32))
    new.replace(path)
    return path


def awaited_secret(path: Path) -> Path:
    """Wait for the secret that rank 0 writes, and return its path."""
    until = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise SpecError("no secret yet", file=str(path), rule="Rank 0 writes the secret of the run")
        time.sleep(0.05)
    return checked_secret(path)


def checked_secret(path: Path, key: str = "secret") -> Path:
    """Return the path of a secret that is long enough and that others cannot read."""
    path = path.resolve()
    try:
        mode, size = path.stat().st_mode, len(path.read_bytes().strip())
    except OSError as error:
        raise SpecError(f"cannot read the secret: {error.strerror}", file=str(path), key=key) from None
    if mode & 0o077:
        raise SpecError(
            "others may read the secret",
            file=str(path),
            key=key,
            rule="Only its owner can read a secret",
            fix=f"chmod 600 {path}, if nobody has read it",
        )
    if size < _LEAST_BYTES:
        raise _short(key, f"head -c 32 /dev/urandom | base64 > {path}", str(path))
    return path


def _short(key: str, fix: str, file: str | None = None) -> SpecError:
    return SpecError(
        "the secret is short", file=file, key=key, rule=f"A secret has {_LEAST_BYTES} bytes or more", fix=fix
    )
