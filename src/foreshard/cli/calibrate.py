"""`foreshard calibrate`: costs that predict and plan take, from profiles of layers or from measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import click

from foreshard.cli.options.answer import give, save_page
from foreshard.cli.options.sources import verb_command
from foreshard.errors import SpecError

T = TypeVar("T")


@verb_command("calibrate")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="[DEVICE=]FILE",
    help="What foreshard profile wrote; again for every other device.",
)
@click.option(
    "--lab", metavar="LAB.toml", help="Test bed whose devices are this one, slower; its clock is used."
)
@click.option(
    "--device", "devices", multiple=True, metavar="NAME[=SLOW]", help="A device that was measured here."
)
@click.option(
    "--steps",
    multiple=True,
    metavar="TABLE.csv",
    help="Measured steps, as validate reads them, or of networks: constants are fitted to them.",
)
@click.option("--family", help="Of --steps: those of this family of rows.")
@click.option("--exclude-calibration", metavar="FAMILY", help="Of --steps: start from constants without it.")
@click.option("--report", metavar="OUT.html", help="Of --steps: a report with the curve over measured steps.")
@click.option("--clock", type=click.Choice(["cpu", "wall"]), help="Whose seconds; the lab's, else wall.")
def command(
    profiles: tuple[str, ...],
    lab: str | None,
    devices: tuple[str, ...],
    clock: str | None,
    steps: tuple[str, ...],
    **of_steps: str | None,
) -> None:
    """Fit costs to profiles of a job's layers, or constants to measured steps of any model.

    `foreshard predict` and `plan` take the file by --costs.

    \b
    foreshard calibrate --profile profile.json --device rtx-3090 -o costs.json
    foreshard calibrate --profile rtx-3090=a.json --profile v100-sxm-16gb=b.json -o costs.json
    foreshard calibrate --profile profile.json --lab examples/labs/mixed4.toml -o costs.json
    foreshard calibrate --steps runs.csv --report calibration.html -o costs.json
    foreshard calibrate --steps networks.csv -o costs.json

    A table of networks has the columns model, cluster, step_time_s, and options of predict: micro_batch, ...
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api
    from foreshard.report.measured_screen import costs_screen

    of_profiles = {"--profile": profiles, "--lab": lab, "--device": devices, "--clock": clock}
    if steps:
        _alone("--steps", of_profiles)
        _from_steps(steps, **of_steps)
        return
    _alone("--profile", {f"--{name.replace('_', '-')}": value for name, value in of_steps.items()})
    if not profiles:
        rule, fix = "Costs are fitted to measurements", "Give --profile FILE or --steps TABLE"
        raise SpecError("nothing measured", key="--profile", rule=rule, fix=fix)
    made = api.calibrate(
        _named_once("--profile", [_profile(word) for word in profiles]),
        lab=lab,
        devices=_named_once("--device", [_device(word) for word in devices]),
        clock=clock,
    )
    out = click.get_current_context().meta.get("foreshard.output")
    give(made, lambda: costs_screen(made, out))


def _from_steps(
    steps: tuple[str, ...], *, family: str | None, exclude_calibration: str | None, report: str | None
) -> None:
    from foreshard import api
    from foreshard.cli.validate import find
    from foreshard.report.measured_screen import calibration_screen
    from foreshard.report.pages.calibration_page import calibration_page

    for name in steps:
        if Path(name).suffix == ".json":
            rule, fix = "Measured steps are a table, .csv", "Give what foreshard profile wrote by --profile"
            raise SpecError("no table of steps", key="--steps", value=name, rule=rule, fix=fix)
    files = [find(name) for name in steps]
    made = api.calibrate_steps(files, family=family, exclude_calibration=exclude_calibration)
    out = click.get_current_context().meta.get("foreshard.output")
    if report is not None:
        save_page(report, calibration_page(made, out))
    give(made, lambda: calibration_screen(made, out))


def _alone(flag: str, others: Mapping[str, object]) -> None:
    """Raise for an option that does not go with a flag."""
    for name, value in others.items():
        if value:
            rule, fix = f"{name} does not go with {flag}", f"Leave out {name} or {flag}"
            raise SpecError("is not taken here", key=name, value=str(value), rule=rule, fix=fix)


def _named_once(flag: str, named: list[tuple[str, T]]) -> dict[str, T]:
    """Return the values by name, or raise SpecError for a name given twice."""
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            what = f"{name or 'the measured device'} is given twice"
            rule = "Devices have names of their own"
            raise SpecError(what, key=flag, value=name, rule=rule, fix="Leave one out")
    return dict(named)


def _profile(word: str) -> tuple[str, str]:
    name, equals, file = word.partition("=")
    return (name, file) if equals and not Path(word).exists() else ("", word)


def _device(word: str) -> tuple[str, float]:
    name, _, factor = word.partition("=")
    try:
        slow = float(factor or 1.0)
    except ValueError:
        slow = -1.0
    if not name or not 0 < slow < 1e6:
        rule = "A device's name, and how many times as slow as here it is"
        fix = "Write it like rtx-3090 or rtx-3090=2.5"
        raise SpecError(f"{word!r} is not valid", key="--device", value=word, rule=rule, fix=fix)
    return name, slow
