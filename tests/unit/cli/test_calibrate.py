"""Names of devices in calibrate come once."""

import pytest


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--profile", "a=x.json", "--profile", "a=y.json"), "--profile"),
        (("--profile", "x.json", "--profile", "y.json"), "--profile"),
        (("--profile", "x.json", "--device", "a", "--device", "a=2"), "--device"),
    ],
)
def test_a_device_that_is_given_twice_is_refused(words, key, shell):
    answer = shell("calibrate", *words, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key and "twice" in answer.json["error"]["what"]
