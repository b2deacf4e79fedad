"""Other predictors of training steps, run from a checkout of theirs on our inputs.

Decides how a run is written in the input of another tool, and refuses what that tool cannot express. The
path of a checkout and a run go in; seconds of a step come out. Nothing of a tool is shipped, and none of its
inputs is tuned. A new tool is one file with ``load(path)`` and an entry of ``PEERS`` below. Read
``one_replica.py`` first, then ``calculon.py``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from foreshard.errors import ExtraMissingError, SpecError, unknown

if TYPE_CHECKING:
    from foreshard.validation.predictors import StepPredictor

PEERS = {"calculon": "calculon", "llm-analysis": "llm_analysis", "simumax": "simumax"}
"""By name: the folder of a checkout that is imported, which is also the name of the module here."""


def load_peer(text: str) -> StepPredictor:
    """Return the predictor that ``NAME=PATH`` names, PATH a checkout of the tool.

    Raises
    ------
    SpecError
        For an unknown tool, or a path that does not hold it.
    ExtraMissingError
        Where a library that the tool needs is not installed.
    """
    name, equals, path = text.partition("=")
    if name not in PEERS:
        raise unknown("tool", name, PEERS, key="--peer", rule="Tools are")
    folder = PEERS[name]
    if not equals or not (Path(path) / folder).is_dir():
        rule = f"A peer is {name}=PATH, where PATH is a checkout that holds the folder {folder}"
        fix = f"Clone the tool and write --peer {name}=PATH"
        raise SpecError(f"no checkout of {name}", key="--peer", value=path, rule=rule, fix=fix)
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    try:
        made: StepPredictor = import_module(f"foreshard.interop.peers.{folder}").load(Path(path))
    except ModuleNotFoundError as error:
        what = f"{name} needs {error.name}"
        raise ExtraMissingError(what, key="--peer", fix=f"pip install {error.name}") from error
    return made
