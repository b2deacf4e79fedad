"""Disks that have no room."""

import errno
from pathlib import Path

import pytest


class Full:
    """A file that takes the first bytes of a line and then nothing, as the kernel does it."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *told):
        self.file.close()


class Disk:
    """A disk: `room` bytes fit each time a file is opened to be added to, all if None."""

    room = None


@pytest.fixture
def disk(monkeypatch):
    found, opened = Disk(), Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *how, **more: (
            opened(path, *how, **more)
            if found.room is None or how[:1] != ("ab+",)
            else Full(opened(path, *how, **more), found.room)
        ),
    )
    return found
