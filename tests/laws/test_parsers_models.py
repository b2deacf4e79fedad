"""No configuration, however broken, gives anything but a model or a `SpecError`."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshard.catalog.hf.load import FAMILIES, model_from_config, read_config
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.spec.model import Model
from foreshard.validation.row_dimensions import DIMENSIONS
from foreshard.validation.row_model import resolve_row_model

CASES = json.loads((Path(__file__).parents[1] / "golden/model_params.json").read_text("utf-8"))["cases"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def parsed(config) -> Model | None:
    try:
        model = model_from_config(config, name="fuzz", file="config.json")
    except SpecError as error:
        json.dumps(error.to_dict())
        assert str(error)
        return None
    return model


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_key_replaced_by_junk(data):
    config = dict(data.draw(st.sampled_from(CASES))["config"])
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(JUNK)
    model = parsed(config)
    if model:
        assert model.num_params >= model.active_params > 0


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_keys_taken_away(data):
    config = dict(data.draw(st.sampled_from(CASES))["config"])
    for key in data.draw(st.sets(st.sampled_from(sorted(config)), max_size=4)):
        del config[key]
    parsed(config)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.text(max_size=12), JUNK, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_family_and_nothing_it_needs(model_type, config):
    assert parsed(config | {"model_type": model_type}) is None


@given(JUNK)
@settings(max_examples=60, deadline=None)
def test_any_json_value(value):
    assert parsed(value) is None


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_in_a_file(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        load_model(path)


@given(st.integers(0, 1000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere(tmp_path, cut):
    path = tmp_path / "config.json"
    text = json.dumps(CASES[0]["config"])
    path.write_text(text[: min(cut, len(text) - 1)])
    with pytest.raises(SpecError):
        read_config(path)


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_name(text):
    try:
        load_model(text)
    except SpecError as error:
        assert str(error)


COLUMNS = (*DIMENSIONS, "seq_len", "n_experts", "topk")


@given(
    st.sampled_from(
        ["GPT-3-175B", "x", "", "DeepSeekV3", "MPT-7b LoRA r99999", "Llama-2-7B LoRA r0", "Kimi_K2 LoRA"]
    ),
    st.dictionaries(
        st.sampled_from((*COLUMNS, "gated_mlp", "notes", "in_other")),
        st.text(max_size=6) | st.integers(-5, 10**6).map(str) | st.just("; LoRA: head_dim 0"),
    ),
)
@settings(max_examples=150, deadline=None)
def test_any_table_row(name, cells):
    try:
        model = resolve_row_model({"model": name} | cells)
    except SpecError as error:
        assert str(error)
    else:
        assert model.num_params > 0


@given(st.sampled_from(CASES), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_longer_sequence_never_costs_less_per_token(case, factor):
    """Attention grows with the sequence; causal work never exceeds full work."""
    model = model_from_config(case["config"], name="x")
    lengths = (128, 128 * (factor + 1))
    if model.head_rows:  # a classifier spreads its head over more tokens
        return
    for causal in (True, False):
        short, long = (model.flops_per_token(length, causal) for length in lengths)
        assert long >= short > 0
    assert model.flops_per_token(lengths[1], True) <= model.flops_per_token(lengths[1], False)


@given(st.sampled_from(CASES))
@settings(max_examples=40, deadline=None)
def test_parts_sum_to_the_whole(case):
    model = model_from_config(case["config"], name="x")
    ends = model.embedding_params + model.head_params + model.final_norm_params + model.extra_params
    blocks = sum(block.num_params for block in model.blocks)
    assert ends - model.tied_params + blocks == model.num_params == model.trainable_params
