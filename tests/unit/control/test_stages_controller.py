"""The controller on one pipeline of wide stages lives through good and bad days."""

from __future__ import annotations

import io

import numpy as np
import pytest

from foreshard.control.controller import Controller
from foreshard.control.journal import replay
from foreshard.control.moves import spans_of
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.slots import MP_OVER_DP, Budget
from foreshard.errors import SpecError
from foreshard.spec.online import DeviceSeen, RankLost, StepMeasured
from foreshard.spec.plan_file import parse_plan

LAYERS, BATCH, MICRO_BATCH = 6, 64, 8
PLAN = parse_plan(
    {
        "global_batch": BATCH,
        "seq_len": 8,
        "groups": [
            {
                "share": BATCH,
                "micro_batch": MICRO_BATCH,
                "stages": [
                    {"ranks": [0, 1], "layers": [[0, 3]]},
                    {"ranks": [2, 3], "layers": [[3, LAYERS]]},
                ],
            }
        ],
    }
)


class World:
    """What really happens: ranks that hold four of six layers at most, seen through noise."""

    def __init__(self, cases, noise=0.0):
        self.cases, self.noise, self.rng = cases, noise, np.random.default_rng(0)
        self.chain = cases.chain(np.full(LAYERS, 0.1), 4, boundary=0.1, sync=0.01, saved=0.01, memory=4.7)
        self.speed, self.there = np.ones(4), np.ones(4, bool)

    def state(self):
        return self.cases.state(self.speed, available=self.there.copy())

    def controller(self, **asked):
        return Controller(self.chain, self.cases.state(np.ones(4)), PLAN, **asked)

    def step(self, number, plan):
        made = structure_of(plan, MP_OVER_DP)
        real = evaluate(
            self.chain, self.state(), made, shares_of(plan, MP_OVER_DP), micro_batch=MICRO_BATCH, batch=BATCH
        )
        speeds = {w: float(self.speed[w]) / self.rng.lognormal(0.0, self.noise) for w, _ in spans_of(made)}
        return StepMeasured(
            step=number, time_s=real.time_s, relative_speed=speeds, costs={"money": real.costs["usd"]}
        )


def run(world, controller, steps):
    """Let steps pass; return what they took and the commands."""
    took, commands = [], []
    for number in steps:
        event = world.step(number, controller.plan)
        took.append(event.time_s)
        commands += controller.on(event)
        controller.check_invariants()
    return np.array(took), commands


def test_a_straggler_gets_less_and_gets_it_back(cases):
    world = World(cases)
    controller = world.controller()
    before, _ = run(world, controller, range(20))
    world.speed[2] = 0.25
    slow, _ = run(world, controller, range(20, 60))
    assert slow[0] > 2.5 * before[-1] and slow[-1] < 0.5 * slow[0]
    assert controller.counts["re-share"] + controller.reconfigurations >= 1
    world.speed[2] = 1.0
    after, _ = run(world, controller, range(60, 100))
    assert after[-1] == pytest.approx(before[-1], rel=0.03)


def test_a_lost_rank_is_left_out_at_once_and_the_log_replays(cases):
    log = io.StringIO()
    world = World(cases)
    budgets = (Budget(name="money", kind="usd", limit=45.0),)
    controller = world.controller(log=log, budgets=budgets)
    run(world, controller, range(5))
    world.there[1] = False
    (command,) = controller.on(RankLost(step=5, rank=1))
    assert command.kind in ("idle", "activate", "regroup") and 1 not in command.plan.ranks
    run(world, controller, range(6, 30))
    world.there[1] = True
    controller.on(DeviceSeen(step=30, rank=1, relative_speed=1.0))
    run(world, controller, range(31, 80))
    assert 1 in controller.plan.ranks
    lines = log.getvalue().splitlines()
    said = [line for line in lines if line.startswith('{"command"')]
    again = replay([line for line in lines if line.startswith('{"event"')], world.controller(budgets=budgets))
    assert list(again) == said


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_noise_alone_changes_stages_hardly_ever(cases, noise):
    world = World(cases, noise)
    controller = world.controller()
    run(world, controller, range(60))
    before = controller.reconfigurations
    run(world, controller, range(60, 260))
    assert controller.reconfigurations - before <= 1


def test_readings_that_a_plan_does_not_have_are_refused(cases):
    world = World(cases)
    with pytest.raises(SpecError, match="one rank"):
        world.controller(reading="dp_over_mp")
    with pytest.raises(SpecError, match="unknown reading"):
        world.controller(reading="both")
    two = parse_plan(
        {
            "global_batch": BATCH,
            "seq_len": 8,
            "groups": [
                {"share": 32, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]} for rank in range(2)
            ],
        }
    )
    with pytest.raises(SpecError, match="2 pipelines"):
        Controller(world.chain, world.state(), two, reading=MP_OVER_DP)
