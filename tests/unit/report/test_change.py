import pytest

from foreshard import api
from foreshard.advise import advice
from foreshard.advise import nearest_fit as nearest_fit_module
from foreshard.advise.advice import improvements
from foreshard.advise.change import KEYS, apply, effect
from foreshard.advise.nearest_fit import nearest_fit, verdict
from foreshard.advise.request import DEGREES, OPTIONS
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import offers_of
from foreshard.errors import SpecError
from foreshard.spec.framework import OVERRIDES
from foreshard.spec.plan import COMM_OPTIONS

pytestmark = pytest.mark.usefixtures("stand_in")


def ask(model, cluster, **choices):
    return api.request(api.load_model(model), api.load_cluster(cluster), **choices)


def test_plan_and_degrees_exclude_each_other(answered):
    asked, prediction, _ = answered
    with pytest.raises(SpecError, match="together"):
        api.request(asked.model, asked.cluster, prediction.plan, tp=2)


def test_options_change_inside_a_plan_degrees_do_not(answered):
    asked, prediction, _ = answered
    by_plan = api.request(asked.model, asked.cluster, prediction.plan)
    changed = apply(by_plan, "recompute=full,zero=3").to_plan()
    assert {stage.recompute for group in changed.groups for stage in group.stages} == {"full"}
    assert {stage.zero for group in changed.groups for stage in group.stages} == {3}
    assert apply(by_plan, "micro-batch=4").to_plan() == apply(asked, "micro-batch=4").to_plan()
    with pytest.raises(SpecError, match="plan file"):
        apply(by_plan, "tp=4")
    with pytest.raises(SpecError, match="plan file"):
        apply(by_plan, "nodes=4")


@pytest.mark.parametrize("stated", ["@100Gb/s", ""])
def test_a_device_change_brings_its_own_board_and_keeps_the_count_and_a_stated_nic(stated):
    asked = apply(ask("llama3-8b", f"2x8xh100-sxm{stated}"), "device=a100-sxm-40gb")
    group = asked.cluster.nodes[0]
    assert (group.count, group.per_node, group.device.name) == (2, 8, "a100-sxm-40gb")
    fresh = load_cluster(f"2x8xa100-sxm-40gb{stated}").nodes[0]
    assert group.nic_bytes_per_s == fresh.nic_bytes_per_s


def test_gain_is_in_tokens_per_second():
    asked = ask("llama3-8b", "2x8xh100-sxm", tp=2)
    base = asked.predict()
    one = effect(asked, base, "recompute=full")
    assert one.gain == pytest.approx(one.prediction.tokens_per_s / base.tokens_per_s - 1) and one.gain < 0


def test_advice_fits_wins_and_is_sorted():
    asked = ask("llama3-8b", "2x8xh100-sxm", tp=8, recompute="full", global_batch=32)
    base = asked.predict()
    found = improvements(asked, base)
    assert found and len(found) <= 5
    assert all(one.prediction.memory.fits and one.gain >= 0.01 for one in found)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    assert {one.prediction.plan.global_batch for one in found} == {32}, "compared at the same batch"


@pytest.mark.parametrize("cluster", ["1x1xh100-sxm", "1x8xa100-sxm-40gb", "4x8xv100-sxm-16gb"])
def test_the_nearest_fit_fits(cluster):
    asked = ask("llama3-70b", cluster)
    base = asked.predict()
    assert not base.memory.fits
    found = nearest_fit(asked, base)
    assert found.effects and found.effects[0].prediction.memory.fits
    again = apply(asked, found.effects[0].change).predict()
    assert again.memory.fits and again.memory.peak_bytes == found.effects[0].prediction.memory.peak_bytes


def test_the_change_that_costs_least_comes_first():
    asked = ask("llama3-8b", "1x8xh100-sxm", micro_batch=16, global_batch=128)
    found = nearest_fit(asked, asked.predict())
    assert found.effects[0].change == "micro-batch=8"
    gains = [one.gain for one in found.effects[:2]]
    assert gains == sorted(gains, reverse=True) and all(one.prediction.memory.fits for one in found.effects)


def test_what_binds_is_said_and_the_defaulted_sequence_with_it():
    asked = ask("llama3-8b", "1x8xh100-sxm", micro_batch=32, global_batch=256)
    base = asked.predict()
    said = verdict(base, nearest_fit(asked, base))
    assert "activations take 64.0 GiB at sequence 8192, which was not stated" in said
    stated = asked.with_choice("seq_len", 8192)
    assert "not stated" not in verdict(base, nearest_fit(stated, base))


def test_offload_and_nodes_come_only_when_nothing_else_fits():
    asked = ask("llama3-8b", "1x8xh100-sxm", micro_batch=16, global_batch=128)
    changes = [one.change for one in nearest_fit(asked, asked.predict()).effects]
    assert not any("offload" in change or "nodes" in change for change in changes)
    alone = ask("llama3-70b", "1x1xh100-sxm")
    assert nearest_fit(alone, alone.predict()).effects[0].change.startswith("nodes=")


@pytest.mark.parametrize(
    "framework", ["megatron-core", "nemo", "torchtitan", "deepspeed", "megatron-lm@2021"]
)
def test_no_candidate_is_more_than_the_framework_ships(framework, monkeypatch):
    asked = ask("mixtral-8x7b", "4x8xh100-sxm", tp=2, pp=2, framework=framework, zero=0)
    seen = []
    for place in (advice, nearest_fit_module):
        monkeypatch.setattr(place, "effect", record(seen))
    base = asked.predict()
    improvements(asked, base)
    nearest_fit(asked, base)
    offers = offers_of(load_framework(framework))
    parts = [part.partition("=") for change in seen for part in change.split(",")]
    assert len(parts) > 10
    for key, _, value in parts:
        if key == "zero":
            assert int(value) in offers.zero and int(value) <= (3 if offers.shards_pipelines else 1)
        if key == "schedule":
            assert value in offers.schedules
        if key.replace("-", "_") in COMM_OPTIONS:
            assert key.replace("-", "_") in offers.overlaps
        if key in ("tp", "cp", "ep", "etp") and int(value) > 2:
            assert key in offers.degrees


def record(seen):
    """Return a spy on the function that predicts a change."""

    def spy(request, base, change, **more):
        seen.append(change)
        return effect(request, base, change, **more)

    return spy


def test_overlaps_are_tried_where_they_are_off():
    asked = ask("llama3-8b", "2x8xh100-sxm", tp=4, pp=2)
    plan = asked.to_plan()
    tried = set(advice._time_changes(asked, plan))
    assert {"tp-overlap=true", "grad-overlap=true,param-gather-overlap=true"} <= tried
    assert "p2p-overlap=true" not in tried and "schedule=zb-h1" not in tried and "zero=2" not in tried
    on = asked.with_choice("tp_overlap", True)
    assert "tp-overlap=true" not in set(advice._time_changes(on, on.to_plan()))
    without = asked.with_choice("sp", False)
    assert "tp-overlap=true" not in set(advice._time_changes(without, without.to_plan()))


def test_a_larger_batch_is_advised_only_where_none_was_stated():
    def advised(**choices):
        asked = ask("llama3-8b", "2x8xh100-sxm", pp=4, tp=2, **choices)
        return [one.change for one in improvements(asked, asked.predict())]

    assert any(change.startswith("global-batch=") for change in advised())
    assert not any(change.startswith("global-batch=") for change in advised(global_batch=8))
    wide = ask("llama3-8b", "512x8xh100-sxm", tp=2).to_plan()  # 16.8 M tokens a step: 64 times is untrained
    assert set(advice._larger_batches(wide)) == {"global-batch=8192", "global-batch=8192,micro-batch=4"}


def test_expert_degrees_are_tried_for_experts_only():
    def tried(model):
        asked = ask(model, "2x8xh100-sxm", tp=4)
        return {change.partition("=")[0] for change in advice._time_changes(asked, asked.to_plan())}

    assert "ep" in tried("mixtral-8x7b") and "ep" not in tried("llama3-8b")


def test_switches_reach_the_plan_by_flag_and_by_change():
    asked = ask("llama3-8b", "1x8xh100-sxm", tp=4, tp_overlap=True)
    assert asked.to_plan().comm == {"tp_overlap": True}
    changed = apply(asked, "tp-overlap=false,grad_overlap=on").to_plan()
    assert changed.comm == {"tp_overlap": False, "grad_overlap": True}
    by_plan = api.request(asked.model, asked.cluster, asked.to_plan())
    assert apply(by_plan, "p2p-overlap=off").to_plan().comm == {"tp_overlap": True, "p2p_overlap": False}


def test_adapters_are_a_model_of_their_own():
    asked = ask("llama3-8b", "1x8xh100-sxm", lora="16:q+v")
    hidden, kv = 4096, 1024
    assert asked.trained.trainable_params == 32 * 16 * (2 * hidden + hidden + kv)
    assert apply(asked, "lora=none").trained == asked.model
    for wrong in ("0", "x", "16:z", "16:", "9" * 30):
        with pytest.raises(SpecError) as caught:
            ask("llama3-8b", "1x8xh100-sxm", lora=wrong).predict()
        assert caught.value.key == "--lora"


def test_defaults_are_assumptions():
    said = " ".join(ask("mixtral-8x7b", "1x8xh100-sxm", tp=4, framework="torchtitan").predict().assumptions)
    for words in ("sequence 4096, not stated", "global batch 2, not stated", "zero 3, not stated", "(etp 1)"):
        assert words in said
    stated = ask("llama3-8b", "1x8xh100-sxm", seq_len=2048, global_batch=8, zero=0).predict().assumptions
    assert not any("not stated" in text for text in stated)
    mixed = ask("llama3-8b", "1x8xh100-sxm+1x8xa100-sxm-80gb").predict().assumptions
    assert any("split the work evenly" in text for text in mixed)


def test_virtual_stages_need_a_pipeline():
    with pytest.raises(SpecError, match="without a pipeline"):
        ask("llama3-8b", "1x8xh100-sxm", vpp=4).to_plan()


def test_a_change_to_16_bits_leaves_the_recipe_of_8_bits_behind():
    asked = ask("llama3-8b", "8xh100-sxm", precision="fp8", fp8_recipe="blockwise")
    fresh = ask("llama3-8b", "8xh100-sxm", precision="bf16").predict()
    assert apply(asked, "dtype=bf16").predict().step_time_s == fresh.step_time_s


def test_every_degree_and_option_of_a_prediction_can_be_changed():
    """But for `overrides`, whose keys are changed each by itself."""
    assert {*DEGREES, *OPTIONS, *OVERRIDES} - {"overrides"} <= {*KEYS}


@pytest.mark.parametrize(("word", "on"), [("on", True), ("off", False)])
def test_compiling_by_a_change_is_compiling_by_the_flag(word, on):
    plain = ask("llama3-8b", "1x8xh100-sxm", framework="torchtitan")
    asked = ask("llama3-8b", "1x8xh100-sxm", framework="torchtitan", compile=on)
    assert apply(plain, f"compile={word}").to_plan() == asked.to_plan()
