"""Python processes as forks of this one, which has torch loaded: importing is most of a short run."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

MODULES = ("foreshard.lab.lab_rank", "foreshard.runtime.worker", "foreshard.runtime.membership.supervisor")


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process; `python -m MODULE` is a fork, anything else is started as usual."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *more: Any
    ) -> None:
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        if words[:2] != [sys.executable, "-m"]:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *more)  # type: ignore[misc]
            return
        _, env, _, _, _, stdin, write_in, read_out, stdout, read_err, stderr, *_ = more
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(stdin, write_in, read_out, stdout, read_err, stderr)
            return
        code = 1
        try:
            if preexec_fn is not None:
                preexec_fn()
            _become(words[2:], env, (stdin, stdout, stderr), pass_fds)
            runpy.run_module(words[2], run_name="__main__", alter_sys=False)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _become(words: Sequence[str], env: Any, files: Sequence[int], kept: Sequence[int]) -> None:
    """Take the arguments, the environment and the files of the new process; leave those of the old one."""
    for place, file in enumerate(files):
        if file >= 0:
            os.dup2(file, place)
    last = 2
    for file in sorted(kept):
        os.closerange(last + 1, file)
        last = file
        os.set_inheritable(file, True)
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    if env is not None:
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = list(words)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))


def preload() -> None:
    """Load what runs need, and start processes as forks from here on."""
    for name in MODULES:
        importlib.import_module(name)
    subprocess.Popen = Forked  # type: ignore[misc]
