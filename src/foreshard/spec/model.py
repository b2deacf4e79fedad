"""What is trained: a `Model` is an ordered list of transformer `Block`s between an embedding and a head.

Sizes are integers as written in a model card. FLOP = 2 per multiply-add. Layers are numbered as in a plan:
0 is the embedding, 1..L the blocks, L+1 the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.block import WIDE_GROUPS, Block

__all__ = ["LORA_TARGETS", "ROUTERS", "Block", "Model", "decoder", "freeze", "kept_wide", "lora"]

ROUTERS = ("softmax", "softmax_all", "sigmoid")
"""Weights of experts: softmax of the chosen ones or of all, or sigmoids that are made to sum to 1.

By sigmoids experts are chosen with a learned correction of their load (arXiv 2408.15664).
"""
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


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
    # what a run needs beyond sizes; None where the configuration does not say
    rope_base: float | None = None
    rope_scaling: tuple[float | str, ...] | None = None  # kind, factor; of yarn also its mscales
    rope_interleaved: bool = False  # neighbouring channels turn together, not the halves of a head
    norm_eps: float | None = None
    scaled: bool = False  # fixed factors on embeddings, residuals, attention scores or logits
    activation: str = ""  # as transformers names it; that of most: SiLU of gated MLPs, GELU of others
    router: tuple[str, float] | None = None  # one of ROUTERS, and a factor on the weights of experts

    def __repr__(self) -> str:
        """Return name and sizes on one line; fields and `block_kinds` have the rest."""
        layers = " + ".join(
            f"{count} blocks" + (f" of {block.num_experts} experts" if block.num_experts else "")
            for block, count in self.block_kinds()
        )
        return f"<Model {self.name}: {layers}, hidden {self.hidden:,}, {self.num_params:,} parameters>"

    @property
    def rope_percent(self) -> float:
        """Share of a head's channels that rotary positions turn, 1 of a model without any.

        Of latent attention also 1: it has rotary channels of its own, all of which turn.
        """
        turning = (block for block in self.blocks if block.num_heads and block.rotary and not block.kv_lora)
        return next((block.rotary for block in turning), 1.0)

    @property
    def num_layers(self) -> int:
        """Number of blocks L."""
        return len(self.blocks)

    def block_kinds(self) -> tuple[tuple[Block, int], ...]:
        """Return each distinct block with its count, in order of first appearance."""
        # By identity first: hashing a block is slow, and most are one object.
        same = Counter(map(id, self.blocks))
        counts: dict[Block, int] = {}
        for block in dict(zip(map(id, self.blocks), self.blocks, strict=True)).values():
            counts[block] = counts.get(block, 0) + same[id(block)]
        return tuple(counts.items())

    def block_order(self) -> tuple[int, ...]:
        """Return the kind of each block, by its place in `block_kinds`."""
        kinds = {block: i for i, (block, _) in enumerate(self.block_kinds())}
        distinct = {id(block): block for block in self.blocks}  # hashing a block is slow
        place = {key: kinds[block] for key, block in distinct.items()}
        return tuple(place[id(block)] for block in self.blocks)

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
        weights cost four, and nothing backward below the first trainable layer. In an encoder-decoder a token
        stands for one position of each side. With `causal` only what a causal kernel needs counts; without
        it, as in MFU, all pairs.
        """
        flops = self.forward_flops_per_token(seq_len, causal)
        gradient_flows = not self.embedding_frozen
        known: dict[tuple[int, bool], float] = {}  # most blocks are one object
        for block in self.blocks:
            case = (id(block), gradient_flows)
            if case not in known:
                known[case] = block.backward_flops(seq_len, causal, gradient_flows)
            flops += known[case]
            gradient_flows = gradient_flows or block.trainable_params > 0
        head = self._head_flops(seq_len) - 2 * self.embedding_matmul_params
        flops += head * (gradient_flows + (not self.head_frozen))
        flops += (
            2 * self.embedding_matmul_params * (not self.embedding_frozen)
        )  # no gradient of the input data
        return flops + 2 * self._next_token_flops(seq_len, causal)


def kept_wide(model: Model, first: int, last: int, groups: tuple[str, ...] = ()) -> Model:
    """Return the model with products that stay in 16 bit where those of the run are narrower.

    All of the `first` and `last` layers, and of the others these `groups` (`WIDE_GROUPS`).

    Source
    ------
    Megatron-LM d98e8a6 core/fp4_utils.py get_fp4_context and fp8_utils.py is_first_last_bf16_layer.
    """
    known: dict[tuple[int, bool], Block] = {}  # most blocks are one object, and stay so
    blocks = []
    for place, block in enumerate(model.blocks):
        whole = place < first or place >= model.num_layers - last
        if (id(block), whole) not in known:
            known[id(block), whole] = replace(block, wide=WIDE_GROUPS if whole else groups)
        blocks.append(known[id(block), whole])
    return replace(model, blocks=tuple(blocks))


def lora(model: Model, rank: int, targets: Iterable[str] = ("q", "k", "v", "o")) -> Model:
    """Return the model with all weights frozen and a low-rank adapter on each target matrix of each block."""
    targets = tuple(targets)
    unknown = sorted(set(targets) - set(LORA_TARGETS))
    if unknown or not targets:
        what = f"unknown LoRA target {unknown[0]!r}" if unknown else "no LoRA target"
        rule = f"Targets are {', '.join(LORA_TARGETS)}"
        raise SpecError(
            what,
            key="lora_targets",
            value=unknown[0] if unknown else None,
            rule=rule,
            fix="Name some of them",
        )
    if rank < 1:
        raise SpecError(
            f"LoRA rank {rank}", key="lora_rank", value=rank, rule="The rank is at least 1", fix="Use 16"
        )
    for block, _ in model.block_kinds():
        on_mlp = {"gate", "up", "down"} & set(targets)
        if block.kv_lora or block.scan_state or (on_mlp and not block.ffn) or block.cross_attention:
            what = f"LoRA on {model.name} is not modelled"
            rule = "Adapters are modelled on plain attention and dense MLPs"
            raise SpecError(what, key="lora_targets", value=",".join(targets), rule=rule)
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
            f"no layer {outside[0]}",
            key="layers",
            value=outside[0],
            rule=f"Layers are 0 to {last}",
            fix="Leave it out",
        )
    if model.tied_embeddings and (0 in chosen) != (last in chosen):
        what = "embedding and head are one matrix"
        rule = "Tied weights are frozen together"
        fix = f"Give both 0 and {last}, or neither"
        raise SpecError(what, key="layers", value=sorted(chosen)[0], rule=rule, fix=fix)
    blocks = tuple(
        replace(block, frozen=True) if i in chosen else block for i, block in enumerate(model.blocks, start=1)
    )
    return replace(model, blocks=blocks, embedding_frozen=0 in chosen, head_frozen=last in chosen)


def decoder(
    *,
    blocks: tuple[Block, ...],
    vocab: int,
    learned_positions: int = 0,
    embedding_dim: int = 0,
    embedding_norm: bool = False,
    final_norm: bool = True,
    head_bias: bool = False,
    **fields: Any,
) -> Model:
    """Return a decoder-only language model around these blocks.

    `embedding_dim` differs from the hidden size where the token table is projected (OPT-350M);
    `embedding_norm` is a norm right after the table (BLOOM); `fields` are others of `Model`.
    """
    first = blocks[0]
    width = embedding_dim or first.hidden
    projection = (width != first.hidden) * width * first.hidden
    norm, positions = first.norm_params * first.hidden, learned_positions * first.hidden
    return Model(
        **fields,
        blocks=blocks,
        hidden=first.hidden,
        vocab=vocab,
        learned_positions=learned_positions,
        embedding_dim=embedding_dim,
        embedding_params=vocab * width + projection + positions + embedding_norm * norm,
        embedding_matmul_params=projection,
        head_params=vocab * (width + head_bias) + projection,
        head_matmul_params=vocab * width + projection,
        final_norm_params=final_norm * norm,
    )
