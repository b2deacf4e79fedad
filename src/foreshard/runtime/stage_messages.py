"""How stages send to each other: by the backend's messages or by broadcasts that a run names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.selection import BACKEND, KEYS, schedule_selection
from foreshard.errors import SpecError
from foreshard.runtime.records.durable_jsonl import OnEvent
from foreshard.runtime.state.layout import receiver_counts
from foreshard.spec.plan import Plan

if TYPE_CHECKING:
    from foreshard.transport.stage_message import ScheduleFor

_KEY = KEYS["broadcast"]


def check_stage_messages(plan: Plan, name: str | None, *, virtual: bool = False) -> None:
    """Raise SpecError for names that do not exist, and plans and clocks whose stages do not send so."""
    selection = None if name is None else schedule_selection("broadcast", name)
    if selection is None:
        return
    counts, leave_out = receiver_counts(plan), f"Leave it out, or take {_KEY} {BACKEND}"
    if not counts:
        rule = "Messages are sent between the stages of a pipeline"
        raise SpecError("a plan of one stage", key=_KEY, value=name, rule=rule, fix=leave_out)
    if virtual:
        rule = "Its clock reckons with single messages on modelled links"
        fix = f'{leave_out}, or use foreshard lab with clock = "wall"'
        raise SpecError("a lab in virtual time", key=_KEY, value=name, rule=rule, fix=fix)
    for count in counts:
        selection.schedule_for(1 + count)


class StageMessageSchedules:
    """The broadcasts of a run, which its first plan suits (`check_stage_messages`).

    Later plans follow losses and changes. Where the broadcast is then none for the ranks that share a
    message, all messages go by the backend, which an event says. Names are those that `schedule_selection`
    reads as a broadcast.
    """

    def __init__(self, name: str | None, on_event: OnEvent):
        self._selection = None if name is None else schedule_selection("broadcast", name)
        self._on_event = on_event

    def connect(self, plan: Plan, *, on_devices: bool, says: bool) -> ScheduleFor | None:
        """Return the schedule of a message by its number of ranks; None for the backend's messages.

        All ranks come to the same, on accelerators (NCCL) to a SpecError; `says` whether this one reports.
        """
        selection, made = self._selection, dict[int, Schedule]()
        if selection is None:
            return None
        if on_devices:
            rule = "Schedules are executed in host memory, over gloo"
            fix = f"Take {_KEY} {BACKEND}, or add --device cpu"
            what = "stage messages on accelerators"
            raise SpecError(what, key=_KEY, value=selection.name, rule=rule, fix=fix)
        try:
            for count in receiver_counts(plan):
                made[1 + count] = selection.schedule_for(1 + count)
        except SpecError as error:
            if says:
                text = f"stages send by the backend: {error.what}"
                self._on_event("collective", text, algorithm=selection.name)
            return None
        return made.__getitem__
