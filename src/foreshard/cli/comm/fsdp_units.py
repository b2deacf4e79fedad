"""The answer of `foreshard comm buckets` with `--zero 2` or `3`: units of FSDP, and how many go ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreshard import quantity
from foreshard.advise.fsdp_units import UnitAdvice, UnitChoice, unit_advice
from foreshard.advise.request import Request
from foreshard.cli.options.answer import give
from foreshard.report.screen import Box, Screen, Table, table
from foreshard.spec.plan import WHOLE_MODEL

_LITTLE = 0.005  # of a step: less than what runs of one configuration differ by


def answer(request: Request, prefetch: tuple[int, ...] | None, wrap: tuple[int | str, ...] | None) -> bool:
    """Print which units FSDP should gather and how many ahead; return whether any that was compared fits."""
    advice = unit_advice(request, prefetch=prefetch, wrap=wrap)
    notes = tuple(_notes(request, advice))
    give(_object(request, advice, notes), lambda: _screen(request, advice, notes))
    return advice.best is not None


def _object(request: Request, advice: UnitAdvice, notes: tuple[str, ...]) -> dict[str, Any]:
    best, default = advice.best, advice.default
    stage = default.prediction.plan.groups[0].stages[0]
    return {
        "schema_version": 1,
        "model": request.model.name,
        "cluster": request.cluster.name,
        "framework": request.framework.label,
        "zero": stage.zero,
        "dp": stage.inner_dp,
        "best": None if best is None else _entry(best),
        "default": _entry(default),
        "saved_s": None if best is None else default.step_time_s - best.step_time_s,
        "capacity_bytes": default.prediction.memory.capacity_bytes,
        "choices": [_entry(choice) for choice in advice.choices],
        "notes": list(notes),
    }


def _entry(choice: UnitChoice) -> dict[str, Any]:
    return {
        "prefetch": choice.prefetch,
        "wrap": choice.wrap,
        "step_time_s": choice.step_time_s,
        "exposed_s": choice.exposed_s,
        "peak_bytes": choice.peak_bytes,
        "fits": choice.fits,
    }


def _words(choice: UnitChoice) -> str:
    """Return a choice in words."""
    if choice.wrap == WHOLE_MODEL:
        return "the whole model as one unit"
    size = "one block" if choice.wrap == 1 else f"{choice.wrap} blocks"
    ahead = {0: "none ahead", 1: "one ahead"}.get(choice.prefetch, f"{choice.prefetch} ahead")
    return f"units of {size}, {ahead}"


def _notes(request: Request, advice: UnitAdvice) -> Iterator[str]:
    best, default, fastest = advice.best, advice.default, advice.fastest
    capacity = quantity.size(default.prediction.memory.capacity_bytes)
    if best is None:
        least = min(advice.choices, key=lambda choice: choice.peak_bytes)
        yield (
            f"No choice fits {capacity}: {_words(least)} needs {quantity.size(least.peak_bytes)}, the least. "
            "Recompute activations, take smaller micro-batches or more devices."
        )
        return
    saved_s = default.step_time_s - best.step_time_s
    if default.fits and saved_s < _LITTLE * default.step_time_s:
        yield (
            f"The framework's own choice, {_words(default)}, is as good: the best saves "
            f"{quantity.seconds(max(saved_s, 0.0))} a step, less than two runs differ by."
        )
    elif default.fits:
        more = best.peak_bytes - default.peak_bytes
        memory = f"{quantity.size(abs(more))} {'more' if more > 0 else 'less'} memory"
        yield (
            f"{_words(best).capitalize()}: {quantity.seconds(default.exposed_s - best.exposed_s)} less of "
            f"weights and gradients is exposed than with {_words(default)}, for {memory}."
        )
    else:
        yield f"The framework's own choice, {_words(default)}, does not fit {capacity}."
    if fastest is not best:
        yield (
            f"{_words(fastest).capitalize()} would take {quantity.seconds(fastest.step_time_s)}, but needs "
            f"{quantity.size(fastest.peak_bytes)} of {capacity}."
        )
    alone = [choice for choice in advice.choices if choice.prefetch == 0 and choice.wrap == best.wrap]
    if alone and best.prefetch > 0:
        yield (
            f"In turn with computation {quantity.seconds(alone[0].exposed_s)} of its collectives would be "
            f"exposed; with {_words(best)} it is {quantity.seconds(best.exposed_s)}, waiting and computation "
            "that collectives slow."
        )
    if any(choice.wrap == WHOLE_MODEL for choice in advice.choices):
        yield (
            "One unit of the whole model hides nothing, but as the root it keeps its weights from forward to "
            "backward and gathers them once."
        )
    yield _how(request, best)


def _how(request: Request, best: UnitChoice) -> str:
    """Return how a choice is set in PyTorch."""
    if request.framework.fsdp == "fsdp1":
        ahead = (
            "backward_prefetch=None, which leaves the forward as it is"
            if best.prefetch == 0
            else "forward_prefetch=True, backward_prefetch=BACKWARD_PRE and limit_all_gathers=True"
        )
        return f"FSDP1: wrap the units with FullyShardedDataParallel, and give {ahead}."
    if best.wrap == WHOLE_MODEL:
        return "FSDP2: call fully_shard once, on the whole model."
    units = "each block" if best.wrap == 1 else f"each list of {best.wrap} blocks"
    if best.prefetch == 0:
        return f"FSDP2: call fully_shard on {units}; it has no switch against gathering one unit ahead."
    following = "unit" if best.prefetch == 1 else f"{best.prefetch} units"
    return (
        f"FSDP2: call fully_shard on {units}, and set_modules_to_forward_prefetch and "
        f"set_modules_to_backward_prefetch of each unit with the next {following} in that order."
    )


def _screen(request: Request, advice: UnitAdvice, notes: tuple[str, ...]) -> Screen:
    best = advice.best
    stage = advice.default.prediction.plan.groups[0].stages[0]
    header = (
        f"{request.model.name} on {request.cluster.name}: {request.framework.label}, zero {stage.zero} over "
        f"{stage.inner_dp} replicas"
    )
    boxes: tuple[Box, ...] = ()
    if best is not None:
        saved_s = advice.default.step_time_s - best.step_time_s
        share = quantity.percent(saved_s / advice.default.step_time_s)
        boxes = (
            Box(title="best", value=_words(best), note="of those that fit"),
            Box(title="saves", value=f"{quantity.seconds(saved_s)}, {share}", note="of a step"),
            Box(title="step", value=quantity.seconds(best.step_time_s)),
            Box(title="memory", value=quantity.size(best.peak_bytes), note="of the fullest rank"),
        )
    return Screen(header=(header,), boxes=boxes, tables=(_table(advice),), notes=notes)


def _table(advice: UnitAdvice) -> Table:
    marks = {id(advice.default): "the framework's own"}
    if advice.best is not None:
        both = advice.best is advice.default
        marks[id(advice.best)] = "best, the framework's own" if both else "best"
    rows: list[tuple[object, ...]] = [
        (
            "model" if choice.wrap == WHOLE_MODEL else choice.wrap,
            choice.prefetch,
            quantity.seconds(choice.exposed_s),
            quantity.seconds(choice.step_time_s),
            quantity.size(choice.peak_bytes),
            marks.get(id(choice), "" if choice.fits else "does not fit"),
        )
        for choice in sorted(advice.choices, key=_order)
    ]
    columns = (">blocks of a unit", ">units ahead", ">exposed", ">step", ">memory", "")
    return table("Units of FSDP", columns, rows)


def _order(choice: UnitChoice) -> tuple[bool, int, int]:
    whole = choice.wrap == WHOLE_MODEL
    return whole, 0 if whole else int(choice.wrap), choice.prefetch
