"""The published pre-training of DeepSeek-V3, which no constant was fitted to."""

from __future__ import annotations

import pytest

from foreshard import api

DEVICE_HOURS, TOKENS = 2.664e6, 14.8e12  # arXiv 2412.19437, table 1 and section 4.1
RUN = {"tp": 1, "pp": 16, "ep": 64, "zero": 1, "global_batch": 15360, "seq_len": 4096, "precision": "fp8"}


def step_s(**options):
    """Return the step of the report's degrees, with norms, up-projections and activations run again."""
    again = "selective:layernorm+mla_up_proj+moe_act"
    asked = {**RUN, "framework": "hai-llm", "schedule": "dualpipe", "recompute": again, **options}
    return api.predict("deepseek-v3", "256x8xh800-sxm", **asked).step_time_s


def test_device_hours_are_within_12_percent():
    published_s = DEVICE_HOURS * 3600 / 2048 / (TOKENS / (RUN["global_batch"] * RUN["seq_len"]))
    assert step_s() == pytest.approx(published_s, rel=0.12)


def test_what_dualpipe_hides_is_most_of_what_it_saves():
    assert step_s(schedule="1f1b") > 1.3 * step_s()
    assert step_s(schedule="dualpipe", framework="megatron-core") > step_s()


def test_a_search_of_dualpipe_finds_the_degrees_of_the_report():
    asked = {name: RUN[name] for name in ("global_batch", "seq_len", "precision", "pp")}
    found = api.plan(
        "deepseek-v3", "256x8xh800-sxm", framework="hai-llm", schedule="dualpipe", micro_batch=1, **asked
    )
    chosen = found.plans[0]
    assert chosen.plan.groups[0].stages[0].ep == RUN["ep"] and chosen.prediction.memory.fits
    assert chosen.prediction.step_time_s < 1.2 * step_s()
