"""`foreshard whatif MODEL CLUSTER --change KEY=VALUE ...`: the predicted effect of each change, ranked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.advise.request import Request
from foreshard.cli.options.answer import give
from foreshard.cli.options.request import describing_a_run, to_request, traced_request_of, warn_of_offers
from foreshard.cli.options.sources import verb_command
from foreshard.report.plan_words import counted, plan_line, priced
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.advise.change import Effect
    from foreshard.advise.diagnosis import Diagnosis
    from foreshard.spec.prediction import Prediction


_STATED = re.compile(r"global[-_]batch|gbs", re.I)  # in a change that says what the global batch is


@verb_command("whatif", describing_a_run)
@click.option(
    "--change", "changes", multiple=True, metavar="KEY=VALUE", help="A change; repeat it (none: --diagnose)."
)
@click.option("--diagnose", is_flag=True, help="Show the critical path, and rank what would help.")
def command(changes: tuple[str, ...], diagnose: bool, **values: Any) -> None:
    """Predict the effect of each --change, and rank them by tokens per second; without one, diagnose.

    KEY is any flag of predict without dashes, or device, nodes, nic, link, memory-bandwidth, or speed-PART
    for a part of the step that many times as fast (speed-tensor-comm=2, speed-attention=inf). Join changes
    that happen together with commas: --change tp=4,pp=4. What the run does not state follows its default
    after the change.

    \b
    foreshard whatif llama3-8b 2x8xh100-sxm --tp 2 --change tp=4 --change "nic=800 Gb/s" --change speed-host=2
    foreshard whatif llama3-8b 2x8xh100-sxm --tp 2
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.advise.change import effects_of

    found: Diagnosis | None = None
    request = traced_request_of(values) or to_request(values)
    base, effects = effects_of(request, changes)
    if isinstance(request, Request):
        warn_of_offers(request, base.plan)
    if diagnose or not changes:
        from foreshard.advise.diagnosis import diagnose as diagnosed

        found = diagnosed(request, base)
    data = {"schema_version": 1, "base": base.to_dict(), "effects": list(map(effect_dict, effects))}
    if found is not None:
        data["diagnosis"] = found.to_dict()
    give(data, lambda: _screen(base, effects, found))


def effect_dict(effect: Effect) -> dict[str, Any]:
    """Return one effect as its JSON object."""
    return {
        "change": effect.change,
        "gain": effect.gain,
        "error": effect.error,
        "prediction": effect.prediction.to_dict() if effect.prediction else None,
    }


def _row(name: str, gain: str, prediction: Prediction, base: Prediction) -> tuple[str, ...]:
    return (
        name,
        gain,
        quantity.seconds(prediction.step_time_s),
        quantity.gib(prediction.memory.peak_bytes),
        quantity.usd(priced(base.plan, prediction.cost.usd_per_1b_tokens)[0]),
        "" if prediction.memory.fits else "does not fit",
    )


def _effect_row(effect: Effect, base: Prediction) -> tuple[str, ...]:
    if effect.prediction is None or effect.gain is None:
        return effect.change, "-", "-", "-", "-", f"not valid: {effect.error}"
    return _row(effect.change, quantity.gain(effect.gain), effect.prediction, base)


def _screen(base: Prediction, effects: tuple[Effect, ...], found: Diagnosis | None) -> Screen:
    from foreshard.report.diagnosis_tables import diagnosis_tables

    many, price = counted(base.plan), f">per {priced(base.plan, None)[1]}"
    columns = ("change", f">{many}/s", ">step", ">peak GiB", price, "")
    rows = [_row("(now)", "", base, base), *(_effect_row(effect, base) for effect in effects)]
    gains = [effect.gain or 0.0 for effect in effects if effect.prediction and effect.prediction.memory.fits]
    useless = bool(effects) and not any(gain > 0 for gain in gains)
    notes = (f"No change gives more {many} per second.",) if useless else ()
    return Screen(
        header=(f"{base.model} on {base.cluster}", plan_line(base.plan)),
        tables=(
            table("", columns, rows, spare=(price, ">peak GiB")),
            *(() if found is None else diagnosis_tables(found, many)),
        ),
        notes=(*notes, *_batches(base, effects)),
    )


def _batches(base: Prediction, effects: tuple[Effect, ...]) -> tuple[str, ...]:
    """Say where a step holds other samples than now: its seconds then do not compare."""
    now = base.plan.global_batch
    found = [(effect.change, effect.prediction.plan.global_batch) for effect in effects if effect.prediction]
    followed = [(change, batch) for change, batch in found if batch != now and not _STATED.search(change)]
    said = ", ".join(f"{change} {batch}" for change, batch in followed)
    if not said:
        return ()
    return (f"The global batch follows the change: {now} now, {said}. State --global-batch to keep it.",)
