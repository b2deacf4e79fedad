"""A clock that does not race the machine."""

from __future__ import annotations

import time
from itertools import count

import pytest

from foreshard.planner.solver import integer_heuristic

TICK_S = 4e-3


@pytest.fixture(autouse=True)
def processor_seconds(monkeypatch):
    """Let budgets count seconds of the processor, of which a busy machine has no fewer."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


@pytest.fixture
def even_clock(monkeypatch):
    """Let a search see as many seconds on a busy machine as on an idle one.

    The clock goes on by as much each time it is asked, and integer programs are solved to their end.
    """
    asked, solved = count(), integer_heuristic.whole_mix
    monkeypatch.setattr(time, "perf_counter", lambda: next(asked) * TICK_S)
    monkeypatch.setattr(
        integer_heuristic, "whole_mix", lambda *rows, limit_s, **how: solved(*rows, limit_s=60.0, **how)
    )
