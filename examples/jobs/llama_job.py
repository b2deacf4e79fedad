"""A small Llama of transformers on made-up text: built from its configuration, split at its blocks."""

import os

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SEQUENCE, SAMPLES = 256, 64, 4096
WIDTH, BLOCKS = int(os.environ.get("LLAMA_WIDTH", 96)), int(os.environ.get("LLAMA_BLOCKS", 6))
DTYPE = torch.float64 if os.environ.get("LLAMA_DTYPE") == "float64" else torch.float32


class Text:
    """Words that mostly follow from the one before, in lines of different length."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        first, pace, length = torch.randint(0, VOCABULARY, (3,), generator=made).tolist()
        jumps = torch.randint(0, 2, (SEQUENCE // 2 + length % (SEQUENCE // 2) + 1,), generator=made)
        return (first + torch.arange(len(jumps)) * (1 + pace % 7) + jumps) % VOCABULARY


def model():
    """Return the model; its embedding and its head, here of one weight, are the first and the last layer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(DTYPE)


def dataset():
    """Return the lines."""
    return Text()


def collate(lines):
    """Pad lines to one length: -100 is what the loss leaves out."""
    padded = torch.full((len(lines), SEQUENCE + 1), -100)
    for row, line in zip(padded, lines, strict=True):
        row[: len(line)] = line
    return padded


def inputs(batch):
    """Return the words; what stands for the padding is never looked at by a word before it."""
    return batch[:, :-1].clamp_min(0)


def loss(output, batch):
    """Return the sum over words, and how many there are: lines count by their length."""
    target = batch[:, 1:]
    scores, words = output.flatten(0, 1), target.flatten()
    total = functional.cross_entropy(scores, words, ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


def optimizer(params):
    """Return the optimizer of some of the parameters."""
    return torch.optim.AdamW(params, lr=3e-4)
