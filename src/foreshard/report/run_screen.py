"""The outcome of a run, as a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreshard.quantity import digits, gain, seconds
from foreshard.report.screen import Box, Screen
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.runtime.records.outcome import RunOutcome


_BROKEN = (
    "The loss became NaN or infinite and training continued; events.jsonl says from which step. Check the "
    "data, lower the learning rate, or clip gradients with --clip-norm."
)
_LOSS_DIGITS = 5  # of a loss: the first and the last of a short run differ late
_UNDISTURBED = "The prediction is for the lab's initial state, without its changes."


def _budget(name: str, limit: float, mean: float) -> Box:
    over = mean / limit - 1
    kept = f"exceeded by {100 * over:.1f} %" if over > 0 else "kept"
    return Box(title=f"{name}, mean", value=digits(mean), note=f"budget {limit:g}, {kept}", alarm=over > 0)


def _absent(ranks: tuple[int, ...]) -> tuple[Box, ...]:
    note = "absent at the end; supervisor.jsonl says since when and why"
    box = Box(title="Ranks left out", value=", ".join(map(str, ranks)), note=note, alarm=True)
    return (box,) if ranks else ()


def _damage(outcome: RunOutcome) -> str:
    lines = number_of(outcome.damaged_lines, "line")
    return f"{lines} of {outcome.out}/metrics.jsonl damaged: no whole line of a step, counted nowhere."


def run_screen(outcome: RunOutcome, predicted_s: float | None = None, *, changes: bool = False) -> Screen:
    """Return the screen of a run that has ended, its step beside the predicted one where there is one.

    `changes`: the lab changed during the run, which the prediction does not include.
    """
    against = ""
    if predicted_s is not None and outcome.median_step_s:
        error = predicted_s / outcome.median_step_s - 1
        against = f"predicted {seconds(predicted_s)}, {gain(error)}"
    broken = outcome.last_loss is None and outcome.median_step_s is not None
    losses = (outcome.first_loss, outcome.last_loss)
    first, last = ("" if loss is None else digits(loss, _LOSS_DIGITS) for loss in losses)
    loss = "not finite" if broken else last or "-"
    began = f"from {first}" if first else ""
    wrong = outcome.lost + outcome.repeated + outcome.misread
    faults = f"{outcome.lost} lost, {outcome.repeated} repeated, {outcome.misread} different among ranks"
    ledger = faults if wrong else "each trained once"
    starts, together = str(outcome.restarts), number_of(outcome.generations, "generation")
    return Screen(
        header=(f"{number_of(outcome.steps, 'step')}, {outcome.clock} clock",),
        boxes=(
            Box(title="Step, median", value=seconds(outcome.median_step_s), note=against),
            Box(title="Loss", value=loss, note=began, alarm=broken),
            Box(title="Samples", value=f"{outcome.samples:,}", note=ledger, alarm=wrong > 0),
            Box(title="Ranks restarted", value=starts, note=together),
            *_absent(outcome.absent),
            *(_budget(name, **numbers) for name, numbers in outcome.budgets.items()),
        ),
        notes=(
            *((_BROKEN,) if broken else ()),
            *((_damage(outcome),) if outcome.damaged_lines else ()),
            *((_UNDISTURBED,) if against and changes else ()),
            f"Metrics of each step: {outcome.out}/metrics.jsonl; events: {outcome.out}/events.jsonl.",
        ),
    )
