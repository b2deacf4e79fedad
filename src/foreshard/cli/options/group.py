"""A command whose verbs live one to a module, imported when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from foreshard.errors import unknown

_MEANT = {
    **dict.fromkeys(("estimate", "forecast", "time", "memory", "cost", "price", "calc"), "predict"),
    **dict.fromkeys(("search", "optimize", "optimise", "tune", "find", "auto", "recommend"), "plan"),
    **dict.fromkeys(("train", "launch", "start"), "run"),
    **dict.fromkeys(("gpus", "gpu", "accelerators", "hardware"), "devices"),
    **dict.fromkeys(("instances", "clouds", "nodes"), "clusters"),
    **dict.fromkeys(("benchmark", "measure"), "profile"),
    **dict.fromkeys(("what-if", "sensitivity"), "whatif"),
    **dict.fromkeys(("frameworks", "config", "help-config"), "schema"),
    **dict.fromkeys(("check", "health", "info"), "doctor"),
    "convert": "export",
    "goodput": "predict",
    "list": "models",
}
"""Verbs of other words for what they do."""


class VerbGroup(click.Group):
    """Verbs by name with what each is for; `load` imports the command of one."""

    def __init__(self, *, verbs: Mapping[str, str], load: Callable[[str], click.Command], **settings: Any):
        super().__init__(**settings)
        self.verbs, self.load = verbs, load

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command of a verb, imported now."""
        return self.load(name) if name in self.verbs else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that the words call, or raise for an unknown verb."""
        if args and args[0] not in self.verbs:
            help_of = f"See {ctx.command_path} --help"
            error = unknown("verb", args[0], self.verbs, key="verb", rule="Verbs are", otherwise=help_of)
            ours = _MEANT.get(args[0].lower())
            error.fix = f"Did you mean {ours!r}?" if ours in self.verbs else error.fix
            raise error
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of verbs into the help."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(self.verbs.items()))
