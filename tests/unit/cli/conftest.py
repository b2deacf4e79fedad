"""Run the command line in this process and see what a shell would."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest


@pytest.fixture
def shell(capsys):
    """Return a function of the arguments that gives code, out, err and, where out is one, the JSON object."""
    from foreshard.cli.program import run

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        data = json.loads(out) if out.startswith("{") else None
        return SimpleNamespace(code=code, out=out, err=err, json=data)

    return call
