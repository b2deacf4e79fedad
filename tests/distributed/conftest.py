"""Tests of this folder share jobs, plans and ranks as threads."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def connections() -> Iterator[None]:
    """Wait for what ranks that were killed have left in gloo, at the very end: other tests run meanwhile."""
    yield
    if "theatre" in sys.modules:
        sys.modules["theatre"].wait_for_connections()
