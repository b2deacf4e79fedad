"""What `foreshard export` writes, prints and exits with."""

from __future__ import annotations

import json
import sys

import pytest

from foreshard.cli import main
from foreshard.spec.degrees import plan_from_degrees


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(plan_from_degrees(32, 16, tp=2, zero=1, global_batch=64, seq_len=8192).to_dict())
    )
    return str(path)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["foreshard", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


def test_files_are_written_where_asked(monkeypatch, plan_file, tmp_path, capsys):
    out = tmp_path / "made"
    assert (
        run(monkeypatch, "export", plan_file, "llama3-8b", "2x8xh100-sxm", "--to", "megatron", "-o", str(out))
        == 0
    )
    assert "--tensor-model-parallel-size 2" in (out / "megatron_args.sh").read_text()
    said = capsys.readouterr().err
    assert "Yours to add" in said and "epsilon" not in said  # the configuration states it


def test_json_holds_the_files(monkeypatch, plan_file, capsys):
    assert run(monkeypatch, "export", plan_file, "llama3-8b", "--to", "megatron", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["schema_version"] == 1 and read["files"][0]["name"] == "megatron_args.sh"


def test_a_plan_the_target_cannot_say_exits_2(monkeypatch, plan_file, capsys):
    assert run(monkeypatch, "export", plan_file, "llama3-8b", "--to", "fsdp") == 2
    assert "fsdp cannot express the plan" in capsys.readouterr().err


def test_a_cluster_is_asked_for_where_it_is_needed(monkeypatch, plan_file, capsys):
    assert run(monkeypatch, "export", plan_file, "--to", "slurm") == 2
    assert "CLUSTER" in capsys.readouterr().err.upper()


def test_unknown_targets_and_files_are_named(monkeypatch, plan_file, capsys):
    assert run(monkeypatch, "export", plan_file, "--to", "nemo") == 2
    assert "megatron" in capsys.readouterr().err
    assert run(monkeypatch, "export", "absent.json", "--to", "megatron") == 2
    assert "absent.json" in capsys.readouterr().err


def test_a_plan_of_another_model_exits_2(monkeypatch, plan_file, capsys):
    assert run(monkeypatch, "export", plan_file, "llama3-70b", "--to", "megatron") == 2
    err = capsys.readouterr().err
    assert plan_file in err and "layers end at 34, llama3-70b has layers 0 to 81" in err


@pytest.mark.parametrize(
    ("run_folder", "out", "said"),
    [("absent", "x", "no such folder"), ("a file", "x", "is a file"), ("a run", "a file", "cannot write")],
)
def test_a_run_that_is_none_and_a_folder_that_cannot_be_are_bad_input(
    monkeypatch, tmp_path, capsys, run_folder, out, said
):
    """`File exists`, as the operating system says it, was an internal fault."""
    torch = pytest.importorskip("torch")
    from foreshard.runtime.checkpoint.format import Attempt

    (tmp_path / "a file").write_text("{}")
    weights = {"layers.0.weight": torch.ones(2)}
    attempt = Attempt(
        tmp_path / "a run" / "ckpt", step=3, tensors=weights, meta={}, rank=0, group=None, lead=True
    )
    attempt.write()
    attempt.finish()
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "export", run_folder, "--to", "safetensors", "-o", out) == 2
    assert said in capsys.readouterr().err
    assert run(monkeypatch, "export", "a run", "--to", "safetensors", "-o", "new", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
