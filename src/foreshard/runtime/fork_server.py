"""Starts ranks by forking a process that has loaded their module: torch takes seconds to load, a fork none.

`ForkServer` is the agent's side. Its other side is a process of this module, ``python -m`` with a socket
and the modules. It runs nothing but forks, so that it holds no threads. Ranks are its children; they die with
it, and it dies with the agent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from foreshard.runtime.membership.processes import die_with_parent, follow_parent
from foreshard.runtime.run_settings import PARENT, REPORT_FD

_MESSAGE_BYTES = 1 << 17
"""More than the settings of a rank take."""


class Forked:
    """A process that a fork server started; it has what is used of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int):
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Return its exit code, the negative signal if one killed it, None while it runs."""
        return self._server.code_of(self.pid)

    def kill(self) -> None:
        """Kill it if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Return its exit code once it has ended.

        Raises
        ------
        subprocess.TimeoutExpired
            If it runs for longer than `timeout` seconds.
        """
        until_s = time.monotonic() + timeout
        while (code := self._server.code_of(self.pid, max(0.0, until_s - time.monotonic()))) is None:
            if time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"rank of process {self.pid}", timeout)
        return code


class ForkServer:
    """Starts processes of the first of `modules`, which has a function `start`; its own output goes to `log`.

    All the modules are loaded before the first fork, with `settings` beside this process's environment.
    """

    def __init__(self, modules: Sequence[str], settings: Mapping[str, str], log: IO[bytes]):
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int | None] = {}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "foreshard.runtime.fork_server", str(other.fileno()), *modules],
                env={**os.environ, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                preexec_fn=follow_parent,
            )

    @property
    def is_running(self) -> bool:
        """Whether it can start processes."""
        return self._process.poll() is None

    def start(self, settings: Mapping[str, str], log: int, report: int) -> Forked:
        """Start a process with this environment beside the server's, an open log and an end of a pipe.

        The first one waits until the module is loaded. A server that fails to load it ends, and the process
        that is returned has ended with its code.
        """
        self.wake()
        self._control.settimeout(None)
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(dict(settings)).encode()], [log, report])
        while (message := self._receive(None)) is not None:
            if "started" in message:
                self._codes[message["started"]] = None
                return Forked(self, message["started"])
        return Forked(self, self._process.pid)

    def code_of(self, pid: int, within_s: float = 0.0) -> int | None:
        """Return the exit code of a process, None if it still runs after that many seconds."""
        if self._codes.get(pid) is None:
            self._receive(within_s)
        if self._codes.get(pid) is None and not self.is_running:
            return self._process.returncode  # its children died with it
        return self._codes.get(pid)

    def wake(self) -> None:
        """Let the server continue if somebody stopped it: unlike a rank it has missed nothing."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, within_s: float | None) -> dict[str, int] | None:
        """Return the next message and note what it says, None if there is none or the server has ended."""
        self._control.settimeout(within_s)
        try:
            received = self._control.recv(_MESSAGE_BYTES)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            received = b""
        if not received:
            self._process.wait()
            return None
        message: dict[str, int] = json.loads(received)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


def serve(control: socket.socket, modules: Sequence[str]) -> None:
    """Fork whenever asked, and say which process was started or has ended; return in the forked process."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to every page, which is shared until then
    with selectors.DefaultSelector() as ready:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        ready.register(control, selectors.EVENT_READ)
        ready.register(reading, selectors.EVENT_READ)
        while True:
            chosen = [key.fileobj for key, _ in ready.select()]
            if reading in chosen:
                os.read(reading, _MESSAGE_BYTES)
                _tell_ended(control)
            if control in chosen and _started(control):
                break
    for descriptor in (reading, writing):
        os.close(descriptor)


def _tell_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            said = {"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}
            control.send(json.dumps(said).encode())


def _started(control: socket.socket) -> bool:
    """Fork as the next message says; return whether this is the forked process."""
    message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
    if not message:
        sys.exit(0)  # the agent has ended
    server = os.getpid()
    pid = os.fork()
    if pid:
        control.send(json.dumps({"started": pid}).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return False
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    log, report = descriptors
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.environ.update(json.loads(message))
    os.environ[REPORT_FD] = str(report)
    os.environ[PARENT] = str(server)
    return True


if __name__ == "__main__":
    _, descriptor, *names = sys.argv
    serve(socket.socket(fileno=int(descriptor)), names)
    sys.modules[names[0]].start()
