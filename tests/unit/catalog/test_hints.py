"""Names and prices of elsewhere: what was meant, and what is doubted, is said."""

import json
from dataclasses import replace

import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import alias_of, load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.shipped import shipped
from foreshard.cli.program import run
from foreshard.errors import SpecError


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("lightning", "torchtitan (FSDP2), deepspeed or ddp, whichever its strategy is"),
        ("torchtitn", "'torchtitan'"),
        ("openrlhf", "deepspeed, which trains its actor; generation is not modelled"),
    ],
)
def test_framework_names_of_other_places(label, meant):
    with pytest.raises(SpecError) as caught:
        load_framework(label)
    assert caught.value.fix == f"Did you mean {meant}?"


@pytest.mark.parametrize("table", ["alias", "taken"])
def test_names_that_mean_a_framework_name_one_of_the_catalog(table):
    for name in shipped("framework_hints.toml")[table]:
        assert load_framework(name).name == alias_of(name)[0] != name


def test_a_framework_taken_for_another_is_said_with_when_it_is_not(capsys):
    assert run(["predict", "gpt2", "1x2xh100-sxm", "--framework", "TRL"]) == 0
    assert "framework trl: taken as hf (FSDP2; else deepspeed or ddp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stated", "missing"),
    [
        (("--framework", "ddp", "--zero", "3"), ["ddp has no zero 3 (it has 0, 1)"]),
        (("--framework", "hf", "--pp", "2"), ["hf@5 runs no pipelines of stages"]),
        (("--framework", "hf", "--no-grad-overlap"), ["hf@5 has no switch for grad_overlap"]),
        (("--framework", "composer", "--tp", "2", "--dp", "1"), ["composer@2023 has no tp (it has none)"]),
        (
            ("--pp", "2", "--schedule", "zbv"),
            ["megatron-core has no schedule zbv (it has 1f1b, interleaved)"],
        ),
        (("--framework", "torchtitan", "--tp", "2", "--zero", "3"), []),
        (("--zero", "3"), ["zero 3 of megatron-core is that of megatron-fsdp, which is taken"]),
        (("--framework", "megatron-lm@2021", "--tp", "2"), []),
        (
            ("--framework", "megatron-lm@2021", "--tp", "2", "--sp"),
            ["megatron-lm@2021 has no sp (it has tp, pp, vpp)"],
        ),
    ],
)
def test_what_a_framework_does_not_offer_is_warned_of(stated, missing, capsys):
    assert run(["predict", "gpt2", "1x2xh100-sxm", "--json", *stated]) == 0
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if "warning" in line]
    assert [line.split(": ")[2].split(";")[0] for line in said] == missing
    assert set(missing) <= set(json.loads(printed.out)["assumptions"])


@pytest.mark.parametrize(
    ("framework", "cuts"),
    [
        ("megatron-core", True),
        ("torchtitan", True),
        ("megatron-lm@2022", True),
        ("megatron-lm@2021", False),
        ("megatron-deepspeed", False),
        ("hf", False),
    ],
)
def test_sequences_are_cut_by_default_where_the_framework_does_it(framework, cuts):
    degrees = {"tp": 4, "framework": framework, "seq_len": 1024, "zero": 1}
    assert api.make_plan("gpt3-13b", "1x4xa100-sxm-80gb", **degrees).groups[0].sp == cuts


def test_a_search_cuts_no_sequences_where_the_framework_does_not():
    found = api.plan(
        *("llama3.2-1b", "1x4xa100-sxm-80gb"),
        global_batch=4,
        seq_len=1024,
        framework="megatron-deepspeed",
        tp=4,
    )
    assert found.plans and not any(group.sp for one in found.plans for group in one.plan.groups)


def test_a_hub_name_is_not_a_missing_file():
    with pytest.raises(SpecError) as caught:
        load_model("mistralai/Mistral-7B-v0.9")
    assert "'mistral-7b'" in caught.value.fix and "nothing is downloaded" in caught.value.rule
    with pytest.raises(SpecError, match="no file 'folder/nothing-like-it'") as caught:
        load_model("folder/nothing-like-it")
    assert caught.value.fix == "Fetch its config.json and give the path"
    with pytest.raises(SpecError, match="cannot read") as caught:
        load_model("folder/below/nothing-like-it")
    assert caught.value.file == "folder/below/nothing-like-it"


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


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("p5.48xlarge*4", "4xaws-p5.48xlarge"),
        ("4*p5.48xlarge", "4xaws-p5.48xlarge"),
        ("aws:p5.48xlarge", "aws-p5.48xlarge"),
        ("4xp4d", "4xaws-p4d.24xlarge"),
        ("2xnd-h100-v5", "2xazure-nd96isr-h100-v5"),
        ("ND96isr_H100_v5", "azure-nd96isr-h100-v5"),
        ("Standard_ND96amsr_A100_v4", "azure-nd96amsr-a100-v4"),
        ("NDv4", "azure-nd96asr-v4"),
        ("ndm-a100-v4", "azure-nd96amsr-a100-v4"),
        ("a3-highgpu-8g", "gcp-a3-highgpu-8g"),
        ("a3 mega * 2", "2xgcp-a3-megagpu-8g"),
        ("4 nodes of 8 H100", "4x8xh100-sxm"),
        ("4 nodes x 8 H100", "4x8xh100-sxm"),
        ("2x8xh100@8xNDR", "2x8xh100-sxm@3200Gb/s"),
        ("2x8xh100@HDR/gpu", "2x8xh100-sxm@1600Gb/s"),
        ("v5p-128", "16x4xtpu-v5p"),
        ("tpu v5e-256", "64x4xtpu-v5e"),
        ("DGX-2", "1x16xv100-sxm3-32gb"),
        ("2 dgx-1", "2xdgx-1"),
        ("4 DGX H100s", "4x8xh100-sxm"),
        ("2 hgx h200", "2x8xh200-sxm"),
        ("dgx-h100:4", "4x8xh100-sxm"),
        ("16 p4d.24xlarge", "16xaws-p4d.24xlarge"),
    ],
)
def test_what_practitioners_type_is_the_cluster_they_mean(text, meant):
    one, other = (
        [replace(group, nics=group.num_nics) for group in load_cluster(written).nodes]
        for written in (text, meant)
    )
    assert one == other


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("H100", ("'1xh100-sxm'", "'8xh100-sxm'")),
        ("GB200 NVL72", ("'18x4xgb200-nvl72'", "'1xgb200-nvl72'")),
        ("h100x8x4", ("'4x8xh100'", "'8x4xh100'")),
        ("2xnc-a100-v4", ("'azure-nc24ads-a100-v4'", "'azure-nc96ads-a100-v4'")),
        ("2x8xh100@NDR400", ("'400Gb/s'", "'8x400Gb/s'")),
        ("2x8xh100@1.6T", ("'1.6Tb/s'", "'1.6TB/s'")),
        ("2x8xh100@EFA", ("of a node", "of each device")),
        ("coreweave 8xh100", ("8xh100",)),
        ("DGX GB200", ("'18x4xgb200-nvl72'", "'1xgb200-nvl72'")),
        ("2x8xh100 with 400Gbps", ("'2x8xh100@400Gbps'",)),
        ("8xh100, 400 Gb/s", ("'8xh100@400 Gb/s'",)),
    ],
)
def test_what_is_ambiguous_is_refused_with_its_readings(text, readings):
    with pytest.raises(SpecError) as caught:
        load_cluster(text)
    assert all(reading in caught.value.fix for reading in readings)
