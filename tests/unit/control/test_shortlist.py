"""The closer look at what a search finds: what is slow by finer seconds is not taken."""

from __future__ import annotations

import pytest

from foreshard.control.budgets.objective import Objective
from foreshard.control.search.shortlist import Shortlist
from foreshard.control.search.slot_search import PipelineSearch
from foreshard.control.slots import Budget

BATCH, UPDATE_S = 24, 3.0


def compared(cases, speed, update_s):
    """Return the best replicas where every replica takes an update the slower, the slower its worker."""
    chain, state = cases.chain([1.0] * 4, len(speed)), cases.state(speed)
    budgets = [Budget(name="money", kind="usd", limit=1.0)]
    asked = {"batch": BATCH, "micro_batch": 1}

    def timed(state, structure, shares):
        workers = [group.workers[0] for group in structure.groups]
        seconds = zip(workers, shares, strict=True)
        return max((update_s + 4.0 * share) / state.speed[worker] for worker, share in seconds)

    slots = PipelineSearch(chain, budgets, max_stages=1, **asked)
    shortlist = Shortlist(slots, timed=timed, plain=False, **asked)
    free = Objective(time=1.0, costs={}, budgets=tuple(budgets))
    running = slots.compare(state, free, None).best
    return shortlist.compare(state, free, running)


@pytest.mark.parametrize("update_s", [0.0, UPDATE_S])
def test_a_group_of_few_samples_is_left_out_where_its_update_costs_more_than_it_saves(cases, update_s):
    found = compared(cases, [1.0, 1.0, 0.1], update_s)
    workers = {worker for group in found.best.groups for worker in group.workers}
    assert workers == ({0, 1} if update_s else {0, 1, 2})
    assert found.best_worth <= found.stay_worth
