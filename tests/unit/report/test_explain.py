import pytest

from foreshard.report.explain_screen import explanations
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS


def test_every_part_that_takes_time_or_memory_is_explained(answered):
    _, prediction, _ = answered
    found = explanations(*answered[:2])
    for part in TIME_PARTS:
        assert (part in found) == (prediction.time_breakdown_s[part] > 0)
    for part in MEMORY_PARTS:
        assert (f"memory {part}" in found) == (prediction.memory.breakdown_bytes[part] > 0)


def test_what_the_predictor_says_itself_wins(answered):
    assert explanations(*answered[:2])["step_time_s"] == "sum of its parts"


def test_the_values_are_those_of_the_run(answered):
    asked, prediction, _ = answered
    found = explanations(asked, prediction)
    assert "262,144 tokens" in found["tokens_per_s"] and "16 x h100-sxm 989" in found["mfu"]
    flops = asked.model.flops_per_token(8192, False)
    assert f"{flops:.4g} FLOPs" in found["mfu"]


def test_an_unknown_price_is_said(answered, fake):
    asked, prediction, _ = answered
    unpriced = fake.predict(asked.model, asked.cluster, prediction.plan)
    assert "null, not zero" in explanations(asked, unpriced)["cost"]


@pytest.mark.usefixtures("stand_in")
def test_a_stated_price_is_named(answered):
    from foreshard import api

    asked = api.request(
        api.load_model("llama3-8b"), api.load_cluster("1x8xh100-sxm"), usd_per_device_hour=2.5
    )
    assert "$2.5 a device-hour, stated, x 8 devices" in explanations(asked, asked.predict())["cost"]
