"""`foreshard compare MODEL CLUSTER`: the same run under every engine and cost source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.request import describing_a_run, to_request
from foreshard.cli.options.sources import verb_command
from foreshard.report.screen import Screen, table
from foreshard.spec.prediction import TIME_LABELS

if TYPE_CHECKING:
    from foreshard.spec.prediction import Prediction


@verb_command("compare", partial(describing_a_run, with_engine=False))
def command(**values: Any) -> None:
    """Predict the same run under every engine and cost source, side by side."""
    predictions = to_request(values).compare()
    data = {"schema_version": 1, "predictions": [prediction.to_dict() for prediction in predictions]}
    give(data, lambda: _screen(predictions))


def _screen(predictions: tuple[Prediction, ...]) -> Screen:
    from foreshard.report.plan_words import plan_line

    first = predictions[0]
    numbers: dict[str, Callable[[Prediction], str]] = {
        "step": lambda prediction: quantity.seconds(prediction.step_time_s),
        "interval": lambda prediction: quantity.seconds_range(*prediction.step_time_interval_s),
        "MFU": lambda prediction: quantity.percent(prediction.mfu),
        "peak GiB": lambda prediction: quantity.gib(prediction.memory.peak_bytes),
        "predicted in": lambda prediction: quantity.seconds(prediction.predict_s),
    }
    parts = [
        part for part in TIME_LABELS if any(prediction.time_breakdown_s[part] for prediction in predictions)
    ]
    headline = [_folded(name, map(write, predictions)) for name, write in numbers.items()]
    times = [
        _folded(
            TIME_LABELS[part],
            (quantity.seconds(prediction.time_breakdown_s[part]) for prediction in predictions),
        )
        for part in parts
    ]
    columns = ("", *(f">{prediction.engine}/{prediction.costs}" for prediction in predictions))
    return Screen(
        header=(f"{first.model} on {first.cluster}", plan_line(first.plan)),
        tables=(table("", columns, headline), table("Where the time goes", columns, times)),
    )


def _folded(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return a row in which every value that repeats the first is written as `equal`."""
    first, *others = values
    return name, first, *("equal" if value == first else value for value in others)
