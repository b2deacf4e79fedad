"""A rank's side of the rendezvous: what it notes of itself while peers come and go."""

import threading
import time

import pytest

pytest.importorskip("torch")

from foreshard.runtime.membership.member import DEVICE_GROUPS, Membership
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


@pytest.mark.parametrize("name", ["world", DEVICE_GROUPS[0]])
@pytest.mark.parametrize("after_s", [0.0, 0.28, 0.35])
def test_a_rank_that_gave_up_a_connection_is_busy_again_for_good(tmp_path, name, after_s):
    """Who seems to wait is never found to hang, be it a thread of the connection that still waits."""
    supervisor = Supervisor(tmp_path, PLAN, [0, 1], detect_s=30.0)
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
