"""Tests of this folder share jobs, plans and ranks as threads."""

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def connections() -> Iterator[None]:
    """Leave alone what killed ranks have left in gloo: the interpreter may not end in the middle of it.

    A process that runs tests for another ends without its interpreter, once its results are sent; one that
    runs them by itself has to wait.
    """
    yield
    if "theatre" not in sys.modules:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(os._exit, 0)
    else:
        sys.modules["theatre"].wait_for_connections()
