import pytest

from foreshard import units
from foreshard.errors import SpecError


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("80GB", "bytes", 80e9),
        ("0 B", "bytes", 0.0),
        ("1.5e3 MiB", "bytes", 1500 * 2**20),
        ("400 Gb/s", "bytes_per_s", 50e9),
        ("400 Gbit/s", "bytes_per_s", 50e9),
        ("400Gbps", "bytes_per_s", 50e9),
        ("50 GB/s", "bytes_per_s", 50e9),
        ("1 GiB/s", "bytes_per_s", 2**30),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        (" 1 ms ", "s", 1e-3),
        ("2 h", "s", 7200.0),
        ("312 TFLOP/s", "flops_per_s", 312e12),
        ("312 TFLOPS", "flops_per_s", 312e12),
        ("700 W", "w", 700.0),
        ("1.2 kW", "w", 1200.0),
        ("98.32 USD/h", "usd_per_h", 98.32),
        ("1 kWh", "j", 3.6e6),
        ("1980 MHz", "hz", 1.98e9),
        ("400gbps", "bytes_per_s", 50e9),
        ("400 gbit/s", "bytes_per_s", 50e9),
        ("80 gb", "bytes", 80e9),
        ("80gib", "bytes", 80 * 2**30),
        ("312 TFLOPs", "flops_per_s", 312e12),
        ("312 tflops", "flops_per_s", 312e12),
        ("700 w", "w", 700.0),
        ("1980mhz", "hz", 1.98e9),
        ("10 sec", "s", 10.0),
        ("2 days", "s", 172_800.0),
        ("2 usd/hr", "usd_per_h", 2.0),
    ],
)
def test_parse_reads_a_quantity(text, dimension, value):
    assert units.parse(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("80", "bytes"),
        (80, "bytes"),
        (None, "bytes"),
        (True, "s"),
        ("", "bytes"),
        ("GiB", "bytes"),
        ("nan GiB", "bytes"),
        ("inf GiB", "bytes"),
        ("1e999 GiB", "bytes"),
        ("-1 GiB", "bytes"),
        ("1 GiB/s", "bytes"),
        ("1 GB", "bytes_per_s"),
        ("400 gb/s", "bytes_per_s"),
        ("1 Mb", "bytes"),
        ("1 GiB 2", "bytes"),
        ("٣ GiB", "bytes"),
        ("9" * 100 + " B", "bytes"),
        ("5 m", "s"),
        ("50 GBps", "bytes_per_s"),
        ("700 mw", "w"),
    ],
)
def test_parse_refuses_what_is_no_quantity(text, dimension):
    with pytest.raises(SpecError) as caught:
        units.parse(text, dimension)
    assert caught.value.rule and caught.value.fix


def test_wrong_case_suggests_both_spellings():
    with pytest.raises(SpecError, match=r"'GB/s' or 'Gb/s'"):
        units.parse("400 gb/s", "bytes_per_s")


def test_the_rule_says_what_is_measured_in_words():
    with pytest.raises(SpecError) as told:
        units.parse("400", "bytes_per_s")
    assert told.value.rule == "A rate is a non-negative number with a unit"


def test_gb_and_gib_differ():
    assert units.parse("1 GB", "bytes") == 1e9
    assert units.parse("1 GiB", "bytes") == 2**30
