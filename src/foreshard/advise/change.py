"""One change to what was asked, written `KEY=VALUE`, and what it does to the prediction.

Keys are the flags of `predict` without dashes, `device`, `nic`, `link`, `memory-bandwidth`, `nodes`, and
`speed-PART` for a part of the step that many times as fast. Several joined by a comma happen together:
`tp=4,pp=4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from foreshard.advise.request import CPU, DEGREES, Request, flag_of
from foreshard.advise.traced_request import Asked, TracedRequest, check_change
from foreshard.catalog.clusters import with_device, with_nic
from foreshard.catalog.frameworks import load_framework
from foreshard.errors import ForeshardError, SpecError, unknown
from foreshard.option_names import option_name
from foreshard.planner.request import MARGIN
from foreshard.predict.tasks.kernels import KERNELS
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import invalid, one_of
from foreshard.spec.device import Device
from foreshard.spec.framework import OVERRIDES, checked_override, checked_overrides
from foreshard.spec.plan import (
    ALGORITHMS,
    ATTENTIONS,
    COMM_OPTIONS,
    DISPATCHERS,
    FP8_RECIPES,
    MAX_UNITS,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    WHOLE_MODEL,
    check_recompute,
    checked_buckets,
    checked_prefetch,
)
from foreshard.spec.prediction import TIME_PARTS, Prediction
from foreshard.units import count, number_of, parse
from foreshard.words import zero_level

_COUNTS = (*DEGREES, "micro_batch", "global_batch", "seq_len", "shard_size")
_CHOICES = {
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "offload": (*OFFLOADS, CPU),
    "collectives": ALGORITHMS,
    "attention": ATTENTIONS,
    "fp8_recipe": FP8_RECIPES,
    "dispatcher": DISPATCHERS,
}
_RATES = {"link": "link_bytes_per_s", "memory_bandwidth": "memory_bytes_per_s"}
"""Rates of a device that a change names: of its links to other devices, one direction, and of its memory."""
_HARDWARE = ("device", "nic", "nodes", *_RATES)
_HARDWARE_WORDS = dict.fromkeys(("gpu", "accelerator"), "device") | dict.fromkeys(
    ("nnodes", "num_nodes"), "nodes"
)
_HARDWARE_FIXES = {
    "network|bandwidth|interconnect|infiniband|ib": "Write nic= for the rate of a node, link= for that "
    "between its devices each way, or memory-bandwidth=",
    "nvlink": "Write link= for the rate each way, half of what datasheets add up",
    "hbm|mem_bw": "Write memory-bandwidth=",
    "cluster|gpus|devices|num_gpus|world_size": "Write nodes=, device= or nic=",
    "model": "Predict the other model by itself",
}
"""What to write for words that name no one key."""
_FLAG_NAMES = {"seq": "seq_len", "dtype": "precision"}
_SWITCHES = ("sp", "compile", *COMM_OPTIONS)
_SPEEDS = tuple(f"speed_{part}" for part in (*TIME_PARTS, *KERNELS) if part not in ("bubble", "straggler"))
_OTHERS = (*OVERRIDES, "buckets", "prefetch", "wrap", "zero", "recompute", "framework", "lora", "shares")
KEYS = (*_COUNTS, *_CHOICES, *_SWITCHES, *_OTHERS, *_SPEEDS, *_HARDWARE, *_FLAG_NAMES)
_SPELLED = tuple(dict.fromkeys(flag_of(key).removeprefix("--") for key in KEYS))  # as flags spell them
_ON = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change and the prediction under it; `error` says why there is none.

    `gain` is the fraction of the tokens per second won, negative when the change loses.
    """

    change: str
    prediction: Prediction | None
    gain: float | None
    error: str | None = None

    def is_likely_to_fit(self, least: float = MARGIN) -> bool:
        """Return whether the changed run fits, as probably as a plan must where the probability is known."""
        if self.prediction is None:
            return False
        memory = self.prediction.memory
        return memory.fits and (memory.fits_probability is None or memory.fits_probability >= least)


def apply(request: Asked, change: str) -> Asked:
    """Return the request with `KEY=VALUE[,KEY=VALUE]*` applied.

    Raises
    ------
    SpecError
        For an unknown key or a value the key does not take.
    """
    for part in change.split(","):
        key, equals, value = part.partition("=")
        key = option_name(key.strip().removeprefix("--").lower()).replace("-", "_")
        key = _HARDWARE_WORDS.get(key, key)
        if not equals and key in KEYS:
            what = f"{part.strip()!r} has no value"
            fix = f"Write --change {part.strip()}=VALUE"
            raise SpecError(what, key="--change", value=part.strip(), rule="A change is KEY=VALUE", fix=fix)
        if not equals or key not in KEYS:
            rule = "A change is KEY=VALUE with KEY one of"
            error = unknown(
                "change", part, _SPELLED, key="--change", rule=rule, otherwise="Write it like --change tp=4"
            )
            known = (fix for words, fix in _HARDWARE_FIXES.items() if re.fullmatch(words, key))
            error.fix = next(known, error.fix)
            raise error
        try:
            request = _apply_one(request, _FLAG_NAMES.get(key, key), value.strip())
        except SpecError as error:
            error.fix = error.fix or "Write a value that the flag takes: foreshard predict --help"
            raise
    return request


def _apply_one(request: Asked, key: str, value: str) -> Asked:
    if isinstance(request, TracedRequest) and key not in _HARDWARE:
        check_change(key, value)
    if key in _HARDWARE:
        cluster = _change_cluster(request.cluster, key, value)
        cluster = cluster if request.prices is None else request.prices.on(cluster)
        return _resize(replace(request, cluster=cluster), key)
    if key in _COUNTS:
        return request.with_choice(key, _whole(key, value, 1, 2**31))
    if key == "zero":
        level = zero_level(value)
        return request.with_choice(key, _whole(key, value if level is None else str(level), 0, 3))
    if key == "recompute":
        return request.with_choice(
            key, check_recompute(request.framework.recompute(value), key=f"--change {key}")
        )
    if key == "precision" and value.lower() != "fp8":
        request = request.with_choice("fp8_recipe", None)  # scales are of 8-bit products alone
    if key in _CHOICES:
        return request.with_choice(key, _one_of(key, value, _CHOICES[key]))
    if key in _SPEEDS:
        faster = {key.removeprefix("speed_"): _factor(key, value)}
        return replace(request, speeds={**request.speeds, **faster})
    if key == "shares":
        return _with_shares(request, value)
    return _apply_to_model(request, key, value) if isinstance(request, Request) else request


def _apply_to_model(request: Request, key: str, value: str) -> Request:
    """Return the request with a choice that traced modules do not have."""
    if key in _SWITCHES:
        return request.with_choice(key, _ON[_one_of(key, value, tuple(_ON))])
    if key in OVERRIDES:
        stated = (
            request.plan.overrides if request.plan else checked_overrides(request.choices.get("overrides"))
        )
        name, read = checked_override(key, value, key=f"--change {flag_of(key).removeprefix('--')}")
        return request.with_choice("overrides", replace(stated, **{name: read}))
    if key == "buckets":
        return request.with_choice(key, checked_buckets(parse(value, "bytes")))
    if key == "prefetch":
        return request.with_choice(key, checked_prefetch(_whole(key, value, 0, MAX_UNITS)))
    if key == "wrap":
        whole = value.lower() == WHOLE_MODEL
        return request.with_choice(key, WHOLE_MODEL if whole else _whole(key, value, 1, MAX_UNITS))
    if key == "lora":
        changed = replace(request, lora=None if value == "none" else value)
        assert changed.trained
        return changed
    if key == "framework":
        with _named(key):
            load_framework(value)
    return request.with_choice(key, value)


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Let an error name the change that it is of."""
    try:
        yield
    except SpecError as error:
        error.key = f"--change {flag}"
        raise


def _resize(request: Asked, key: str) -> Asked:
    """Let data parallelism follow the number of devices, unless the user stated it alone."""
    if key != "nodes":
        return request
    if request.plan is not None:
        what = "the number of nodes cannot be changed under a plan file"
        fix = "State the run with --tp, --pp, ... instead of --plan"
        raise SpecError(what, key="nodes", rule="A plan file names every rank", fix=fix)
    return replace(request, choices={k: v for k, v in request.choices.items() if k != "dp"})


def _with_shares(request: Asked, value: str) -> Asked:
    """Return the request with other samples per group of its plan file, written 24:8."""
    if request.plan is None:
        what = "shares without a plan file"
        rule = "Only a plan file has groups; flags split the work evenly"
        raise SpecError(what, key="--change shares", value=value, rule=rule, fix="Give --plan")
    shares = [_whole("shares", text.strip(), 1, 2**31) for text in value.split(":")]
    plan = request.plan
    if len(shares) != len(plan.groups) or sum(shares) != plan.global_batch:
        what = f"{value} does not split {plan.global_batch} samples over {len(plan.groups)} groups"
        rule = "shares has one number per group and sums to the global batch"
        fix = f"Give {number_of(len(plan.groups), 'number')} that sum to {plan.global_batch}"
        raise SpecError(what, key="--change shares", value=value, rule=rule, fix=fix)
    groups = tuple(replace(group, share=n) for group, n in zip(plan.groups, shares, strict=True))
    return replace(request, plan=replace(plan, groups=groups))


def _whole(key: str, value: str, low: int, high: int) -> int:
    counted = count(value, thousand=1024) if key == "seq_len" else None
    if counted is not None and counted.is_integer() and low <= counted <= high:
        return int(counted)
    if value.isascii() and value.isdecimal() and len(value) < 12 and low <= int(value) <= high:
        return int(value)
    flag = flag_of(key).removeprefix("--")
    rule = f"Must be a whole number from {low} to {high}"
    raise invalid(value, rule, key=f"--change {flag}", name=flag)


def _factor(key: str, value: str) -> float:
    """Return how many times as fast; inf makes it free."""
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if factor > 0.0:
        return factor
    flag = flag_of(key).removeprefix("--")
    rule = "Must be a factor above 0, or inf for free"
    raise invalid(value, rule, key=f"--change {flag}", name=flag, fix=f"Write --change {flag}=2")


def _one_of(key: str, value: str, known: Sequence[str]) -> str:
    flag = flag_of(key).removeprefix("--")
    return str(one_of(value, known, key=f"--change {flag}", name=flag))


def _change_cluster(cluster: Cluster, key: str, value: str) -> Cluster:
    if key == "nodes":
        if len(cluster.nodes) != 1:
            what = "a cluster of several node groups has no one number of nodes"
            rule = "nodes= needs a cluster of equal nodes"
            fix = "Predict the other cluster by itself"
            raise SpecError(what, key="--change nodes", value=value, rule=rule, fix=fix)
        count = _whole(key, value, 1, 2**20)
        resized = replace(cluster.nodes[0], count=count)
        return replace(cluster, nodes=(resized,), name=f"{cluster.name} with {count} nodes")
    name = f"{cluster.name} with {key} {value}"
    if key in _RATES:
        nodes = tuple(replace(g, device=_with_rate(g.device, key, value)) for g in cluster.nodes)
        return replace(cluster, nodes=nodes, name=name)
    change = with_device if key == "device" else with_nic
    with _named(key):
        return replace(change(cluster, value), name=name)


def _with_rate(device: Device, key: str, value: str) -> Device:
    """Return the device with other links or another memory."""
    flag = flag_of(key).removeprefix("--")
    if not getattr(device, _RATES[key]):
        rule, fix = f"{flag}= changes a rate that the device has", "Change nic, or the device"
        raise SpecError(
            f"{device.name} has no {flag}", key=f"--change {flag}", value=value, rule=rule, fix=fix
        )
    with _named(flag):
        rate: Any = parse(value, "bytes_per_s")
    return replace(device, **{_RATES[key]: rate})


def effect(request: Asked, base: Prediction, change: str, *, engine: str | None = None) -> Effect:
    """Return what one change does, against a base prediction of the same engine."""
    try:
        changed = apply(request, change)
        prediction = _predicted(request, changed, engine)
    except ForeshardError as error:
        return Effect(change=change, prediction=None, gain=None, error=str(error))
    gain = prediction.tokens_per_s / base.tokens_per_s - 1
    return Effect(change=change, prediction=prediction, gain=gain)


def _predicted(request: Asked, changed: Asked, engine: str | None) -> Prediction:
    """Return the prediction of the changed run; what one measured step taught holds for it too."""
    if request.observed_step_s is None:
        return changed.predict(engine)
    before, after = (asked.observing(None).predict(engine) for asked in (request, changed))
    ratio = request.observed_step_s / before.step_time_s
    made = changed.observing(ratio * after.step_time_s).predict(engine)
    scaled = f"scaled by {ratio:.3f}, measured over predicted step of the run before the change"
    return replace(made, assumptions=(scaled, *made.assumptions[1:]))


def rank(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """Return the effects, best first: what fits by gain, then what does not fit, then what is invalid."""

    def order(found: Effect) -> tuple[int, float]:
        if found.prediction is None or found.gain is None:
            return 2, 0.0
        return (0 if found.prediction.memory.fits else 1), -found.gain

    return tuple(sorted(effects, key=order))


def effects_of(request: Asked, changes: Iterable[str] | str) -> tuple[Prediction, tuple[Effect, ...]]:
    """Return the prediction of a request and the effect of each change on it, best first.

    An unknown key or value is the user's error; a change that cannot run is an answer.
    """
    changes = (changes,) if isinstance(changes, str) else tuple(changes)
    for change in changes:
        apply(request, change)
    base = request.predict()
    return base, rank([effect(request, base, change) for change in changes])
