"""What is trained: a `Model` is an ordered list of transformer `Block`s between an embedding and a head.

Sizes are integers as written in a model card. Methods are arithmetic only, so that a batch engine may put
numpy arrays in the same fields. FLOP = 2 per multiply-add. Layers are numbered as in a plan: 0 is the
embedding, 1..L the blocks, L+1 the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from foreshard.errors import SpecError

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


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
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # total width of the shared experts
    shared_gate: bool = False  # the shared expert is scaled by a learned scalar
    window: int = 0  # 0: full attention
    causal: bool = True
    cross_attention: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    rope_head_dim: int = 0
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
        one = out + (self.kv_lora == 0) * plain + (self.kv_lora > 0) * latent
        return one * (1 + self.cross_attention)

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
        return self._mlp_params(self.expert_ffn)

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
    def matmul_params(self) -> int:
        """Active weights that are multiplied with every token: no biases, norms or adapters."""
        return (
            self.attention_matmul_params
            + self._mlp_matmul_params(self.ffn + self.shared_ffn + self.top_k * self.expert_ffn)
            + self.num_experts * self.hidden
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
        return 2 * self.num_heads * (self.head_dim + self.value_head_dim) * keys

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An embedding, L blocks and a head, with the counts that training needs.

    `embedding_params` and `head_params` are all parameters layer 0 and layer L+1 hold on their own device;
    a tied matrix is in both and `num_params` counts it once. The modules that predict further tokens
    (`num_next_token`) are work of a training step but, as in transformers, not part of `num_params`.
    """

    name: str
    blocks: tuple[Block, ...]
    hidden: int
    vocab: int
    tied_embeddings: bool
    max_seq_len: int
    embedding_params: int
    head_params: int
    final_norm_params: int
    head_matmul_params: int
    embedding_matmul_params: int = 0
    learned_positions: int = 0
    embedding_dim: int = 0  # width of the token table where it is not `hidden`
    extra_params: int = 0  # next to the head and outside the loss: poolers
    head_rows: int = 0  # head outputs per sequence; 0: one per token
    kind: str = "decoder"  # decoder | encoder | encoder-decoder | vision
    num_next_token: int = 0
    embedding_frozen: bool = False
    head_frozen: bool = False
    source: str = ""
    assumptions: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of blocks L."""
        return len(self.blocks)

    def block_kinds(self) -> tuple[tuple[Block, int], ...]:
        """Return each distinct block with its count, in order of first appearance."""
        counts: dict[Block, int] = {}
        for block in self.blocks:
            counts[block] = counts.get(block, 0) + 1
        return tuple(counts.items())

    @property
    def tied_params(self) -> int:
        """Parameters held by embedding and head alike."""
        return self.tied_embeddings * self.vocab * (self.embedding_dim or self.hidden)

    @property
    def _outer_params(self) -> int:
        ends = self.embedding_params + self.head_params - self.tied_params
        return ends + self.final_norm_params + self.extra_params

    @property
    def num_params(self) -> int:
        """All parameters, tied ones once: what transformers counts."""
        return self._outer_params + sum(n * block.num_params for block, n in self.block_kinds())

    @property
    def active_params(self) -> int:
        """Parameters one token meets: `num_params` less the experts it is not routed to."""
        return self._outer_params + sum(n * block.active_params for block, n in self.block_kinds())

    @property
    def trainable_params(self) -> int:
        """Parameters that get a gradient."""
        embedding = (not self.embedding_frozen) * self.embedding_params
        head = self.head_params + self.final_norm_params + self.extra_params
        tied = (not self.embedding_frozen) * self.tied_params
        blocks = sum(n * block.trainable_params for block, n in self.block_kinds())
        return embedding + (not self.head_frozen) * head - tied * (not self.head_frozen) + blocks

    @property
    def next_token_params(self) -> int:
        """Parameters of the modules that predict further tokens: two norms, a 2h x h projection, a block.

        Source
        ------
        DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2: embedding and head are shared.
        """
        last = self.blocks[-1]
        module = last.num_params + 2 * self.hidden**2 + 3 * last.norm_params * self.hidden
        return self.num_next_token * module

    def forward_flops_per_token(self, seq_len: int, causal: bool) -> float:
        """Return the forward FLOPs per token, head and next-token modules included."""
        blocks = sum(n * block.forward_flops(seq_len, causal) for block, n in self.block_kinds())
        return blocks + self._head_flops(seq_len) + self._next_token_flops(seq_len, causal)

    def _head_flops(self, seq_len: int) -> float:
        rows = self.head_rows / seq_len if self.head_rows else 1.0
        return 2 * (self.head_matmul_params * rows + self.embedding_matmul_params)

    def _next_token_flops(self, seq_len: int, causal: bool) -> float:
        block = self.blocks[-1].forward_flops(seq_len, causal)
        return self.num_next_token * (block + 2 * (2 * self.hidden**2 + self.head_matmul_params))

    def flops_per_token(self, seq_len: int, causal: bool) -> float:
        """Return the model FLOPs of forward and backward per token of a sequence.

        Six per active matrix parameter (head included, embedding look-up not) plus the attention products:
        12*L*h*s for full attention, half of it when causal; windows count only what they reach. Frozen
        weights cost four, and nothing backward below the first trainable layer. In an encoder-decoder a
        token stands for one position of each side.

        Parameters
        ----------
        seq_len : int, tokens
        causal : bool
            Count what a causal kernel needs; False is the convention of MFU.

        Returns
        -------
        float, FLOPs per token
        """
        flops = self.forward_flops_per_token(seq_len, causal)
        gradient_flows = not self.embedding_frozen
        for block in self.blocks:
            flops += block.backward_flops(seq_len, causal, gradient_flows)
            gradient_flows = gradient_flows or block.trainable_params > 0
        head = self._head_flops(seq_len) - 2 * self.embedding_matmul_params
        flops += head * (gradient_flows + (not self.head_frozen))
        flops += (
            2 * self.embedding_matmul_params * (not self.embedding_frozen)
        )  # no gradient of the input data
        return flops + 2 * self._next_token_flops(seq_len, causal)


def lora(model: Model, rank: int, targets: Iterable[str] = ("q", "k", "v", "o")) -> Model:
    """Return the model with all weights frozen and a low-rank adapter on each target matrix of each block.

    Parameters
    ----------
    model : Model
    rank : int, >= 1
    targets : iterable of q, k, v, o, gate, up, down
    """
    targets = tuple(targets)
    unknown = sorted(set(targets) - set(LORA_TARGETS))
    if unknown or not targets:
        raise SpecError(
            f"unknown LoRA target {unknown[0]!r}" if unknown else "no LoRA target",
            key="lora_targets",
            value=unknown[0] if unknown else None,
            rule=f"Targets are {', '.join(LORA_TARGETS)}",
        )
    if rank < 1:
        raise SpecError(f"LoRA rank {rank}", key="lora_rank", value=rank, rule="The rank is at least 1")
    for block, _ in model.block_kinds():
        on_mlp = {"gate", "up", "down"} & set(targets)
        if block.kv_lora or (on_mlp and not block.ffn) or block.cross_attention:
            raise SpecError(
                f"LoRA on {model.name} is not modelled",
                key="lora_targets",
                value=",".join(targets),
                rule="Adapters are modelled on plain attention and dense MLPs",
            )
    adapted = {
        block: replace(block, lora_rank=rank, lora_targets=targets, frozen=True)
        for block, _ in model.block_kinds()
    }
    return replace(
        model,
        name=f"{model.name} LoRA r{rank}",
        blocks=tuple(adapted[block] for block in model.blocks),
        embedding_frozen=True,
        head_frozen=True,
        num_next_token=0,
    )


def freeze(model: Model, layers: Iterable[int]) -> Model:
    """Return the model with these layers frozen: 0 is the embedding, 1..L the blocks, L+1 the head."""
    chosen = set(layers)
    last = model.num_layers + 1
    outside = sorted(layer for layer in chosen if not 0 <= layer <= last)
    if outside:
        raise SpecError(
            f"no layer {outside[0]}", key="layers", value=outside[0], rule=f"Layers are 0 to {last}"
        )
    if model.tied_embeddings and (0 in chosen) != (last in chosen):
        raise SpecError(
            "embedding and head are one matrix",
            key="layers",
            value=sorted(chosen)[0],
            rule="Tied weights are frozen together",
            fix=f"Give both 0 and {last}, or neither",
        )
    blocks = tuple(
        replace(block, frozen=True) if i in chosen else block for i, block in enumerate(model.blocks, start=1)
    )
    return replace(model, blocks=blocks, embedding_frozen=0 in chosen, head_frozen=last in chosen)


def slice_layers(model: Model, num_layers: int) -> Model:
    """Return the model with its first `num_layers` blocks only, as proxies and layer cuts have it."""
    if not 1 <= num_layers <= model.num_layers:
        raise SpecError(
            f"cannot keep {num_layers} of {model.num_layers} layers",
            key="n_layers",
            value=num_layers,
            rule="A slice keeps between 1 and all layers",
        )
    return replace(model, name=f"{model.name} ({num_layers} layers)", blocks=model.blocks[:num_layers])


def decoder(
    *,
    name: str,
    blocks: tuple[Block, ...],
    vocab: int,
    tied_embeddings: bool,
    max_seq_len: int,
    learned_positions: int = 0,
    embedding_dim: int = 0,
    embedding_norm: bool = False,
    final_norm: bool = True,
    num_next_token: int = 0,
    source: str = "",
    assumptions: tuple[str, ...] = (),
) -> Model:
    """Return a decoder-only language model around these blocks.

    `embedding_dim` differs from the hidden size where the token table is projected (OPT-350M);
    `embedding_norm` is a norm right after the table (BLOOM).
    """
    first = blocks[0]
    width = embedding_dim or first.hidden
    projection = (width != first.hidden) * width * first.hidden
    norm = first.norm_params * first.hidden
    return Model(
        name=name,
        blocks=blocks,
        hidden=first.hidden,
        vocab=vocab,
        tied_embeddings=tied_embeddings,
        max_seq_len=max_seq_len,
        learned_positions=learned_positions,
        embedding_dim=embedding_dim,
        embedding_params=vocab * width
        + projection
        + learned_positions * first.hidden
        + embedding_norm * norm,
        embedding_matmul_params=projection,
        head_params=vocab * width + projection,
        head_matmul_params=vocab * width + projection,
        final_norm_params=final_norm * norm,
        num_next_token=num_next_token,
        source=source,
        assumptions=assumptions,
    )
