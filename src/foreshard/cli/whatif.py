"""`foreshard whatif MODEL CLUSTER --change KEY=VALUE ...`: the predicted effect of each change, ranked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.request import describing_a_run, to_request, warn_of_offers
from foreshard.cli.options.sources import verb_command
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.advise.change import Effect
    from foreshard.advise.diagnosis import Diagnosis
    from foreshard.spec.prediction import Prediction


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

    request = to_request(values)
    base, effects = effects_of(request, changes)
    warn_of_offers(base.plan)
    data = {"schema_version": 1, "base": base.to_dict(), "effects": list(map(effect_dict, effects))}
    found: Diagnosis | None = None
    if diagnose or not changes:
        from foreshard.advise.diagnosis import diagnose as diagnosed

        found = diagnosed(request, base)
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


def _row(name: str, gain: str, prediction: Prediction) -> tuple[str, ...]:
    return (
        name,
        gain,
        quantity.seconds(prediction.step_time_s),
        quantity.gib(prediction.memory.peak_bytes),
        quantity.usd(prediction.cost.usd_per_1b_tokens),
        "" if prediction.memory.fits else "does not fit",
    )


def _effect_row(effect: Effect) -> tuple[str, ...]:
    if effect.prediction is None or effect.gain is None:
        return effect.change, "-", "-", "-", "-", f"not valid: {effect.error}"
    return _row(effect.change, quantity.gain(effect.gain), effect.prediction)


def _screen(base: Prediction, effects: tuple[Effect, ...], found: Diagnosis | None) -> Screen:
    from foreshard.report.diagnosis_tables import diagnosis_tables
    from foreshard.report.plan_words import plan_line

    columns = ("change", ">tokens/s", ">step", ">peak GiB", ">per 1B tokens", "")
    rows = [_row("(now)", "", base), *map(_effect_row, effects)]
    gains = [effect.gain or 0.0 for effect in effects if effect.prediction and effect.prediction.memory.fits]
    useless = bool(effects) and not any(gain > 0 for gain in gains)
    notes = ("No change gives more tokens per second.",) if useless else ()
    return Screen(
        header=(f"{base.model} on {base.cluster}", plan_line(base.plan)),
        tables=(
            table("", columns, rows, spare=(">per 1B tokens", ">peak GiB")),
            *(() if found is None else diagnosis_tables(found)),
        ),
        notes=(*notes, *_batches(base, effects)),
    )


def _batches(base: Prediction, effects: tuple[Effect, ...]) -> tuple[str, ...]:
    """Say where a step holds other samples than now: its seconds then do not compare."""
    now = base.plan.global_batch
    found = [(effect.change, effect.prediction.plan.global_batch) for effect in effects if effect.prediction]
    said = ", ".join(f"{change} {batch}" for change, batch in found if batch != now)
    if not said:
        return ()
    return (f"The global batch follows the change: {now} now, {said}. State --global-batch to keep it.",)
