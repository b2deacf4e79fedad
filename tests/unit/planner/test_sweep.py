"""Tasks of Ray find what a local search finds."""

import pickle
import socket
import sys
from types import SimpleNamespace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import training_constants
from foreshard.errors import ExtraMissingError, InfeasibleError, SpecError
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.grid.ray_sweep import check_executor, num_at_once
from foreshard.planner.grid.search import search_rows
from foreshard.planner.grid.space import GridRequest
from foreshard.planner.rental import rent
from foreshard.planner.request import checked_request
from foreshard.planner.search import plan
from foreshard.planner.settings import settings
from foreshard.planner.settings_search import search_settings
from foreshard.predict.plan_table import COLUMNS

SPACES = (
    ("llama3-8b", "1x8xh100-sxm", 64, 8192),
    ("mixtral-8x7b", "2x8xh100-sxm", 16, 4096),
)


def _request(model, cluster, global_batch, seq_len):
    return GridRequest(
        model=load_model(model),
        cluster=load_cluster(cluster),
        framework=load_framework("megatron-core"),
        constants=training_constants(),
        global_batch=global_batch,
        seq_len=seq_len,
    )


@pytest.fixture(scope="module")
def ray():
    module = pytest.importorskip("ray", reason="ray (extra sweep) is not installed")
    module.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
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


def test_an_address_where_nothing_listens_is_named_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        executor = f"ray:127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SpecError, match=r"no Ray cluster answers.*ray start"):
            num_at_once(executor)


@pytest.mark.parametrize("text", ["local", "ray", "ray:auto", "ray:10.0.0.1:6379"])
def test_executors(text):
    assert check_executor(text) == text


@pytest.mark.parametrize("text", ["", "ray:", "slurm", "local:1"])
def test_what_is_no_executor(text):
    with pytest.raises(SpecError, match="executor"):
        check_executor(text)


class StandIn:
    """Tasks that run when they are asked for, on copies of their arguments, the last one first.

    As much of Ray as the planner uses, where Ray is not installed.
    """

    def __init__(self, stop_after: int = 10**9):
        self.left, self.cancelled = stop_after, []
        self.exceptions = SimpleNamespace(RayTaskError=type("RayTaskError", (Exception,), {}))

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, function):
        return SimpleNamespace(remote=lambda *arguments: (function, pickle.dumps(arguments)))

    def wait(self, tasks):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return [tasks[-1]], tasks[:-1]

    def get(self, task):
        function, arguments = task
        try:
            return pickle.loads(pickle.dumps(function(*pickle.loads(arguments))))
        except SpecError as cause:
            error = self.exceptions.RayTaskError()
            error.cause = cause
            raise error from None

    def cancel(self, task, *, force):
        self.cancelled.append(task)


@pytest.fixture(params=["stand-in", "ray"])
def tasks(request, monkeypatch):
    """Run tasks by the stand-in, and by Ray where it is installed."""
    if request.param == "ray":
        return request.getfixturevalue("ray")
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def _settings(executor, precisions=("bf16", "fp8")):
    """Return what a search that always ends finds in each precision."""
    request = checked_request(
        load_model("llama3-8b"), load_cluster("1x8xh100-sxm"), global_batch=16, seq_len=4096, budget_s=600.0
    )
    chosen = tuple(settings(request, precisions, ("grad_overlap", "tp_overlap")))
    return search_settings(request, chosen, search_homogeneous, executor=executor)


@pytest.mark.filterwarnings("ignore")  # ray's own
@pytest.mark.parametrize("precisions", [("bf16",), ("bf16", "fp8")])
def test_settings_are_tasks_with_the_results_of_a_local_search(tasks, precisions):
    here, there = _settings("local", precisions), _settings("ray", precisions)
    assert [one.plan for one in there.plans] == [one.plan for one in here.plans]
    assert there.plans[0].plan.comm
    assert there.lower_bound_step_time_s == here.lower_bound_step_time_s
    assert there.notes == here.notes
    assert not there.interrupted


def test_a_search_of_mixed_devices_is_a_task(monkeypatch):
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    model, cluster = load_model("gpt2-xl"), load_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb")
    found = plan(model, cluster, global_batch=8, seq_len=1024, budget_s=2.0, executor="ray")
    assert made.left == 10**9 - 1
    assert found.lower_bound_step_time_s <= found.plans[0].prediction.step_time_s * (1 + 1e-12)


def _rent(**options):
    instances = ("aws-p4d.24xlarge", "aws-p5.48xlarge", "gcp-a2-highgpu-8g")
    return rent(
        load_model("llama3-8b"),
        global_batch=32,
        tokens=1e10,
        seq_len=2048,
        max_devices=16,
        tp=4,
        instances=instances,
        **options,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ray's own
def test_instances_to_rent_are_tasks_with_the_results_of_a_local_search(tasks):
    here, there = _rent(), _rent(executor="ray")
    assert [(one.cluster, one.ranked.plan) for one in there.offers] == [
        (one.cluster, one.ranked.plan) for one in here.offers
    ]
    assert there.left_out == here.left_out and not there.interrupted
    assert min(there.evaluated, here.evaluated) > 0  # how many depends on the time that each task got


def test_an_interrupt_keeps_the_tasks_that_ended(monkeypatch):
    made = StandIn(stop_after=1)
    monkeypatch.setitem(sys.modules, "ray", made)
    found = _settings("ray")
    assert found.interrupted and {one.plan.precision for one in found.plans} == {"bf16"}
    assert "fp8" in found.notes[-1] and len(made.cancelled) == 3
    made.left, made.cancelled = 1, []
    rented = _rent(executor="ray")
    assert rented.interrupted and rented.offers and len(made.cancelled) == 2
    assert list(rented.left_out.values()).count("not searched before the end") == 2


def test_an_interrupt_before_any_task_ended_is_passed_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", StandIn(stop_after=0))
    with pytest.raises(KeyboardInterrupt):
        _settings("ray")
    with pytest.raises(KeyboardInterrupt):
        _rent(executor="ray")


def test_an_error_of_a_task_is_the_error_of_the_search(tasks):
    from foreshard.planner.grid.ray_sweep import each_in_tasks

    with pytest.raises(SpecError, match="executor") as caught:
        list(each_in_tasks(check_executor, [("dask",)], "ray"))
    assert caught.value.key == "--executor"


def test_what_tasks_send_back_survives_the_way():
    error = InfeasibleError("no plan", key="--seq", value=1, rule="rule", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert again.to_dict() == error.to_dict()


def test_an_interrupt_of_a_local_search_keeps_the_instances_before(monkeypatch):
    from foreshard.planner import rental

    searched, calls = rental._searched, []

    def interrupted(part):
        calls.append(part.name)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return searched(part)

    monkeypatch.setattr(rental, "_searched", interrupted)
    found = _rent()
    assert found.interrupted and {one.instance for one in found.offers} == {calls[0]}
    assert len(found.left_out) >= 2
