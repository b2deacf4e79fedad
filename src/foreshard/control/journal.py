"""Events and commands as lines of JSON, and back, so that a controller's run can be replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol, get_args

from foreshard.errors import SpecError
from foreshard.spec.online import Command, Event, Policy, StepMeasured, Together

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


def event_line(event: Event) -> str:
    """Return an event as a line."""
    return json.dumps(_encoded(event))


def _encoded(event: Event) -> dict[str, Any]:
    if isinstance(event, Together):
        return {"event": "Together", "step": event.step, "events": [_encoded(fact) for fact in event.events]}
    data: dict[str, Any] = {"event": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "relative_speed" and isinstance(event, StepMeasured):
            value = {str(rank): speed for rank, speed in value.items()}
        if field.name == "link_s":
            value = [[*pair, *amount] for pair, amount in value.items()]
        data[field.name] = dict(value) if field.name == "costs" else value
    return data


def event_of(line: str) -> Event:
    """Return the event of a line.

    Raises
    ------
    SpecError
        When the line holds none.
    """
    try:
        return _decoded(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            "no event", key="log", value=line[:60], rule="A line is a JSON object of a known event"
        ) from error


def _decoded(data: dict[str, Any]) -> Event:
    kind = _EVENTS[data.pop("event")]
    if kind is Together:
        return Together(step=data["step"], events=tuple(_decoded(fact) for fact in data["events"]))  # type: ignore[misc]
    if kind is StepMeasured and "relative_speed" in data:
        data["relative_speed"] = {int(rank): float(speed) for rank, speed in data["relative_speed"].items()}
    if "link_s" in data:
        data["link_s"] = {(int(a), int(b)): (float(c), float(d)) for a, b, c, d in data["link_s"]}
    return kind(**data)  # type: ignore[no-any-return]


def command_line(command: Command) -> str:
    """Return a command as a line."""
    plan = None if command.plan is None else command.plan.to_dict()
    return json.dumps({"command": command.kind, "reason": command.reason, "plan": plan})


class Log(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> Any:
        """Take lines."""
        ...


def logged(decide: Callable[[Event], Sequence[Command]], event: Event, log: Log | None) -> Sequence[Command]:
    """Return what is decided on an event: it is in the log before, the commands after."""
    if log is None:
        return decide(event)
    log.write(event_line(event) + "\n")
    commands = decide(event)
    for command in commands:
        log.write(command_line(command) + "\n")
    return commands


def replay(log: Iterable[str], policy: Policy) -> Sequence[str]:
    """Return the commands (as lines) that a policy gives on the events of a log; skip other lines."""
    commands: list[str] = []
    for line in log:
        if '"event"' in line[:12]:
            commands += [command_line(command) for command in policy.on(event_of(line))]
    return commands
