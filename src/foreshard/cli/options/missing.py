"""What is said where an option or an argument is missing that a verb needs: what it is, and an example."""

from __future__ import annotations

import click

from foreshard.errors import SpecError

_EXAMPLES = {
    "model": ("A catalog name, the path of an HF config.json, or module.py:factory", "llama3-8b"),
    "cluster": ("A catalog name, a TOML file, or nodes x devices per node x device", "2x8xh100-sxm"),
    "collective": ("A collective, or send", "all-reduce"),
    "size": ("Bytes of the whole buffer, as nccl-tests count them", "1GiB"),
    "--change": ("A change of the input", "--change tp=4"),
    "--to": ("The tool that reads the plan or schedule", "--to megatron, or --to msccl under comm"),
    "--from": ("The tool that reads the file", "--from megatron"),
    "configuration": ("What another tool is started with", "train_llama.sh"),
    "what": ("A schedule, as foreshard comm synthesize -o wrote it, or a cluster", "schedule.json"),
    "--profile": ("What foreshard profile wrote", "--profile profile.json"),
    "--plan": ("The plan to run, as foreshard plan -o wrote it", "--plan plan.json"),
    "plan": ("A plan, as foreshard plan -o wrote it", "plan.json"),
    "plan_file": ("A plan, as foreshard plan -o wrote it", "plan.json"),
    "job": ("The file that defines what is trained", "job.py"),
    "run": ("The folder of a run, as run --out named it", "runs/one"),
    "lab_file": ("A lab: ranks, speeds, memory and links", "lab.toml"),
    "file": ("A scenario: a cluster and how it changes", "scenario.toml"),
    "files": ("Tables of measured runs", "runs.csv"),
}


def missing(error: click.MissingParameter) -> SpecError | None:
    """Return the error of a missing parameter, None where no example is known.

    Examples
    --------
    >>> option = click.Option(["--change"], required=True)
    >>> print(missing(click.MissingParameter(param=option)))
    --change: not given. A change of the input, for example --change tp=4. See foreshard --help.
    """
    param = error.param
    if param is None:
        return None
    name = max(param.opts, key=len)
    if name not in _EXAMPLES:
        return None
    meaning, example = _EXAMPLES[name]
    key = name if name.startswith("-") else param.metavar or name
    command = error.ctx.command_path if error.ctx is not None else "foreshard"
    rule = f"{meaning}, for example {example}"
    return SpecError("not given", key=key, rule=rule, fix=f"See {command} --help")
