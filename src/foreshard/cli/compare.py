"""`foreshard compare MODEL CLUSTER`: the same run under every engine and cost source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import answering, give
from foreshard.cli.options.request import describing_a_run, to_request
from foreshard.cli.options.sources import configurable
from foreshard.report.screen import Screen, table
from foreshard.spec.prediction import TIME_PARTS

if TYPE_CHECKING:
    from foreshard.spec.prediction import Prediction


@click.command("compare")
def command(**values: Any) -> None:
    """Predict the same run under every engine and cost source, side by side."""
    from foreshard import api

    predictions = api.compare_request(to_request(values))
    data = {"schema_version": 1, "predictions": [one.to_dict() for one in predictions]}
    give(data, lambda: _screen(predictions))


def _screen(predictions: tuple[Prediction, ...]) -> Screen:
    from foreshard.report.plan_words import plan_line
    from foreshard.report.summary import PART_NAMES

    first = predictions[0]
    names = [f"{one.engine}/{one.costs}" for one in predictions]
    headline = [
        ("step", *(quantity.seconds(one.step_time_s) for one in predictions)),
        ("interval", *(quantity.seconds_range(*one.step_time_interval_s) for one in predictions)),
        ("MFU", *(quantity.percent(one.mfu) for one in predictions)),
        ("peak GiB", *(quantity.gib(one.memory.peak_bytes) for one in predictions)),
        ("predicted in", *(quantity.seconds(one.predict_s) for one in predictions)),
    ]
    parts = [
        (PART_NAMES[part], *(quantity.seconds(one.time_breakdown_s[part]) for one in predictions))
        for part in TIME_PARTS
        if any(one.time_breakdown_s[part] for one in predictions)
    ]
    columns = ("", *(f">{name}" for name in names))
    parts = [_folded(row) for row in parts]
    headline = [_folded(row) for row in headline]
    return Screen(
        header=(f"{first.model} on {first.cluster}", plan_line(first.plan)),
        tables=(table("", columns, headline), table("Where the time goes", columns, parts)),
    )


def _folded(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return the row with every value that repeats the first written as `equal`."""
    name, first, *others = row
    return name, first, *("equal" if value == first else value for value in others)


command = configurable(answering(describing_a_run(command, with_engine=False)))
