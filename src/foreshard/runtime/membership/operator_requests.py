"""Plans that the operator gives to a running job, through a file in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from foreshard.errors import SpecError
from foreshard.runtime.membership.supervisor_state import load_state, write_json
from foreshard.runtime.state.layout import check_runnable
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan, parse_plan

_FILE = "replan.json"


def request_plan(run: Path, plan_file: str) -> int:
    """Ask a run to adopt a plan, and return the number of the request.

    The plan has to be one of this run, which is under way.
    """
    plan, state = load_plan(plan_file), load_state(run)
    check_runnable(plan, file=plan_file)
    if state is None or state.over:
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
