"""Configurations of other tools as plans, one module per tool, each imported when it is asked for.

The text of a file goes in; degrees, options, uneven layers and notes come out (`StatedRun`), which
`api.import_plan` turns into a Plan. What a file sets and a plan cannot express is an error, what a file
leaves to the tool takes the tool's own default. A new importer is one file and an entry of ``SOURCES``
below. Read ``stated_run.py`` first, then ``deepspeed.py``.
"""

from __future__ import annotations

import re
from importlib import import_module

from foreshard.errors import SpecError, unknown
from foreshard.interop.importers.stated_run import StatedRun

SOURCES = {
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "torchtitan@0.2": "torchtitan",
    "deepspeed": "deepspeed",
    "fsdp": "accelerate",
    "accelerate": "accelerate",
}
"""Module of each tool, by the name that ``--from`` takes."""


_SIGNS = {
    "deepspeed": r'^\s*\{(?s:.)*"(zero_optimization|train_(micro_)?batch_size(_per_gpu)?)"\s*:',
    "torchtitan": r"^\[(parallelism|activation_checkpoint|job)\]",
    "accelerate": r'(^|")(distributed_type|fsdp_config|deepspeed_config)"?\s*:',
    "megatron": r"--(tensor-model-parallel-size|num-layers|micro-batch-size)\b",
}
"""What the files of each tool say and those of no other."""


def tool_of(text: str) -> str | None:
    """Return the tool that a file configures, None where nothing says so.

    Examples
    --------
    >>> tool_of('{"zero_optimization": {"stage": 3}}'), tool_of("tp = 2")
    ('deepspeed', None)
    """
    return next((tool for tool, sign in _SIGNS.items() if re.search(sign, text, re.MULTILINE)), None)


def stated_tool(text: str, file: str) -> str:
    """Return the tool that a file configures; raise SpecError where nothing in it says so."""
    tool = tool_of(text)
    if tool is None:
        what, rule = "no tool is known by what the file says", f"Tools are {', '.join(SOURCES)}"
        raise SpecError(
            what, file=file, key="--from", rule=rule, fix="Name the one that reads it: --from TOOL"
        )
    return tool


def read_run(text: str, source: str, file: str) -> StatedRun:
    """Return the run that a configuration of another tool states.

    Parameters
    ----------
    text : str
        Contents of the file.
    source : str
        A key of `SOURCES`.
    file : str
        Name of the file, for errors.

    Raises
    ------
    SpecError
        When the file is not one of the tool's, or sets what a plan cannot express.
    """
    if source not in SOURCES:
        raise unknown("tool", source, SOURCES, key="--from", rule="Tools are")
    if not text.strip():
        fix = "Give the configuration that the tool is started with"
        raise SpecError("the file is empty", file=file, rule=f"A file of {source} states a run", fix=fix)
    run: StatedRun = import_module(f"foreshard.interop.importers.{SOURCES[source]}").read(text, file)
    return run
