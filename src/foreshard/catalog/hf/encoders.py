"""Models with an encoder: bert and its like (masked language models), t5 and bart, vit (image classifier)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreshard.catalog.hf.decoders import attention_sizes
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.block import heads_of
from foreshard.spec.model import Block, Model


def _model(reader: Reader, blocks: tuple[Block, ...], *assumptions: str, **counts: Any) -> Model:
    counts |= {"name": reader.name, "source": reader.file or "", "hidden": blocks[0].hidden}
    return Model(**counts, blocks=blocks, assumptions=(*reader.assumptions, *assumptions))


_WIDTHS = {"hidden": ["hidden_size", "dim"], "num_heads": ["num_attention_heads", "n_heads"]}


def _encoder(reader: Reader, *, qkv_bias: bool = True, dropout: float) -> tuple[Block, ...]:
    """Return the blocks of an encoder whose attention sees the whole sequence."""
    ffn = reader.size("intermediate_size", "hidden_dim")
    block = Block(
        **attention_sizes(reader, _WIDTHS),
        ffn=ffn,
        gated=False,
        norm_params=2,
        rotary=0.0,
        qkv_bias=qkv_bias,
        proj_bias=True,
        mlp_bias=True,
        causal=False,
        dropout=dropout,
    )
    return (block,) * reader.layers("num_hidden_layers", "n_layers")


def bert(
    reader: Reader, *, token_types: int = 2, spare_positions: int = 0, second_bias: bool = True
) -> Model:
    """BERT with the masked-language-model head: a dense layer, a norm, and the tied table with a bias.

    Parameters
    ----------
    reader : Reader
    token_types : int
        Rows of that table where the file does not say; 0 of a model without it.
    spare_positions : int
        Rows of the table of positions that no token uses.
    second_bias : bool
        Whether transformers keeps a second bias when the table is not tied.
    """
    blocks = _encoder(reader, dropout=reader.fraction("hidden_dropout_prob", "dropout", default=0.1))
    hidden, vocab = blocks[0].hidden, reader.size("vocab_size")
    positions = reader.positions("max_position_embeddings")
    tied = reader.flag("tie_word_embeddings", True)
    bias = vocab * (1 + (second_bias and not tied))
    types = reader.size("type_vocab_size", default=token_types) if token_types else 0
    return _model(
        reader,
        blocks,
        vocab=vocab,
        tied_embeddings=tied,
        max_seq_len=positions - spare_positions,
        learned_positions=positions,
        embedding_params=(vocab + positions + types) * hidden + 2 * hidden,
        head_params=vocab * hidden + bias + hidden * hidden + hidden + 2 * hidden,
        head_matmul_params=vocab * hidden + hidden * hidden,
        final_norm_params=0,
        kind="encoder",
    )


def modernbert(reader: Reader) -> Model:
    """ModernBERT with its masked-language-model head: gated MLPs, windows in two of three layers."""
    layers = reader.layers("num_hidden_layers")
    every = reader.layers("global_attn_every_n_layers", default=3)
    window = reader.size("local_attention", default=128)
    bias, head_bias = reader.flag("norm_bias", False), reader.flag("classifier_bias", False)
    attention = reader.flag("attention_bias", False)
    block = Block(
        **attention_sizes(reader, _WIDTHS),
        ffn=reader.size("intermediate_size"),
        gated=True,
        norm_params=1 + bias,
        qkv_bias=attention,
        proj_bias=attention,
        mlp_bias=reader.flag("mlp_bias", False),
        causal=False,
    )
    reach = reader.layer_windows(layers, window) or [window * (layer % every > 0) for layer in range(layers)]
    kinds = {width: replace(block, window=width) for width in set(reach)}
    # the norm before the first attention is that of the embedding
    blocks = (replace(kinds[reach[0]], num_norms=1), *(kinds[width] for width in reach[1:]))
    hidden, vocab, norm = block.hidden, reader.size("vocab_size"), block.norm_params * block.hidden
    more = vocab * reader.flag("decoder_bias", True) + hidden * (hidden + head_bias) + norm
    return _model(
        reader,
        blocks,
        vocab=vocab,
        tied_embeddings=reader.flag("tie_word_embeddings", True),
        max_seq_len=reader.positions("max_position_embeddings"),
        embedding_params=vocab * hidden + norm,
        head_params=vocab * hidden + more,
        head_matmul_params=vocab * hidden + hidden * hidden,
        final_norm_params=norm,
        kind="encoder",
    )


def bart(reader: Reader) -> Model:
    """BART: blocks of the encoder, then of the decoder, each stack with learned positions and a norm."""
    hidden, vocab = reader.size("d_model", "hidden_size"), reader.size("vocab_size")
    stacks = []
    for side in ("encoder", "decoder"):
        heads = reader.heads(hidden, f"{side}_attention_heads")
        decodes = side == "decoder"
        block = Block(
            hidden=hidden,
            **heads_of(heads, hidden // heads),
            ffn=reader.size(f"{side}_ffn_dim"),
            gated=False,
            norm_params=2,
            num_norms=2 + decodes,
            rotary=0.0,
            qkv_bias=True,
            proj_bias=True,
            mlp_bias=True,
            causal=decodes,
            cross_attention=decodes,
            dropout=reader.fraction("dropout", default=0.1),
        )
        stacks += [block] * reader.layers(f"{side}_layers")
    positions = reader.positions("max_position_embeddings", default=1024)
    rows = positions + 2  # two spare rows, as in OPT
    tied = reader.flag("tie_word_embeddings", True)
    tables = 1 if tied else 3  # that of both sides, which nothing reads then, and one of each
    return _model(
        reader,
        tuple(stacks),
        "encoder and decoder sequences are equally long",
        vocab=vocab,
        tied_embeddings=tied,
        max_seq_len=positions,
        learned_positions=rows,
        embedding_params=tables * vocab * hidden + 2 * rows * hidden + 4 * hidden,
        head_params=vocab * hidden,
        head_matmul_params=vocab * hidden,
        final_norm_params=0,
        kind="encoder-decoder",
    )


def t5(reader: Reader) -> Model:
    """T5: blocks of the encoder, then of the decoder; relative positions in the first block of each."""
    hidden, vocab = reader.size("d_model", "hidden_size"), reader.size("vocab_size")
    heads, width = reader.size("num_heads", "num_attention_heads"), reader.size("d_kv")
    activation = reader.text("feed_forward_proj", default="relu")
    encoder = Block(
        hidden=hidden,
        **heads_of(heads, width),
        ffn=reader.size("d_ff"),
        gated=activation.startswith("gated"),
        # transformers configuration_t5.py: gated-gelu is gelu_new
        spelled_activation="gelu_new" if activation in ("gated-gelu", "gelu_new", "gated-gelu_new") else "",
        relu=activation == "relu",
        rotary=0.0,
        causal=False,
        dropout=reader.fraction("dropout_rate", default=0.1),
    )
    decoder = replace(encoder, causal=True, cross_attention=True, num_norms=3)
    table = reader.size("relative_attention_num_buckets", default=32) * heads
    layers = reader.layers("num_layers", "num_hidden_layers")
    if not reader.flag("tie_word_embeddings", True):
        reader.assumptions.append("embedding and head are tied, as transformers 5 does with every T5")
    decoder_layers = reader.layers("num_decoder_layers", default=layers)
    blocks = (
        replace(encoder, other_params=table),
        *(encoder,) * (layers - 1),
        replace(decoder, other_params=table),
        *(decoder,) * (decoder_layers - 1),
    )
    return _model(
        reader,
        blocks,
        "encoder and decoder sequences are equally long",
        vocab=vocab,
        tied_embeddings=True,
        max_seq_len=reader.positions("n_positions", default=512),
        embedding_params=vocab * hidden,
        head_params=vocab * hidden,
        head_matmul_params=vocab * hidden,
        final_norm_params=2 * hidden,
        kind="encoder-decoder",
    )


def vit(reader: Reader) -> Model:
    """ViT with a linear classifier on the class token."""
    side, patch = reader.size("image_size"), reader.size("patch_size")
    patches = (side // patch) ** 2
    if not patches:
        raise reader.error("patch_size", patch, f"patches of {patch} pixels", f"The image has {side}")
    bias, dropout = reader.flag("qkv_bias", True), reader.fraction("hidden_dropout_prob")
    blocks = _encoder(reader, qkv_bias=bias, dropout=dropout)
    hidden, labels = blocks[0].hidden, _num_labels(reader)
    projection = reader.size("num_channels", default=3) * patch * patch * hidden
    return _model(
        reader,
        blocks,
        vocab=labels,
        tied_embeddings=False,
        max_seq_len=patches + 1,
        learned_positions=patches + 1,
        embedding_params=projection + hidden + hidden + (patches + 1) * hidden,
        embedding_matmul_params=projection,
        head_params=labels * hidden + labels,
        head_matmul_params=labels * hidden,
        head_rows=1,
        final_norm_params=2 * hidden,
        kind="vision",
    )


def _num_labels(reader: Reader) -> int:
    """Return the classes: the labels listed, else num_labels, else 2 as in transformers."""
    labels = reader.nested("id2label").config
    return len(labels) or reader.size("num_labels", default=2)
