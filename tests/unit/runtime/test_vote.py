"""What ranks tell in the vote of links, without any network."""

from foreshard.runtime.engine.clock import Clock, VirtualClock
from foreshard.runtime.engine.vote import MAX_LINKS, cast

SAID = {
    "loss": 1.0,
    "count": 2.0,
    "square_norm": 0.0,
    "boundary": False,
    "plan_number": 0,
    "work_s": 3.0,
    "samples": 4.0,
}


class Both:
    """An all-reduce with what another rank would have put in."""

    def __init__(self, other):
        self.other = other

    def allreduce(self, tensors):
        tensors[0] += self.other
        return self

    def wait(self):
        pass


class Kept:
    def allreduce(self, tensors):
        self.ballot = tensors[0].clone()
        return self

    def wait(self):
        pass


def test_links_of_all_ranks_come_out_as_mean_messages():
    kept = Kept()
    cast(kept, (2, 5), 5, **SAID, traffic={2: (4.0, 400.0, 2.0)})
    vote = cast(Both(kept.ballot), (2, 5), 2, **SAID, traffic={5: (2.0, 20.0, 0.5), 7: (1.0, 1.0, 1.0)})
    assert vote.links == {(2, 5): (10.0, 0.25), (2, 7): (1.0, 1.0), (5, 2): (100.0, 0.5)}
    assert (vote.loss, vote.count, vote.work_s, vote.samples) == (
        2.0,
        4.0,
        {2: 3.0, 5: 3.0},
        {2: 4.0, 5: 4.0},
    )


def test_the_links_that_carried_most_are_told():
    traffic = {target: (1.0, float(target), 1.0) for target in range(1, 9)}
    vote = cast(None, (0,), 0, **SAID, traffic=traffic)
    assert sorted(target for _, target in vote.links) == list(range(9 - MAX_LINKS, 9))


def test_nothing_is_told_where_nothing_is_timed():
    kept = Kept()
    vote = cast(kept, (0, 1), 0, **SAID)
    assert vote.links == {} and len(kept.ballot) == 12 and Clock().traffic_from(0) is None


def test_a_clock_tells_what_links_carried_once():
    clock = VirtualClock(lambda a, b: (100.0 if (a, b) == (0, 1) else 1000.0, 0.5))
    clock.sent(200, 0, 1)
    clock.sent(100, 0, 1)  # waits for the one before: that is not the link's
    assert clock.traffic_from(0) == {1: (2, 300, 4.0)}
    assert clock.traffic_from(0) == {}
    for source, target, size_s in [(0, 1, 4.0), (1, 0, 0.4)]:
        clock.all_reduce_s(800, (0, 1))
        assert clock.traffic_from(source) == {target: (2, 800.0, 2 * (0.5 + size_s))}
    clock.all_reduce_s(0, (0, 1))
    assert clock.traffic_from(0) == {}
