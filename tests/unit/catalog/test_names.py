"""Names that people type: each is a model of the catalog, or is refused by what it is."""

from pathlib import Path

import pytest

from foreshard import api
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.models import _key, _names, near_models
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError

LINES = (Path(__file__).parent / "names.txt").read_text("utf-8").splitlines()
NAMES = [line.split(" = ") for line in LINES if line and not line.startswith("#")]


def test_each_name_is_a_model_or_says_what_it_is():
    """One test for all: they share what is read once."""
    wrong = []
    for typed, meant in NAMES:
        try:
            found = api.load_model(typed).name
        except SpecError as error:
            said = meant.startswith("! ") and meant[2:] in str(error)
            found = meant if said else str(error)
        if found != meant:
            wrong.append((typed, meant, found))
    assert len(NAMES) > 200 and wrong == []


# billions of parameters on the model cards or in the papers: all, and those a token meets
@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("codellama-13b", 13.02, 13.02),
        ("solar-10.7b", 10.73, 10.73),
        ("deepseek-coder-33b", 33.3, 33.3),
        ("falcon3-10b", 10.3, 10.3),
        ("falcon2-11b", 11.1, 11.1),
        ("codestral-22b", 22.2, 22.2),
        ("qwen1.5-110b", 111.2, 111.2),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen3-coder-480b-a35b", 480.2, 35.5),
        ("deepseek-r1-distill-qwen-1.5b", 1.78, 1.78),
        ("phi4-mini", 3.84, 3.84),
        ("phi3.5-moe", 41.9, 6.6),
        ("olmoe-1b-7b", 6.92, 1.28),
        ("olmo2-32b", 32.2, 32.2),
        ("minitron-8b", 8.27, 8.27),
        ("command-r-plus-104b", 103.8, 103.8),
        ("starcoder2-7b", 7.17, 7.17),
        ("glm-4.5-355b-a32b", 353, 33.6),
        ("glm-4.5-air-106b-a12b", 106.9, 13.4),
        ("granite3-8b", 8.17, 8.17),
        ("minimax-m2", 229, 11.0),
        ("chinchilla-70b", 70.0, 70.0),
        ("gopher-280b", 280.0, 280.0),
        ("snowflake-arctic-480b", 480.0, 17.3),
        ("mamba2-2.7b", 2.70, 2.70),
        ("roberta-large", 0.355, 0.355),
        ("bart-large", 0.406, 0.406),
        ("modernbert-large", 0.395, 0.395),
        ("t5-3b", 2.85, 2.85),
        ("ernie-4.5-21b-a3b", 21.83, 3.37),
        ("ernie-4.5-300b-a47b", 299.0, 47.0),
        ("seed-oss-36b", 36.15, 36.15),
        ("exaone-3.5-2.4b", 2.405, 2.405),
        ("exaone-4.0-32b", 32.0, 32.0),
        ("apertus-70b", 70.6, 70.6),
        ("ling-mini-2.0", 16.26, 1.43),
        ("ling-flash-2.0", 103.0, 6.1),
    ],
)
def test_size_is_the_published_one(name, billions, active):
    model = api.load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_no_hub_name_means_two_models_and_no_refusal_hides_one():
    table, refused = _names(), shipped("models.json")["families_not_modelled"]
    for name, entry in shipped("models.json")["models"].items():
        for spelling in (name, *entry["aliases"]):
            assert table[_key(spelling)] == name
            assert not any(_key(spelling) == start for start in refused)


@pytest.mark.parametrize(
    "name",
    [
        "resnet152x",
        "efficient",
        "swin",
        "folder",
        "x",
        "3d-unet",
        "transformer",
        "my-model-7b",
        "answer-base",
    ],
)
def test_nothing_is_suggested_where_nothing_is_near(name):
    assert near_models(name) == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mistral", "mistral-7b"),
        ("t5", "t5-3b"),
        ("bert", "bert-large"),
        ("mixtral", "mixtral-8x22b"),
        ("opt-1b", "opt-1.3b"),
        ("mixtrl-8x7b", "mixtral-8x7b"),
        ("deepsek-v3", "deepseek-v3"),
    ],
)
def test_a_family_gets_its_sizes_and_a_slip_its_name(name, near):
    assert near in near_models(name)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("A100", "a100-sxm-80gb"),
        ("a100-80g", "a100-sxm-80gb"),
        ("H100 SXM", "h100-sxm"),
        ("h100-80gb-hbm3", "h100-sxm"),
        ("RTX A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("RTX PRO 6000", "rtx-pro-6000-server"),
        ("GeForce RTX 4080", "rtx-4080"),
        ("RTX 5080", "rtx-5080"),
        ("RTX 3060", "rtx-3060"),
        ("TITAN V", "titan-v"),
        ("L20", "l20"),
        ("MI250X", "mi250x"),
        ("Ironwood", "tpu-v7x"),
        ("Gaudi3", "gaudi-3"),
    ],
)
def test_devices_by_the_names_that_people_type(typed, meant):
    assert resolve_device(typed).name == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("BM.GPU.H100.8", (1, 8, "h100-sxm", 3200)),
        ("4xBM.GPU.A100-v2.8", (4, 8, "a100-sxm-80gb", 1600)),
        ("Standard_NC24s_v3", (1, 4, "v100-pcie-16gb", 24)),
        ("DGX-1", (1, 8, "v100-sxm-16gb", 400)),
        ("DGX-H100", (1, 8, "h100-sxm", 3200)),
        ("trn2u.48xlarge", (1, 16, "trainium-2", 3200)),
        ("a2-highgpu-4g", (1, 4, "a100-sxm-40gb", 50)),
        ("8x4090", (1, 8, "rtx-4090", 100)),
        ("TPU v4-64", (8, 4, "tpu-v4", 100)),
        ("2x8xh100@3.2Tb/s", (2, 8, "h100-sxm", 3200)),
        ("2x8xa100@100 Gbps", (2, 8, "a100-sxm-80gb", 100)),
        ("gpu_8x_a100", (1, 8, "a100-sxm-40gb", 1600)),
        ("gpu_4x_a6000", (1, 4, "rtx-a6000", 100)),
        ("2x HGX H100 4-GPU", (2, 4, "h100-sxm", 1600)),
        ("DGX A100 320GB", (1, 8, "a100-sxm-40gb", 1600)),
        ("gd-8xh100ib-i128", (1, 8, "h100-sxm", 3200)),
        ("BM.GPU.A10.4", (1, 4, "a10", 100)),
        ("VM.GPU3.4", (1, 4, "v100-sxm-16gb", 25)),
        ("2xa3-highgpu-4g", (2, 4, "h100-sxm", 100)),
        ("p6-b300.48xlarge", (1, 8, "b300-sxm", 6400)),
        ("2xct5lp-hightpu-4t", (2, 4, "tpu-v5e", 100)),
        ("4xml.p5.48xlarge", (4, 8, "h100-sxm", 3200)),
        ("h100-80gb-sxm-ib.8x", (1, 8, "h100-sxm", 3200)),
    ],
)
def test_clusters_by_the_names_that_people_type(typed, meant):
    (group,) = api.load_cluster(typed).nodes
    gigabits = round(group.nic_bytes_per_s * 8e-9)
    assert (group.count, group.per_node, group.device.name, gigabits) == meant


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("M3 Max", "a chip of Apple"),
        ("8xM3 Max", "a chip of Apple"),
        ("Jetson Orin", "inference at the edge"),
        ("4xCS-3", "a wafer"),
    ],
)
def test_what_is_no_device_of_the_catalog_says_what_it_is(typed, said):
    with pytest.raises(SpecError, match=said) as caught:
        api.load_cluster(typed)
    assert "[[devices]]" in caught.value.fix


def test_no_device_of_another_line_is_suggested():
    for name in ("VR200", "B580", "MTT S4000"):
        with pytest.raises(SpecError) as caught:
            resolve_device(name)
        assert "Did you mean" not in caught.value.fix
