"""`foreshard comm VERB`: collectives and gradient buckets, one file per verb.

In go words and options; out comes an answer as of every verb. A verb of this group is a file of its name here
with a ``command`` made by ``verb_command``, and an entry of ``VERBS``. Read ``predict.py`` first.
"""

from importlib import import_module

import click

from foreshard.cli.options.group import VerbGroup

VERBS = {
    "predict": "Predict one collective, and explain what NCCL picks.",
    "simulate": "Simulate a schedule on a topology, flow by flow.",
    "synthesize": "Make a schedule for a topology, and bound what is possible.",
    "measure": "Execute a schedule between ranks, and time it.",
    "buckets": "Find the gradient bucket size that data-parallel training should use.",
    "jobs": "Run jobs that share a fabric, under policies side by side.",
    "compress": "Compare compressed sums of gradients.",
    "import": "Read the output of nccl-tests, and predict it.",
    "export": "Write a schedule or a topology for another tool.",
}


@click.command(
    "comm",
    cls=VerbGroup,
    verbs=VERBS,
    load=lambda name: import_module(f"foreshard.cli.comm.{name}").command,
)
def command() -> None:
    """Predict and plan what devices send to each other.

    Every verb takes --json, -o and --config; 'foreshard comm VERB --help' shows its options.
    """
