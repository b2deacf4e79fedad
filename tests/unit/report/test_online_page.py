"""The page of a contest says what its lines mean."""

from __future__ import annotations

import pytest

from foreshard.report.pages import simulation_page
from foreshard.simulate.sweeps import Sweeps


@pytest.mark.parametrize(("ours", "said"), [(0.4, True), (0.2, False)])
def test_a_line_above_the_bound_is_said_to_have_spent_too_much(ours, said):
    row = {"factor": 2.0, "ours": ours, "ideal": 0.3, "free": 0.5, "formula": 0.5}
    swept = Sweeps(uneven=[row], rates=[], front=[], slots=60)
    assert '<div class="wide"><table>' in simulation_page._uneven(swept)
    assert ("spent more than its budget" in simulation_page._uneven(swept)) is said
