"""A file is written as a whole: who reads it finds the old content or the new one, also on a full disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def replace_file(path: str | Path, content: str | bytes, *, durable: bool = False) -> int:
    """Write a file beside the old one and put it in its place; return its bytes.

    The new file keeps the permissions of the old one, and a symbolic link its place. What is no file (a pipe,
    /dev/stdout), and a file in a folder that takes no other, is written where it is; a file that may not be
    written is not replaced either.

    Parameters
    ----------
    path : str or Path
        Its folder exists.
    content : str or bytes
        Text is written in UTF-8.
    durable : bool
        Return when the content is on the disk.

    Raises
    ------
    OSError
        If it cannot be written; the old file is as it was then.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    final = os.path.realpath(path)
    try:
        mode = os.stat(final).st_mode
    except FileNotFoundError:
        mode = None
    replaceable = all(os.access(one, os.W_OK) for one in (final, os.path.dirname(final)))
    in_place = mode is not None and not (stat.S_ISREG(mode) and replaceable)
    if in_place:
        _write(str(path), raw, durable)
        return len(raw)
    new = os.path.join(os.path.dirname(final), f".foreshard-{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        _write(new, raw, durable)
        if mode is not None:
            os.chmod(new, stat.S_IMODE(mode))
        os.replace(new, final)
    except BaseException:  # an interrupt too: no half a file stays
        Path(new).unlink(missing_ok=True)
        raise
    return len(raw)


def _write(path: str, raw: bytes, durable: bool) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        if durable:
            file.flush()
            os.fsync(file.fileno())
