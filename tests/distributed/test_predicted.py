"""The runtime's virtual clock and the prediction from measured costs tell one step time, plan by plan."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rehearsal import plan_of
from small_jobs import gpt
from small_plans import PLANS

from foreshard.errors import SpecError
from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import load_costs
from foreshard.predict.measured.engine import predict_measured, rank_times
from foreshard.profile.calibration import calibrate
from foreshard.profile.layer_times import profile_layers, write_profile
from foreshard.runtime.engine.executor import through
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.tensor.single_rank import TensorPart
from foreshard.runtime.trainer import Trainer

LAB = Lab(
    clock="table",
    slow=(1.0, 2.0, 4.0, 8.0),
    devices=("a", "b", "c", "d"),
    bandwidth_bytes_per_s=2e7,
    latency_s=3e-4,
    table_s={"forward": 1e-3, "backward": 2.5e-3, "optimizer": 2e-4},
)
PLAIN = [
    name
    for name, plan in PLANS.items()
    if all(s.zero == 0 or s.inner_dp == 1 for g in plan.groups for s in g.stages)
    and all(s.recompute == "none" and g.schedule != "zb-h1" for g in plan.groups for s in g.stages)
]


def together(*groups):
    """Pipelines of (share, micro-batch, stages of (ranks, layers, tp))."""
    told = [
        {
            "share": share,
            "micro_batch": size,
            "stages": [(ranks, [layers], {"tp": tp}) for ranks, layers, tp in stages],
            "schedule": schedule,
        }
        for share, size, stages, schedule in groups
    ]
    return plan_of(told, global_batch=sum(one["share"] for one in told))


TENSOR = {
    "tp 2": together((12, 6, [([0, 1], [0, 8], 2)], "1f1b")),
    "tp 4": together((12, 3, [([3, 1, 0, 2], [0, 8], 4)], "1f1b")),
    "tp 2 beside two alone": together(
        (6, 3, [([1, 3], [0, 8], 2)], "1f1b"),
        (4, 2, [([0], [0, 8], 1)], "1f1b"),
        (2, 1, [([2], [0, 8], 1)], "1f1b"),
    ),
    "tp 2 in two stages": together((12, 4, [([0, 1], [0, 3], 2), ([2, 3], [3, 8], 2)], "1f1b")),
    "one before tp 2": together((12, 4, [([3], [0, 3], 1), ([0, 2], [3, 8], 2)], "gpipe")),
    "tp 2 beside tp 2": together(
        (8, 4, [([0, 1], [0, 8], 2)], "1f1b"),
        (4, 2, [([2, 3], [0, 8], 2)], "1f1b"),
    ),
}


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Costs of the job by the lab's table, its bytes as profiled."""
    return {tied: costs_of(tied, tmp_path_factory.mktemp("costs") / "costs.json") for tied in (False, True)}


def costs_of(tied, file):
    job, cpu = gpt(tied=tied), torch.device("cpu")
    made = profile_layers(
        job,
        samples=(1, 2),
        repeats=1,
        out=None,
        device=cpu,
        through=through,
        parts={degree: partial(TensorPart, job, degree, cpu) for degree in (2, 4)},
    )
    told = calibrate(
        made, clock="cpu", slow=dict(zip(LAB.devices, LAB.slow, strict=True)), table_s=LAB.table_s
    )
    write_profile(file, told)
    return load_costs(str(file))


def step_times(plan, tied, steps=2):
    """Return the step times that the ranks agree on."""
    store, found, ranks = dist.HashStore(), {}, sorted(plan.ranks)

    def body(rank):
        clock = LAB.make_clock([0])
        clock.slow = LAB.slow[rank]
        trainer = Trainer(
            gpt(tied=tied), membership=FixedMembership(store, rank, plan, ranks, timeout_s=30), clock=clock
        )
        found[rank] = [trainer.train_step().time_s for _ in range(steps)]

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(ranks), "a rank is missing"
    return found[ranks[0]]


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in PLAIN), *((n, True) for n in PLAIN[2:6])]
)
def test_predicted_is_what_the_virtual_clock_shows(costs, name, tied):
    plan = PLANS[name]
    told = predict_measured(costs[tied], LAB.cluster(), plan).step_time_s
    exact = all(g.share % g.micro_batch == 0 and s.inner_dp == 1 for g in plan.groups for s in g.stages)
    # messages of a short last micro-batch, and of part of a stage's samples, are priced as whole ones
    assert step_times(plan, tied)[1] == pytest.approx(told, rel=1e-9 if exact else 1e-3)


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in TENSOR), ("tp 4", False), ("tp 2 beside two alone", False)]
)
def test_so_it_is_where_ranks_compute_layers_together(costs, name, tied):
    told = predict_measured(costs[tied], LAB.cluster(), TENSOR[name])
    assert step_times(TENSOR[name], tied)[1] == pytest.approx(told.step_time_s, rel=1e-9)
    assert sum(told.time_breakdown_s.values()) == pytest.approx(told.step_time_s)
    sums_s = {one.rank: one.tensor_s for one in rank_times(costs[tied], LAB.cluster(), TENSOR[name])}
    stages = [stage for group in TENSOR[name].groups for stage in group.stages]
    assert all((sums_s[rank] > 0) == (stage.tp > 1) for stage in stages for rank in stage.ranks)


def test_parts_that_were_not_measured_are_refused(costs):
    other = together((12, 6, [([0, 1, 2], [0, 8], 3)], "1f1b"))
    with pytest.raises(SpecError, match="layers that 3 ranks compute together were not measured"):
        predict_measured(costs[True], LAB.cluster(), other)


def test_enough_plans_are_compared():
    assert len(PLAIN) >= 8
