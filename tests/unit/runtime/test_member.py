"""A rank's side of the rendezvous: what it notes of itself while peers come and go."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from foreshard.runtime.membership.member import DEVICE_GROUPS, Membership
from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.membership.store import StoreServer
from foreshard.runtime.membership.supervisor import Supervisor
from foreshard.runtime.membership.wire import PeerLost
from foreshard.spec.plan_file import parse_plan

SECRET = b"of this test only"
PLAN = parse_plan(
    {
        "global_batch": 2,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [{"share": 1, "stages": [{"ranks": [rank], "layers": [[0, 8]]}]} for rank in range(2)],
    }
)


def two_members(folder):
    """Return two ranks of a generation, with their supervisor and its server."""
    supervisor = Supervisor(folder, PLAN, [0, 1], detect_s=30.0)
    server = StoreServer("127.0.0.1", 0, SECRET, supervisor.answer)
    members = {}

    def join(rank):
        members[rank] = Membership(
            ("127.0.0.1", server.port), rank, SECRET, interface="127.0.0.1", beat_s=0.05
        )
        members[rank].client.close()

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return members, supervisor, server


def test_a_heartbeat_answered_late_does_not_break_the_next_generation(tmp_path):
    """On a loaded machine its thread loses the processor between the answer and what follows from it."""
    members, _, server = two_members(tmp_path)
    mine, ask, acted = members[0], members[0].client.ask, threading.Event()

    def slow_to_read(message, **more):
        answer = ask(message, **more)
        if message["ask"] == "join":  # heartbeats learn before it that there is another generation
            acted.wait(5.0)
        return answer

    def slow_to_act():
        acted.set()
        time.sleep(0.5)

    mine.client.ask, mine._abort_device_groups = slow_to_read, slow_to_act
    sums = {}

    def train(rank):
        members[rank].next_generation("a test")
        group = members[rank].group((0, 1), "world")
        for _ in range(10):
            sums[rank] = torch.ones(1)
            group.allreduce([sums[rank]]).wait()
            time.sleep(0.1)
        members[rank].client.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acted.is_set() and [float(sums[rank]) for rank in (0, 1)] == [2.0, 2.0]
    assert not mine._abandoned()
    for member in members.values():
        member._done.set()
    server.close()


class Armed(Progress):
    """Counts how often a rank puts off its end instead of ending."""

    def __init__(self):
        super().__init__(30.0)
        self.count_armed = 0

    def arm(self, margin_s=1.0):
        self.count_armed += 1


def test_a_supervisor_that_does_not_answer_ends_no_rank(tmp_path):
    supervisor = Supervisor(tmp_path, PLAN, [0], detect_s=30.0)
    go_on = threading.Event()

    def answer(message):
        if message["ask"] == "beat":
            go_on.wait(10.0)
        return supervisor.answer(message)

    server = StoreServer("127.0.0.1", 0, SECRET, answer)
    progress = Armed()
    place = ("127.0.0.1", server.port)
    mine = Membership(place, 0, SECRET, interface="127.0.0.1", beat_s=0.01, progress=progress)
    until = time.monotonic() + 5.0
    while progress.count_armed < 10 and time.monotonic() < until:
        time.sleep(0.01)
    assert progress.count_armed >= 10
    mine._done.set()
    go_on.set()
    mine.client.close()
    server.close()


@pytest.mark.parametrize("name", ["world", DEVICE_GROUPS[0]])
@pytest.mark.parametrize("after_s", [0.0, 0.28, 0.35])
def test_a_rank_that_gave_up_a_connection_is_busy_again_for_good(tmp_path, name, after_s):
    """Who seems to wait is never found to hang, be it a thread of the connection that still waits."""
    members, supervisor, server = two_members(tmp_path)
    mine, peer = members[1], members[0]
    peer._done.set()  # no more heartbeats: it dies while this rank connects
    pid = mine.generation.pids[0]
    died = {"ask": "agent", "ranks": [0, 1], "died": [[0, pid, "signal 9"]], "gone": [], "running": []}
    threading.Timer(after_s, lambda: supervisor.answer(died)).start()
    with pytest.raises(PeerLost):
        mine.group((0, 1), name)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert mine.progress.waits_for is None
        time.sleep(0.01)
    mine._done.set()
    mine.client.close()
    server.close()
