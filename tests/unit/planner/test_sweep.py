"""Tasks of Ray find what a local search finds."""

import sys

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import training_constants
from foreshard.errors import ExtraMissingError, SpecError
from foreshard.planner.grid import search_rows
from foreshard.planner.grid_space import GridRequest
from foreshard.planner.search import plan
from foreshard.planner.sweep import check_executor
from foreshard.predict.plan_table import COLUMNS

SPACES = (
    ("llama3-8b", "1x8xh100-sxm", 64, 8192),
    ("mixtral-8x7b", "2x8xh100-sxm", 16, 4096),
)


def _request(model, cluster, global_batch, seq_len):
    return GridRequest(
        model=load_model(model), cluster=load_cluster(cluster), framework=load_framework("megatron-core"),
        constants=training_constants(), global_batch=global_batch, seq_len=seq_len,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ray():
    module = pytest.importorskip("ray", reason="ray (extra sweep) is not installed")
    module.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield module
    module.shutdown()


@pytest.mark.filterwarnings("ignore")  # ray's own
@pytest.mark.parametrize("space", SPACES, ids=lambda space: space[0])
def test_tasks_find_what_a_local_search_finds(ray, space):
    request = _request(*space)
    here, there = search_rows(request), search_rows(request, executor="ray")
    assert list(there.score) == pytest.approx(list(here.score), rel=1e-12)
    for mine, theirs in zip(here.tables, there.tables, strict=True):
        assert all(getattr(mine, name)[0] == getattr(theirs, name)[0] for name in COLUMNS)
    assert there.bound == pytest.approx(here.bound, rel=1e-12)
    assert there.evaluated + there.pruned == here.evaluated + here.pruned
    assert not there.interrupted


@pytest.mark.filterwarnings("ignore")  # ray's own
def test_a_deadline_leaves_a_bound_that_holds(ray):
    request = _request(*SPACES[1])
    whole = search_rows(request, keep=1)
    part = search_rows(request, keep=1, executor="ray", deadline=0.0, patience_s=1e-6)
    assert part.interrupted
    assert part.bound <= whole.score[0]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissingError, match=r"foreshard\[sweep\]"):
        plan(load_model("llama3-8b"), load_cluster("1x2xh100-sxm"), global_batch=2, executor="ray")


@pytest.mark.parametrize("text", ["local", "ray", "ray:auto", "ray:10.0.0.1:6379"])
def test_executors(text):
    assert check_executor(text) == text


@pytest.mark.parametrize("text", ["", "ray:", "slurm", "local:1"])
def test_what_is_no_executor(text):
    with pytest.raises(SpecError, match="executor"):
        check_executor(text)
