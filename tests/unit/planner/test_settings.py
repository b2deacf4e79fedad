"""Searching precision and switches of communication equals pricing every plan under every one of them."""

import time
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from tests.unit.planner.test_grid import _everything, _request

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.offers import offers_of
from foreshard.catalog.training import training_constants
from foreshard.errors import SpecError
from foreshard.planner.grid.equal_nodes import least_step_s, search_homogeneous
from foreshard.planner.grid.node_counts import part_of, sizes_of
from foreshard.planner.grid.space import experts_overlap
from foreshard.planner.mixed.search import search_cluster
from foreshard.planner.mixed.subspaces import AIM, Subspace
from foreshard.planner.request import checked_request
from foreshard.planner.search import plan
from foreshard.planner.settings import Setting, left_out, settings, switches
from foreshard.planner.settings_search import search_settings
from foreshard.predict.analytical.table import evaluate
from foreshard.predict.space import draw_plans
from foreshard.predict.step import predict
from foreshard.spec.plan import COMM_OPTIONS, acting

SPACES = (("llama3-8b", "1x2xh100-sxm", "deepspeed", 6, 2048, ("bf16", "fp16")),)
SLOW_SPACES = (
    ("llama3-8b", "1x2xh100-sxm", "megatron-core", 2, 2048, ("bf16", "fp8")),
    ("gpt2-xl", "1x2xa100-sxm-40gb", "torchtitan", 4, 1024, ("bf16",)),
    ("olmoe-1b-7b", "1x2xh200-sxm", "nemo", 2, 1024, ("bf16",)),
)


def _runnable(request, table, comm):
    """Return which plans a framework runs with some switches on."""
    if not comm.get("grad_overlap", request.framework.grad_overlap) and comm.get("param_gather_overlap"):
        return np.zeros(len(table), dtype=bool)
    return experts_overlap(table) if comm.get("expert_overlap") else np.ones(len(table), dtype=bool)


def _least(space):
    """Return the least step time over every size, precision, set of switches and plan."""
    model, cluster, framework, batch, seq_len, precisions = space
    least, whole = np.inf, load_cluster(cluster)
    shipped = offers_of(load_framework(framework)).overlaps
    for size in sizes_of(whole):
        request = replace(_request(model, cluster, framework, batch, seq_len), cluster=part_of(whole, size))
        table = _everything(request)
        for values, precision in product(product((False, True), repeat=len(shipped)), precisions):
            comm = dict(zip(shipped, values, strict=True))
            some = table.take(_runnable(request, table, comm))
            for start in range(0, len(some), 8192):
                result = evaluate(
                    request.model,
                    request.cluster,
                    some.take(slice(start, start + 8192)),
                    framework=replace(request.framework, **comm),
                    constants=training_constants(),
                    seq_len=seq_len,
                    precision=precision,
                )
                least = min(least, result.step_time_s[result.fits].min(initial=np.inf))
    return least


@pytest.mark.parametrize(
    "space",
    [*SPACES, *(pytest.param(space, marks=pytest.mark.slow) for space in SLOW_SPACES)],
    ids=lambda space: f"{space[0]}-{space[2]}",
)
def test_search_equals_pricing_every_setting(space):
    model, cluster, framework, batch, seq_len, precisions = space
    found = plan(
        load_model(model),
        load_cluster(cluster),
        global_batch=batch,
        seq_len=seq_len,
        framework=framework,
        precision=precisions,
        comm="all",
        engine="analytical",
        memory_margin=0.0,  # as `fits` in `_least`
        budget_s=600.0,  # a proof ends it, however slow the machine is
    )
    least = _least(space)
    assert found.plans[0].prediction.step_time_s == pytest.approx(least, rel=1e-9)
    assert found.lower_bound_step_time_s == pytest.approx(least, rel=AIM)
    assert not found.interrupted


@pytest.mark.parametrize(
    ("nodes", "engine"),
    [
        ("1x4xh100-sxm", "analytical"),
        ("1x2xh100-sxm+1x2xa100-sxm-80gb", "graph"),
        pytest.param("1x4xh100-sxm", "graph", marks=pytest.mark.slow),
        pytest.param("1x2xh100-sxm+1x2xa100-sxm-80gb", "analytical", marks=pytest.mark.slow),
    ],
)
def test_the_file_of_a_plan_predicts_what_the_search_said(nodes, engine):
    model, cluster = load_model("gpt2-xl"), load_cluster(nodes)
    found = plan(
        model,
        cluster,
        global_batch=8,
        seq_len=1024,
        precision=("bf16", "fp16"),
        engine=engine,
        budget_s=4.0,
        comm=("grad_overlap", "param_gather_overlap", "tp_overlap"),
    )
    assert any(one.plan.comm for one in found.plans)
    for one in found.plans:
        again = predict(model, cluster, one.plan, engine=engine)
        assert again.step_time_s == pytest.approx(one.prediction.step_time_s, rel=1e-12)
        assert again.memory.peak_bytes == pytest.approx(one.prediction.memory.peak_bytes, rel=1e-12)
        assert one.prediction.plan == one.plan


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_switches_that_are_not_stated_make_no_difference(name):
    model, cluster, rng = load_model(name), load_cluster("1x8xh100-sxm"), np.random.default_rng(3)
    table = draw_plans(model, cluster, 12, rng, global_batch=16, seq_len=1024)
    for i in range(len(table)):
        made = table.plan(i, model, seq_len=1024)
        comm = {option: bool(rng.integers(2)) for option in COMM_OPTIONS}
        stated = replace(made, comm=acting(made, comm))
        whole = replace(made, comm=comm)
        one, other = (predict(model, cluster, some, engine="analytical") for some in (whole, stated))
        assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)
        assert one.memory.peak_bytes == other.memory.peak_bytes


def test_what_the_other_precision_takes_is_said():
    model, cluster = load_model("llama3.2-1b"), load_cluster("1x2xh100-sxm")
    asked = {"global_batch": 16, "seq_len": 4096, "memory_margin": 0.0}
    found = plan(model, cluster, precision=("bf16", "fp8"), **asked)
    wide = plan(model, cluster, **asked).plans[0].prediction.step_time_s
    more = wide / found.plans[0].prediction.step_time_s - 1.0
    assert found.plans[0].plan.precision == "fp8"
    assert f"fp8 was chosen; the best plan in bf16 takes {more:+.1%} time" in found.notes


def test_hidden_collectives_of_tensor_parallelism_take_buffers():
    model, cluster = load_model("llama3-8b"), load_cluster("1x8xh100-sxm")
    table = draw_plans(model, cluster, 40, np.random.default_rng(5), global_batch=16, seq_len=4096)
    split = next(i for i in range(len(table)) if table.tp[i] > 1 and table.sp[i])
    made = table.plan(split, model, seq_len=4096)
    off, on = (predict(model, cluster, replace(made, comm={"tp_overlap": value})) for value in (False, True))
    assert on.memory.peak_bytes > off.memory.peak_bytes
    assert on.step_time_s < off.step_time_s


def _asked(**options):
    model, cluster = load_model("llama3-8b"), load_cluster("1x8xh100-sxm")
    return checked_request(model, cluster, global_batch=64, seq_len=2048, **options)


@cache
def _searched(precision):
    """Return the whole search of a precision, whatever time is left to it."""
    return search_homogeneous(_asked(precision=precision))


def test_a_precision_without_hardware_or_framework_is_left_out_by_name():
    found = plan(
        load_model("gpt2"), load_cluster("1x2xv100-sxm-32gb"), global_batch=8, precision=("bf16", "fp16")
    )
    assert found.plans[0].plan.precision == "fp16"
    assert found.notes[-1] == "bf16 is left out: no device has it"
    without = left_out(_asked(framework="deepspeed"), ("bf16", "fp8"))
    assert without == {"fp8": "deepspeed@0.19 does not ship it"}


@pytest.mark.parametrize("asked", ["", "bf17", ("bf16", "int8"), ()])
def test_an_unknown_precision_is_refused(asked):
    with pytest.raises(SpecError, match="dtype") as caught:
        plan(load_model("gpt2-xl"), load_cluster("1x1xh100-sxm"), global_batch=1, precision=asked or ("",))
    assert caught.value.key == "--dtype"


def test_switches_are_those_of_the_framework():
    assert switches("framework", load_framework("megatron-core")) == ()
    assert switches("all", load_framework("deepspeed")) == ("grad_overlap",)
    with pytest.raises(SpecError, match="no switch for tp_overlap") as caught:
        switches(("tp_overlap",), load_framework("deepspeed"))
    assert "grad_overlap" in caught.value.fix
    with pytest.raises(SpecError, match="comm"):
        switches(("overlap",), load_framework("megatron-core"))


def test_gathering_weights_is_hidden_only_where_gradients_are():
    (alone,) = settings(_asked(), ("bf16",), ("param_gather_overlap",))
    assert alone.comm == {}
    both = list(settings(_asked(), ("bf16",), ("grad_overlap", "param_gather_overlap")))
    assert both == [Setting(precision="bf16", comm={"grad_overlap": True, "param_gather_overlap": True})]


def test_the_fastest_precision_is_searched_first():
    chosen = settings(_asked(), ("fp32", "bf16", "fp16", "fp8"), ())
    assert [one.precision for one in chosen] == ["fp8", "bf16", "fp16", "fp32"]


def test_proofs_end_at_the_best_step_of_another_setting(monkeypatch):
    """The lowest bound of all settings is that of the answer: no other has to be raised above it."""
    steps, prove = [], Subspace.prove

    def counted(self, *arguments):
        steps.append(self)
        prove(self, *arguments)

    monkeypatch.setattr(Subspace, "prove", counted)
    model, cluster = load_model("gpt2"), load_cluster("1x2xh100-sxm")
    request = checked_request(
        model, cluster, global_batch=4, seq_len=1024, engine="analytical", budget_s=600.0, memory_margin=0.0
    )
    alone, alone_steps = search_cluster(request), len(steps)
    best_s = alone.plans[0].prediction.step_time_s
    beside = search_cluster(replace(request, known_s=0.9 * best_s))
    assert len(steps) - alone_steps < alone_steps
    assert beside.plans[0].prediction.step_time_s == pytest.approx(best_s, rel=AIM)
    assert 0.9 * best_s / (1.0 + AIM) <= beside.lower_bound_step_time_s * (1.0 + 1e-9)
    assert beside.lower_bound_step_time_s <= best_s
    assert not beside.interrupted


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_later_settings_know_the_best_step_where_time_is_to_be_small(objective):
    request, known = _asked(objective=objective, usd_per_device_hour=1.0), []
    result = search_homogeneous(request)

    def search(asked):
        known.append(asked.known_s)
        return result

    search_settings(request, tuple(settings(request, ("bf16", "fp8"), ())), search)
    best_s = result.plans[0].prediction.step_time_s
    assert known == [np.inf, best_s if objective == "time" else np.inf]


def test_time_that_is_over_leaves_settings_by_name():
    request = _asked(budget_s=1e-3)
    chosen = tuple(settings(request, ("bf16", "fp8"), ()))

    def search(asked):
        over = time.perf_counter() + request.budget_s
        while time.perf_counter() < over:  # seconds of the processor, which no sleep takes
            pass
        return replace(_searched(asked.precision), wall_s=asked.budget_s + 1.0)

    found = search_settings(request, chosen, search)
    assert found.plans[0].plan.precision == "fp8"
    assert found.interrupted
    assert found.notes[-1] == "Time left no plan for bf16: the bound does not speak of them"
    assert found.space.endswith("in fp8")
    bounded = search_settings(request, chosen, search, least_step_s=least_step_s)
    assert bounded.lower_bound_step_time_s <= found.plans[0].prediction.step_time_s
    assert bounded.notes[-1] == "Time left no plan for bf16: the bound counts their computation alone"
    slower = search_settings(request, chosen[::-1], search, least_step_s=least_step_s)
    assert slower.lower_bound_step_time_s <= found.plans[0].prediction.step_time_s
    assert slower.lower_bound_step_time_s < slower.plans[0].prediction.step_time_s / (1.0 + AIM)
    assert slower.notes[-1] == "Time left no plan for fp8: the bound counts their computation alone"


def test_a_search_that_its_time_ended_early_leaves_the_others_theirs():
    """It keeps a part of its seconds for what it shows, and may need less: nobody stopped it."""
    request = _asked()

    def search(asked):
        return replace(_searched(asked.precision), interrupted=True, wall_s=0.9 * asked.budget_s)

    found = search_settings(request, tuple(settings(request, ("bf16", "fp8"), ()))[::-1], search)
    assert found.plans[0].plan.precision == "fp8"


def test_an_interrupt_keeps_what_other_settings_found():
    request, calls = _asked(), []

    def search(asked):
        calls.append(asked.precision)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return _searched(asked.precision)

    found = search_settings(request, tuple(settings(request, ("bf16", "fp8"), ())), search)
    assert found.interrupted and found.plans
    assert "bf16" in found.notes[-1]


def test_what_no_setting_fits_says_why():
    found = plan(
        load_model("gpt3-175b"),
        load_cluster("1x2xt4"),
        global_batch=2,
        seq_len=2048,
        precision=("fp16", "fp32"),
        budget_s=20.0,
    )
    assert not found.plans
    assert found.infeasible is not None and found.infeasible.exit_code == 3


@pytest.mark.parametrize("at", [2, 4])
def test_an_interrupt_ends_the_search_at_once(monkeypatch, at):
    from foreshard.planner.grid import search

    calls, priced = [], search._search_cells

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == at:
            raise KeyboardInterrupt
        priced(*arguments)

    monkeypatch.setattr(search, "_search_cells", interrupted)
    found = search_homogeneous(_asked())
    assert found.stopped and found.interrupted and found.plans
    assert len(calls) == at


def test_an_interrupt_before_any_plan_looks_for_no_change_that_fits(monkeypatch):
    from foreshard.planner.grid import search

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_search_cells", interrupted)
    found = search_homogeneous(_asked())
    assert found.stopped and not found.plans
    assert found.infeasible is not None and found.infeasible.fix is None


def test_an_interrupt_keeps_the_changes_that_were_found_to_fit(monkeypatch):
    from foreshard.planner.grid import infeasible

    calls = []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return len(calls) == 3

    monkeypatch.setattr(infeasible, "_fits", interrupted)
    request = replace(_asked(), model=load_model("llama3.1-405b"))
    found = search_homogeneous(request)
    assert found.infeasible is not None and found.infeasible.fix.startswith("It fits with ")
    assert len(calls) == 4


def test_a_setting_that_cannot_beat_the_best_counts_in_the_bound():
    best = search_homogeneous(_asked())
    least = best.plans[0].prediction.step_time_s
    nothing = search_homogeneous(replace(_asked(), beat_s=least))
    assert not nothing.plans and nothing.infeasible is None
    assert nothing.lower_bound_step_time_s == pytest.approx(least)
    again = search_homogeneous(replace(_asked(), beat_s=1.01 * least))
    assert again.plans[0].plan == best.plans[0].plan
