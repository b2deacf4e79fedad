"""Networks of timm: made by its own code where it is installed, else refused with what to install."""

import sys
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from foreshard.api import trace
from foreshard.errors import ExtraMissingError, SpecError
from foreshard.profile.networks import timm_models
from foreshard.profile.networks.catalog import is_traced, network, network_name

LIBRARY = """
import torch
from torchvision.ops.misc import FrozenBatchNorm2d
from torchvision.transforms import functional

__version__ = "0"


def list_models():
    return ["plain", "patches"]


class layers:
    fused = True

    @classmethod
    def set_fused_attn(cls, enable):
        cls.fused = enable


def create_model(name, img_size=64):
    if name not in list_models():
        raise RuntimeError(f"Unknown model ({name})")
    made = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    made.made_for = img_size
    made.fused = layers.fused
    made.default_cfg = {"input_size": (3, 64, 64), "fixed_input_size": name == "patches"}
    assert not isinstance(made, FrozenBatchNorm2d)
    return made
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library called timm, which imports torchvision as timm does."""
    (tmp_path / "timm.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    timm_models._timm.cache_clear()
    yield
    timm_models._timm.cache_clear()
    sys.modules.pop("timm", None)


def test_names_of_timm_are_said_to_be_so():
    assert (
        network_name("timm:ResNet50") == network_name("timm/resnet50.a1_in1k") == "resnet50"
    )  # of the catalog
    assert network_name("timm:ViT_tiny_patch16_224") == "timm/vit_tiny_patch16_224"
    assert network_name("timm/vit_tiny_patch16_224.augreg") == "timm/vit_tiny_patch16_224.augreg"
    assert is_traced("timm/vit_tiny_patch16_224") and not is_traced("timm/")


def test_a_network_is_made_for_the_side_that_it_reads(library):
    module, image = network("timm/plain")
    assert tuple(image.shape) == (1, 3, 64, 64) and image.device.type == "meta"
    assert next(module.parameters()).device.type == "meta"
    module, image = network("timm/plain", side=32)  # any side: it is made as it is
    assert (module.made_for, tuple(image.shape)) == (64, (1, 3, 32, 32))
    module, image = network("timm/patches", side=32)
    assert (module.made_for, tuple(image.shape)) == (32, (1, 3, 32, 32))
    assert find_spec("torchvision") is not None or "torchvision" not in sys.modules


def test_attention_is_as_it_was_before_it_was_fused(library):
    made = [network("timm/plain", fused_attention=fused)[0].fused for fused in (True, False, True)]
    assert made == [True, False, True]


def test_a_name_that_timm_does_not_make_is_refused(library):
    with pytest.raises(SpecError, match=r"timm 0 does not make plane: .* Did you mean plain"):
        network("timm/plane")


def test_without_timm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    timm_models._timm.cache_clear()
    with pytest.raises(ExtraMissingError, match="pip install timm"):
        trace("timm/vit_tiny_patch16_224")


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_a_network_of_timm_is_the_one_of_the_catalog():
    from foreshard.profile.tracing.trace import trace_module

    ours, theirs = (
        trace("resnet18", precision="fp16"),
        trace_module(*network("timm/resnet18"), precision="fp16"),
    )
    assert theirs.flops(4) == pytest.approx(ours.flops(4))
    assert theirs.reads_images
