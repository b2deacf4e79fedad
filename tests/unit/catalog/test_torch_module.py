import pytest

torch = pytest.importorskip("torch", reason="torch is in the extra `run`, not in `test`")

from foreshard.catalog.models import load_model
from foreshard.catalog.torch_module import model_from_module
from foreshard.errors import SpecError

nn = torch.nn


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, bias):
        super().__init__()
        self.n_heads = heads
        width = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=bias)
        self.k = nn.Linear(hidden, kv_heads * width, bias=bias)
        self.v = nn.Linear(hidden, kv_heads * width, bias=bias)
        self.o = nn.Linear(hidden, hidden, bias=bias)


class Fused(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.n_head = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)


class Gated(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(64), nn.RMSNorm(64)
        self.attention, self.mlp = Attention(64, 8, 2, False), Gated(64, 160)


class GptBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.attn = Fused(64, 4)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.max_seq_len = 128
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, 1000, bias=False)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        self.h = nn.ModuleList(GptBlock() for _ in range(2))
        self.ln_f = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 1000, bias=False)
        self.lm_head.weight = self.wte.weight


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_llama_written_by_hand():
    module = Llama()
    model = model_from_module(module)
    block = model.blocks[0]
    assert (model.num_layers, model.vocab, model.max_seq_len, model.tied_embeddings) == (3, 1000, 128, False)
    assert (block.num_heads, block.num_kv_heads, block.head_dim, block.ffn, block.gated) == (
        8,
        2,
        8,
        160,
        True,
    )
    assert (block.norm_params, block.qkv_bias, block.mlp_bias) == (1, False, False)
    assert model.num_params == count(module)


def test_gpt_with_fused_projection_positions_and_tied_head():
    module = Gpt()
    model = model_from_module(module)
    block = model.blocks[0]
    assert (block.num_heads, block.num_kv_heads, block.ffn, block.gated) == (4, 4, 256, False)
    assert (block.norm_params, block.qkv_bias, block.proj_bias, block.mlp_bias) == (2, True, True, True)
    assert (model.learned_positions, model.max_seq_len, model.tied_embeddings) == (32, 32, True)
    assert model.num_params == count(module)


def test_matrix_products_match_the_counter_of_torch():
    """FLOPs of the linear layers, against torch's own counter on a real forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    module = Llama()
    model = model_from_module(module)
    tokens = torch.randn(5, 64)
    with FlopCounterMode(display=False) as counter:
        for block in module.layers:
            for linear in (m for m in block.modules() if isinstance(m, nn.Linear)):
                linear(torch.randn(5, linear.in_features))
        module.head(tokens)
    attention = sum(block.attention_flops(128, False) for block in model.blocks)
    assert counter.get_total_flops() == 5 * (model.forward_flops_per_token(128, False) - attention)


def test_encoder_layers_of_torch_itself():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 50)

    module = Encoder()
    model = model_from_module(module)
    assert (model.blocks[0].num_heads, model.blocks[0].ffn, model.num_layers) == (4, 96, 2)
    assert model.num_params == count(module)


def test_what_is_not_a_plain_stack_is_refused_with_the_remainder():
    with pytest.raises(SpecError, match="no stack of blocks"):
        model_from_module(nn.Sequential(nn.Linear(4, 4)))
    odd = Gpt()
    odd.h[0].extra = nn.Parameter(torch.zeros(7))
    with pytest.raises(SpecError, match="parameters of a block are not recognised"):
        model_from_module(odd)
    more = Gpt()
    more.adapter = nn.Linear(64, 8)
    with pytest.raises(SpecError, match="not recognised"):
        model_from_module(more)


def test_a_factory_may_return_a_module_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "class Attention(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.num_heads = 4\n"
        "        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)\n"
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.attention = Attention()\n"
        "        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)\n"
        "class Decoder(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.tokens = nn.Embedding(50, 32)\n"
        "        self.layers = nn.ModuleList(Layer() for _ in range(3))\n"
        "        self.head = nn.Linear(32, 50, bias=False)\n"
        "def make():\n"
        "    return Decoder()\n"
        "def other():\n"
        "    return nn.Linear(2, 2)\n"
    )
    model = load_model(f"{path}:make")
    assert (model.num_layers, model.blocks[0].num_heads, model.vocab) == (3, 4, 50)
    assert model.num_params == 2 * 50 * 32 + 3 * (4 * 32 * 32 + 2 * 32 * 128)
    with pytest.raises(SpecError, match="no stack of blocks"):
        load_model(f"{path}:other")
