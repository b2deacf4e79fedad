"""Groups of unequal speed: the times are those of the predictor, the shares follow from them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard import api
from foreshard.advise.advice import improvements
from foreshard.advise.change import apply
from foreshard.advise.group_times import apportioned, better_shares, group_times, uneven
from foreshard.advise.nearest_fit import nearest_fit
from foreshard.errors import SpecError
from foreshard.report.plain import render
from foreshard.report.summary import prediction_screen
from foreshard.spec.plan_file import parse_plan


@pytest.fixture
def mixed():
    """A request of two equal shares on eight H100 and eight A100."""
    stage = {"layers": [[0, 34]], "tp": 2, "recompute": "selective"}
    groups = [
        {
            "share": 32,
            "micro_batch": 4,
            "sp": True,
            "stages": [stage | {"ranks": list(range(8 * g, 8 * g + 8))}],
        }
        for g in range(2)
    ]
    plan = parse_plan({"global_batch": 64, "seq_len": 4096, "groups": groups})
    cluster = api.load_cluster("1x8xh100-sxm+1x8xa100-sxm-80gb")
    return api.request(api.load_model("llama3-8b"), cluster, plan)


def test_the_fast_group_waits_for_the_slow_one(mixed):
    fast, slow = group_times(mixed, mixed.plan)
    assert (fast.devices, slow.devices) == ("h100-sxm", "a100-sxm-80gb")
    assert (
        slow.wait_s == 0 and fast.wait_s == pytest.approx(slow.work_s - fast.work_s) and uneven((fast, slow))
    )
    assert slow.work_s < mixed.predict("analytical").step_time_s


def test_better_shares_are_faster_when_predicted_anew(mixed):
    best = next(iter(better_shares(mixed, mixed.plan)))
    fast, slow = map(int, best.removeprefix("shares=").split(":"))
    assert fast + slow == 64 and fast > slow and fast % 4 == 0
    assert apply(mixed, best).predict().step_time_s < 0.8 * mixed.predict().step_time_s
    assert any(one.change == best for one in improvements(mixed, mixed.predict()))


def test_even_groups_need_no_words(mixed):
    even = apply(mixed, "device=h100-sxm")
    assert not uneven(group_times(even, even.plan)) and not list(better_shares(even, even.plan))


def test_the_table_stands_on_the_screen_only_when_groups_wait(mixed):
    def screen(asked):
        made = asked.predict()
        return render(prediction_screen(made, (), None, group_times(asked, made.plan)))

    assert "waiting for the slowest" in screen(mixed)
    assert "waiting for the slowest" not in screen(apply(mixed, "device=h100-sxm"))


@pytest.mark.parametrize("text", ["40:20", "64", "0:64", "a:b", "32:32:0"])
def test_shares_that_do_not_split_the_batch_are_refused(mixed, text):
    with pytest.raises(SpecError):
        apply(mixed, f"shares={text}")


@given(
    weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8),
    count=st.integers(8, 500),
    unit=st.integers(1, 8),
)
def test_shares_sum_are_whole_and_leave_nobody_out(weights, count, unit):
    shares = apportioned(weights, count * unit, unit)
    assert sum(shares) == count * unit and all(share >= unit and share % unit == 0 for share in shares)
    ranked = [share for _, share in sorted(zip(weights, shares, strict=True))]
    assert all(b >= a - unit for a, b in pairwise(ranked))


def test_what_is_advised_fits_as_probably_as_a_plan():
    over = api.request(
        api.load_model("qwen3-30b-a3b"), api.load_cluster("2x8xh100-sxm"), ep=8, global_batch=64
    )
    fits = api.request(
        api.load_model("llama3-8b"), api.load_cluster("8x8xa100-sxm-80gb"), zero=3, framework="torchtitan"
    )
    found = [*nearest_fit(over, over.predict()).effects, *improvements(fits, fits.predict())]
    assert len(found) > 3 and all(one.prediction.memory.fits_probability >= 0.95 for one in found)
