"""`foreshard calibrate --profile FILE -o costs.json`: costs that predict and plan take, from profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import click

from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.errors import SpecError

T = TypeVar("T")


@verb_command("calibrate")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="[DEVICE=]FILE",
    required=True,
    help="What foreshard profile wrote; again for every other device.",
)
@click.option(
    "--lab", metavar="LAB.toml", help="Test bed whose devices are this one, slower; its clock is used."
)
@click.option(
    "--device", "devices", multiple=True, metavar="NAME[=SLOW]", help="A device that was measured here."
)
@click.option("--clock", type=click.Choice(["cpu", "wall"]), help="Whose seconds; the lab's, else wall.")
def command(profiles: tuple[str, ...], lab: str | None, devices: tuple[str, ...], clock: str | None) -> None:
    """Fit costs to profiles: `foreshard predict` and `plan` take them by --costs.

    \b
    foreshard calibrate --profile profile.json --device rtx-3090 -o costs.json
    foreshard calibrate --profile rtx-3090=a.json --profile v100-sxm-16gb=b.json -o costs.json
    foreshard calibrate --profile profile.json --lab examples/labs/mixed4.toml -o costs.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api
    from foreshard.report.measured_screen import costs_screen

    made = api.calibrate(
        _named_once("--profile", [_profile(word) for word in profiles]),
        lab=lab,
        devices=_named_once("--device", [_device(word) for word in devices]),
        clock=clock,
    )
    out = click.get_current_context().meta.get("foreshard.output")
    give(made, lambda: costs_screen(made, out))


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
