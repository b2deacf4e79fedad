"""Plans that the conducting rank has announced, until the vote that makes all ranks adopt them."""

from __future__ import annotations

import json

from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan


class Proposals:
    """Plans of one generation by number; numbers rise.

    Parameters
    ----------
    company : WorldGroup
    """

    def __init__(self, company: WorldGroup):
        self._company, self._adopted = company, 0
        self._waiting: dict[int, Plan] = {}

    @property
    def newest(self) -> int:
        """The number that this rank tells in the vote; 0 for none."""
        return max(self._waiting, default=0) if self._company.conducts else 0

    def is_due(self, number: int) -> bool:
        """Return whether the plan of this number is to be adopted."""
        return number > self._adopted

    def announce(self, plan: Plan) -> int:
        """Tell the others a plan; return its number."""
        number = max([self._adopted, *self._waiting]) + 1
        self._waiting[number] = plan
        if self._company.membership.store is not None:
            self._company.membership.store.set(self._where(number), json.dumps(plan.to_dict()))
        return number

    def take(self, number: int) -> Plan:
        """Return the plan of a number, to be adopted now."""
        plan = self._waiting.pop(number, None)
        if plan is None:
            plan = parse_plan(json.loads(bytes(self._company.membership.store.get(self._where(number)))))
        self._adopted = number
        return plan

    def _where(self, number: int) -> str:
        return f"g{self._company.number}/plan/{number}"
