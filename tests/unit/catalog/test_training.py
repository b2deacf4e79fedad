"""Constants of training steps: what is shipped against the ranges that are stated."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from foreshard.catalog.training import TrainingConstants, term_metadata, training_constants

EDGE = 0.01  # of a range: nearer to an end, the range decided and not the data


@pytest.mark.parametrize("name", term_metadata())
def test_no_shipped_constant_sits_on_its_bound(name):
    low, high = term_metadata()[name]["low"], term_metadata()[name]["high"]
    edge = EDGE * (high - low)
    assert low + edge < getattr(training_constants(), name) < high - edge


@pytest.mark.parametrize("name", term_metadata())
def test_a_start_lies_inside_its_range(name):
    low, high = term_metadata()[name]["low"], term_metadata()[name]["high"]
    assert low < getattr(TrainingConstants(), name) < high


def test_constants_without_a_family_name_the_same_terms():
    assert asdict(training_constants("vtrain_single")).keys() == term_metadata().keys()
