"""Plans that the operator gives to a running job, through a file in its folder."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from foreshard.errors import SpecError
from foreshard.runtime.membership.leader_failover import Rendezvous, read_rendezvous
from foreshard.runtime.membership.supervisor_state import REQUEST, load_state, write_json
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.state.layout import check_runnable
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan, parse_plan

_CONNECT_S = 2.0
_RESTART_S = 15.0
"""How long the agent may take to start a supervisor again that was killed."""
_TAKEOVER_S = 150.0
"""How long another host may take to do so, which waits for twice `--detect-s` (30 s if not given)."""


def request_plan(run: Path, plan_file: str) -> int:
    """Ask a run to adopt a plan, and return the number of the request.

    The plan has to be one of this run, which is under way.
    """
    plan, state = load_plan(plan_file), load_state(run)
    check_runnable(plan, file=plan_file)
    if state is None or state.over or _was_ended(read_rendezvous(run)):
        raise SpecError(
            "no job trains there", file=str(run), key="RUN", rule="A plan is given to a run under way"
        )
    before = parse_plan(state.plan)
    facts = [
        ("global batch", before.global_batch, plan.global_batch),
        ("layers", before.groups[0].num_layers, plan.groups[0].num_layers),
        ("precision", before.precision, plan.precision),
        ("collectives", before.collectives, plan.collectives),
        ("buckets", before.buckets, plan.buckets),
        ("lora", before.lora, plan.lora),
    ]
    for name, old, new in facts:
        if old != new:
            raise SpecError(
                f"{name} {new}, the run has {old}",
                file=plan_file,
                key="PLAN",
                value=new,
                rule=f"A run keeps its {name}",
                fix="Plan for the same job",
            )
    absent = set(plan.ranks) - {*state.expected, *state.ranks, *before.ranks}
    if absent:
        raise SpecError(
            f"the plan uses rank {max(absent)}, the run has none",
            file=plan_file,
            key="PLAN",
            value=max(absent),
            rule="A run keeps the ranks that it was started with",
            fix=f"Plan for the ranks {', '.join(map(str, sorted(state.expected)))}",
        )
    # by the clock: one that is asked for at the same time has another number
    number = max(time.time_ns() // 1_000_000, 1 + _newest(run))
    write_json(run / REQUEST, {"number": number, "plan": plan.to_dict()})
    return number


class RunLiveness:
    """Whether a run can still adopt the plan of a request, as another process of this host sees it."""

    def __init__(self, run: Path, number: int, now: Callable[[], float] = time.monotonic):
        self._run, self._number, self._now = run, number, now
        self._refused_s: float | None = None

    def end(self) -> str | None:
        """Return in words why the plan will not be adopted, None while it may be."""
        state, rendezvous = load_state(self._run), read_rendezvous(self._run)
        if _newest(self._run) > self._number:
            return "another plan was asked for since"
        if state is not None and state.over:
            return "the run has done its steps"
        if _was_ended(rendezvous):
            return "the run was ended"
        if rendezvous is None or not _refuses(rendezvous):
            self._refused_s = None
            return None
        if self._refused_s is None:
            self._refused_s = self._now()
        silent_s = self._now() - self._refused_s
        patience_s = _RESTART_S if rendezvous.address.startswith("127.") else _TAKEOVER_S
        if silent_s < patience_s:
            return None
        return f"nothing has listened at {rendezvous.address}:{rendezvous.port} for {silent_s:.0f} s"


def _was_ended(rendezvous: Rendezvous | None) -> bool:
    return rendezvous is not None and not rendezvous.port


def _refuses(rendezvous: Rendezvous) -> bool:
    """Return whether no process listens at a rendezvous; one that is out of reach may live."""
    try:
        socket.create_connection((rendezvous.address, rendezvous.port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Requests:
    """The requests to a run, as its leader reads them between steps.

    The newest is open until a leader has written its answer to the run's events. A leader may die before, and
    what it has proposed goes with the generation.
    """

    def __init__(self, run: Path):
        self._run = run
        self._answered, self._seen_ns = 0, 0
        self._newest: tuple[int, Plan] | None = None

    def open(self) -> tuple[int, Plan] | None:
        """Return the newest request by its number, if no rank has answered it."""
        with contextlib.suppress(OSError):
            changed_ns = (self._run / REQUEST).stat().st_mtime_ns
            if changed_ns != self._seen_ns:
                self._seen_ns, self._newest = changed_ns, _read(self._run)
        if self._newest is None or self._newest[0] <= self._answered:
            return None
        answers = (line.get("request", 0) for line in whole_lines(self._run / "events.jsonl"))
        self._answered = max(answers, default=0)
        return self._newest if self._newest[0] > self._answered else None

    def answered(self, number: int) -> None:
        """Close a request, also where the disk does not take its answer yet."""
        self._answered = number


def _newest(run: Path) -> int:
    found = _read(run)
    return 0 if found is None else found[0]


def _read(run: Path) -> tuple[int, Plan] | None:
    try:
        data = json.loads((run / REQUEST).read_text())
        return int(data["number"]), parse_plan(data["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
