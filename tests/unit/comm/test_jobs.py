"""Jobs on one fabric: two jobs on a link by hand, conservation, relabelling, bounds, policies' oracles."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from foreshard.comm.jobs.comparison import compared, simulated
from foreshard.comm.jobs.demand import demands_of
from foreshard.comm.jobs.draw import drawn_jobs
from foreshard.comm.jobs.intensity import chosen_paths, compressed, intensities, priorities
from foreshard.comm.jobs.job import IterationPhase, TrainingJob, Transfer, collective_transfers
from foreshard.comm.jobs.policies import POLICIES
from foreshard.comm.jobs.rotation import CircleJob, best_shifts, excess, on_circle, rotations
from foreshard.comm.jobs.run import FlowSetting, Pace, program_of_jobs, run_jobs
from foreshard.comm.jobs.trace import DrawTable
from foreshard.comm.topology.graph import Edge, Topology, Vertex
from foreshard.errors import SpecError

RATE = 10e9


def two_by_two(num_cables: int = 1, num_pairs: int = 2) -> Topology:
    """Pairs of devices left and right of one cable (or several equal ones) that they share."""
    names = [f"{side}{i}" for side in ("left", "right") for i in range(num_pairs)]
    vertices = [Vertex(name=name, kind="device", node=i) for i, name in enumerate(names)]
    hubs = [Vertex(name=f"hub{i}", kind="switch") for i in range(2)]
    mid = [Vertex(name=f"mid{i}", kind="switch") for i in range(num_cables)]
    west, first_mid = 2 * num_pairs, 2 * num_pairs + 2
    links = []
    for i in range(num_pairs):
        for device, hub in ((i, west), (num_pairs + i, west + 1)):
            links += [Edge(source=device, target=hub, bytes_per_s=RATE)]
            links += [Edge(source=hub, target=device, bytes_per_s=RATE)]
    for i in range(num_cables):
        for hub in (west, west + 1):
            links += [Edge(source=hub, target=first_mid + i, bytes_per_s=RATE)]
            links += [Edge(source=first_mid + i, target=hub, bytes_per_s=RATE)]
    return Topology(vertices=(*vertices, *hubs, *mid), links=tuple(links))


def job(index: int, *, compute_s=1.0, send_s=1.0, iterations=20, arrival_s=0.0, num_pairs=2) -> TrainingJob:
    """Return a job of one pair that computes, then sends to the right."""
    send = Transfer(source=index, target=num_pairs + index, num_bytes=send_s * RATE)
    return TrainingJob(
        name=f"job{index}",
        ranks=(index, num_pairs + index),
        phases=(IterationPhase(compute_s=compute_s, transfers=(send,)),),
        num_iterations=iterations,
        arrival_s=arrival_s,
    )


def plain(demands):
    return [[(0, FlowSetting(choice=demand.hashed))] for demand in demands]


class TestTwoJobsOnALink:
    """Each computes for 1 s and sends for 1 s; alone an iteration takes 2 s."""

    demands = demands_of(two_by_two(), [job(0), job(1)])

    def test_fair_share_keeps_them_in_step(self):
        for times in simulated(self.demands, "fair-share"):
            assert times.iteration_s == pytest.approx([3.0] * 20)

    def test_priorities_part_them(self):
        first, second = simulated(self.demands, "priorities")
        assert first.iteration_s == pytest.approx([2.0] * 20)
        assert second.iteration_s == pytest.approx([3.0] + [2.0] * 19)

    def test_rotations_part_them(self):
        times = simulated(self.demands, "rotations")
        late = sorted(made.start_s[0] for made in times)
        assert late[0] == 0.0 and 0.9 < late[1] < 1.1
        for made in times:
            assert made.iteration_s[1:].mean() == pytest.approx(2.02, rel=5e-3)  # a circle with 1 % slack

    def test_mltcp_parts_them_by_and_by_when_one_starts_later(self):
        demands = demands_of(two_by_two(), [job(0), job(1, arrival_s=0.2)])
        for times in simulated(demands, "mltcp"):
            assert times.iteration_s[-1] == pytest.approx(2.0, rel=1e-3)
        for times in simulated(demands, "fair-share"):
            assert times.iteration_s[-1] > 2.5

    def test_the_bound_is_a_lone_job(self):
        found = compared(self.demands, ["fair-share"])
        assert found["bound"].mean_iteration_s == pytest.approx(2.0)
        assert found["bound"].makespan_s == pytest.approx(40.0)
        assert found["fair-share"].mean_slowdown == pytest.approx(1.5)

    def test_paths_part_them_where_there_are_two(self):
        demands = demands_of(two_by_two(2), [job(0), job(1)])
        one, other = chosen_paths(demands)
        assert set(demands[0].paths(one)[0].resources).isdisjoint(demands[1].paths(other)[0].resources)
        for times in simulated(demands, "paths"):
            assert times.iteration_s == pytest.approx([2.0] * 20)


def test_a_setting_holds_from_its_iteration_on():
    demands = demands_of(two_by_two(), [job(0, iterations=4), job(1, iterations=4)])
    histories = plain(demands)
    histories[1].append((2, FlowSetting(choice=demands[1].hashed, priority=1)))
    first, second = run_jobs(demands, histories, compiled=False)
    assert second.iteration_s == pytest.approx([3.0, 3.0, 2.0, 2.0])
    assert first.iteration_s == pytest.approx([3.0, 3.0, 3.0, 2.0])
    paced = [[(0, FlowSetting(choice=demands[0].hashed, pace=Pace(first_s=0.5, period_s=2.5)))]]
    assert run_jobs(demands[:1], paced, compiled=False)[0].end_s == pytest.approx([2.5, 5.0, 7.5, 10.0])


def test_a_job_waits_for_its_ranks():
    one = job(0, iterations=3)
    demands = demands_of(two_by_two(), [one, replace(one, name="next", arrival_s=1.0)])
    first, second = run_jobs(demands, plain(demands), compiled=False)
    assert second.ready_s == first.end_s[-1] == pytest.approx(6.0)
    assert second.end_s[-1] == pytest.approx(12.0)


def test_transfers_that_overlap_hide_behind_the_next_computation():
    send = Transfer(source=0, target=2, num_bytes=RATE)
    phases = (
        IterationPhase(compute_s=1.0, transfers=(send,), overlaps=True),
        IterationPhase(compute_s=0.5, transfers=(send,), overlaps=True),
        IterationPhase(compute_s=0.25),
    )
    made = TrainingJob(name="overlaps", ranks=(0, 2), phases=phases, num_iterations=3)
    demands = demands_of(two_by_two(), [made])
    # 1 s, then two transfers one after the other: 3 s; the computation beside them ends at 1.75 s
    assert demands[0].bound_s() == pytest.approx(3.0)
    assert run_jobs(demands, plain(demands), compiled=False)[0].iteration_s == pytest.approx([3.0] * 3)


def leaves(num_spines: int = 2):
    from foreshard.comm.topology.fabrics import leaf_spine
    from foreshard.comm.topology.machines import switched

    server = switched(1, 100e9, num_nics=1, nic_bytes_per_s=5e9)
    return leaf_spine([server] * 8, nodes_per_leaf=2, num_spines=num_spines, oversubscription=2.0)


DRAW = DrawTable(
    jobs=6,
    kinds=3,
    compute=(0.05, 0.2),
    communication=(0.2, 0.5),
    ranks=(2, 3, 4),
    iterations=(4, 6),
    mean_gap=0.3,
)


@pytest.mark.parametrize("seed", range(30))
def test_a_job_alone_takes_its_bound(seed):
    """One pair, one path: whatever phases overlap, or send nothing."""
    draw = np.random.default_rng(seed)
    phases = []
    for _ in range(draw.integers(1, 5)):
        send = Transfer(source=0, target=2, num_bytes=float(draw.integers(1, 4)) * RATE)
        phase = IterationPhase(
            compute_s=float(draw.integers(0, 4)),
            transfers=(send,) if draw.random() < 0.6 else (),
            overlaps=bool(draw.random() < 0.5),
        )
        phases.append(phase)
    lone = replace(job(0, iterations=3), phases=(IterationPhase(compute_s=1.0), *phases))
    (demand,) = demands_of(two_by_two(), [lone])
    (times,) = run_jobs([demand], plain([demand]), compiled=False)
    assert times.iteration_s == pytest.approx([demand.bound_s()] * 3)
    assert demand.iteration_s(demand.hashed) == pytest.approx(demand.bound_s())


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy):
    for seed in range(2):
        demands = demands_of(leaves(), drawn_jobs(replace(DRAW, seed=seed), leaves()))
        found = compared(demands, [policy])
        bound, own = found["bound"], found[policy]
        assert np.all(own.job_iteration_s >= bound.job_iteration_s * (1 - 1e-9))
        assert own.makespan_s >= bound.makespan_s * (1 - 1e-9)
        assert min(own.p99_slowdown, own.mean_slowdown) >= 1 - 1e-9


def test_bytes_are_conserved_under_every_setting():
    jobs = drawn_jobs(DRAW, leaves())
    demands = demands_of(leaves(), jobs)
    wanted = sum(
        demand.phase_loads(demand.hashed).sum(axis=0) * demand.job.num_iterations for demand in demands
    )
    for ramp in ((1.0,), POLICIES["mltcp"].ramp):
        histories = [
            [
                (0, FlowSetting(choice=demand.hashed)),
                (2, FlowSetting(choice=demand.hashed, priority=i, pace=Pace(first_s=1.0, period_s=0.5))),
            ]
            for i, demand in enumerate(demands)
        ]
        program, _ = program_of_jobs(demands, histories, ramp=ramp)
        assert program.resource_bytes == pytest.approx(wanted)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "rotations" not in policy])
def test_names_and_order_of_jobs_do_not_matter(policy):
    """Jobs on ranks of their own that arrive at different times, in two orders.

    Rotations are left out: jobs whose circles are equally good both ways are shifted in the order given.
    """
    jobs = [
        job(i, compute_s=0.1 * (3 + i), send_s=0.1 * (1 + i), iterations=6, arrival_s=0.37 * i, num_pairs=4)
        for i in range(4)
    ]
    order = [2, 0, 3, 1]
    fabric = two_by_two(1, num_pairs=4)
    usual = simulated(demands_of(fabric, jobs), policy)
    mixed = simulated(demands_of(fabric, [replace(jobs[i], name="x") for i in order]), policy)
    for place, i in enumerate(order):
        assert mixed[place].end_s == pytest.approx(usual[i].end_s, rel=1e-6)


def random_circle(rng, num_jobs, num_steps, num_resources=2):
    jobs = []
    for _ in range(num_jobs):
        start = rng.uniform(0.0, 0.5)
        spans = np.array([[start, start + rng.uniform(0.1, 0.5)]])
        rates = rng.choice([0.0, 0.5, 1.0], size=(1, num_resources))
        repeats = int(rng.choice([1, 1, 2]))
        jobs.append(on_circle(spans / repeats, rates, repeats=repeats, length_s=1.0, num_steps=num_steps))
    return jobs


@pytest.mark.parametrize("num_jobs", [2, 3])
def test_shifts_of_three_jobs_are_the_best_of_all(num_jobs):
    rng = np.random.default_rng(num_jobs)
    for _ in range(40):
        jobs = random_circle(rng, num_jobs, 12)
        every = product((0,), *(range(one.num_shifts) for one in jobs[1:]))
        least = min(excess(jobs, shifts) for shifts in every)
        assert excess(jobs, best_shifts(jobs)) == pytest.approx(least, abs=1e-9)


def test_shifts_of_more_jobs_are_near_the_best():
    rng = np.random.default_rng(7)
    over = []
    for _ in range(25):
        jobs = random_circle(rng, 4, 10)
        every = product((0,), *(range(one.num_shifts) for one in jobs[1:]))
        over.append(excess(jobs, best_shifts(jobs)) - min(excess(jobs, shifts) for shifts in every))
    assert min(over) >= -1e-9 and max(over) < 0.01 and np.mean(np.array(over) < 1e-9) >= 0.9


def test_a_circle_carries_what_its_iterations_send():
    spans, rates = np.array([[0.3, 0.7], [0.9, 1.05]]), np.array([[1.0, 0.25], [0.5, 0.0]])
    made = on_circle(spans, rates, repeats=3, length_s=3.3, num_steps=50)
    sent = (np.diff(spans, axis=1) * rates).sum(axis=0) * 3
    assert made.demand.mean(axis=1) * 3.3 == pytest.approx(sent)


def test_half_and_half_fit_on_a_circle():
    half = CircleJob(repeats=1, demand=np.array([[1.0, 1.0, 0.0, 0.0]]))
    assert excess([half, half], (0, 0)) == pytest.approx(0.5)
    assert excess([half, half], best_shifts([half, half])) == 0.0
    demands = demands_of(two_by_two(), [job(0), job(1)])
    best = rotations(demands, [demand.hashed for demand in demands])[0]
    assert best.excess < 1e-9 and best.periods_s == pytest.approx((2.02, 2.02))


def test_classes_of_priority_are_the_best_of_all():
    rng = np.random.default_rng(3)
    for _ in range(30):
        size, count = int(rng.integers(1, 7)), int(rng.integers(1, 4))
        weights = {(i, j): float(rng.uniform()) for i in range(size) for j in range(i + 1, size)}

        def inside(classes, weights=weights):
            return sum(w for (i, j), w in weights.items() if classes[i] == classes[j])

        falling = [c for c in product(range(count), repeat=size) if all(np.diff(c) <= 0)]
        assert inside(compressed(weights, size, count)) == pytest.approx(min(map(inside, falling)))


def test_intensity_is_work_over_the_busiest_link():
    demands = demands_of(two_by_two(), [job(0, compute_s=3.0, send_s=0.5), job(1, compute_s=1.0)])
    hashed = [demand.hashed for demand in demands]
    assert intensities(demands, hashed) == pytest.approx([2 * 3.0 / 0.5, 2 * 1.0 / 1.0])
    assert priorities(demands, hashed) == [1, 0]
    assert priorities(demands, hashed, num_classes=1) == [0, 0]


def test_a_draw_is_the_same_each_time_and_has_what_was_asked():
    fabric = leaves(1)
    jobs = drawn_jobs(DRAW, fabric)
    assert jobs == drawn_jobs(DRAW, fabric) != drawn_jobs(replace(DRAW, seed=1), fabric)
    assert len(jobs) == 6 and {len(one.ranks) for one in jobs} <= {2, 3, 4}
    for demand in demands_of(fabric, jobs):
        part = 1.0 - demand.job.compute_s / demand.bound_s()
        assert 0.2 - 1e-3 < part < 0.5 + 1e-3  # but for latencies


def test_a_collective_without_a_ring_is_sent_directly():
    """Every pair of three sends a third of a rank's buffer."""
    sends = collective_transfers("all-to-all", 3e6, (0, 4, 8))
    assert {(one.source, one.target): one.num_bytes for one in sends} == {
        (a, b): pytest.approx(1e6) for a in (0, 4, 8) for b in (0, 4, 8) if a != b
    }


@pytest.mark.parametrize("algorithm", ["nvls", "hierarchical", "wave"])
def test_collectives_that_need_more_than_ranks_are_refused(algorithm):
    with pytest.raises(SpecError) as caught:
        collective_transfers("all-reduce", 1e6, (0, 1, 2, 3), algorithm=algorithm)
    assert caught.value.key == "algorithm"


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(SpecError, match="rank 9"):
        demands_of(
            two_by_two(),
            [
                replace(
                    job(0),
                    phases=(
                        IterationPhase(
                            compute_s=1.0, transfers=(Transfer(source=0, target=9, num_bytes=1.0),)
                        ),
                    ),
                )
            ],
        )
