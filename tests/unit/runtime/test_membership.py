"""What the supervisor decides, told what happens by hand and on a clock of its own."""

import json

import pytest

from foreshard.runtime.membership.link_blame import LinkBlame
from foreshard.runtime.membership.processor_wait import ProcessorWait
from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.membership.supervisor import START_S, Supervisor
from foreshard.runtime.membership.supervisor_state import load_state, reopen
from foreshard.spec.plan_file import parse_plan

PLAN = parse_plan(
    {
        "global_batch": 4,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [
            {"share": 2, "stages": [{"ranks": [0], "layers": [[0, 4]]}, {"ranks": [1], "layers": [[4, 8]]}]},
            {"share": 2, "stages": [{"ranks": [2], "layers": [[0, 8]]}]},
        ],
    }
)


class Told:
    """A supervisor and what it is told; rank r has process 100 + r unless said otherwise."""

    def __init__(self, folder, expected=(0, 1, 2), detect_s=2.0):
        self.folder, self.expected, self.detect_s, self.now_s = folder, expected, detect_s, 0.0
        self.restart()

    def restart(self):
        self.supervisor = Supervisor(
            self.folder, PLAN, self.expected, detect_s=self.detect_s, now=lambda: self.now_s
        )

    def join(self, rank, after=-1, pid=None, reason=""):
        """Ask; the answer is there only if this was the last who had to ask."""
        message = {"ask": "join", "rank": rank, "pid": pid or 100 + rank, "after": after, "reason": reason}
        told = self.supervisor.answer({**message, "timeout_s": 0.0})
        return told["generation"]

    def all_join(self, ranks, after=-1, **more):
        for rank in ranks:
            self.join(rank, after, **more)
        return [self.join(rank, after) for rank in ranks]

    def beat(self, rank, number=0, pid=None, **progress):
        return self.supervisor.answer(
            {"ask": "beat", "rank": rank, "pid": pid or 100 + rank, "number": number, **progress}
        )

    def agent(self, died=(), gone=(), ranks=(0, 1, 2), running=()):
        return self.supervisor.answer(
            {"ask": "agent", "ranks": ranks, "died": list(died), "gone": list(gone), "running": list(running)}
        )

    def finished(self, rank, pid=None):
        return self.supervisor.answer({"ask": "finished", "rank": rank, "pid": pid or 100 + rank})


@pytest.fixture
def told(tmp_path, monkeypatch):
    monkeypatch.setattr("foreshard.runtime.membership.supervisor._ASK_S", 0.0)
    return Told(tmp_path)


def test_the_first_generation_waits_for_all_who_should_come(told):
    assert told.join(0) is None and told.join(1) is None
    assert told.join(2)["ranks"] == [0, 1, 2]
    assert told.join(0)["number"] == 0


def test_it_waits_no_longer_than_its_bound_and_not_for_those_who_will_not_come(told, tmp_path):
    told.join(0)
    told.agent(gone=[2])
    assert told.join(1)["ranks"] == [0, 1]
    (tmp_path / "late").mkdir()
    late = Told(tmp_path / "late")
    late.join(0)
    late.now_s = START_S + 1
    assert late.join(1)["ranks"] == [0, 1]


def test_a_dead_rank_is_left_out_when_the_others_have_asked(told):
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, "exit code -9"]])
    assert told.beat(0)["broken"]
    assert told.join(0, 0) is None
    generation = told.join(2, 0)
    assert (generation["number"], generation["ranks"]) == (1, [0, 2])
    assert parse_plan(generation["plan"]).ranks == (0, 2)


def test_a_death_told_late_does_not_touch_the_process_after_it(told):
    told.all_join([0, 1, 2])
    told.join(1, -1, pid=999)
    told.agent(died=[[1, 101, "exit code -9"]])
    assert told.beat(0)["broken"]
    for rank in (0, 2):
        told.join(rank, 0)
    assert told.join(1, -1, pid=999)["ranks"] == [0, 1, 2]


def test_a_heartbeat_read_after_the_death_of_who_sent_it_revives_nobody(told):
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, "signal 9"]])
    told.beat(1, number=0, pid=101)
    assert told.beat(0)["broken"]
    assert told.supervisor.answer({"ask": "state"})["alive"] == [0, 2]


def test_a_new_process_is_not_let_into_the_generation_of_the_one_before(told):
    told.all_join([0, 1, 2])
    assert told.join(1, -1, pid=999) is None


def test_who_comes_back_makes_the_others_wish_for_a_boundary_and_gets_its_layers_back(told):
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, ""]])
    told.all_join([0, 2], 0)
    assert not told.beat(0, 1)["wanted"]
    told.join(1, -1, pid=201)
    assert told.beat(0, 1)["wanted"] and told.beat(2, 1)["wanted"]
    told.join(0, 1, reason="boundary")
    generation = told.join(2, 1, reason="boundary")
    assert generation["number"] == 2 and parse_plan(generation["plan"]) == PLAN


def test_silence_beyond_the_bound_is_a_loss_and_the_agent_is_told_to_make_sure(told):
    told.all_join([0, 1, 2])
    told.now_s = 1.9
    told.beat(0), told.beat(2)
    told.supervisor.watch()
    assert not told.beat(0)["broken"]
    told.now_s = 2.1
    told.supervisor.watch()
    assert told.beat(0)["broken"]
    assert told.agent()["kill"] == {1: 101}
    assert told.agent()["kill"] == {}


def test_a_rank_that_goes_silent_at_the_door_does_not_keep_the_others_waiting(told):
    told.all_join([0, 1, 2])
    told.join(5, -1)
    told.now_s = 2.1
    for rank in (0, 1, 2):
        told.beat(rank)
    told.supervisor.watch()
    for rank in (0, 1):
        told.join(rank, 0)
    assert told.join(2, 0)["ranks"] == [0, 1, 2]


def test_a_rank_whose_link_was_silent_is_known_again(told):
    told.all_join([0, 1, 2])
    told.now_s = 2.1
    told.beat(0), told.beat(2)
    told.supervisor.watch()
    told.beat(1)
    assert not told.beat(0)["broken"]


def test_a_supervisor_that_is_killed_goes_on_where_it_was(told):
    told.all_join([0, 1, 2])
    told.restart()
    beat = told.beat(0)
    assert (beat["wanted"], beat["broken"], beat["number"]) == (False, False, 0)
    told.agent(died=[[1, 101, ""]])
    told.restart()
    assert told.beat(0)["broken"]
    told.join(0, 0)
    assert told.join(2, 0)["number"] == 1


def test_numbers_never_fall_even_if_memory_is_lost(told, tmp_path):
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, ""]])
    told.all_join([0, 2], 0)
    (tmp_path / "supervisor.json").write_text("{ torn")
    told.restart()
    told.beat(0, 1), told.beat(2, 1)
    assert told.join(0, 1) is None
    assert told.join(2, 1)["number"] == 2


def test_a_full_disk_under_the_supervisor_is_not_the_end(told, monkeypatch):
    def full(folder, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foreshard.runtime.membership.supervisor.save_state", full)
    assert all(generation["number"] == 0 for generation in told.all_join([0, 1, 2]))


def test_all_ranks_of_a_generation_are_told_one_plan_whatever_is_adopted_meanwhile(told):
    told.join(0), told.join(1)
    first = told.join(2)
    other = {**PLAN.to_dict(), "groups": PLAN.to_dict()["groups"][::-1]}
    told.supervisor.answer({"ask": "plan", "plan": other})
    assert told.join(0) == first
    told.agent(died=[[1, 101, ""]])
    told.join(0, 0)
    assert parse_plan(told.join(2, 0)["plan"]).groups[0].stages[0].ranks == (2,)


def test_the_run_is_over_when_all_have_done_their_steps_and_nobody_starts_it_again(told):
    told.all_join([0, 1, 2])
    assert told.finished(0) == {"end": False, "back": False}
    told.finished(1)
    assert told.finished(2)["end"]
    assert told.finished(0)["end"]
    answer = told.supervisor.answer(
        {"ask": "join", "rank": 1, "pid": 777, "after": -1, "reason": "", "timeout_s": 0.0}
    )
    assert answer == {"generation": None, "over": True}
    assert told.agent()["over"]


def test_who_is_done_goes_back_for_one_who_was_cut_off(told):
    told.all_join([0, 1, 2])
    told.finished(0), told.finished(1)
    told.join(2, 0, reason="connection closed by peer")
    assert told.finished(0) == {"end": False, "back": True}
    told.join(0, 0), told.finished(1)
    assert told.join(1, 0)["number"] == 1


def test_a_death_among_those_who_are_done_does_not_hold_up_the_end(told):
    told.all_join([0, 1, 2])
    told.finished(0), told.finished(1)
    told.agent(died=[[2, 102, "exit code -9"]])
    assert told.finished(0)["end"]


def test_a_run_that_goes_on_has_rising_numbers(told, tmp_path):
    told.all_join([0, 1, 2])
    reopen(tmp_path, PLAN, [0, 1, 2])
    assert load_state(tmp_path).number == 0
    told.restart()
    assert told.join(0, pid=501) is None
    told.join(1, pid=502)
    assert told.join(2, pid=503)["number"] == 1


def test_nobody_left_is_waited_out_and_told_once(told, tmp_path):
    told.all_join([0, 1, 2])
    for rank in (0, 1, 2):
        told.agent(died=[[rank, 100 + rank, ""]])
    told.join(7), told.join(7)
    lines = [json.loads(line) for line in (tmp_path / "supervisor.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "waiting" for line in lines) == 1
    assert told.join(0, pid=300)["ranks"] == [0, 7]


@pytest.mark.parametrize(("died", "said"), [([1, 2], "rank 0"), ([1], "ranks 0, 2")])
def test_who_goes_on_is_said(told, tmp_path, died, said):
    told.all_join([0, 1, 2])
    told.agent(died=[[rank, 100 + rank, "signal 9"] for rank in died])
    for rank in {0, 1, 2}.difference(died):
        told.join(rank, 0)
    lines = [json.loads(line) for line in (tmp_path / "supervisor.jsonl").read_text().splitlines()]
    assert lines[-1]["text"].endswith(f" before any step was heard of; continuing with {said}")


def stuck(told, number, waits, for_s=6.0, heard=None):
    """Let ranks wait for others without getting on, with heartbeats of those `heard`; return the answers."""
    for rank, others in waits.items():
        told.beat(rank, number, count=7 + 10 * number, waits_for=others)
    for _ in range(round(2 * for_s)):
        told.now_s += 0.5
        answers = {
            rank: told.beat(rank, number, count=7 + 10 * number, waits_for=others)["stuck"]
            for rank, others in waits.items()
            if heard is None or rank in heard
        }
        told.agent(running=[[rank, 100 + rank] for rank in waits])
        told.supervisor.watch()
    return list(answers.values())


def test_a_lost_link_between_ranks_that_live_leaves_one_out_for_a_while(told):
    told.all_join([0, 1, 2])
    for number in (0, 1):
        stuck(told, number, {0: [1, 2], 1: [2], 2: [1]}, for_s=12.0)
        for rank in range(3):
            told.join(rank, number, reason="closed by peer")
    assert told.join(0, 1)["ranks"] == [0, 1]
    assert not told.beat(0, 2)["wanted"]
    told.beat(0, 2, step=3), told.beat(0, 2, step=4)  # they train without it
    told.now_s += 20.0
    assert told.beat(0, 2)["wanted"]


def of_two():
    """Return a plan that leaves rank 0 idle."""
    stages = [{"ranks": [1], "layers": [[0, 4]]}, {"ranks": [2], "layers": [[4, 8]]}]
    return {"global_batch": 4, "seq_len": 8, "precision": "fp32", "groups": [{"share": 4, "stages": stages}]}


def test_the_last_rank_of_the_plan_is_not_excluded(told):
    """An idle rank is too few for the plan: nothing would be trained."""
    told.supervisor.answer({"ask": "plan", "plan": of_two()})
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, ""]])
    told.all_join([0, 2], 0)
    for number in (1, 2, 3):
        stuck(told, number, {0: [2], 2: [0]}, for_s=42.0)
        assert told.all_join([0, 2], number)[0]["ranks"] == [0, 2]


def test_idle_ranks_train_when_no_rank_of_the_plan_will_come_back(told):
    told.supervisor.answer({"ask": "plan", "plan": of_two()})
    told.all_join([0, 1, 2])
    told.agent(died=[[1, 101, ""], [2, 102, ""]])
    assert told.join(0, 0) is None, "the others are started again"
    told.agent(gone=[1, 2])
    plan = parse_plan(told.join(0, 0)["plan"])
    assert (plan.ranks, plan.groups[0].stages[0].layers) == ((0,), ((0, 8),))


def test_no_rank_is_excluded_for_good():
    blame = LinkBlame(1.0)
    now_s, lengths = 0.0, []
    for _ in range(40):
        blame.exclude(1, now_s)
        began_s = now_s
        while blame.excludes(1, now_s):
            now_s += 4.0
        lengths.append(now_s - began_s)
    assert lengths[:3] == [8.0, 16.0, 32.0] and max(lengths) == 600.0


def test_a_loaded_machine_is_not_a_lost_link():
    link_blame = LinkBlame(2.0)
    link_blame.began(0, [0, 1], 0.0)
    link_blame.stuck(0, [1])
    link_blame.began(1, [0, 1], 2.0)
    link_blame.stuck(1, [1])
    assert link_blame.rank_to_exclude(1, [0, 1], 500.0) is None
    assert link_blame.rank_to_exclude(1, [0, 1], 4.0) == 1


def test_ranks_that_all_wait_are_stuck(told):
    told.all_join([0, 1, 2])
    assert stuck(told, 0, {0: [1], 1: [0], 2: [1]}) == [True] * 3
    assert told.beat(1, count=8, waits_for=None)["stuck"], "what was cut stays so until the next generation"


def test_ranks_that_wait_for_a_processor_are_not_stuck(told):
    told.all_join([0, 1, 2])
    waits, waited_s, found = {0: [1], 1: [0], 2: [1]}, 0.0, []
    for _ in range(40):
        told.now_s += 0.5
        waited_s += 0.4
        found += [told.beat(r, count=7, waits_for=w, waited_s=waited_s)["stuck"] for r, w in waits.items()]
    assert not any(found), "in 20 s they could have run for 4 s"
    assert stuck(told, 0, waits, for_s=2.5) == [True] * 3, "the rest of the time, with a processor"


def test_starved_readers_do_not_hide_ranks_that_are_stuck(told):
    """Readers that wait all the time: ten times as long as else, and no longer."""
    told.all_join([0, 1, 2])
    waits, waited_s = {0: [1], 1: [0], 2: [1]}, 0.0
    found = []
    while not any(found) and told.now_s < 1000:
        told.now_s += 0.5
        waited_s += 0.5
        found = [told.beat(r, count=7, waits_for=w, waited_s=waited_s)["stuck"] for r, w in waits.items()]
    assert 50.0 <= told.now_s <= 51.0


def test_one_rank_that_works_keeps_all_from_being_stuck(told):
    told.all_join([0, 1, 2])
    assert stuck(told, 0, {0: [1], 1: [0], 2: None}) == [False] * 3, "rank 2 works: it is only slow"
    assert stuck(told, 0, {0: [1], 1: [0], 2: [1]}, for_s=4.0) == [False] * 3
    told.beat(1, count=8, waits_for=[0])  # it has got on
    assert stuck(told, 0, {0: [1], 1: [0], 2: [1]}, for_s=4.0) == [False] * 3


def test_a_rank_that_sends_no_heartbeats_is_not_taken_to_wait_as_it_last_said(told):
    """On a loaded machine a first step may hold the interpreter for long; idle ranks wait."""
    told.all_join([0, 1, 2])
    told.beat(2, count=7, waits_for=[0])
    waits = {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert stuck(told, 0, waits, for_s=20.0, heard=[0, 1]) == [False] * 2
    assert not told.beat(0, count=7, waits_for=[1])["broken"], "its agent sees it run"
    told.beat(2, count=7, waits_for=[0, 1])
    assert not told.beat(2, count=7, waits_for=[0, 1])["stuck"], "two heartbeats far apart show nothing"
    assert stuck(told, 0, waits) == [True] * 3


def test_a_supervisor_that_had_no_processor_has_not_missed_heartbeats(told):
    told.all_join([0, 1, 2])
    told.supervisor.watch(0.2)
    told.now_s += 50.0  # nobody could be heard
    told.supervisor.watch(0.2)
    assert not told.beat(0)["broken"] and told.agent()["kill"] == {}
    for _ in range(12):
        told.now_s += 0.2
        told.beat(0), told.beat(1)
        told.supervisor.watch(0.2)
    assert told.agent()["kill"] == {2: 102}, "this one is silent while others are heard"


def test_ranks_may_wait_longer_after_each_generation_without_a_step(told):
    told.all_join([0, 1, 2])
    lasted_s = []
    for number, waits in enumerate([{0: [1, 2], 1: [2], 2: [1]}] * 2 + [{0: [1], 1: [0]}] * 2):
        began_s = told.now_s
        while not any(stuck(told, number, waits, for_s=0.5)):
            pass
        lasted_s.append(told.now_s - began_s)
        told.all_join(list(waits), number)
        if number == 2:
            told.beat(0, 3, step=5), told.beat(0, 3, step=6)
    assert lasted_s == pytest.approx([5.0, 10.0, 20.0, 5.0], abs=1.0)


def test_generations_that_ranks_die_in_without_a_step_end_the_run_by_name(told):
    told.all_join([0, 1, 2])
    number = fault = 0
    while not fault and number < 100:
        pid = 200 + number  # another process of rank 2 each time
        told.join(2, pid=pid), told.join(0, number), told.join(1, number)
        number += 1
        assert number == told.supervisor.state.number
        told.agent(died=[[2, pid, "signal 9"]])
        fault = told.agent()["fault"]
    assert number == 16 and "--detect-s" in fault["fix"]


def test_a_rank_that_is_gone_does_not_let_the_others_wait_for_ever(told):
    told.all_join([0, 1, 2])
    told.agent(died=[[2, 102, "exit code -9"]])
    assert stuck(told, 0, {0: [2], 1: [2]}) == [True, True]


def test_a_silent_rank_that_its_agent_sees_run_is_not_dead(told):
    told.all_join([0, 1, 2])
    for _ in range(9):
        told.now_s += 1.0
        told.beat(0), told.beat(2), told.agent(running=[[1, 101]])
        told.supervisor.watch()
    assert not told.beat(0)["broken"]
    told.now_s += 3.0
    told.beat(0), told.beat(2), told.agent(running=[[1, 999]])
    told.supervisor.watch()
    assert told.beat(0)["broken"], "the agent has seen another process"


def hang(told, rank, number):
    told.supervisor.answer({"ask": "hangs", "rank": rank, "pid": 100 + rank, "where": "loss, line 3"})
    return told.agent()["fault"]


def test_a_run_that_hangs_again_and_again_without_a_step_ends_by_name(told):
    told.all_join([0, 1, 2])
    for number in range(2):
        assert hang(told, 1, number) is None
        told.all_join([0, 2], number)
        told.join(1)
        told.all_join([0, 1, 2], number)
    fault = hang(told, 1, 2)
    assert "rank 1 hangs in loss, line 3" in fault["what"]


def test_a_step_between_them_forgives_hangs(told):
    told.all_join([0, 1, 2])
    for number in range(8):
        (
            told.beat(0, number, step=number % 3),
            told.beat(0, number, step=number % 3 + 1),
        )  # also of steps done again
        assert hang(told, 1, number) is None
        told.join(1)
        told.all_join([0, 1, 2], number)


def test_generations_that_fail_for_no_loss_end_the_run_with_their_reason(told):
    told.all_join([0, 1, 2])
    for number in range(9):
        for rank in range(3):
            told.join(rank, number, reason="cannot be summed")
    assert "cannot be summed" in told.agent()["fault"]["what"]


def test_a_run_that_hangs_in_one_step_after_every_restart_ends_by_name(told):
    """What a process that has started again says first is where it is, not that it got on."""
    told.all_join([0, 1, 2])
    for number in range(3):
        for step in (-1, 30, 30):
            told.beat(1, number, step=step)
        told.beat(0, number, step=30), told.beat(2, number, step=30)
        fault = hang(told, 1, number)
        assert (fault is None) == (number < 2)
        told.all_join([0, 2], number)
        told.join(1)
        told.all_join([0, 1, 2], number)
    assert "rank 1 hangs in loss, line 3" in fault["what"]


def test_the_first_step_of_a_process_is_learned_apart_wherever_it_begins():
    now = [0.0]
    for first in (0, 30):
        progress = Progress(1.0, now=lambda: now[0])
        progress.turn_to("joining")
        for step, seconds in ((first, 50.0), (first + 1, 2.0)):
            progress.begin_step(step)
            progress.turn_to("forward")
            now[0] += seconds
            progress.turn_to("vote")
        assert progress.to_dict()["longest_s"]["forward"] == 2.0
        assert progress.to_dict()["longest_s"]["forward/first"] == 50.0


def test_a_rank_without_a_processor_does_not_hang():
    """100 s of which it could run for 9 are not a hang at 10 s; 11 s of its own are."""
    now, waits = [0.0], [0.0]
    progress = Progress(10.0, now=lambda: now[0], waited_s=lambda: waits.pop() if waits else 0.0)
    progress.turn_to("forward")
    progress.turn_to("vote")  # known, so that it may take no more than ten times as long
    progress.turn_to("forward")
    now[0], waits[:] = 100.0, [91.0]
    assert progress.hang() is None
    now[0] = 102.0
    where = progress.hang()
    assert where is not None and where.endswith("for 11 s (and 91 s without a processor)")
    progress.turn_to("vote")
    assert progress.to_dict()["longest_s"]["forward/first"] == pytest.approx(11.0), "nor is the wait learned"


def test_a_starved_reader_does_not_hide_a_rank_that_hangs():
    """Its wait grows as fast as time does: at ten times the limit the rank hangs all the same."""
    now, looked_s = [0.0], [0.0]

    def waited_s():
        looked_s[:] = [now[0], now[0] - looked_s[0]]
        return looked_s[1]

    progress = Progress(10.0, now=lambda: now[0], waited_s=waited_s)
    progress.turn_to("forward")
    progress.turn_to("vote")
    progress.turn_to("forward")
    while (where := progress.hang()) is None:
        now[0] += 0.5
        assert now[0] < 1000
    assert now[0] == 100.5
    assert where.endswith("for 0 s (and 100 s without a processor)")


def proc(folder, threads, children=()):
    """Write what Linux says of threads: nanoseconds run and waited."""
    for (process, task), (ran, waited) in threads.items():
        place = folder / process / "task" / task
        place.mkdir(parents=True, exist_ok=True)
        (place / "schedstat").write_text(f"{ran} {waited} 3\n")
        (place / "children").write_text(" ".join(children) if process == "self" else "")


def test_of_all_threads_and_readers_the_longest_wait_counts(tmp_path):
    s = 10**9
    proc(tmp_path, {("self", "7"): (s, 5 * s), ("self", "8"): (s, s), ("90", "90"): (s, 0)}, children=["90"])
    wait = ProcessorWait(tmp_path)
    assert wait.is_known and wait() == 0.0
    proc(tmp_path, {("self", "7"): (s, 6 * s), ("self", "8"): (s, 3 * s), ("90", "90"): (s, s)}, ["90"])
    assert wait() == 2.0
    proc(tmp_path, {("90", "90"): (s, 5 * s), ("self", "9"): (s, s)}, ["90"])
    assert wait() == 4.0, "the reader's; thread 9 is new"
    assert wait() == 0.0


def test_a_system_that_does_not_count_waits_says_so(tmp_path):
    assert not ProcessorWait(tmp_path).is_known
    proc(tmp_path, {("self", "7"): (0, 0)})
    wait = ProcessorWait(tmp_path)
    assert not wait.is_known and wait() == 0.0
