"""Options of the Python interface under the names of the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

import foreshard
from foreshard.errors import SpecError


def test_names_of_flags_mean_the_same():
    named = foreshard.predict("gpt2", "1x2xa100-sxm-80gb", global_batch=8, seq=512, dtype="fp32")
    assert named.step_time_s == (
        foreshard.predict(
            "gpt2", "1x2xa100-sxm-80gb", global_batch=8, seq_len=512, precision="fp32"
        ).step_time_s
    )


def test_both_names_of_an_option_are_refused():
    with pytest.raises(SpecError, match="together"):
        foreshard.predict("gpt2", "1x2xa100-sxm-80gb", global_batch=8, seq=512, seq_len=1024)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ({"tp": "2", "micro_batch": "2", "seq": "2k"}, {"tp": 2, "micro_batch": 2, "seq_len": 2048}),
        ({"tokens": "2T", "usd_per_device_hour": "2.5"}, {"tokens": 2e12, "usd_per_device_hour": 2.5}),
        ({"buckets": "25MiB"}, {"buckets": 25 * 2**20}),
        ({"lora": "16"}, {"lora": 16}),
    ],
)
def test_numbers_are_written_as_on_the_command_line(words, numbers):
    one, other = (foreshard.predict("gpt2", "1x2xh100-sxm", **stated) for stated in (words, numbers))
    assert one == replace(other, predict_s=one.predict_s)


def test_an_objective_by_another_word_is_the_known_one():
    found = foreshard.plan("gpt2", "1x2xh100-sxm", global_batch="8", objective="speed", budget_s=1)
    assert found.plans and found.objective == "time"


def test_one_change_may_be_a_text():
    assert foreshard.whatif("gpt2", "1x2xh100-sxm", "tp=2")[1][0].change == "tp=2"
