"""One transformer block: its sizes, and the parameters and FLOPs that follow from them.

Methods are arithmetic only, so that a batch engine may put numpy arrays in the fields. FLOP = 2 per
multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ACTIVATION_FORMULAS = ("", "gelu_new", "gelu_fast", "bloom", "gpt_oss", "xielu")
"""Activations that transformers spells, as it names them; the first is a kernel of torch."""

ATTENTION_CODES = ("", "eager", "capped", "sinks", "wide", "math")
"""What transformers runs for attention: a fused kernel, or operations that keep the scores.

`capped` scores go through a tanh, `sinks` get one more column and stay in 16 bit, `wide` queries and keys
are cast to 32 bit; `math` is torch's own fallback, all of it in 32 bit.
"""

NORM_CODES = ("", "kernel", "spelled")
"""How transformers runs a norm: a layer norm that only scales is a kernel, or one operation after another."""

ROUTER_CODES = ("", "wide", "exact")
"""How transformers runs a router: as other products; in 32 bit, which autocast narrows again; in 32 bit
whatever autocast says."""

NORM_PLACES = ("", "behind", "turned")
"""Where the norms of a block are: before attention and MLP; behind both, which read the residual itself; or
also on queries and keys that rotary positions have turned."""


WIDE_GROUPS = ("attention", "latent", "mlp", "experts")
"""Products that a recipe may keep in 16 bit beside narrower ones: those of attention, between the width of a
layer and that of its experts, of dense, shared and state-space MLPs, of routed experts."""


def heads_of(num_heads: int, width: int, num_kv_heads: int | None = None) -> dict[str, Any]:
    """Return the fields of a block whose heads of queries, keys and values are equally wide.

    Without `num_kv_heads` there are as many of keys and values as of queries.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    return {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": width, "value_head_dim": width}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of transformer block: attention followed by a dense or an expert MLP.

    With multi-head latent attention (`kv_lora` > 0), `head_dim` is the width of a query head with its
    rotary part, and `num_kv_heads` equals `num_heads`.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    ffn: int  # width of the dense MLP; 0 in a block that has experts only
    gated: bool  # three matrices per MLP and per expert instead of two
    spelled_activation: str = ""  # of `ACTIVATION_FORMULAS`: what transformers runs operation by operation
    relu: bool = False  # its output, which the next product reads, is all that its backward needs
    norm_code: str = ""  # of `NORM_CODES`, where `norm_params` do not tell it
    norm_place: str = ""  # of `NORM_PLACES`
    wide_norms: bool = False  # transformers scales what a norm returns in 32 bit
    fused_projections: bool = False  # transformers: one product of queries, keys and values
    fused_gate: bool = False  # transformers: one product of gate and up, of an MLP and of shared experts
    attention_code: str = ""  # of `ATTENTION_CODES`
    num_experts: int = 0
    top_k: int = 0
    expert_groups: int = 1  # equal groups of experts; a token's are in the best `top_groups` of them
    top_groups: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0  # total width of the shared experts
    shared_gate: bool = False  # the shared expert is scaled by a learned scalar
    router_code: str = ""  # of `ROUTER_CODES`
    every_expert: bool = False  # transformers: all tokens go through all experts, most of them as zeros
    window: int = 0  # 0: full attention
    causal: bool = True
    cross_attention: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    rope_head_dim: int = 0
    rotary: float = 1.0  # share of a head's channels that rotary positions turn; 0 without
    rotary_scaled: bool = False  # sines and cosines have a factor, which fused kernels do not take
    qk_norm: bool = False
    num_norms: int = 2
    norm_params: int = 1  # per channel: 1 scale, 2 scale and bias
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    router_bias: bool = False
    other_params: int = 0  # small tables without matrix products: attention sinks, relative positions
    parallel: bool = False  # attention and MLP read the same input
    dropout: float = 0.0
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    frozen: bool = False
    expert_hidden: int = 0  # width tokens are projected to before their experts; 0: hidden
    scan_heads: int = 0  # of a state-space mixer (Mamba-2), whose channels are `ffn`, with `gated`
    scan_state: int = 0
    scan_groups: int = 0
    wide: tuple[str, ...] = ()  # of `WIDE_GROUPS`: in 16 bit where products are narrower

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all keys plus all values, as the attention kernel reads them."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def attention_matmul_params(self) -> int:
        """Weights of the matrices that attention multiplies each token with, cross attention included."""
        out = self.num_heads * self.value_head_dim * self.hidden
        plain = self.hidden * (self.query_width + self.kv_width)
        query = (self.q_lora > 0) * self.q_lora * (self.hidden + self.query_width) + (
            self.q_lora == 0
        ) * self.hidden * self.query_width
        nope_and_value = self.num_heads * (self.head_dim - self.rope_head_dim + self.value_head_dim)
        latent = query + self.hidden * (self.kv_lora + self.rope_head_dim) + self.kv_lora * nope_and_value
        weights = out + (self.kv_lora == 0) * plain + (self.kv_lora > 0) * latent
        return weights * (1 + self.cross_attention)

    @property
    def attention_params(self) -> int:
        """All parameters of attention: matrices, biases, query/key norms, latent norms, sinks."""
        qkv_channels = (self.kv_lora == 0) * (self.query_width + self.kv_width) + (self.kv_lora > 0) * (
            self.q_lora + self.kv_lora + self.rope_head_dim
        )
        bias = self.qkv_bias * qkv_channels + self.proj_bias * self.hidden
        norms = self.qk_norm * 2 * self.head_dim * self.norm_params + self.q_lora + self.kv_lora
        return self.attention_matmul_params + (bias + norms) * (1 + self.cross_attention) + self.other_params

    def _mlp_matmul_params(self, width: int) -> int:
        return (2 + self.gated) * self.hidden * width

    def _mlp_params(self, width: int) -> int:
        bias = self.mlp_bias * ((1 + self.gated) * width + self.hidden) * (width > 0)
        return self._mlp_matmul_params(width) + bias

    @property
    def mlp_params(self) -> int:
        """Parameters of the dense MLP (0 in a block that has experts only)."""
        return self._mlp_params(self.ffn)

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return self._mlp_params(self.expert_ffn) * self._expert_width // self.hidden

    @property
    def _expert_width(self) -> int:
        return self.expert_hidden + (self.expert_hidden == 0) * self.hidden

    @property
    def latent_params(self) -> int:
        """Parameters of the projections between the hidden width and that of the experts."""
        return 2 * self.hidden * self.expert_hidden

    @property
    def scan_matmul_params(self) -> int:
        """Weights that make a scan's inputs, outputs and step sizes beside its channels and their gate."""
        return self.hidden * (2 * self.scan_groups * self.scan_state + self.scan_heads)

    @property
    def scan_params(self) -> int:
        """Parameters of a scan beside its channels: a convolution of 4 with bias, three per head, a norm."""
        channels = (self.scan_heads > 0) * self.ffn
        convolved = channels + 2 * self.scan_groups * self.scan_state
        return self.scan_matmul_params + 5 * convolved + 3 * self.scan_heads + channels

    @property
    def shared_params(self) -> int:
        """Parameters of all shared experts together."""
        return self._mlp_params(self.shared_ffn) + self.shared_gate * self.hidden

    @property
    def router_params(self) -> int:
        """Parameters of the router."""
        return self.num_experts * (self.hidden + self.router_bias)

    @property
    def norm_total_params(self) -> int:
        """Parameters of the norms of width `hidden`."""
        return self.num_norms * self.norm_params * self.hidden

    @property
    def lora_params(self) -> int:
        """Parameters of the low-rank adapters: rank x (inputs + outputs) per adapted matrix."""
        kv_heads = self.num_kv_heads
        shapes = {
            "q": self.hidden + self.query_width,
            "k": self.hidden + kv_heads * self.head_dim,
            "v": self.hidden + kv_heads * self.value_head_dim,
            "o": self.hidden + self.num_heads * self.value_head_dim,
            "gate": self.gated * (self.hidden + self.ffn),
            "up": self.hidden + self.ffn,
            "down": self.hidden + self.ffn,
        }
        return self.lora_rank * sum(shapes[target] for target in self.lora_targets)

    def _resident_params(self, num_experts: int) -> int:
        return (
            self.attention_params
            + self.mlp_params
            + self.shared_params
            + self.router_params
            + self.latent_params
            + self.scan_params
            + self.norm_total_params
            + num_experts * self.expert_params
        )

    @property
    def num_params(self) -> int:
        """All parameters of the block, adapters included."""
        return self._resident_params(self.num_experts) + self.lora_params

    @property
    def active_params(self) -> int:
        """Parameters one token meets: `top_k` experts instead of all."""
        return self._resident_params(self.top_k) + self.lora_params

    @property
    def trainable_params(self) -> int:
        """Parameters that get a gradient: adapters only in an adapted block, none in a frozen one."""
        return (1 - self.frozen) * self._resident_params(self.num_experts) + self.lora_params

    @property
    def wide_params(self) -> int:
        """Weights outside routed experts that products in 16 bit read."""
        mlp = self._mlp_matmul_params(self.ffn + self.shared_ffn) + self.scan_matmul_params
        groups = {"attention": self.attention_matmul_params, "latent": self.latent_params, "mlp": mlp}
        return sum(weights for name, weights in groups.items() if name in self.wide)

    @property
    def matmul_params(self) -> int:
        """Active weights that are multiplied with every token: no biases, norms or adapters."""
        return (
            self.attention_matmul_params
            + self._mlp_matmul_params(self.ffn + self.shared_ffn)
            + self.top_k * self._mlp_matmul_params(self.expert_ffn) * self._expert_width // self.hidden
            + self.num_experts * self.hidden
            + self.latent_params
            + self.scan_matmul_params
            + self.shared_gate * self.hidden
        )

    def context(self, seq_len: int, causal: bool) -> float:
        """Keys a query meets on average: the sequence or window, about half of it when causal.

        A causal window w in a sequence s leaves s*w - w^2/2 pairs; w = s gives s/2.
        """
        window = self.window + (self.window == 0) * seq_len
        window = (window + seq_len - abs(window - seq_len)) // 2  # minimum, also of arrays
        return window - (causal and self.causal) * window * window / (2 * seq_len)

    def attention_flops(self, seq_len: int, causal: bool) -> float:
        """Forward FLOPs per token of scores and weighted values (no projections)."""
        keys = self.context(seq_len, causal) + self.cross_attention * seq_len
        scan = 4 * (self.scan_heads > 0) * self.ffn * self.scan_state
        return 2 * self.num_heads * (self.head_dim + self.value_head_dim) * keys + scan

    def forward_flops(self, seq_len: int, causal: bool) -> float:
        """Forward FLOPs per token of the whole block."""
        return 2 * (self.matmul_params + self.lora_params) + self.attention_flops(seq_len, causal)

    def backward_flops(self, seq_len: int, causal: bool, input_gradient: bool = True) -> float:
        """Backward FLOPs per token.

        Trained weights cost twice their forward, frozen ones once (the gradient of their input), attention
        twice. Without anything trainable in or before the block there is no backward at all.
        """
        if not input_gradient and self.frozen and not self.lora_targets:
            return 0.0
        weights = 2 * (2 - self.frozen) * self.matmul_params + 4 * self.lora_params
        return weights + 2 * self.attention_flops(seq_len, causal)
