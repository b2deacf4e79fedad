"""What a batch takes and costs, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshard.control.search.pricing import StageArrays, evaluate, pace_of, period_s, sync_s
from foreshard.control.slots import MP_OVER_DP, Structure, WorkerPipeline
from foreshard.errors import SpecError
from foreshard.graph.pace import pipeline_pace


def one_group(*workers, cuts):
    return Structure(groups=(WorkerPipeline(workers=workers, cuts=cuts),))


def test_a_pipeline_by_hand(cases):
    chain = cases.chain([1.0, 1.0, 2.0], 2, boundary=5.0, sync=4.0)
    state = cases.state([1.0, 2.0], latency_s=np.full((2, 2), 0.5))
    choice = evaluate(chain, state, one_group(0, 1, cuts=(0, 2, 3)), (8,), micro_batch=2)
    # Stages: 2 samples * 2 s; 2 samples * 2 s / 2 + two latencies + 2 samples * 5 bytes / 10 = 4 s.
    assert choice.time_s == pytest.approx(4.0 + 4.0 + 3 * 4.0)
    assert choice.costs["rent_usd"] == pytest.approx(2 * 20.0)
    assert choice.costs["joule"] == pytest.approx(300 * 16 + 100 * 4 + 300 * 8 + 100 * 12)
    assert choice.costs["duty:0"] == 16.0 and choice.costs["duty:7"] == 0.0
    assert choice.costs["carbon_kg"] == pytest.approx(1e-7 * choice.costs["joule"])


def test_replicas_wait_for_the_ring(cases):
    chain = cases.chain([1.0, 1.0], 3, sync=[6.0, 3.0])
    structure = Structure(groups=tuple(WorkerPipeline(workers=(w,), cuts=(0, 2)) for w in range(3)))
    choice = evaluate(chain, cases.state([1.0, 1.0, 2.0]), structure, (2, 2, 6), micro_batch=1)
    assert choice.time_s == pytest.approx(6.0 + 2 * 2 / 3 * 9.0 / 10.0)


def test_bytes_between_sites_are_paid_by_who_sends(cases):
    chain = cases.chain([1.0, 1.0], 2, boundary=8.0, sync=6.0)
    price = np.array([[0.0, 0.1], [0.3, 0.0]])
    state = cases.state([1.0, 1.0], usd_per_byte=price)
    pipe = evaluate(chain, state, one_group(0, 1, cuts=(0, 1, 2)), (4,), micro_batch=2)
    assert pipe.costs["egress_usd"] == pytest.approx(4 * 4.0 * 0.1 + 4 * 4.0 * 0.3)
    assert pipe.costs["egress_usd:1"] == pytest.approx(4 * 4.0 * 0.3)
    both = Structure(
        groups=(WorkerPipeline(workers=(0,), cuts=(0, 2)), WorkerPipeline(workers=(1,), cuts=(0, 2)))
    )
    ring = evaluate(chain, state, both, (2, 2), micro_batch=2)
    assert ring.costs["egress_usd"] == pytest.approx(12.0 * 0.4)
    assert ring.costs["usd"] == pytest.approx(ring.costs["rent_usd"] + ring.costs["egress_usd"])


def test_what_does_not_fit_or_is_not_there_takes_for_ever(cases):
    chain = cases.chain([1.0, 1.0], 2, states=3.0, saved=1.0, memory=8.0)
    state = cases.state([1.0, 1.0])
    alone = one_group(0, cuts=(0, 2))
    assert math.isfinite(evaluate(chain, state, alone, (1,), micro_batch=1).time_s)
    assert math.isinf(evaluate(chain, state, alone, (2,), micro_batch=2).time_s)
    # First of two stages: a micro-batch of its own and one on the way.
    pair = one_group(0, 1, cuts=(0, 1, 2))
    assert math.isfinite(evaluate(chain, state, pair, (8,), micro_batch=2).time_s)
    gone = cases.state([1.0, 1.0], available=np.array([True, False]))
    assert math.isinf(evaluate(chain, gone, pair, (8,), micro_batch=2).time_s)


def test_what_takes_for_ever_costs_without_end_also_where_a_worker_is_free(cases):
    chain, state = cases.chain([1.0], 1, saved=10.0, memory=1.0), cases.state([1.0], usd_per_h=np.zeros(1))
    found = evaluate(
        chain, state, Structure(groups=(WorkerPipeline(workers=(0,), cuts=(0, 1)),)), (1,), micro_batch=1
    )
    assert math.isinf(found.costs["rent_usd"]) and math.isinf(found.costs["usd"])


def test_stages_of_several_workers_by_hand(cases):
    chain = cases.chain([2.0, 2.0], 3, boundary=10.0, sync=5.0)
    structure = Structure(
        groups=(WorkerPipeline(workers=(0, 1), cuts=(0, 1)), WorkerPipeline(workers=(2,), cuts=(1, 2))),
        reading=MP_OVER_DP,
    )
    choice = evaluate(chain, cases.state([3.0, 1.0, 4.0]), structure, (3, 1, 4), micro_batch=4, batch=16)
    # 2 s each for a micro-batch; 4 s of messages to one worker; a ring of two over 5 bytes.
    assert choice.time_s == pytest.approx(2.0 + 6.0 + 3 * 6.0 + 0.5)
    assert choice.costs["duty:1"] == pytest.approx(8.0)
    with pytest.raises(SpecError, match="no batch"):
        evaluate(chain, cases.state([3.0, 1.0, 4.0]), structure, (3, 1, 4), micro_batch=4)


def test_one_stage_of_equal_workers_is_data_parallel_in_both_readings(cases):
    chain = cases.chain([1.0, 2.0], 2, sync=3.0)
    state = cases.state([1.0, 1.0])
    wide = Structure(groups=(WorkerPipeline(workers=(0, 1), cuts=(0, 2)),), reading=MP_OVER_DP)
    apart = Structure(groups=tuple(WorkerPipeline(workers=(w,), cuts=(0, 2)) for w in range(2)))
    one = evaluate(chain, state, wide, (2, 2), micro_batch=4, batch=16)
    other = evaluate(chain, state, apart, (8, 8), micro_batch=2)
    assert one.time_s == pytest.approx(other.time_s) and dict(one.costs) == pytest.approx(dict(other.costs))


@pytest.mark.parametrize("seed", range(20))
def test_pipelines_go_at_the_pace_of_the_planner(cases, seed):
    """Any mixture of pipelines of one to six stages: each alone, by the closed form of the planner."""
    rng = np.random.default_rng(seed)
    chain, state = cases.random_case(rng, 6, layers=7)
    sizes = rng.multinomial(6, np.ones(3) / 3)
    workers, groups = iter(rng.permutation(6).tolist()), []
    for size in sizes[sizes > 0].tolist():
        cuts = (0, *sorted(rng.choice(np.arange(1, 7), size - 1, replace=False).tolist()), 7)
        groups.append(WorkerPipeline(workers=tuple(next(workers) for _ in range(size)), cuts=cuts))
    structure = Structure(groups=tuple(groups))
    stages, found = StageArrays.of(structure), pace_of(chain, state, structure, micro_batch=2)
    period = period_s(chain, state, stages, 2)
    sync = sync_s(chain, state, stages).max()
    for group in range(len(groups)):
        pace = pipeline_pace(period[stages.group == group])
        end_s = found.start_s[group] + found.rate_s[group] * 10
        assert end_s == pytest.approx(pace.fill_s + 5 * pace.period_s + sync, rel=1e-12)
