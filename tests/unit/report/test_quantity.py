import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard import quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (1.834, "1.83 s"),
        (0.04, "40.0 ms"),
        (0.9996, "1.00 s"),
        (123.4e-6, "123 us"),
        (4e-9, "0.00400 us"),
        (59.96, "60.0 s"),
        (1234.0, "1,234 s"),
        (7200.0, "2.00 h"),
        (None, "-"),
    ],
)
def test_seconds(value, text):
    assert quantity.seconds(value) == text


def test_a_number_that_rounds_up_takes_the_next_unit():
    assert quantity.count(999_885_952) == "1.00 B" and quantity.joules(999_960) == "1.00 MJ"
    assert quantity.seconds_range(0.99, 0.99996) == "0.990-1.00 s"


def test_a_range_has_one_unit():
    assert quantity.seconds_range(0.95, 1.2) == "0.950-1.20 s"
    assert quantity.seconds_range(0.00095, 0.0012) == "0.950-1.20 ms"


def test_unknown_money_is_a_dash_never_zero():
    assert quantity.usd(None) == "-" and quantity.usd(0.0) == "$0.00" and quantity.usd(0.0012) == "$0.00120"


def test_gib_are_binary():
    assert quantity.gib(80 * 2**30) == "80.0" and quantity.gib(80e9) == "74.5"


@given(st.floats(1e-9, 1e9))
def test_digits_keep_three_figures(value):
    assert float(quantity.digits(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


def test_memory_of_small_jobs_has_a_unit_that_shows_it():
    assert quantity.memory(40.5 * 2**30) == "40.5 GiB" and quantity.memory(8 * 2**30) == "8.0 GiB"
    assert quantity.memory(1_850_360) == "1.8 MiB" and quantity.memory(2048) == "2.0 KiB"
    assert quantity.memory_unit(0) == "GiB" and quantity.memory(64) == "0.1 KiB"
    assert quantity.memory(100_000) == "97.7 KiB"
    assert quantity.memory(0) == "0 B"
    assert quantity.memory_in("MiB", 40_104) == "0.038" and quantity.memory_in("GiB", None) == "-"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.054, "5.4 % longer"),
        (3.0, "200.0 % longer"),
        (382.02, "382 times as long"),
        (1e5, "100,000 times as long"),
    ],
)
def test_much_longer_is_said_by_how_many_times(ratio, said):
    assert quantity.longer(ratio) == said


def test_what_rounding_leaves_of_a_difference_is_no_time():
    assert quantity.seconds(6.94e-18) == quantity.seconds(-1e-17) == quantity.seconds(0.0) == "0 s"
    assert quantity.seconds(8.24e-8) == "0.0824 us"
