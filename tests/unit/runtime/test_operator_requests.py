"""A plan that the operator asks for is adopted or refused whoever dies, and the answer is its own."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.runtime.membership.operator_requests import Requests, RunLiveness, request_plan
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.runtime.membership.supervisor_state import SupervisorState, reopen, save_state
from foreshard.runtime.worker import RankWorker
from foreshard.spec.plan_file import parse_plan


def plan_of(*shares):
    stages = [{"ranks": [rank], "layers": [[0, 2]]} for rank in range(len(shares))]
    groups = [{"share": share, "stages": [stage]} for share, stage in zip(shares, stages, strict=True)]
    return parse_plan({"global_batch": 4, "seq_len": 8, "precision": "fp32", "groups": groups})


class Leader:
    """What `RankWorker._serve_request` uses of a rank that leads."""

    _serve_request = RankWorker._serve_request

    def __init__(self, run, plan, ranks=(0, 1)):
        self.events, self.proposed, self._requests = run / "events.jsonl", [], Requests(run)
        self.trainer = SimpleNamespace(plan=plan, propose=lambda command: self.proposed.append(command.plan))
        generation = SimpleNamespace(ranks=ranks)
        self.membership = SimpleNamespace(generation=generation, plan_adopted=lambda plan: None)
        self.metrics = SimpleNamespace(event=self.event)

    def event(self, kind, text, **facts):
        with self.events.open("a") as file:
            print(json.dumps({"kind": kind, "text": text, **facts}), file=file)

    def answers(self):
        return [line["request"] for line in map(json.loads, self.events.read_text().splitlines())]


@pytest.fixture
def run(tmp_path):
    """The folder of a run of two ranks."""
    save_state(tmp_path, SupervisorState(plan=plan_of(2, 2).to_dict(), expected=[0, 1]))
    return tmp_path


def asked(run, plan):
    (run / "asked.json").write_text(json.dumps(plan.to_dict()))
    return request_plan(run, str(run / "asked.json"))


def test_a_proposal_that_went_with_its_generation_is_made_again(run):
    """A peer dies in the step in which the plan was proposed: it is proposed to the ranks that are left."""
    leader, plan = Leader(run, plan_of(2, 2)), plan_of(3, 1)
    number = asked(run, plan)
    leader._serve_request(5)
    leader.membership.generation.ranks = (0,)
    leader._serve_request(5)
    assert leader.proposed == [plan, repaired(plan, [0])]
    leader.trainer.plan = leader.proposed[-1]
    leader._serve_request(6)
    leader._serve_request(7)
    assert leader.answers() == [number] and len(leader.proposed) == 2


def test_a_leader_that_starts_after_the_request_serves_it_and_none_that_is_answered(run):
    number, plan = asked(run, plan_of(3, 1)), plan_of(3, 1)
    survivor, started = Leader(run, plan_of(2, 2)), Leader(run, plan_of(2, 2))
    survivor._serve_request(5)
    started._serve_request(6)
    started.trainer.plan = plan
    started._serve_request(7)
    survivor._serve_request(8)
    assert survivor.proposed == started.proposed == [plan] and started.answers() == [number]
    reopen(run, plan, [0, 1])
    asked(run, plan_of(1, 3))
    reopen(run, plan, [0, 1])
    assert Requests(run).open() is None, "that run has ended"


def test_a_plan_that_another_one_replaced_is_not_said_to_be_adopted(run):
    first = asked(run, plan_of(3, 1))
    second = asked(run, plan_of(1, 3))
    assert RunLiveness(run, first).end() == "another plan was asked for since"
    assert RunLiveness(run, second).end() is None


def test_a_plan_of_ranks_that_the_run_does_not_have_is_refused(run):
    with pytest.raises(SpecError, match="uses rank 2, the run has none"):
        asked(run, plan_of(2, 1, 1))
