"""One host at a time has the rendezvous, and ranks find it."""

import socket
import time

import pytest

from foreshard.errors import ForeshardError, SpecError
from foreshard.profile.address import own_address
from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.leader_failover import (
    Rendezvous,
    announce,
    claim_term,
    current_term,
    read_rendezvous,
    rendezvous_address,
    running_rendezvous,
)
from foreshard.runtime.membership.operator_requests import RunLiveness
from foreshard.runtime.membership.store import Client, StoreServer
from foreshard.runtime.membership.supervisor_state import SupervisorState, save_state
from foreshard.runtime.run_settings import RunSettings
from foreshard.spec.plan_file import parse_plan

SECRET = b"of this test only"
PLAN = parse_plan(
    {
        "global_batch": 2,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [{"share": 1, "stages": [{"ranks": [rank], "layers": [[0, 2]]}]} for rank in range(2)],
    }
)


def test_a_term_is_claimed_once(tmp_path):
    assert claim_term(tmp_path, 2) and not claim_term(tmp_path, 2)
    assert claim_term(tmp_path, 3) and claim_term(tmp_path, 4)
    assert not (tmp_path / "rendezvous-2.claim").exists(), "claims of long ago are cleared away"


def test_a_place_is_read_as_it_was_announced(tmp_path):
    assert read_rendezvous(tmp_path) is None and current_term(tmp_path) == 0
    announce(tmp_path, Rendezvous(address="10.0.0.7", port=29501, term=3))
    assert read_rendezvous(tmp_path) == Rendezvous(address="10.0.0.7", port=29501, term=3)
    assert rendezvous_address(tmp_path) == ("10.0.0.7", 29501)
    announce(tmp_path, Rendezvous(address="10.0.0.7", port=0, term=4))
    assert rendezvous_address(tmp_path) is None and current_term(tmp_path) == 4
    (tmp_path / "rendezvous.json").write_text("{ torn")
    assert read_rendezvous(tmp_path) is None


def test_an_address_of_this_host_is_found():
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_client_finds_the_server_where_it_is_now():
    first = StoreServer("127.0.0.1", 0, SECRET)
    second = StoreServer("127.0.0.1", 0, SECRET)
    client = Client(("127.0.0.1", first.port), SECRET, locate=lambda: ("127.0.0.1", second.port))
    try:
        assert client.ask({"ask": "count"}) == {"value": 0}
        second._values["here"] = b"1"
        first.close()
        assert client.ask({"ask": "count"}, patience_s=5.0) == {"value": 1}
    finally:
        client.close()
        second.close()


class Elsewhere:
    """A rendezvous that does not answer."""

    def ask(self, *told, **more):
        raise RuntimeError("nobody")

    def close(self):
        pass


@pytest.fixture
def started(monkeypatch):
    """What agents start in place of a supervisor."""
    found: list = []
    monkeypatch.setattr(Agent, "_start_supervisor", lambda self: found.append((self.address, self._term)))
    return found


def agent(folder):
    work = RunSettings(job="job.py", out=str(folder), steps=1)
    made = Agent(
        out=folder,
        plan=PLAN,
        work=work,
        ranks=[1],
        expected=[0, 1],
        secret_file=folder / "secret",
        address="10.255.255.1",
        port=29501,
        supervises=False,
        own="127.0.0.1",
        takeover_s=-1.0,
    )
    made._client, made._term, made._was_heard = Elsewhere(), 1, True
    return made


def test_one_of_those_who_hear_nothing_takes_over(tmp_path, started):
    one, other = agent(tmp_path), agent(tmp_path)
    one._contact_supervisor(), other._contact_supervisor()
    assert started == [("127.0.0.1", 2)]
    assert one.supervises and not other.supervises
    announce(tmp_path, Rendezvous(address="127.0.0.1", port=4000, term=2))
    other._client = Elsewhere()
    other._contact_supervisor()
    assert (other.address, other.port, other._term) == ("127.0.0.1", 4000, 2)
    assert len(started) == 1


def test_if_who_claimed_it_is_lost_too_the_next_term_is_claimed(tmp_path, started):
    assert claim_term(tmp_path, 2)
    late = agent(tmp_path)
    late._contact_supervisor()
    assert started == []
    late._contact_supervisor()
    assert started == [("127.0.0.1", 3)]


def test_nobody_takes_over_before_it_has_begun(tmp_path, started):
    early = agent(tmp_path)
    early._was_heard, early._heard_s = False, time.monotonic()
    early._contact_supervisor()
    early._heard_s -= 400.0
    with pytest.raises(ForeshardError, match="no supervisor has answered for 400 s"):
        early._contact_supervisor()
    assert started == [] and not (tmp_path / "rendezvous-2.claim").exists()


def test_a_run_that_was_ended_on_purpose_is_not_gone_on_with(tmp_path, started):
    announce(tmp_path, Rendezvous(address="10.0.0.1", port=0, term=2))
    with pytest.raises(ForeshardError, match=r"the run was ended.*--resume"):
        agent(tmp_path)._contact_supervisor()
    assert started == []


def test_an_agent_that_comes_back_goes_where_the_rendezvous_is_now(tmp_path, started):
    rendezvous = Rendezvous(address="127.0.0.1", port=4000, term=2)
    announce(tmp_path, rendezvous)
    back = agent(tmp_path)
    back._term, back._was_heard, back._heard_s = 2, False, time.monotonic()
    back._contact_supervisor()
    assert (back.address, back.port, back.supervises) == ("127.0.0.1", 4000, False)
    back._client = Elsewhere()
    back._contact_supervisor()  # it waits there, and takes nothing over
    assert started == [] and (back.address, back.port) == ("127.0.0.1", 4000)


def test_a_run_goes_on_where_its_supervisor_answers(tmp_path):
    told = {"over": False}
    server = StoreServer("127.0.0.1", 0, SECRET, lambda message: dict(told))
    rendezvous = Rendezvous(address="127.0.0.1", port=server.port, term=2)
    try:
        assert running_rendezvous(tmp_path, SECRET) is None
        announce(tmp_path, rendezvous)
        assert running_rendezvous(tmp_path, SECRET) == rendezvous
        with pytest.raises(SpecError, match="secret"):  # a run that may be alive is not opened anew
            running_rendezvous(tmp_path, b"another run's")
        told["over"] = True
        assert running_rendezvous(tmp_path, SECRET) is None
    finally:
        server.close()
    assert running_rendezvous(tmp_path, SECRET) is None


def test_a_run_that_nobody_serves_any_more_has_ended_as_a_request_sees_it(tmp_path):
    now_s = [0.0]
    liveness = RunLiveness(tmp_path, 1, now=lambda: now_s[0])
    assert liveness.end() is None  # no rendezvous yet
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        announce(tmp_path, Rendezvous(address="127.0.0.1", port=port, term=1))
        assert liveness.end() is None
    assert liveness.end() is None  # its agent may start it again
    now_s[0] = 14.0
    assert liveness.end() is None
    now_s[0] = 16.0
    assert liveness.end() == f"nothing has listened at 127.0.0.1:{port} for 16 s"
    announce(tmp_path, Rendezvous(address="127.0.0.1", port=0, term=2))
    assert liveness.end() == "the run was ended"
    save_state(tmp_path, SupervisorState(plan={}, expected=[0], over=True))
    assert liveness.end() == "the run has done its steps"
