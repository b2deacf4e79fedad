"""Objectives, limits, fewer devices, and what is said when nothing fits."""

import re
from dataclasses import replace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import InfeasibleError, LimitError, SpecError
from foreshard.planner.grid.node_counts import part_of, sizes_of
from foreshard.planner.mixed.subspaces import AIM
from foreshard.planner.nearest_change import other_frameworks
from foreshard.planner.request import checked_request
from foreshard.planner.search import plan
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan

TOKENS = 1e10


def _plan(model, cluster, **asked):
    return plan(load_model(model), load_cluster(cluster), **asked)


@pytest.fixture(scope="module")
def fastest():
    return _plan("llama3-8b", "2x8xh100-sxm", global_batch=64, tokens=TOKENS)


def test_the_fastest_plan_is_proven(fastest):
    assert fastest.gap <= 0.03  # by the closed form none is faster; the graph times the plan itself
    steps = [one.prediction.step_time_s for one in fastest.plans]
    assert steps == sorted(steps)
    assert fastest.infeasible is None


def test_dictionary_has_the_keys_of_the_contract(fastest):
    made = fastest.to_dict()
    assert set(made) >= {
        "schema_version",
        "plans",
        "lower_bound_step_time_s",
        "gap",
        "binding",
        "evaluated",
        "pruned",
        "wall_s",
    }
    assert set(made["plans"][0]) == {"plan", "prediction", "why"}
    assert made["plans"][0]["why"].startswith("chosen")
    assert all("slower" in one["why"] or "as fast" in one["why"] for one in made["plans"][1:])
    assert "error" not in made


def test_the_cheapest_plan_is_no_dearer_than_the_fastest(fastest):
    cheapest = _plan("llama3-8b", "2x8xh100-sxm", global_batch=64, tokens=TOKENS, objective="cost")
    first = cheapest.plans[0].prediction
    # By cost the grid alone is searched: unequal chunks of layers may save a little more.
    assert first.cost.usd_total <= fastest.plans[0].prediction.cost.usd_total * 1.001
    assert first.cost.usd_total == min(one.prediction.cost.usd_total for one in cheapest.plans)


def test_front_holds_what_nothing_beats():
    result = _plan("llama3-8b", "4x8xh100-sxm", global_batch=64, tokens=TOKENS, objective=("cost", "time"))
    values = [
        (p.step_time_s, p.cost.usd_per_step, p.energy_j_per_step)
        for p in (one.prediction for one in result.front)
    ]
    assert len(values) > 1
    for mine in values:
        assert not any(
            other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in values
        )


@pytest.mark.slow
def test_limits_between_the_least_and_the_most_are_kept(fastest):
    hours = 3.0 * fastest.plans[0].prediction.run_time_s / 3600.0
    for objective in ("cost", "energy"):
        result = _plan(
            "llama3-8b", "2x8xh100-sxm", global_batch=64, tokens=TOKENS, objective=objective, max_hours=hours
        )
        assert result.infeasible is None
        assert all(one.prediction.run_time_s <= 3600.0 * hours for one in result.plans)


@pytest.mark.parametrize("objective", ["time", pytest.param("energy", marks=pytest.mark.slow)])
def test_a_limit_that_nothing_meets_names_the_least(fastest, objective):
    least = fastest.plans[0].prediction.run_time_s / 3600.0
    result = _plan(
        "llama3-8b", "2x8xh100-sxm", global_batch=64, tokens=TOKENS, objective=objective, max_hours=least / 2
    )
    assert isinstance(result.infeasible, LimitError)
    assert result.infeasible.exit_code == 4
    named = re.search(r"less than ([\d.]+) hours", str(result.infeasible))
    assert named is not None and float(named[1]) == pytest.approx(least, rel=2e-3)
    assert result.plans


@pytest.mark.slow
def test_a_price_overrides_that_of_the_catalog():
    asked = {"global_batch": 16, "tokens": TOKENS, "usd_per_device_hour": 1.0}
    first = _plan("llama3-8b", "1x8xh100-sxm", **asked).plans[0].prediction
    assert first.cost.usd_total == pytest.approx(8 * first.run_time_s / 3600.0)


def test_devices_idle_where_using_them_hurts():
    result = _plan("gpt2-xl", "31x1xh100-sxm@10Gb/s", global_batch=4, seq_len=1024)
    chosen = result.plans[0]
    assert len(chosen.plan.ranks) < 31
    assert any("of 31 devices are used" in note for note in result.notes)
    model, cluster = load_model("gpt2-xl"), load_cluster("31x1xh100-sxm@10Gb/s")
    check_plan(chosen.plan, model, cluster)
    again = predict(model, cluster, chosen.plan, engine="analytical")
    assert again.step_time_s == pytest.approx(chosen.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("most", "used"), [(20, 20), (5, 5), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (8, 1))]
)
def test_at_most_so_many_devices(most, used):
    result = _plan(
        "gpt2-xl", "4x8xa100-sxm-80gb", global_batch=60, seq_len=1024, max_devices=most, budget_s=5.0
    )
    assert len(result.plans[0].plan.ranks) <= used
    check_plan(result.plans[0].plan, load_model("gpt2-xl"), load_cluster("4x8xa100-sxm-80gb"))


def test_sizes_are_whole_nodes_or_parts_of_one():
    cluster = load_cluster("40x8xh100-sxm")
    sizes = list(sizes_of(cluster))
    assert sizes[0] == 320
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(size % 8 == 0 or size < 8 for size in sizes)
    assert {312, 304, 160, 80, 8, 4, 1} <= set(sizes)
    assert min(sizes_of(cluster, whole_nodes=True)) == 8
    assert max(sizes_of(cluster, 7, whole_nodes=True)) == 7
    assert [part_of(cluster, size).num_devices for size in sizes] == sizes


@pytest.mark.slow
def test_memory_that_holds_no_plan_is_named_with_the_nearest_change():
    result = _plan("llama3-70b", "1x2xh100-sxm", global_batch=64, seq_len=8192)
    error = result.infeasible
    assert isinstance(error, InfeasibleError)
    assert error.exit_code == 3
    assert not result.plans
    assert result.to_dict()["gap"] is None
    assert "memory" in str(error)
    devices = int(str(error.fix).split(" devices instead of 2")[0].split()[-1])
    larger = _plan("llama3-70b", f"{devices // 2}x2xh100-sxm", global_batch=64, seq_len=8192)
    assert larger.plans


@pytest.mark.parametrize(
    ("framework", "stated", "labels"),
    [
        ("hf", {}, ["megatron-core", "megatron-fsdp", "torchtitan", "deepspeed"]),
        ("hf", {"compile": True}, ["torchtitan", "deepspeed"]),
        ("nemo", {"precision": "fp8", "fp8_recipe": "tensorwise"}, ["megatron-core", "megatron-fsdp"]),
        ("megatron-core", {"precision": "fp8", "fp8_recipe": "delayed"}, ["megatron-fsdp"]),
    ],
)
def test_no_framework_is_advised_that_refuses_what_is_asked_for(framework, stated, labels):
    model, cluster = load_model("llama3-70b"), load_cluster("1x8xh100-sxm")
    asked = {"global_batch": 16, "seq_len": 8192, **stated}
    request = checked_request(model, cluster, framework=framework, **asked)
    changed = dict(other_frameworks(request))
    assert list(changed) == [f"--framework {label}" for label in labels]
    for label in labels:
        other = checked_request(model, cluster, framework=label, **asked).framework
        tried = changed[f"--framework {label}"].framework
        assert (tried.elementwise, tried.host, tried.fp8_recipe) == (
            other.elementwise,
            other.host,
            other.fp8_recipe,
        )


def test_a_batch_that_devices_do_not_divide_has_a_plan_all_the_same():
    result = _plan("llama3-8b", "1x7xh100-sxm", global_batch=13)
    assert result.plans
    assert result.plans[0].plan.global_batch == 13


def test_one_device():
    result = _plan("gpt2-xl", "1x1xa100-sxm-80gb", global_batch=8, seq_len=1024)
    assert len(result.plans[0].plan.ranks) == 1
    assert result.gap <= AIM  # at which a search is closed


def test_the_graph_engine_orders_plans_over_a_bound_it_keeps():
    result = _plan("llama3-8b", "1x8xh100-sxm", global_batch=16, engine="graph")
    assert {one.prediction.engine for one in result.plans} == {"graph"}
    assert 0 < result.lower_bound_step_time_s <= min(one.prediction.step_time_s for one in result.plans)
    assert result.gap > 0


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"max_usd": 5.0}, "--max-usd"),
        ({"max_hours": 5.0}, "--max-hours"),
        ({"objective": "beauty"}, "--objective"),
        ({"budget_s": 0.0}, "--budget-s"),
        ({"max_devices": 0}, "--max-devices"),
        ({"tokens": float("nan")}, "--tokens"),
        ({"top": 0}, "--top"),
    ],
)
def test_bad_input_names_the_flag(asked, flag):
    with pytest.raises(SpecError) as caught:
        checked_request(load_model("gpt2-xl"), load_cluster("1x8xh100-sxm"), global_batch=8, **asked)
    assert caught.value.key == flag


def test_a_precision_the_devices_lack_names_others():
    with pytest.raises(SpecError, match="no fp8"):
        _plan("gpt2-xl", "1x8xa100-sxm-80gb", global_batch=8, precision="fp8")


def test_a_short_budget_still_has_a_plan_and_a_bound():
    whole = _plan("mixtral-8x7b", "4x8xh100-sxm", global_batch=256)
    short = _plan("mixtral-8x7b", "4x8xh100-sxm", global_batch=256, budget_s=1e-3)
    assert short.plans
    assert short.interrupted
    assert short.lower_bound_step_time_s <= whole.plans[0].prediction.step_time_s * (1 + 1e-12)
    assert short.gap >= 0.0


def test_a_cluster_without_prices_has_no_cheapest_but_a_fastest():
    cluster = load_cluster("1x8xh100-sxm")
    free = replace(cluster, nodes=(replace(cluster.nodes[0], usd_per_h=None),))
    asked = {"global_batch": 16, "tokens": TOKENS}
    result = plan(load_model("llama3-8b"), free, objective="cost", **asked)
    assert result.plans[0].prediction.cost.usd_total is None
    limited = plan(load_model("llama3-8b"), free, max_usd=1e6, **asked)
    assert isinstance(limited.infeasible, LimitError)
    assert "usd-per-device-hour" in str(limited.infeasible)


def test_ctrl_c_after_a_plan_was_found_shows_it(monkeypatch):
    from foreshard.planner.grid import equal_nodes as homogeneous

    search = homogeneous.search_rows

    def interrupted(request, **options):
        if request.cluster.num_devices < 32:
            raise KeyboardInterrupt
        return search(request, **options)

    monkeypatch.setattr(homogeneous, "search_rows", interrupted)
    result = _plan("llama3-8b", "4x8xh100-sxm", global_batch=64, tokens=TOKENS, objective="cost")
    assert result.interrupted
    assert len(result.plans[0].plan.ranks) == 32


def test_a_search_that_ended_early_does_not_call_a_run_impossible(monkeypatch):
    from foreshard.planner.mixed import search as mixed

    monkeypatch.setattr(mixed, "LEAST_S", 0.0)
    result = _plan("llama3-70b", "1x2xh100-sxm", global_batch=64, seq_len=8192, budget_s=1e-6)
    assert isinstance(result.infeasible, InfeasibleError)
    assert result.interrupted
    assert "a plan may exist" in str(result.infeasible)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_margin", None),
        ("memory_margin", "most"),
        ("budget_s", None),
        ("budget_s", "long"),
        ("tokens", "many"),
        ("objective", None),
        ("precision", 16),
        ("executor", None),
        ("framework", None),
    ],
)
def test_what_is_no_value_of_an_option_is_named(name, value):
    asked = {"global_batch": 4, "seq_len": 256, name: value}
    with pytest.raises(SpecError, match=r"is not valid|is not a valid|is no executor"):
        plan(load_model("gpt2"), load_cluster("1x2xl4"), **asked)


def test_powers_of_two_below_an_odd_number_of_nodes_are_tried():
    """Eighths of 77 nodes miss 64 and 32, over which batches and heads divide; 100,000 nodes miss all."""
    for count, whole in ((77, {64, 32, 16}), (100_000, {65536, 32768})):
        assert whole <= {size // 8 for size in sizes_of(load_cluster(f"{count}x8xh100-sxm"))}
