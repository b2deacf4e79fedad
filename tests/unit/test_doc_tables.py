"""Tables of the documentation that benches write."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "doc_tables.py"
DOCUMENT = (
    "As in `<!-- bench two: python x.py -->`:\n"
    "<!-- bench {}: python bench/bench_one.py -->\nstale\n<!-- /bench -->\nafter\n"
)


@pytest.fixture
def project(tmp_path):
    """A project of two benches, of which a document shows one."""
    for name in ("src", "docs", "bench", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    (tmp_path / "docs" / "page.md").write_text(DOCUMENT.format("one"))
    log = "open('ran.txt', 'a').write('{0}'); print('a solver says'); print('| {0} |')"
    (tmp_path / "bench" / "bench_one.py").write_text(log.format("one"))
    (tmp_path / "bench" / "bench_two.py").write_text("import sys\n" + log.format("two"))
    return tmp_path


def ran(project, *words):
    command = [sys.executable, f"scripts/{SCRIPT.name}", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_a_table_takes_the_place_of_the_last_one(project):
    assert ran(project, "one").returncode == 0
    assert (project / "docs" / "page.md").read_text() == DOCUMENT.format("one").replace("stale", "| one |")


def test_a_run_that_failed_goes_on_where_it_stopped(project):
    two = project / "bench" / "bench_two.py"
    (project / "bench" / "bench_zero.py").write_text("import os, sys; sys.exit(not os.path.exists('mended'))")
    assert ran(project).returncode != 0
    (project / "mended").touch()
    assert ran(project).returncode == 0 and ran(project).returncode == 0
    assert (project / "ran.txt").read_text() == "onetwo"
    assert ran(project, "two").returncode == 0
    assert (project / "ran.txt").read_text() == "onetwotwo"
    two.write_text(two.read_text() + "\n")  # other code: everything runs again
    assert ran(project).returncode == 0
    assert (project / "ran.txt").read_text() == "onetwotwoonetwo"


def test_unknown_and_double_names_are_refused(project):
    assert "no bench is named three" in ran(project, "three").stderr
    (project / "docs" / "other.md").write_text(DOCUMENT.format("one"))
    assert "two tables are named one" in ran(project).stderr


def test_every_marker_of_the_project_runs_a_script_that_exists():
    spec = importlib.util.spec_from_file_location("doc_tables", SCRIPT)
    tables = importlib.util.module_from_spec(spec)
    sys.modules["doc_tables"] = tables
    spec.loader.exec_module(tables)
    parts = tables.parts_of(tables.ROOT)
    assert len(parts) >= len(list((tables.ROOT / "bench").glob("bench_*.py")))
    for part in parts:
        assert (tables.ROOT / part.command.split()[1]).is_file()
