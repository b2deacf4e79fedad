"""Every command and every example of the README runs."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line.removeprefix("$ ") for line in README.splitlines() if re.match(r"(\$ )?foreshard ", line)]
TRAINING = [line for line in LINES if "job.py" in line or line.startswith("foreshard calibrate")]
COMMANDS = sorted(set(LINES) - set(TRAINING))
FIRST = "foreshard run --plan plan.json"


@pytest.fixture
def place(tmp_path, monkeypatch, answered):
    """A folder with the files the README speaks of."""
    import json

    from foreshard.spec.degrees import layer_spans

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "config.json").write_bytes((ROOT / "examples/llama3-70b.json").read_bytes())
    (tmp_path / "cluster.toml").write_bytes((ROOT / "examples/two-sites.toml").read_bytes())
    plan = answered[1].plan.to_dict()
    for stage, spans in zip(plan["groups"][0]["stages"], layer_spans(80, 4, 1), strict=True):
        stage["layers"] = spans
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, place, shell):
    short = ["--budget-s", "2"] if command.startswith("foreshard plan ") else []
    answer = shell(*shlex.split(command)[1:], *short)
    assert answer.code in (0, 3) and answer.out, answer.err


def test_the_training_chapter_runs_from_top_to_bottom(tmp_path, monkeypatch, shell):
    """The job of the chapter by its commands; the first needs the plan of a later one."""
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = next(code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "def model" in code)
    (tmp_path / "job.py").write_text(job)
    order = [line for line in TRAINING if not line.startswith(FIRST)]
    order += [line for line in TRAINING if line.startswith(FIRST)]
    assert len(order) == 6
    for line in order:
        short = ["--steps", "6"] if " run " in line else []
        answer = shell(*shlex.split(line)[1:], *short)
        assert answer.code == 0, (line, answer.err)
    for out in ("run", "planned", "steered"):
        assert len((tmp_path / out / "metrics.jsonl").read_text().splitlines()) == 6


def test_files_named_by_options_are_written(place, shell):
    command = next(command for command in COMMANDS if "--report report.html" in command)
    shell(*shlex.split(command)[1:])
    assert (place / "report.html").stat().st_size > 20_000 and (place / "step.json.gz").exists()


def test_python_example(place, capsys):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    exec(compile(code, "README.md", "exec"), {})
    assert "compute" in capsys.readouterr().out


def test_links_lead_to_files():
    later = {"docs/accuracy.md"}  # generated
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target in later or (ROOT / target).exists(), target


def test_the_example_config_is_read(place, shell):
    answer = shell("predict", "llama3-8b", "2x8xh100-sxm", "--config", "examples/options.toml", "--json")
    assert answer.code == 0 and answer.json["plan"]["global_batch"] == 512
    assert answer.json["cost"]["usd_total"] > 0
