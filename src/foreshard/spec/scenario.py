"""Scenario: a job, the devices it may use, what changes while it runs, and the budgets it must keep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from foreshard.errors import SpecError
from foreshard.spec import codec
from foreshard.spec.codec import Range, Size, Unit
from foreshard.units import parse

What = Literal["speed", "bandwidth", "price", "carbon", "availability"]
How = Literal["fixed", "one-at-a-time", "markov", "diurnal", "co-located", "failures", "trace"]
FORMS: Mapping[str, tuple[str, ...]] = {
    "speed": ("fixed", "one-at-a-time", "markov", "diurnal", "co-located", "trace"),
    "bandwidth": ("fixed", "markov", "diurnal", "trace"),
    "price": ("fixed", "markov", "diurnal", "trace"),
    "carbon": ("fixed", "markov", "diurnal", "trace"),
    "availability": ("failures", "trace"),
}
"""Which processes can drive which quantity."""

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "fixed": ("factor",),
    "one-at-a-time": ("factor", "stay"),
    "markov": ("factors", "stay"),
    "diurnal": ("swing", "period"),
    "co-located": ("stay",),
    "failures": ("mean_up", "mean_down"),
    "trace": ("file",),
}
_OF_LINKS = ("bandwidth",)
_RANKS = re.compile(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*")
Factor = Annotated[float, Range(1e-6, 1e6)]
Share = Annotated[float, Range(0.0, 1.0)]
Seconds = Annotated[float, Unit("s"), Range(0.0, 1e9)]
Length = Annotated[float, Unit("s"), Range(1e-6, 1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticProcess:
    """One ``[[process]]`` table: what changes, and how; `FORMS` says which go together.

    `foreshard schema scenario` documents the keys, of all tables here.
    """

    what: What
    how: How
    ranks: str = ""
    between: tuple[str, str] | None = None
    factor: Factor | None = None
    factors: tuple[Factor, ...] = ()
    stay: Share | None = None
    together: bool = False
    swing: Annotated[float, Range(1.0, 1e6)] | None = None
    period: Length | None = None
    phase: Share = 0.0
    levels: Annotated[int, Range(2, 1000)] = 12
    mean_up: Length | None = None
    mean_down: Length | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """One ``[[budget]]`` table: a long-term mean that must be kept."""

    name: Annotated[str, Size(1, 100)]
    kind: Literal["usd", "rent_usd", "egress_usd", "joule", "carbon_kg", "duty"] = "usd"
    rank: Annotated[int, Range(0, 10**6)] | None = None
    limit: Annotated[float, Range(1e-12, 1e15)] | None = None
    per: Literal["step", "second", "hour"] = "step"
    of: str | None = None
    share: Annotated[float, Range(1e-6, 1e3)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A changing cluster and a job on it; quantities with a unit are held in SI."""

    name: str = ""
    doc: str = ""
    model: str
    cluster: str | Mapping[str, Any]
    global_batch: Annotated[int, Range(1, 10**9)]
    seq_len: Annotated[int, Range(1, 10**8)] | None = None
    micro_batch: Annotated[int, Range(1, 10**6)] = 1
    precision: str = "bf16"
    framework: str = "megatron-core"
    optimizer: str = "adamw"
    process: tuple[StochasticProcess, ...] = ()
    budget: tuple[BudgetTable, ...] = ()
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    slots: Annotated[int, Range(1, 10**7)] = 10_000
    batches: Annotated[int, Range(1, 10**6)] = 1
    slot: Length = 60.0
    sees_now: bool = False
    pause: Seconds = 0.0
    egress_usd_per_gb: Annotated[float, Range(0.0, 1e6)] = 0.0
    carbon_g_per_kwh: Annotated[float, Range(0.0, 1e5)] = 0.0
    file: str | None = None

    def path_of(self, name: str) -> Path:
        """Return where a file that the scenario names lies: relative names are beside the scenario."""
        return Path(name) if self.file is None else Path(self.file).parent / name


def load_scenario(path: str | Path) -> Scenario:
    """Return the scenario of a TOML file."""
    file = str(path)
    data = codec.parse_toml(codec.read_text(path), file=file)
    if "file" in data:
        raise SpecError(
            "unknown key 'file'", file=file, key="file", rule="Unknown keys are errors", fix="Leave it out"
        )
    found = codec.decode(Scenario, data | {"file": file}, file=file)
    for index, process in enumerate(found.process):
        _check_process(process, file, f"process[{index}]")
    for index, budget in enumerate(found.budget):
        _check_budget(budget, file, f"budget[{index}]")
    names = [budget.name for budget in found.budget]
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"two budgets are named {name!r}"
            rule = "Names of budgets differ"
            fix = "Rename one"
            raise SpecError(what, file=file, key=f"budget[{index}].name", value=name, rule=rule, fix=fix)
    return found


def _check_process(process: StochasticProcess, file: str, key: str) -> None:
    def error(name: str, what: str, rule: str, value: Any = None, fix: str | None = None) -> SpecError:
        return SpecError(what, file=file, key=f"{key}.{name}", value=value, rule=rule, fix=fix)

    forms = FORMS[process.what]
    if process.how not in forms:
        raise error(
            "how",
            f"{process.how!r} does not drive {process.what}",
            f"{process.what} is driven by {', '.join(forms)}",
            process.how,
            f"Use one of {', '.join(forms)}",
        )
    for name in _NEEDS[process.how]:
        if getattr(process, name) in (None, ()):
            raise error(name, f"'{name}' is missing", f"how = {process.how!r} needs it", fix="Add it")
    if process.ranks and not _RANKS.fullmatch(process.ranks):
        raise error(
            "ranks",
            f"cannot read {process.ranks!r}",
            "Ranks are numbers and ranges",
            process.ranks,
            "Write them like '0-3, 8'",
        )
    if process.ranks and process.what in _OF_LINKS:
        raise error("ranks", "a link is not of ranks", "Links are named by racks", fix="Use 'between'")
    if process.between and process.what not in _OF_LINKS:
        raise error(
            "between",
            "only links lie between racks",
            "between goes with what = 'bandwidth'",
            fix="Leave it out",
        )


def _check_budget(budget: BudgetTable, file: str, key: str) -> None:
    if (budget.kind == "duty") != (budget.rank is not None):
        what = "a budget of duty is of one rank, and only that is"
        rule = "kind = 'duty' goes with rank"
        fix = "Give both or neither"
        raise SpecError(what, file=file, key=f"{key}.rank", value=budget.rank, rule=rule, fix=fix)
    stated = budget.limit is not None
    related = budget.of is not None and budget.share is not None
    if stated == related:
        what = "a budget needs a limit"
        rule = "Either limit, or of (a policy) and share"
        fix = "Give one of them"
        raise SpecError(what, file=file, key=f"{key}.limit", value=budget.limit, rule=rule, fix=fix)


_PERIODS = {"step": "step", "s": "second", "h": "hour"}
_KINDS = {"energy_j": "joule"} | {kind: kind for kind in ("usd", "rent_usd", "egress_usd", "carbon_kg")}


def budget_words(text: str) -> tuple[str, str]:
    """Return name and limit of a budget as written: usd/hour = 3 is usd_per_h=3."""
    name, _, value = text.partition("=")
    name = re.sub(r"\s", "_", name.strip().lower().replace("/", "_per_"))
    return re.sub(r"_per_(hour|hr)$", "_per_h", name), value.strip()


def budget_table(text: str) -> BudgetTable:
    """Return the budget that ``usd_per_h=3.5``, ``energy_j_per_step=900 kJ`` or ``duty:2=50 %`` names.

    A limit without a unit is in the one of its name.
    """
    name, value = budget_words(text)
    kind, _, rank = name.partition(":")
    quantity, _, period = name.rpartition("_per_")
    duty = kind == "duty" and rank.isascii() and rank.isdecimal() and len(rank) < 7
    if not duty and (quantity not in _KINDS or period not in _PERIODS):
        rule = (
            f"Budgets are QUANTITY_per_PERIOD, of {', '.join(_KINDS)} and {', '.join(_PERIODS)}, and "
            "duty:RANK, the part of the time that a rank may be busy"
        )
        fix = "Write it like usd_per_h=3.5"
        raise SpecError(f"unknown budget {name!r}", key="--budget", value=text, fix=fix, rule=rule)
    limit = 0.0
    with suppress(ValueError):
        limit = float(value)
    if not limit:
        unit = "part" if duty else next(unit for unit in ("usd", "kg", "j") if unit in quantity.split("_"))
        with suppress(SpecError):
            limit = parse(value, unit)
    if not 1e-12 <= limit <= (1.0 if duty else 1e15):
        rule = "A number above 0" + (", at most 1" if duty else "")
        fix = f"Write it like {name}=0.5"
        raise SpecError(f"{value!r} is no limit", key="--budget", value=text, fix=fix, rule=rule)
    if duty:
        return BudgetTable(name=name, kind="duty", rank=int(rank), limit=limit, per="second")
    return BudgetTable(name=name, kind=_KINDS[quantity], limit=limit, per=_PERIODS[period])  # type: ignore[arg-type]


def ranks_of(text: str, num_devices: int) -> tuple[int, ...]:
    """Return the ranks that "0-3, 8" names; all for an empty text.

    Examples
    --------
    >>> ranks_of("0-2, 5", 8)
    (0, 1, 2, 5)
    """
    if not text:
        return tuple(range(num_devices))
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    if max(found, default=0) >= num_devices or len(set(found)) < len(found) or not found:
        rule = f"Ranks are 0 to {num_devices - 1}, each once"
        what = f"ranks {text!r} are not on the cluster"
        raise SpecError(what, key="ranks", value=text, rule=rule, fix="Name others, or enlarge the cluster")
    return tuple(found)
