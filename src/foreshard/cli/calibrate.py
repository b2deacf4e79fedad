"""`foreshard calibrate --profile FILE -o costs.json`: costs that predict and plan take, from a profile."""

from __future__ import annotations

import click

from foreshard.cli.answer import dump, say, write_text
from foreshard.cli.settings import configurable
from foreshard.errors import SpecError


@configurable
@click.command("calibrate")
@click.option("--profile", "profile_file", metavar="FILE", required=True, help="What foreshard profile wrote.")
@click.option("-o", "--output", metavar="FILE", default="costs.json", show_default=True, help="The costs.")
@click.option("--lab", metavar="LAB.toml", help="Test bed whose devices are this one, slower; its clock is used.")
@click.option("--device", "devices", multiple=True, metavar="NAME[=SLOW]", help="A device that was measured here.")
@click.option("--clock", type=click.Choice(["cpu", "wall"]), help="Whose seconds; the lab's, else wall.")
def command(
    profile_file: str, output: str, lab: str | None, devices: tuple[str, ...], clock: str | None
) -> None:
    """Fit costs to a profile: `foreshard predict` and `plan` take them by --costs.

    \b
    foreshard calibrate --profile profile.json --device rtx-3090 -o costs.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.profile.calibration import calibrate, load_profile

    slow = dict(_named(word) for word in devices)
    if lab is not None:
        from foreshard.runtime.lab import load_lab

        bed = load_lab(lab)
        slow |= dict(zip(bed.devices, bed.slow, strict=True))
        if clock is None:
            clock = bed.clock if bed.clock != "table" else "cpu"
    made = calibrate(load_profile(profile_file), clock=clock or "wall", slow=slow)
    write_text(output, dump(made) + "\n")
    worst = max(layer["relative_error"] for layer in made["layers"])
    say(f"{len(made['layers'])} layers; the worst line is {100 * worst:.1f} % off a size it was fitted to")
    say(f"passes spread from {made['spread'][0]:.3f} to {made['spread'][1]:.3f} of their median; written to {output}")


def _named(word: str) -> tuple[str, float]:
    name, _, factor = word.partition("=")
    try:
        slow = float(factor or 1.0)
    except ValueError:
        slow = -1.0
    if not name or not 0 < slow < 1e6:
        raise SpecError(f"{word!r} is not valid", key="--device", value=word,
                        rule="is a device's name, and how many times as slow as here it is")  # fmt: skip
    return name, slow
