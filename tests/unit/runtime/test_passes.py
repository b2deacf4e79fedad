"""Passes at nominal speed, against the prediction of a step."""

import json

import pytest

from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import load_costs
from foreshard.predict.measured.engine import rank_times, step_seconds
from foreshard.runtime.adaptive.pass_times import PassTimes
from foreshard.spec.plan_file import parse_plan

LAYER = {
    "forward_s": [1e-3, 2e-3],
    "backward_s": [2e-3, 4e-3],
    "backward_input_s": [5e-4, 2e-3],
    "optimizer_s": 0.0,
    "parameter_bytes": 1e5,
    "state_bytes": 2e5,
    "saved_bytes_per_sample": 1e4,
    "boundary_bytes_per_sample": 1.0,
    "frozen_bytes": 0.0,
}
LAB = Lab(clock="cpu", slow=(1.0, 3.0), devices=("a", "b"), bandwidth_bytes_per_s=1e12, latency_s=0.0)


TIMED = {
    **LAYER,
    "timed_sizes": [2, 4, 8],
    "timed_forward_s": [4e-3, 9e-3, 15e-3],
    "timed_backward_s": [9e-3, 16e-3, 38e-3],
    "timed_backward_input_s": [4e-3, 8e-3, 20e-3],
}
"""Far from any line: 8 samples go through in less than four times as long as 2, back in more."""


@pytest.fixture(params=[LAYER, TIMED], ids=["a line", "timed sizes"])
def costs(tmp_path, request):
    told = {
        "schema_version": 1,
        "kind": "measured costs",
        "clock": "cpu",
        "layers": [request.param] * 4,
        "devices": {"a": 1.0, "b": 3.0},
        "spread": [1.0, 1.0],
        "tokens_per_sample": 8,
        "samples": [1, 8],
    }
    (tmp_path / "costs.json").write_text(json.dumps(told))
    return load_costs(str(tmp_path / "costs.json"))


def pipeline(share, size, cut=3):
    stages = [{"ranks": [0], "layers": [[0, cut]]}, {"ranks": [1], "layers": [[cut, 4]]}]
    return parse_plan(
        {
            "global_batch": share,
            "seq_len": 8,
            "precision": "fp32",
            "groups": [
                {"share": share, "micro_batch": size, "stages": stages},
            ],
        }
    )


@pytest.mark.parametrize(("share", "size"), [(12, 4), (13, 4), (5, 8), (7, 1)])
def test_seconds_per_sample_are_what_a_rank_is_predicted_to_compute(costs, share, size):
    passes, plan = PassTimes.measured(costs, LAB.cluster()), pipeline(share, size)
    for one in rank_times(costs, LAB.cluster(), plan):
        span = plan.groups[0].stages[one.rank].layers[0]
        nominal = passes.sample_s(one.rank, span, share, size)
        assert nominal * share / passes.speed[one.rank] == pytest.approx(one.compute_s)


@pytest.mark.parametrize("share", [1, 5, 16, 64, 200])
def test_the_micro_batch_is_the_one_that_is_predicted_to_be_best(costs, share):
    chosen = PassTimes.measured(costs, LAB.cluster()).best_size([(0, (0, 3)), (1, (3, 4))], share, 16)
    times = {
        size: step_seconds(costs, LAB.cluster(), pipeline(share, size))
        for size in range(1, min(16, share) + 1)
    }
    assert times[chosen] <= 1.05 * min(times.values())


def test_one_stage_takes_the_size_with_least_seconds_a_sample(costs):
    """The largest on a line; where sizes were timed, four samples take less than half of eight."""
    best = 4 if costs.layers[0].timed_sizes else 8
    assert PassTimes.measured(costs, LAB.cluster()).best_size([(0, (0, 4))], 32, 8) == best
    assert PassTimes.measured(costs, LAB.cluster()).best_size([(0, (0, 4))], 3, 8) == 3
