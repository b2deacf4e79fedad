"""Which values of degrees and options plans may have: fixed ones, forbidden ones, least and most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreshard.catalog.offers import offers_of, running_level
from foreshard.errors import SpecError, unknown
from foreshard.option_names import unknown_option
from foreshard.spec.codec import one_of, whole
from foreshard.spec.framework import Framework
from foreshard.spec.plan import MAX_BATCH, OFFLOADS, SCHEDULES, Group, Plan, Stage, check_recompute

COUNTS = ("dp", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch")
"""Degrees that also have a least and a most."""
NAMES = (*COUNTS, "zero", "shard_size", "sp", "recompute", "offload", "schedule")
_OF_STAGES = ("tp", "cp", "ep", "micro_batch", "zero", "recompute")
"""What the search of unequal pipelines chooses for each stage; other choices are those of the whole plan."""
_KINDS = ("full", "selective", "every")
"""Kinds of recompute rules: the word before modules or numbers."""
_SWITCH = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What was stated of the plans to search.

    Attributes
    ----------
    allowed, forbidden : mapping of str to tuple
        Values by name of degree or option; what is not in `allowed` may be anything.
    least, most : mapping of str to int
        Of degrees, inclusive.
    """

    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    forbidden: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the degrees and options that something is stated of."""
        stated = {*self.allowed, *self.forbidden, *self.least, *self.most}
        return tuple(name for name in NAMES if name in stated)

    @property
    def of_whole_plans(self) -> tuple[str, ...]:
        """Return those that stages of unequal pipelines do not choose one by one."""
        return tuple(name for name in self.names if name not in _OF_STAGES)

    def may_be(self, name: str, value: Any) -> bool:
        """Return whether a degree or option may have a value."""
        return (
            value in self.allowed.get(name, (value,))
            and not any(_is(name, value, other) for other in self.forbidden.get(name, ()))
            and self.least.get(name, value) <= value <= self.most.get(name, value)
        )

    def most_of(self, name: str, most: int) -> int:
        """Return the largest value that a degree may have, up to `most`."""
        return max(self.of(name, range(1, most + 1)), default=1)

    def of(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return those of some values that may be."""
        return tuple(value for value in values if self.may_be(name, value))

    def mask(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return which values of an array may be; a bool for each."""
        if name not in self.names:
            return np.ones(len(values), dtype=bool)
        known, place = np.unique(values, return_inverse=True)
        return np.array([self.may_be(name, int(value)) for value in known], dtype=bool)[place]

    def rules(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Return the recompute rules to search: those stated, else those of the framework that may be."""
        return self.of("recompute", self.allowed.get("recompute", tuple(offered)))

    def holds(self, plan: Plan) -> bool:
        """Return whether every group and stage of a plan is as stated."""
        if not self:
            return True
        replicas = sum(group.stages[0].inner_dp for group in plan.groups)
        return self.may_be("dp", replicas) and all(self._group_holds(group) for group in plan.groups)

    def _group_holds(self, group: Group) -> bool:
        of_group = {"pp": len(group.stages), "vpp": group.num_chunks}
        if len(group.stages) > 1:
            of_group["schedule"] = group.schedule  # type: ignore[assignment]
        if any(stage.tp > 1 for stage in group.stages):
            of_group["sp"] = group.sp
        return all(self.may_be(name, value) for name, value in of_group.items()) and all(
            self._stage_holds(group, stage) for stage in group.stages
        )

    def _stage_holds(self, group: Group, stage: Stage) -> bool:
        names = ("tp", "cp", "ep", "etp", "zero", "shard_size", "recompute", "offload")
        mine = {name: getattr(stage, name) for name in names}
        mine["shard_size"] = mine["shard_size"] or 0
        mine["micro_batch"] = -(-group.micro_batch // stage.inner_dp)
        return all(self.may_be(name, value) for name, value in mine.items())

    def __str__(self) -> str:
        """Return the words of a note."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        for name in self.names:
            word = name.replace("_", " ")
            if name in self.allowed:
                yield f"{word} {' or '.join(map(str, self.allowed[name]))}"
            if name in self.forbidden:
                yield f"{word} not {' or '.join(map(str, self.forbidden[name]))}"
            for limits, side in ((self.least, "at least"), (self.most, "at most")):
                if name in limits:
                    yield f"{word} {side} {limits[name]}"


def choices(stated: Mapping[str, Any], framework: Framework) -> Choices:
    """Return the choices that words state.

    Parameters
    ----------
    stated : mapping
        A degree or option to its value or a sequence of values; ``min_`` and ``max_`` before a degree; and
        `forbid`, a sequence of ``NAME=VALUE``.
    framework : Framework
        Whose choices they have to be among.

    Raises
    ------
    SpecError
        For an unknown name, a value that it does not take or the framework does not ship, and limits that
        leave nothing.
    """
    allowed: dict[str, tuple[Any, ...]] = {}
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for name, value in stated.items():
        if name in NAMES:
            values = tuple(value) if isinstance(value, tuple | list) else (value,)
            allowed[name] = tuple(dict.fromkeys(_checked(name, one) for one in values))
            _shipped(name, allowed[name], framework)
        elif name.startswith(("min_", "max_")) and name[4:] in COUNTS:
            (least if name.startswith("min_") else most)[name[4:]] = int(_checked(name[4:], value, name))
        elif name != "forbid":
            raise unknown_option(name, NAMES, key=_flag(name))
    found = Choices(allowed=allowed, forbidden=_forbidden(stated.get("forbid") or ()), least=least, most=most)
    for name in COUNTS:
        low, high = least.get(name, 1), most.get(name, MAX_BATCH)
        if low > high:
            rule = f"The least is at most the most, which is {high}"
            raise SpecError(f"{name} of at least {low}", key=f"--min-{name}", value=low, rule=rule)
        if name in allowed and not found.of(name, allowed[name]):
            what = f"no {name} is left"
            rule = "A fixed value is neither forbidden nor outside the limits"
            raise SpecError(what, key=_flag(name), value=str(found), rule=rule, fix="Leave one of them out")
    return found


def _forbidden(written: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    found: dict[str, list[Any]] = {}
    for part in written:
        name, equals, value = part.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in NAMES or not equals:
            rule = "What is forbidden is NAME=VALUE with NAME one of"
            fix = "Write it like --forbid recompute=full"
            if name in NAMES:
                what = f"{part.strip()!r} has no value"
                raise SpecError(what, key="--forbid", value=part, rule="It is NAME=VALUE", fix=fix)
            raise unknown("choice", part, NAMES, key="--forbid", rule=rule, otherwise=fix)
        word = value.strip().lower()
        kind = name == "recompute" and word in _KINDS
        found.setdefault(name, []).append(word if kind else _checked(name, word, "forbid"))
    return {name: tuple(values) for name, values in found.items()}


def _is(name: str, value: Any, forbidden: Any) -> bool:
    """Return whether a value is a forbidden one; a kind of recompute rule forbids all of the kind."""
    if name == "recompute" and forbidden in _KINDS:
        return str(value).replace("-", ":").partition(":")[0] == forbidden
    return bool(value == forbidden)


def _checked(name: str, value: Any, flag: str | None = None) -> Any:
    """Return a value of a degree or option, or raise for one it does not take."""
    key = _flag(flag or name)
    if name == "recompute":
        return check_recompute(value, key=key)
    if name in ("offload", "schedule"):
        known = OFFLOADS if name == "offload" else SCHEDULES
        return one_of(value, known, key=key, name=name)
    if name == "sp":
        return (
            value if isinstance(value, bool) else _SWITCH[one_of(value, tuple(_SWITCH), key=key, name=name)]
        )
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 12 else value
    low, high = (0, 3) if name == "zero" else (1, MAX_BATCH)
    return whole(number, low, high, key=key, name=_flag(name).lstrip("-"))


def _shipped(name: str, values: Sequence[Any], framework: Framework) -> None:
    """Raise for a value that the framework does not let its user choose."""
    offers = offers_of(framework)
    known: dict[str, tuple[Any, ...]] = {"zero": offers.zero, "offload": offers.offload}
    known["schedule"] = (*offers.schedules, *offers.ordered)
    if name in ("tp", "pp", "cp", "ep", "etp", "vpp"):
        has = offers.degrees if name != "pp" else ("pp",) if offers.schedules else ()
        known[name] = values if name in has else (1,)  # type: ignore[assignment]
    if name == "sp" and not offers.cuts_sequences:
        known[name] = (False,)
    if name == "shard_size" and not offers.in_groups:
        raise SpecError(
            f"{framework.label} has no shard groups",
            key=_flag(name),
            value=values[0],
            rule="A search is among what the framework ships",
            fix="Leave it out: weights and states are sharded over all ranks",
        )
    wrong = [value for value in values if value not in known.get(name, (value,))]
    if wrong:
        value = "" if wrong[0] is True else f" {wrong[0]}"
        other = running_level(framework.label, wrong[0]) if name == "zero" else framework.label
        more = "" if other == framework.label else f". The same flags run {other}: --framework {other}"
        raise SpecError(
            f"{framework.label} has no {name.replace('_', ' ')}{value}",
            key=_flag(name),
            value=wrong[0],
            rule="A search is among what the framework ships",
            fix="Leave it out" if not value else f"It has {', '.join(map(str, known[name])) or 'none'}{more}",
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
