"""Other jobs on the links and NICs of a predicted step: what they leave, and what follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foreshard import api
from foreshard.comm.jobs.background import IN, OUT, BackgroundLoad, left_by
from foreshard.comm.jobs.job import IterationPhase, TrainingJob, collective_transfers
from foreshard.errors import SpecError
from foreshard.graph.program import ProgramBuilder
from foreshard.sim import contention
from foreshard.sim.contention import Burst, OtherJob, Phases, SharedNetwork
from foreshard.spec.plan_file import parse_plan
from foreshard.spec.variation import Noise

RACKS = str(Path(__file__).parents[2] / "laws" / "two_racks.toml")
LINK, NIC = 12.5e9, 8 * 50e9
PLAN = parse_plan(
    {
        "global_batch": 16,
        "seq_len": 1024,
        "framework": "megatron-core",
        "defaults": {"zero": 0},
        "groups": [
            {
                "share": 16,
                "micro_batch": 8,
                "stages": [{"ranks": [0, 1, 2, 3, 8, 9, 10, 11], "layers": [[0, 50]]}],
            }
        ],
    }
)
"""Four devices in either rack; the others are free."""


@pytest.fixture(scope="module")
def cluster():
    return api.load_cluster(RACKS)


def job(size: float, ranks: tuple[int, ...] = (4, 12), compute_s: float = 0.01) -> TrainingJob:
    transfers = collective_transfers("all-reduce", size, ranks)
    phase = IterationPhase(compute_s=compute_s, transfers=transfers)
    return TrainingJob(name="beside", ranks=ranks, phases=(phase,), num_iterations=1)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_max_min_fair(seed):
    """The level at which all that ask, and one that always does, together take the whole."""
    draw = np.random.default_rng(seed)
    demands = draw.exponential(3.0, draw.integers(0, 6)).tolist()
    low, high = 0.0, 10.0
    for _ in range(80):
        level = (low + high) / 2
        too_much = level + sum(min(one, level) for one in demands) > 10.0
        low, high = (low, level) if too_much else (level, high)
    assert left_by(10.0, demands) == pytest.approx(level, rel=1e-9)


def test_a_job_sends_its_bytes_evenly_over_an_iteration(cluster):
    """100 MB each way over a link of 12.5 GB/s: 8 ms after 10 ms of computation."""
    load = BackgroundLoad(cluster, [job(100e6)])
    rate = 100e6 / 0.018
    for way in (0, 1):
        assert load.link_share(0, way) == pytest.approx(1 - rate / LINK)
    assert load.nic_share([0], OUT) == load.nic_share([9], IN) == pytest.approx(1 - rate / NIC)
    inside = BackgroundLoad(cluster, [job(100e6, (4, 5))])
    assert inside.link_share(0, 0) == inside.nic_share([0], OUT) == 1.0


def step_s(cluster, *jobs: TrainingJob, **more) -> tuple[float, float]:
    """Seconds of the step, and of its gradient collectives."""
    found = api.request("gpt2-xl", cluster, PLAN, network="flow", other_jobs=jobs, **more).predict()
    return found.step_time_s, sum(one.flow_s for one in found.collectives)


def test_a_gradient_waits_for_what_others_leave_of_the_link(cluster):
    alone, gradients = step_s(cluster)
    closed = api.request("gpt2-xl", cluster, PLAN, network="closed-form").predict().step_time_s
    assert alone == pytest.approx(closed, rel=1e-9), "without others as before"
    shared, longer = step_s(cluster, job(100e6))
    assert longer / gradients == pytest.approx(1 / (1 - 100e6 / 0.018 / LINK), rel=5e-3)
    assert shared - alone == pytest.approx(longer - gradients, rel=1e-3)


def test_more_load_is_never_faster(cluster):
    times = [step_s(cluster, *jobs)[0] for jobs in [(), *[(job(size),) for size in (1e6, 1e8, 1e10)]]]
    times.append(step_s(cluster, job(1e10), job(1e10, (5, 13)))[0])
    assert times == sorted(times) and times[-1] > 1.5 * times[0]
    half = step_s(cluster, job(1e10))[1]
    assert half / step_s(cluster)[1] <= 2.0 + 1e-9, "one other job gets at most half"


@pytest.mark.parametrize("noise", [None, Noise(jitter=0.1, slow={8: 1.2}, seeds=4)])
def test_so_it_is_in_the_event_engine_whether_ranks_differ_or_not(cluster, noise):
    loads = [(), (job(1e6),), (job(1e8),), (job(1e10),), (job(1e10), job(1e10, (5, 13)))]
    times = [step_s(cluster, *jobs, engine="event", noise=noise)[0] for jobs in loads]
    assert times == sorted(times) and times[-1] > 1.3 * times[0]
    if noise is None:
        assert times == pytest.approx([step_s(cluster, *jobs)[0] for jobs in loads], rel=1e-9)


def test_what_other_jobs_cannot_be_is_refused(cluster):
    for jobs, more, says in (
        ((job(1e6, (3, 12)),), {"network": "flow"}, "rank 3"),
        ((job(1e6),), {}, "share no network"),
        ((job(1e6),), {"engine": "analytical"}, "share no network"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            api.request("gpt2-xl", cluster, PLAN, other_jobs=jobs, **more).predict()
        assert caught.value.key == "--other-jobs"


def test_the_command_reads_jobs_of_the_same_cluster(tmp_path):
    from click.testing import CliRunner

    from foreshard.cli.predict import command

    plan, jobs = tmp_path / "plan.json", tmp_path / "jobs.toml"
    plan.write_text(json.dumps(PLAN.to_dict()))
    text = f'cluster = "{RACKS}"\n[[jobs]]\nname = "beside"\nranks = [4, 12]\niterations = 9\n'
    jobs.write_text(text + '[[jobs.phases]]\ncompute = "10 ms"\ncollective = "all-reduce"\nsize = "100 MB"\n')

    def run(*flags: str):
        words = ["gpt2-xl", RACKS, "--plan", str(plan), "--other-jobs", str(jobs), "--json", *flags]
        return CliRunner().invoke(command, words)

    found = json.loads(run("--network", "flow").stdout)
    assert found["step_time_s"] == pytest.approx(step_s(api.load_cluster(RACKS), job(100e6))[0], rel=1e-9)
    assert "beside" in found["assumptions"][0]
    missing = run().exception
    assert isinstance(missing, SpecError) and "--network flow" in missing.fix
    jobs.write_text(jobs.read_text().replace(RACKS, "2x8xh100-sxm"))
    other = run("--network", "flow").exception
    assert isinstance(other, SpecError) and other.key == "cluster"


def burst_s(cluster, *jobs, **more):
    """Seconds of the step while jobs send in bursts, and of its gradient collectives."""
    return step_s(cluster, *jobs, engine="event", bursts=True, **more)


def beside_s(jobs: list[tuple[float, float]]) -> float:
    """Return when a transfer of a second ends beside jobs that wait and then send, over and over.

    All that send at once have equal parts of the link; from one change to the next.
    """
    now, left = 0.0, 1.0
    wakes, sends = [wait for wait, _ in jobs], [0.0 for _ in jobs]
    while left > 1e-12:
        rate = 1.0 / (1 + sum(size > 0.0 for size in sends))
        changes = [left / rate, *(size / rate for size in sends if size > 0.0)]
        changes += [wake - now for wake, size in zip(wakes, sends, strict=True) if size <= 0.0]
        span = min(changes)
        now, left = now + span, left - rate * span
        for i, (wait, size) in enumerate(jobs):
            if sends[i] > 0.0:
                sends[i] -= rate * span
                if sends[i] < 1e-12:
                    sends[i], wakes[i] = 0.0, now + wait
            elif wakes[i] <= now + 1e-12:
                sends[i] = size
    return now


@pytest.mark.parametrize("jobs", [[], [(0.5, 0.25)], [(0.2, 0.1), (0.33, 0.4)], [(0.01, 0.003), (2.0, 1.0)]])
def test_bursts_share_a_link_as_a_loop_over_changes_finds(jobs):
    builder = ProgramBuilder()
    builder.add("send", 1.0, [])
    network = SharedNetwork()
    route = network.route([network.resource("link", 1e9)], [1.0])
    network.others = [
        OtherJob(name="beside", phases=(Burst(compute_s=wait, num_bytes=size * 1e9, route=route),))
        for wait, size in jobs
    ]
    sent = Phases(
        task=np.array([0]),
        delay_s=np.zeros(1),
        num_bytes=np.array([1e9]),
        route=np.array([route]),
        beside=np.zeros(1, dtype=bool),
    )
    found = contention.run(builder.build(), sent, network)
    assert found.times.makespan_s == pytest.approx(beside_s(jobs), rel=1e-9)
    assert found.program.num_tasks == 1


def test_without_jobs_that_send_the_step_is_as_it_was(cluster):
    alone = step_s(cluster, engine="event")[0]
    inside = job(1e9, (4, 5))  # within a node
    assert burst_s(cluster, inside)[0] == alone


def test_a_job_that_waits_for_its_bursts_takes_less_than_an_even_one(cluster):
    """10 ms of computation, and 8 ms of sending that take 16 beside a gradient: 8 of 26 ms are lost."""
    _, gradients = step_s(cluster)
    bursts = burst_s(cluster, job(100e6 / 100, compute_s=0.01 / 100))[1]
    assert bursts / gradients == pytest.approx(26 / 18, rel=1e-2)
    assert bursts < step_s(cluster, job(100e6))[1]


def test_bursts_never_shorten_a_step_and_large_ones_take_half(cluster):
    alone = step_s(cluster, engine="event")
    times = [burst_s(cluster, job(size))[0] for size in (1e6, 1e8, 1e10)]
    assert alone[0] <= times[0] <= times[1] <= times[2]
    endless = burst_s(cluster, job(1e12, compute_s=0.0))
    assert endless[1] / alone[1] == pytest.approx(2.0, rel=2e-2)


def test_bursts_meet_ranks_that_differ_once(cluster):
    noise = Noise(jitter=0.05, seeds=4)
    found = api.request(
        "gpt2-xl",
        cluster,
        PLAN,
        network="flow",
        other_jobs=(job(1e8),),
        engine="event",
        bursts=True,
        noise=noise,
    ).predict()
    assert found.step_time_distribution.contention == "once"
    assert found.step_time_s > burst_s(cluster, job(1e8))[0]


@pytest.mark.parametrize(
    ("jobs", "more", "fix"),
    [
        ((), {"engine": "event"}, "--other-jobs"),
        ((job(1e6),), {"engine": "graph", "network": "flow"}, "--engine event"),
        ((job(1.0, compute_s=1e-9),), {"engine": "event"}, "as good as even"),
    ],
)
def test_bursts_that_cannot_be_simulated_are_refused(cluster, jobs, more, fix):
    with pytest.raises(SpecError) as caught:
        api.request("gpt2-xl", cluster, PLAN, other_jobs=jobs, bursts=True, **more).predict()
    assert caught.value.key == "--bursts" and fix in caught.value.fix
