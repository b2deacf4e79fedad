"""Commands and the exact text they answer with, side by side in `cases`: NAME.toml and NAME.out.

The predictor is the stand-in of tests/conftest.py, so that physics may improve without touching these.
`UPDATE_GOLDEN=1 pytest tests/golden` rewrites the answers; read the diff before committing it.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from foreshard.cli.program import run

CASES = sorted(Path(__file__).parent.joinpath("cases").glob("*.toml"))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_golden(path, capsys):
    case = tomllib.loads(path.read_text(encoding="utf-8"))
    code = run(case["args"])
    out, err = capsys.readouterr()
    answer = f"{out}{'--- stderr' + chr(10) + err if err else ''}--- exit {code}\n"
    golden = path.with_suffix(".out")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(answer, encoding="utf-8")
    assert golden.exists(), "no answer yet; run with UPDATE_GOLDEN=1"
    assert answer == golden.read_text(encoding="utf-8")


def test_every_answer_has_its_case():
    folder = Path(__file__).parent / "cases"
    assert {path.stem for path in folder.glob("*.out")} == {path.stem for path in CASES}
