"""The short form of `make soak`: a hurt run trains every sample once and ends where one in peace does."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "soak", made)
    spec.loader.exec_module(made)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_hurt_run_is_the_run_in_peace(soak, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "KINDS", ("kill", "supervisor", "stop", "phase"))
    monkeypatch.setattr(soak, "DETECT_S", 2.0)
    found = soak.compared(tmp_path, steps=40, seed=1, faults=6, gap_s=(0.1, 0.4), pace_s=0.04, calm=10)
    assert found["faults"] >= 4 and found["restarts"] >= 2
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert found["samples"] == found["peace_samples"] == 40 * 8
    assert found["parameters_max_rel_difference"] <= soak.LIMIT
    assert found["loss_max_rel_difference"] <= soak.LIMIT
