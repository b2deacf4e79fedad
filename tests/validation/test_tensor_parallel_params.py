"""Parameters of a tensor-parallel rank against what DTensor leaves of transformers' own layers.

Products are split as Megatron-core and torchtitan split them: by columns into attention and MLP, by rows out
of them; all else is whole on every rank. Sinks go with their heads, which no style of torch says.
"""

from __future__ import annotations

import pytest
from tests.unit.cost.test_memory import middle
from tests.validation.test_hf_memory import A_LAYER, MODELS, SIZES

from foreshard.catalog.hf.load import model_from_config
from foreshard.cost.memory import stage_memory
from foreshard.spec.framework import Framework

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "fc1", "q_b_proj", "kv_b_proj")
ROWS = ("o_proj", "dense", "down_proj", "c_proj", "fc2", "out_proj")
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}}
KINDS = ("llama", "qwen2_moe", "qwen3", "phi", "starcoder2", "opt", "deepseek_v3", "glm4_moe", "gpt_oss")


@pytest.fixture(params=[2, 4])
def mesh(request):
    """A tensor-parallel mesh of fake ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (request.param,))
    dist.destroy_process_group()


def local_params(layer, mesh) -> int:
    """Return the elements that rank 0 holds of a decoder layer after it is split."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = dict.fromkeys(COLUMNS, ColwiseParallel) | dict.fromkeys(ROWS, RowwiseParallel)
    names = [name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
    plan = {name: styles[name.split(".")[-1]]() for name in names if name.split(".")[-1] in styles}
    parallelize_module(layer, mesh, plan)
    held = 0
    for name, weight in layer.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        held += local.numel() // (mesh.size() if name.endswith("sinks") else 1)
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_the_parameters_that_dtensor_leaves_it(kind, mesh):
    # Heads of keys that four ranks can share out.
    stated = SIZES | MODELS[kind] | {"num_key_value_heads": 4} | BIASED.get(kind, {})
    sizes = {key: value for key, value in stated.items() if value is not None}
    sizes |= {key: sizes[key] for key in A_LAYER if key in sizes}
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=1, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = [modules for name, modules in model.named_modules() if name.endswith("layers")]
    expected = local_params(layers[0][0], mesh)
    block = model_from_config({"model_type": kind, "num_hidden_layers": 1, **sizes}, name=kind).blocks[0]
    stage = middle(block, tp=mesh.size(), etp=1, ep=1)
    counted = stage_memory(stage, Framework(name="megatron-core", memory="megatron-core")).parameters / 2
    assert counted == expected
