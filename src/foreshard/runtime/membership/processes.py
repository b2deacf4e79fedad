"""Starts the processes of a host: ranks and the supervisor, each with a pipe to the agent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from foreshard.errors import ForeshardError
from foreshard.runtime.run_settings import REPORT_FD

Process = subprocess.Popen[bytes]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's, AMD's and, under Windows, any devices."""
_SUPERVISOR_S = 60.0
"""How long a supervisor may take to listen; it imports no torch."""


def start(
    words: Sequence[str], log: Path, settings: dict[str, str] | None = None, *, blocking: bool = True
) -> tuple[Process, int]:
    """Start a process whose output goes to a log; return it, and the end of the pipe on which it reports."""
    with open_log(log) as file, report_pipe(blocking=blocking) as (reading, writing):
        process = subprocess.Popen(
            words,
            env={**os.environ, **(settings or {}), REPORT_FD: str(writing)},
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=[writing],
            preexec_fn=follow_parent,
        )
    return process, reading


def follow_parent() -> None:
    """Leave it to the parent when to end, and end with it.

    Signals that a terminal or a scheduler sends to all processes of a job are for the parent, which ends the
    run in order. That it was killed is no signal to its children, and one that is stopped could not notice.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Let the system kill this process when the one that started it ends, if the system can (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_supervisor(arguments: Sequence[object], log: Path) -> tuple[Process, int | None]:
    """Start a supervisor; return its process, and its port once it listens or None if it does not."""
    module = "foreshard.runtime.membership.supervisor"
    process, reading = start([sys.executable, "-m", module, *map(str, arguments)], log)
    # closed without a word by a process that ends at once; select(2) refuses a process of many open files
    with open(reading, "rb", buffering=0) as pipe, selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        port = pipe.read(8) if ready.select(_SUPERVISOR_S) else b""
    return process, int(port) if port else None


def may_fork(device: str) -> bool:
    """Return whether ranks may be forks of a process that has loaded torch.

    A fork cannot use a CUDA driver that its parent has asked for devices, as libraries do while they are
    loaded (triton): ranks that may use one are started each by itself.
    """
    return sys.platform == "linux" and (device == "cpu" or not any(map(os.path.exists, _DRIVERS)))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, if the system has /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def is_free(address: str, port: int) -> bool:
    """Return whether a server could listen on a port."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


def open_log(path: Path) -> IO[bytes]:
    """Open the log of a process, whose end says why it ended.

    Raises
    ------
    ForeshardError
        If the folder of the run was removed.
    """
    try:
        return path.open("ab")
    except FileNotFoundError:
        raise ForeshardError(
            "the folder of the run is gone",
            file=str(path.parent.parent),
            rule="A run keeps its folder to the end",
            fix="Put it back and add --resume, or start again in a folder that nothing removes",
        ) from None


@contextlib.contextmanager
def report_pipe(*, blocking: bool) -> Iterator[tuple[int, int]]:
    """Give both ends of a pipe; the writing end is the child's, the reading end stays if there is a child."""
    reading, writing = os.pipe()
    os.set_blocking(reading, blocking)
    try:
        yield reading, writing
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
