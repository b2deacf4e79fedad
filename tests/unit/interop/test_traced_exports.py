"""Plans of traced modules as Python: the file is run, and trains as the module does."""

import copy
import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from torch import nn

from foreshard import api
from foreshard.errors import SpecError
from foreshard.interop.exporters.exported import InexpressibleError
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees


class Block(nn.Module):
    """Parameters of its own beside those of its modules."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.scale * self.mlp(self.norm(x))


class Net(nn.Module):
    """A tied table, blocks in a list that is never called, attention by a function, a loose parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.gain = nn.Embedding(50, 16), nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.last = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.gain * self.last(x) @ self.table.weight.T


@pytest.fixture(scope="module")
def traced():
    example = torch.zeros(1, 7, dtype=torch.long)
    return trace_module(Net(), example, precision="fp32", name="net", where="net.py:net")


def plan_of(traced, devices=1, **degrees):
    options = {"zero": 3, "micro_batch": 2} | degrees
    precision = traced.precision
    return plan_from_degrees(
        len(traced.layers) - 2, devices, seq_len=1, precision=precision, framework="ddp", **options
    )


@pytest.fixture
def alone(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_file_wraps_the_module_and_its_gradients_are_those_of_the_module(traced, alone, zero):
    made = api.export(plan_of(traced, 2, zero=zero), "fsdp", model=traced)
    assert made.name == "parallel.py"
    scope = {}
    exec(compile(made.text, made.name, "exec"), scope)
    torch.manual_seed(0)
    module = Net()
    plain, tokens = copy.deepcopy(module), torch.randint(0, 50, (scope["MICRO_BATCH"], 7))
    wrapped = scope["parallelize"](module)
    for net in (wrapped, plain):
        net(tokens).square().mean().backward()
    found = dict(plain.named_parameters())
    for name, parameter in wrapped.named_parameters():
        expected = found.pop(name.removeprefix("module.")).grad
        torch.testing.assert_close(whole(parameter.grad), expected, rtol=1e-5, atol=1e-7)
    assert not found


def test_units_hold_each_parameter_once_and_those_of_one_layer(traced):
    names = [name for layer in traced.layers for name in layer.modules]
    net = Net()
    held = [id(p) for name in names for p in net.get_submodule(name).parameters()]
    assert len(set(held)) == len(held)
    left = {name for name, p in net.named_parameters() if id(p) not in set(held)}
    assert left == {"table.weight", "gain"}  # tied over layers; of no module but the whole
    assert {"blocks.0", "blocks.1"} <= set(names) and "blocks" not in names


def test_weights_are_gathered_as_they_were_traced(traced):
    narrow = replace(traced, precision="bf16", casts_weights=True)
    text = api.export(plan_of(narrow, 2), "fsdp", model=narrow).text
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in text
    mixed = replace(narrow, casts_weights=False)
    made = api.export(plan_of(mixed, 2), "fsdp", model=mixed)
    assert "param_dtype" not in made.text and any("autocast" in note for note in made.notes)


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({"zero": 0, "pp": 2}, "pp 2"),
        ({"zero": 0, "tp": 2, "sp": False}, "tp 2 .*--max-tp 1"),
        ({"zero": 1}, "zero 1"),
        ({"recompute": "full"}, "recompute full"),
    ],
)
def test_what_the_file_cannot_do_is_refused_with_the_reason(traced, degrees, reason):
    with pytest.raises(InexpressibleError, match=reason):
        api.export(plan_of(traced, 2, **degrees), "fsdp", model=traced)


def test_networks_by_name_have_no_units_and_other_targets_no_modules(traced):
    named = replace(traced, source="resnet50", name="resnet50")
    with pytest.raises(InexpressibleError, match="factory"):
        api.export(plan_of(named, 2), "fsdp", model=named)
    assert "DistributedDataParallel" in api.export(plan_of(named, 2, zero=0), "fsdp", model=named).text
    for target in ("torchtitan", "megatron", "deepspeed"):
        with pytest.raises(InexpressibleError) as refused:
            api.export(plan_of(traced, 2), target, model=traced)
        assert "--to fsdp" in refused.value.fix and "config.json" in refused.value.fix


def test_a_plan_of_another_chain_is_refused(traced):
    shorter = replace(traced, layers=traced.layers[:-1])
    with pytest.raises(SpecError) as refused:
        api.export(plan_of(shorter, 2), "fsdp", model=traced)
    assert refused.value.key == "groups.stages.layers"


def test_the_command_takes_a_factory(tmp_path):
    from click.testing import CliRunner

    from foreshard.cli.export import command

    source = tmp_path / "net.py"
    source.write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.empty(1, 4)\n"
    )
    module = api.trace(f"{source}:net", precision="fp32")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(module, 2).to_dict()))
    made = CliRunner().invoke(command, [str(path), f"{source}:net", "--to", "fsdp", "-o", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert "('0',)" in (tmp_path / "parallel.py").read_text()
