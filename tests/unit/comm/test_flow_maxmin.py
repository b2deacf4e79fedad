"""Max-min rates of cases worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate

pytestmark = pytest.mark.parametrize("compiled", [False, True])


def rates(routes, capacity, *, compiled, usage=None, weight=None, priority=None):
    """Rates at the start: those at which a flow of so few bytes moves that it ends before any other."""
    builder = FlowProgramBuilder(np.array(capacity))
    for flow, route in enumerate(routes):
        row = builder.route(route, usage[flow] if usage else ())
        builder.send(
            row, 1.0, weight=weight[flow] if weight else 1.0, priority=priority[flow] if priority else 0
        )
    program, found = builder.build(), []
    for flow in range(len(routes)):
        few = program.num_bytes.copy()
        few[flow] = 2.0**-40
        found.append(2.0**-40 / simulate(replace(program, num_bytes=few), compiled=compiled).end_s[flow])
    return found


def test_what_a_narrow_flow_leaves_goes_to_the_others(compiled):
    assert rates([[0], [0], [0, 1]], [10.0, 1.0], compiled=compiled) == [4.5, 4.5, 1.0]


def test_bertsekas_gallager_example(compiled):
    """Figure 6.12: five sessions on a line of links of capacity 1; rates 1/3 on the middle link, 2/3, 1."""
    found = rates([[0], [1], [1], [0, 1], [2]], [1.0, 1.0, 1.0], compiled=compiled)
    assert found == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3, 1.0], rel=1e-12)


def test_weights_divide_a_resource(compiled):
    assert rates([[0], [0]], [9.0], weight=[2.0, 1.0], compiled=compiled) == [6.0, 3.0]


def test_a_split_flow_occupies_a_part_of_each_path(compiled):
    """Half of flow 0 goes over each resource: 2 r / 2 + r <= 3 gives both flows 2."""
    found = rates([[0, 1], [0]], [3.0, 9.0], usage=[[0.5, 0.5], [1.0]], compiled=compiled)
    assert found == [2.0, 2.0]


def test_a_higher_priority_takes_all_it_can(compiled):
    found = rates([[0, 1], [0], [1]], [5.0, 2.0], priority=[7, 0, 0], compiled=compiled)
    assert found == pytest.approx([2.0, 3.0, 0.0], abs=1e-9)


def test_no_flows(compiled):
    assert rates([], [1.0], compiled=compiled) == []
