import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.report.advice import improvements, nearest_fit
from foreshard.report.change import apply, effect

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


def test_a_device_change_brings_its_own_board_and_keeps_the_count():
    asked = apply(ask("llama3-8b", "2x8xh100-sxm@100Gb/s"), "device=a100-sxm-80gb")
    group = asked.cluster.nodes[0]
    assert (group.count, group.per_node, group.device.name) == (2, 8, "a100-sxm-80gb")
    assert group.nic_bytes_per_s != 100e9 / 8


def test_gain_is_in_tokens_per_second():
    asked = ask("llama3-8b", "2x8xh100-sxm", tp=2)
    base = asked.predict()
    one = effect(asked, base, "recompute=full")
    assert one.gain == pytest.approx(one.prediction.tokens_per_s / base.tokens_per_s - 1) and one.gain < 0


def test_advice_fits_wins_and_is_sorted():
    asked = ask("llama3-8b", "2x8xh100-sxm", tp=8, recompute="full", global_batch=32)
    base = asked.predict()
    advice = improvements(asked, base)
    assert advice and len(advice) <= 3
    assert all(one.prediction.memory.fits and one.gain >= 0.01 for one in advice)
    assert [one.gain for one in advice] == sorted((one.gain for one in advice), reverse=True)
    assert {one.prediction.plan.global_batch for one in advice} == {32}, "compared at the same batch"


@pytest.mark.parametrize("cluster", ["1x1xh100-sxm", "1x8xa100-sxm-40gb", "4x8xv100-sxm-16gb"])
def test_the_nearest_fit_fits(cluster):
    asked = ask("llama3-70b", cluster)
    base = asked.predict()
    assert not base.memory.fits
    fit = nearest_fit(asked, base)
    assert fit.effect is not None and fit.effect.prediction.memory.fits
    again = apply(asked, fit.effect.change).predict()
    assert again.memory.fits and again.memory.peak_bytes == fit.effect.prediction.memory.peak_bytes


def test_the_mildest_change_comes_first():
    asked = ask("llama3-8b", "1x8xh100-sxm", micro_batch=16, global_batch=128)
    base = asked.predict()
    assert nearest_fit(asked, base).effect.change == "recompute=full"
