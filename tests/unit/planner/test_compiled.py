"""Ctrl-C during compiled loops is Ctrl-C."""

import os
import signal
import threading

import numpy as np
import pytest

from foreshard.compiled import allocating_loops, stoppable


def count(most):
    """Return sums that take a while, as arrays: these are made by calls of Python."""
    total = np.zeros(2)
    for i in range(most):
        total[0] += 1.0 / (i + 1.0)
    return total, total


def test_an_interrupt_of_compiled_loops_is_a_keyboard_interrupt():
    pytest.importorskip("numba", reason="numba (extra fast) is not installed")
    loop = allocating_loops(__name__).count
    assert loop(2)[0][0] == 1.5
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                loop(20_000_000)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_the_cause_of_a_system_error_is_raised_only_when_it_is_an_interrupt():
    def failing(cause):
        raise SystemError("returned a result with an exception set") from cause

    with pytest.raises(KeyboardInterrupt):
        stoppable(failing)(KeyboardInterrupt())
    with pytest.raises(SystemError):
        stoppable(failing)(ValueError())
