from dataclasses import replace

import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.frameworks import frameworks, load_framework, parse_frameworks
from foreshard.catalog.shipped import shipped
from foreshard.catalog.training import HOST_CLASSES
from foreshard.errors import SpecError
from foreshard.predict.traits import traits_of


def test_every_entry_names_its_source_and_known_profiles():
    for entry in frameworks():
        assert len(entry.source) > 20, entry.label
        assert entry.memory in shipped("memory_profiles.toml"), entry.label
        assert entry.host in HOST_CLASSES, entry.label
        assert entry.default_zero in (0, 1, 2, 3), entry.label


def test_labels_are_distinct_and_load_back():
    labels = [entry.label for entry in frameworks()]
    assert len(labels) == len(set(labels))
    assert all(load_framework(label).label == label for label in labels)


def test_experts_of_a_graph_run_in_one_launch_unless_a_capacity_says_their_tokens():
    """Megatron-Bridge has the fused experts in recipes whose graph holds the whole iteration, no others."""
    bridge, device = load_framework("megatron-bridge@26.06"), resolve_device("gb300-nvl72")
    changes = ({}, {"cuda_graphs": "partial"}, {"cuda_graphs": "full"})
    runs = [replace(bridge, **change) for change in changes]
    runs.append(replace(runs[-1], routing="dropped"))
    traits = [traits_of(run, device, zero=1) for run in runs]
    assert [one.grouped for one in traits] == [0.0, 0.0, 1.0, 0.0]


def test_tensor_ranks_send_parts_of_a_stage_output_through_the_pipeline_engine_of_deepspeed():
    """pipe_partitioned and grad_partitioned are on by default; ColossalAI has a pipeline of its own."""
    sends = {
        name: load_framework(name).p2p_scatter for name in ("deepspeed", "megatron-deepspeed", "colossalai")
    }
    assert sends == {"deepspeed": True, "megatron-deepspeed": True, "colossalai": False}


def test_blank_release_is_the_newest():
    assert load_framework("megatron-bridge").release == "26.08"
    assert load_framework("megatron-core").release == ""


def test_nemo_recipes_differ_from_plain_megatron_core():
    plain, nemo = load_framework("megatron-core"), load_framework("nemo@24.07")
    assert (plain.grad_bytes, plain.tp_overlap, plain.param_gather_overlap) == (4, False, False)
    assert (nemo.grad_bytes, nemo.tp_overlap, nemo.param_gather_overlap) == (2, True, True)


@pytest.mark.parametrize(
    ("label", "hint"),
    [
        ("megatron-brige", "megatron-bridge"),
        ("nemo@24.08", "nemo@24.0"),
        ("ddp@2.1", "none, give the name alone"),
    ],
)
def test_unknown_names_and_releases_get_a_suggestion(label, hint):
    with pytest.raises(SpecError) as caught:
        load_framework(label)
    assert hint in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('[[framework]]\nname="x"\n', "source"),
        ('[[framework]]\nname="x"\nsource="s"\nspeed=2\n', "speed"),
        ('[[framework]]\nname="x"\nsource="s"\nbase="y"\n', "base"),
        ('[[framework]]\nname="x"\nsource="s"\nfsdp="fsdp9"\n', "fsdp9"),
    ],
)
def test_a_broken_table_says_where(text, word):
    with pytest.raises(SpecError, match=word):
        parse_frameworks(text)


def test_a_base_is_inherited_but_not_its_source():
    text = (
        '[[framework]]\nname="a"\ntp_overlap=true\nsource="first"\n'
        '[[framework]]\nname="a"\nrelease="2"\nbase="a"\ngrad_bytes=2\nsource="second"\n'
    )
    second = parse_frameworks(text)[1]
    assert (second.tp_overlap, second.grad_bytes, second.source) == (True, 2, "second")
