"""What users type for a cluster, a rate, a model or a count means one thing in every spelling of it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import devices
from foreshard.catalog.instances import largest_node
from foreshard.catalog.models import load_model, models
from foreshard.errors import SpecError
from foreshard.units import count

QUIET = settings(deadline=None, max_examples=60)
BY = st.sampled_from(["x", "X", " x ", "×", "*"])
RATES = {
    "100Gb/s": 12.5e9,
    "400 Gbps": 50e9,
    "25GbE": 3.125e9,
    "1.6 Tb/s": 200e9,
    "50GB/s": 50e9,
    "8x100Gb/s": 100e9,
}
OF_DEVICE = ["/gpu", "/GPU", " per gpu", "/device", " per device"]
OF_NODE = ["", "/node", " per node"]
LLAMA = ["llama3.1-8b", "meta-llama/Llama-3.1-8B", "Llama-3.1-8B-Instruct", "unsloth/Meta-Llama-3.1-8B"]


@st.composite
def devices_as_written(draw):
    """Draw a device and a spelling of its name."""
    device = draw(st.sampled_from(list(devices().values())))
    cased = draw(st.sampled_from([str, str.upper, str.title]))(device.name)
    return device, cased.replace("-", draw(st.sampled_from(["-", " ", "_"])))


@st.composite
def terms(draw):
    """Draw a term as (text, nodes, devices per node, device)."""
    device, name = draw(devices_as_written())
    by = draw(BY)
    per_node = draw(st.integers(1, largest_node(device)))
    if draw(st.booleans()):
        return f"{per_node}{by}{name}", 1, per_node, device
    count = draw(st.integers(1, 64))
    return f"{count}{by}{per_node}{by}{name}", count, per_node, device


@QUIET
@given(terms())
def test_a_term_means_its_nodes_in_every_spelling(term):
    text, count, per_node, device = term
    (group,) = load_cluster(text).nodes
    assert (group.count, group.per_node, group.device.name) == (count, per_node, device.name)


@QUIET
@given(st.lists(terms(), min_size=2, max_size=3), st.data())
def test_a_trailing_rate_is_of_all_nodes_and_several_are_of_their_terms(drawn, data):
    rates = [data.draw(st.sampled_from([None, *RATES])) for _ in drawn]
    text = "+".join(t[0] + (f"@{rate}" if rate else "") for t, rate in zip(drawn, rates, strict=True))
    groups = load_cluster(text).nodes
    only_last = [rate is not None for rate in rates] == [False] * (len(rates) - 1) + [True]
    for group, rate, (term, *_) in zip(groups, rates, drawn, strict=True):
        rate = rates[-1] if only_last else rate
        expected = RATES[rate] if rate else load_cluster(term).nodes[0].nic_bytes_per_s
        assert group.nic_bytes_per_s == pytest.approx(expected)


@QUIET
@given(terms(), st.sampled_from(sorted(RATES)), st.sampled_from(OF_DEVICE + OF_NODE))
def test_a_rate_is_of_a_node_or_of_each_device(term, rate, of):
    text, _, per_node, _ = term
    group = load_cluster(f"{text}@{rate}{of}").nodes[0]
    assert group.nic_bytes_per_s == pytest.approx(RATES[rate] * (per_node if of in OF_DEVICE else 1))


@QUIET
@given(terms(), st.sampled_from(["n", "q", "-", " gpu ", "xx", "@", "@400", "@400gb/s", " and 8xh100", "+"]))
def test_a_refusal_names_what_can_be_read(term, more):
    """A suggestion between quotes that looks like a cluster is one."""
    try:
        load_cluster(term[0] + more)
    except SpecError as error:
        assert error.fix
        for meant in re.findall(r"Did you mean '([^']+)'\?$", error.fix):
            if "x" in meant and "/" not in meant:
                assert load_cluster(meant).num_devices


@pytest.mark.parametrize("text", [*LLAMA, f"https://huggingface.co/{LLAMA[1]}/blob/main/config.json"])
def test_a_hub_name_has_the_shapes_of_the_catalog(text):
    model = load_model(text)
    assert (model.name, model.num_layers) == ("llama3.1-8b", models()["llama3.1-8b"].num_layers)


@pytest.mark.parametrize(
    "text", ["mistralai/Mistral-7B-v0.9", "unsloth/Llama-3.1-8B-bnb-4bit", "Qwen/Qwen9-1B"]
)
def test_another_version_is_not_taken_for_the_one_that_is_known(text):
    with pytest.raises(SpecError, match="nothing is downloaded"):
        load_model(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("llama3", "llama3-8b"),
        ("llama-405b", "llama3.1-405b"),
        ("phi3", "phi3-mini"),
        ("llama70b", "llama2-70b"),
    ],
)
def test_models_near_in_meaning_are_suggested(text, near):
    with pytest.raises(SpecError) as caught:
        load_model(text)
    assert repr(near) in caught.value.fix


@QUIET
@given(st.integers(1, 999), st.sampled_from(["k", "M", "B", "T"]), st.sampled_from(["", " "]), st.booleans())
def test_letters_of_a_count_are_powers_of_a_thousand(number, letter, space, lower):
    power = "kMBT".index(letter) + 1
    text = f"{number}{space}{letter.lower() if lower else letter}"
    assert count(text) == number * 1000.0**power
    assert count(text, thousand=1024) == number * 1024.0**power
