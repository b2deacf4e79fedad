"""Options of the Python interface under the names of the command line."""

from __future__ import annotations

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
