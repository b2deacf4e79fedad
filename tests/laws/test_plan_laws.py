"""Plan files: what is written reads back equal, and no input at all is anything but a plan or a SpecError."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.errors import SpecError
from foreshard.spec.plan import (
    COMM_OPTIONS,
    MAX_BATCH,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    Group,
    Plan,
    Stage,
)
from foreshard.spec.plan_file import load_plan, parse_plan

COUNTS = st.integers(1, MAX_BATCH)
RULES = st.one_of(
    st.sampled_from(["none", "full"]),
    st.integers(1, 999_999).map("full:uniform:{}".format),
    st.integers(1, 999_999).map("full:block:{}".format),
    st.integers(1, 999_999).map("every-{}".format),
    st.lists(st.sampled_from(RECOMPUTE_MODULES), min_size=1, unique=True).map(
        lambda modules: "selective:" + "+".join(modules)
    ),
)


@st.composite
def stages(draw):
    cuts = sorted(draw(st.sets(st.integers(0, 10**6), min_size=2, max_size=5)))
    ranks = tuple(draw(st.lists(st.integers(0, MAX_BATCH), min_size=1, max_size=8)))
    return Stage(
        ranks=ranks,
        layers=tuple(pairwise(cuts)),
        **{name: draw(COUNTS) for name in ("tp", "cp", "ep", "etp")},
        rank_shares=draw(st.none() | st.lists(st.integers(0, MAX_BATCH), min_size=1, max_size=4).map(tuple)),
        zero=draw(st.integers(0, 3)),
        shard_size=draw(st.none() | COUNTS),
        recompute=draw(RULES),
        offload=draw(st.sampled_from(OFFLOADS)),
    )


@st.composite
def plans(draw):
    groups = st.builds(
        Group,
        share=COUNTS,
        stages=st.lists(stages(), min_size=1, max_size=3).map(tuple),
        micro_batch=COUNTS,
        schedule=st.sampled_from(SCHEDULES),
        sp=st.booleans(),
    )
    return Plan(
        global_batch=draw(COUNTS),
        seq_len=draw(st.integers(1, 2**26)),
        groups=tuple(draw(st.lists(groups, min_size=1, max_size=3))),
        precision=draw(st.sampled_from(PRECISIONS)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        framework=draw(st.text(max_size=20)),
        comm=draw(st.dictionaries(st.sampled_from(COMM_OPTIONS), st.booleans())),
    )


@given(plans())
def test_a_plan_file_reads_back_equal(plan):
    assert parse_plan(json.loads(json.dumps(plan.to_dict()))) == plan


@given(plans())
def test_writing_twice_gives_the_same_bytes(plan):
    text = json.dumps(plan.to_dict())
    assert json.dumps(parse_plan(json.loads(text)).to_dict()) == text


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


def plan_or_error(read):
    """Return whether reading gave a plan; anything but a plan or a printable SpecError fails."""
    try:
        return isinstance(read(), Plan)
    except SpecError as error:
        assert error.exit_code == 2 and len(str(error)) < 2000
        json.dumps(error.to_dict(), allow_nan=False)
        return False


@given(ANYTHING)
def test_any_json_is_a_plan_or_a_spec_error(data):
    plan_or_error(lambda: parse_plan(data))


@st.composite
def broken_plans(draw):
    """The JSON of a plan with one place replaced, removed or added to."""
    data = draw(plans()).to_dict()
    place = data
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner) or draw(st.integers(0, 3)) == 0:
            break
        place = inner
    change = draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "replace":
        place[key] = draw(ANYTHING)
    elif change == "remove":
        del place[key]
    elif isinstance(place, dict):
        place[draw(st.text(max_size=8))] = draw(ANYTHING)
    else:
        place.append(draw(ANYTHING))
    return data


@settings(max_examples=200)
@given(broken_plans())
def test_a_plan_with_one_change_is_a_plan_or_a_spec_error(data):
    plan_or_error(lambda: parse_plan(data))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("plans") / "plan.json"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_spec_error(path, data):
    path.write_bytes(data)
    assert not plan_or_error(lambda: load_plan(path))


@given(plans(), st.data())
def test_no_part_of_a_plan_file_is_a_plan(path, plan, data):
    text = json.dumps(plan.to_dict())
    path.write_text(text[: data.draw(st.integers(0, len(text) - 1))])
    assert not plan_or_error(lambda: load_plan(path))
