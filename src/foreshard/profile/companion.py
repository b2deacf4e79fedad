"""Processes that train the same layers over and over: a profile of a machine as busy as the run's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_ENDLESS = 1_000_000
"""Passes, more than any profile waits for: companions are killed, they do not end."""
_UNTIL_ALONE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from foreshard.cli.program import run
run(sys.argv[1:])
"""
"""The command line, ended when the process that started it is gone, however it went."""


@contextmanager
def companions(job: str, count: int, *, samples: str, threads: int) -> Iterator[None]:
    """Keep so many other ranks busy in the body.

    `samples` are as ``--samples`` takes them; small ones would leave the caches to who is timed.
    """
    asked = ["--samples", samples, "--threads", str(threads), "--repeats", str(_ENDLESS)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _UNTIL_ALONE, "profile", job, "-o", f"{folder}/{n}.json", *asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ},
            )
            for n in range(count)
        ]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()
