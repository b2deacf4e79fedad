"""Messages between stages by broadcasts that a run names: what arrives is what was sent, over fewer links."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import gradients, plan_of, rehearse, values, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule_file import save_schedule
from foreshard.errors import SpecError
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.stage_messages import StageMessageSchedules, check_stage_messages
from foreshard.runtime.trainer import Options
from foreshard.spec.plan import Plan


def stages(*groups: dict, **more: Any) -> Plan:
    return plan_of(groups, global_batch=12, **more)


ONE_TO_THREE = stages(
    {"share": 12, "micro_batch": 6, "stages": [([3], [[0, 3]]), ([0, 2, 1], [[3, 8]], {"tp": 3})]}
)
TWO_TO_TWO = stages(
    {"share": 12, "micro_batch": 5, "stages": [([0, 1], [[0, 3]], {"tp": 2}), ([2, 3], [[3, 8]], {"tp": 2})]}
)
STAGES = ["three stages, zb-h1", "interleaved", "two uneven pipelines", "uneven data in both stages, zero 1"]


def gradient_error(plan: Plan, options: Options) -> float:
    job = JOBS["gpt"](torch.float64)
    found = rehearse(job, plan, steps=1, after=gradients, ranks=range(4), options=options)
    return worst_error(found, rehearse(job, ALONE, steps=1, after=gradients)[0][1])


@pytest.mark.parametrize("plan", STAGES)
def test_gradients_are_those_of_one_process(plan: str) -> None:
    assert gradient_error(PLANS[plan], Options(stage_messages="ring:parts=3")) <= 1e-14


def of_tensor_ranks(plan: Plan, stage_messages: str | None) -> dict[int, Any]:
    """The job with heads that a stage of two ranks can cut."""
    options = Options(stage_messages=stage_messages)
    return rehearse(JOBS["gpt"](torch.float64), plan, steps=1, after=values, ranks=range(4), options=options)


def counted_sends(monkeypatch: pytest.MonkeyPatch, world: tuple[int, ...]) -> Counter:
    """Numbers that stages send, by (source, target); shapes and what other groups carry are left out."""
    found: Counter = Counter()
    send = PeerGroup.send

    def counted(group: PeerGroup, tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        if group.ranks == world and tensors[0].dtype == torch.float64:
            found[group.ranks[group.place], group.ranks[place]] += tensors[0].numel()
        return send(group, tensors, place, tag)

    monkeypatch.setattr(PeerGroup, "send", counted)
    return found


def test_ranks_that_compute_together_pass_parts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks send two ranks a tensor each; by a tree each sends half, and the receivers share halves.

    Losses and weights are those of the backend's messages, to the last bit.
    """
    first, second = {0, 1}, {2, 3}
    sent = counted_sends(monkeypatch, (0, 1, 2, 3))

    def trained(name: str | None) -> tuple[dict[int, Any], int, int]:
        sent.clear()
        found = of_tensor_ranks(TWO_TO_TWO, name)
        forward = sum(n for (a, b), n in sent.items() if a in first and b in second)
        return found, forward, sum(n for (a, b), n in sent.items() if {a, b} in (first, second))

    expected, forward, inside = trained(None)
    assert forward > 0 and inside == 0
    found, halves, passed_on = trained("double-tree:parts=2")
    assert (halves, passed_on) == (forward // 2, forward), "forward and backward, a half of each inside"
    for rank, (losses, weights) in expected.items():
        assert found[rank][0] == losses
        assert all(torch.equal(found[rank][1][key], weight) for key, weight in weights.items())


def test_a_file_takes_the_place_of_a_name(tmp_path: Path) -> None:
    file = str(tmp_path / "message.json")
    save_schedule(schedule_of("send", "direct", 2, parts=4), file)
    assert gradient_error(PLANS["four stages"], Options(stage_messages=file)) <= 1e-14
    with pytest.raises(SpecError, match="a schedule of 2 ranks"):
        check_stage_messages(TWO_TO_TWO, file)
    save_schedule(schedule_of("all-gather", "ring", 2), file)
    with pytest.raises(SpecError, match="one of all-gather"):
        check_stage_messages(PLANS["four stages"], file)


@pytest.mark.parametrize(
    ("plan", "name", "says"),
    [
        (ALONE, "ring", "a plan of one stage"),
        (TWO_TO_TWO, "rong", "rong"),
        (TWO_TO_TWO, "nvls", "switches"),
        (TWO_TO_TWO, "hierarchical:per_node=2", "in nodes of 2"),
        (TWO_TO_TWO, "ring:parts=0", "parts=0"),
    ],
)
def test_what_no_stage_sends_is_refused(plan: Plan, name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        check_stage_messages(plan, name)
    assert caught.value.rule


def test_a_lab_in_virtual_time_and_accelerators_are_refused() -> None:
    with pytest.raises(SpecError, match="virtual time"):
        check_stage_messages(TWO_TO_TWO, "ring", virtual=True)
    schedules = StageMessageSchedules("ring", lambda *_, **__: None)
    with pytest.raises(SpecError, match="accelerators"):
        schedules.connect(TWO_TO_TWO, on_devices=True, says=True)


def test_a_later_plan_that_the_broadcast_does_not_suit_sends_by_the_backend() -> None:
    said: list[str] = []
    schedules = StageMessageSchedules("hierarchical:per_node=2", lambda kind, text, **_: said.append(text))
    assert schedules.connect(ONE_TO_THREE, on_devices=False, says=True) is None
    assert len(said) == 1 and "by the backend" in said[0]
