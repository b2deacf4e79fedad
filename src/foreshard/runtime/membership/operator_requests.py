"""Plans that the operator gives to a running job, through a file in its folder."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from foreshard.errors import SpecError
from foreshard.runtime.membership.leader_failover import Rendezvous, read_rendezvous
from foreshard.runtime.membership.supervisor_state import load_state, write_json
from foreshard.runtime.state.layout import check_runnable
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan, parse_plan

_FILE = "replan.json"
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
    number = 1 + (_read(run) or (0, plan))[0]
    write_json(run / _FILE, {"number": number, "plan": plan.to_dict()})
    return number


class RunLiveness:
    """Whether a run can still adopt a plan, as another process of this host sees it."""

    def __init__(self, run: Path, now: Callable[[], float] = time.monotonic):
        self._run, self._now = run, now
        self._refused_s: float | None = None

    def end(self) -> str | None:
        """Return in words that the run has ended, None while it may go on."""
        state, rendezvous = load_state(self._run), read_rendezvous(self._run)
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
    """The requests to a run, as its leader reads them between steps."""

    def __init__(self, run: Path):
        self._run = run
        found = _read(run)
        self._done = 0 if found is None else found[0]  # those of an earlier attempt are past
        self._seen_ns = 0

    def next(self) -> tuple[int, Plan] | None:
        """Return a request that is new, by its number."""
        try:
            changed_ns = (self._run / _FILE).stat().st_mtime_ns
        except OSError:
            return None
        if changed_ns == self._seen_ns:
            return None
        self._seen_ns = changed_ns
        found = _read(self._run)
        if found is None or found[0] <= self._done:
            return None
        self._done = found[0]
        return found


def _read(run: Path) -> tuple[int, Plan] | None:
    try:
        data = json.loads((run / _FILE).read_text())
        return int(data["number"]), parse_plan(data["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
