"""Names and prices of elsewhere: what was meant, and what is doubted, is said."""

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError


@pytest.mark.parametrize(
    ("label", "meant"),
    [("fsdp2", "torchtitan (FSDP2)"), ("mcore", "megatron-core"), ("torchtitn", "'torchtitan'")],
)
def test_framework_names_of_other_places(label, meant):
    with pytest.raises(SpecError) as caught:
        load_framework(label)
    assert caught.value.fix == f"Did you mean {meant}?"


def test_a_hub_name_is_not_a_missing_file():
    with pytest.raises(SpecError) as caught:
        load_model("mistralai/Mistral-7B-v0.3")
    assert "Did you mean 'mistral-7b'" in caught.value.fix and "nothing is downloaded" in caught.value.rule
    with pytest.raises(SpecError, match="cannot read") as caught:
        load_model("folder/nothing-like-it")
    assert caught.value.file == "folder/nothing-like-it"


def test_an_empty_config_says_what_a_config_is(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert caught.value.key == "model_type" and "Hugging Face" in caught.value.rule


def test_a_device_count_alone_is_one_node_where_a_node_has_as_many():
    (node,) = load_cluster("8xh100-sxm").nodes
    assert (node.count, node.per_node) == (1, 8)
    with pytest.raises(SpecError) as caught:
        load_cluster("64xh100-sxm")
    assert "Write '8x8xh100-sxm' for 8 nodes" in caught.value.fix


def test_a_doubt_about_a_price_reaches_the_assumptions():
    def doubted(name):
        return any("not reflected" in text for text in load_cluster(name).assumptions)

    assert doubted("1x8xh100-sxm") and not doubted("1x8xv100-sxm-16gb")
