"""The verbs and what each is for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import click

VERBS = {
    "predict": "Predict one training step: time, memory, cost.",
    "compare": "Predict the same run under every engine and cost source.",
    "whatif": "Rank the predicted effects of changes.",
    "plan": "Find the best plans, with a bound on all others.",
    "export": "Write a plan for another tool.",
    "import": "Read another tool's configuration as a plan.",
    "profile": "Time a job's layers on this machine.",
    "calibrate": "Fit costs to profiles.",
    "run": "Train a job under a plan; continue when ranks fail.",
    "replan": "Give a running job another plan.",
    "lab": "Train on a mixed cluster emulated on this machine.",
    "simulate": "Compare policies on a simulated, changing cluster.",
    "comm": "Predict and plan collectives and gradient buckets.",
    "validate": "Predict measured runs and score the predictions.",
    "devices": "List the known devices.",
    "models": "List the known models.",
    "clusters": "List the known instance types.",
    "schema": "Describe the file formats.",
    "doctor": "Check the health of this install.",
}


def verb(name: str) -> click.Command:
    """Return the command of a verb, imported now."""
    command: click.Command = import_module(f"foreshard.cli.{name}").command
    return command


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command that has options with its words: a verb, or a verb of a group as `comm predict`."""
    for name in VERBS:
        command = verb(name)
        if not isinstance(command, click.Group):
            yield name, command
            continue
        ctx = click.Context(command)
        for word in command.list_commands(ctx):
            below = command.get_command(ctx, word)
            if below is not None:
                yield f"{name} {word}", below
