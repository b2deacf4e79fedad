"""Paths: seeded, numbered by what is equal, and as the processes say."""

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.errors import SpecError
from foreshard.simulate.dynamics import CO_LOCATED, describe, draw, read_trace
from foreshard.spec.scenario import Scenario, StochasticProcess


def scenario(*processes, **more):
    return Scenario(model="gpt2", cluster="x", global_batch=8, process=processes, **more)


CLUSTER = load_cluster("1x4xa100-sxm-80gb")


def path_of(*processes, slots=500, seed=0, cluster=CLUSTER, **more):
    return draw(scenario(*processes, **more), cluster, slots=slots, seed=seed)


def speeds(path):
    return path.speed[path.condition]


def test_the_same_seed_gives_the_same_path_and_another_another():
    process = StochasticProcess(what="speed", how="markov", factors=(1.0, 0.5), stay=0.9)
    first, again, other = (path_of(process, seed=seed) for seed in (3, 3, 4))
    assert first.condition.tobytes() == again.condition.tobytes() and np.array_equal(first.speed, again.speed)
    assert not np.array_equal(speeds(first), speeds(other))


def test_a_further_process_does_not_change_what_the_first_draws():
    one = StochasticProcess(what="speed", how="markov", factors=(1.0, 0.5), stay=0.9)
    two = StochasticProcess(what="price", how="markov", factors=(1.0, 2.0), stay=0.5)
    assert np.array_equal(speeds(path_of(one)), speeds(path_of(one, two)))


def test_equal_states_have_one_number():
    path = path_of(StochasticProcess(what="speed", how="markov", factors=(1.0, 0.5), stay=0.5, together=True))
    assert len(path.speed) == 2 and len(path.available) == 1
    assert len(np.unique(path.speed, axis=0)) == len(path.speed)


def test_one_straggler_at_a_time_that_stays():
    path = path_of(StochasticProcess(what="speed", how="one-at-a-time", factor=4.0, stay=0.9), slots=20_000)
    slow = speeds(path) < 1.0
    assert (slow.sum(1) == 1).all() and set(np.unique(speeds(path))) == {0.25, 1.0}
    moved = (np.diff(slow.argmax(1)) != 0).mean()
    assert moved == pytest.approx(0.1, abs=0.01)
    assert slow.mean(0) == pytest.approx(0.25, abs=0.05)


def test_a_wave_swings_between_the_stated_value_and_its_part():
    from foreshard.spec.cluster import Cluster, Link

    cluster = Cluster(
        name="two",
        nodes=CLUSTER.nodes,
        links=(Link(between=("a", "b"), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
    )
    wave = StochasticProcess(what="bandwidth", how="diurnal", swing=10.0, period=100.0, levels=5)
    path = path_of(wave, cluster=cluster, slot=1.0, slots=200)
    factor = path.link[path.condition][:, 0]
    assert factor.min() == pytest.approx(0.1) and factor.max() == pytest.approx(1.0)
    assert factor[0] == pytest.approx(0.1) and factor[50] == pytest.approx(1.0)
    assert np.array_equal(factor[:100], factor[100:])
    assert np.unique(factor) == pytest.approx(10.0 ** -np.linspace(1, 0, 5))


def test_failures_have_the_stated_share_of_time_up():
    gone = StochasticProcess(what="availability", how="failures", ranks="0-2", mean_up=300.0, mean_down=100.0)
    path = path_of(gone, slot=10.0, slots=30_000)
    up = path.available[path.pattern]
    assert up[:, 3].all()
    assert up[:, :3].mean() == pytest.approx(0.75, abs=0.03)


def test_jobs_beside_ours_slow_it_as_measured():
    path = path_of(StochasticProcess(what="speed", how="co-located", stay=0.5, ranks="1"), slots=5000)
    assert set(np.unique(speeds(path)[:, 1])) == set(CO_LOCATED) and (speeds(path)[:, 0] == 1.0).all()


def test_a_trace_is_looped_and_counts_devices(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("# remark\ntime_s,count\n100,4\n110,2\n120,3\n", encoding="utf-8")
    process = StochasticProcess(what="availability", how="trace", file=str(file))
    path = path_of(process, slot=5.0, slots=12)
    counts = path.available[path.pattern].sum(1)
    assert counts.tolist() == [4, 4, 2, 2, 3, 3] * 2
    assert (path.available[path.pattern][counts == 2] == [True, True, False, False]).all()


@pytest.mark.parametrize(
    "text",
    [
        "time_s,value\n0,1\n0,2\n",
        "time_s,value\n0,-1\n",
        "a,b\n1,2\n",
        "time_s,value\n",
        "time_s,value\n0,x\n",
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    file = tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match="not a trace"):
        read_trace(file)


def test_ranks_and_links_must_be_there():
    with pytest.raises(SpecError, match="not on the cluster") as caught:
        path_of(StochasticProcess(what="speed", how="fixed", factor=0.5, ranks="2-9"))
    assert caught.value.key == "process[0].ranks"
    with pytest.raises(SpecError, match="no such link"):
        path_of(StochasticProcess(what="bandwidth", how="fixed", factor=0.5))


def test_a_slot_without_devices_is_refused():
    with pytest.raises(SpecError, match="no device is available"):
        path_of(
            StochasticProcess(what="availability", how="failures", mean_up=10.0, mean_down=100.0), slot=10.0
        )


def test_a_path_describes_itself():
    path = path_of(StochasticProcess(what="speed", how="one-at-a-time", factor=4.0, stay=0.0), slots=1001)
    assert describe(path) == {"slots": 1001, "conditions": 4, "patterns": 1, "changes_per_1000": 1000.0}
