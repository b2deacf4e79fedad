"""Interleaved plans beside proven ones: a small gain does not buy a wide gap."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from foreshard.planner.mixed import phases
from foreshard.planner.mixed.found import MixedFound


@pytest.mark.parametrize(
    ("plain_s", "made_s", "bound_s", "taken"),
    [
        (10.0, 9.7, 5.0, False),  # gains 3 %, proven within 94 %
        (10.0, 9.0, 5.0, True),  # gains a tenth
        (10.0, 9.7, 9.6, True),  # proven as closely
        (13.0, 12.9, 5.0, True),  # the other one is not proven
    ],
)
def test_an_interleaved_plan_is_taken_for_a_large_gain_or_a_close_bound(
    monkeypatch, plain_s, made_s, bound_s, taken
):
    monkeypatch.setattr(phases, "interleaved_plans", lambda *asked: [(made_s, "interleaved")])
    monkeypatch.setattr(phases, "interleaved_bound", lambda *asked: bound_s)
    found = MixedFound(judged=[(plain_s, "1f1b")], bounds=[9.9])
    now = time.perf_counter()
    phases.search_interleaved(SimpleNamespace(budget_s=10.0), [(0,)], found, now, now + 60.0)
    assert ((made_s, "interleaved") in found.judged) is taken
    assert found.set_aside_s == (0.0 if taken else made_s)
