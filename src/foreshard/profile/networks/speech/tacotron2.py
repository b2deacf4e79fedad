"""Tacotron 2: Shen et al. 2017 (arXiv 1712.05884).

The shapes are those of NVIDIA's DeepLearningExamples, which Lambda's benchmark runs on LJSpeech: batches that
are padded to their longest clip.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

MELS = 80
FRAMES = 870
"""Of the longest clip of LJSpeech: 10.1 s of 22,050 Hz at 256 samples a frame. Batches of 48 and more have
one nearly as long (K. Ito, L. Johnson, The LJ Speech Dataset, 2017)."""
CHARACTERS = 180
"""Of the longest text; the 625 to 2,500 clips of the benchmark have up to 175 to 186."""
_SYMBOLS = 148
_TEXT, _HIDDEN, _PRENET, _ATTENTION = 512, 1024, 256, 128
_FILTERS, _LOOK = 32, 31  # of the attention's past: filters, and positions that they see
_KERNEL = 5


def _normed(inside: int, outside: int) -> nn.Sequential:
    convolution = nn.Conv1d(inside, outside, _KERNEL, padding=_KERNEL // 2)
    return nn.Sequential(convolution, nn.BatchNorm1d(outside))


class _Encoder(nn.Module):
    """Characters to vectors: three convolutions and a recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_SYMBOLS, _TEXT)
        self.convolutions = nn.ModuleList(_normed(_TEXT, _TEXT) for _ in range(3))
        self.recurrent = nn.LSTM(_TEXT, _TEXT // 2, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor) -> Tensor:
        """Return vectors of shape (samples, characters, 512)."""
        seen = self.words(text).transpose(1, 2)
        for convolution in self.convolutions:
            seen = functional.dropout(functional.relu(convolution(seen)), 0.5, self.training)
        out: Tensor = self.recurrent(seen.transpose(1, 2))[0]
        return out


class _Attention(nn.Module):
    """Which character comes next, from what was attended to before (arXiv 1506.07503)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_HIDDEN, _ATTENTION, bias=False)
        self.memory = nn.Linear(_TEXT, _ATTENTION, bias=False)
        self.score = nn.Linear(_ATTENTION, 1, bias=False)
        self.past = nn.Conv1d(2, _FILTERS, _LOOK, padding=_LOOK // 2, bias=False)
        self.past_out = nn.Linear(_FILTERS, _ATTENTION, bias=False)

    def forward(self, hidden: Tensor, keys: Tensor, past: Tensor, padding: Tensor) -> Tensor:
        """Return weights of shape (samples, characters)."""
        seen = self.past_out(self.past(past).transpose(1, 2))
        energies = self.score(torch.tanh(self.query(hidden.unsqueeze(1)) + seen + keys)).squeeze(2)
        return functional.softmax(energies.masked_fill(padding, -torch.inf), 1)


class _Decoder(nn.Module):
    """One frame of the spectrum after the other, each from the true one before it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (MELS, _PRENET, _PRENET)
        self.prenet = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.attending = nn.LSTMCell(_PRENET + _TEXT, _HIDDEN)
        self.attention = _Attention()
        self.making = nn.LSTMCell(_HIDDEN + _TEXT, _HIDDEN)
        self.frame = nn.Linear(_HIDDEN + _TEXT, MELS)
        self.gate = nn.Linear(_HIDDEN + _TEXT, 1)

    def forward(self, memory: Tensor, padding: Tensor, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the spectrum and, for each frame, whether it is the last."""
        samples, characters, _ = memory.shape
        before = functional.pad(spectrum[:, :, :-1], (1, 0)).permute(2, 0, 1)
        for linear in self.prenet:
            before = functional.dropout(functional.relu(linear(before)), 0.5)
        keys = self.attention.memory(memory)
        attending = making = tuple(memory.new_zeros(samples, _HIDDEN) for _ in range(2))
        context = memory.new_zeros(samples, _TEXT)
        weights = memory.new_zeros(samples, characters)
        all_weights = memory.new_zeros(samples, characters)
        frames, gates = [], []
        for frame in before:
            attending = self.attending(torch.cat((frame, context), 1), attending)
            attending = (functional.dropout(attending[0], 0.1, self.training), attending[1])
            past = torch.cat((weights.unsqueeze(1), all_weights.unsqueeze(1)), 1)
            weights = self.attention(attending[0], keys, past, padding)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            all_weights = all_weights + weights
            making = self.making(torch.cat((attending[0], context), 1), making)
            making = (functional.dropout(making[0], 0.1, self.training), making[1])
            both = torch.cat((making[0], context), 1)
            frames.append(self.frame(both))
            gates.append(self.gate(both))
        return torch.stack(frames).permute(1, 2, 0).contiguous(), torch.cat(gates, 1)


class Tacotron2(nn.Module):
    """Text to a spectrum, and how far it is from the true one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _Encoder(), _Decoder()
        sizes = (MELS, _TEXT, _TEXT, _TEXT, _TEXT, MELS)
        self.postnet = nn.ModuleList(_normed(a, b) for a, b in pairwise(sizes))

    def forward(self, text: Tensor, padding: Tensor, spectrum: Tensor, ends: Tensor) -> Tensor:
        """Return the loss.

        Parameters
        ----------
        text : tensor of int, shape (samples, characters)
        padding : tensor of bool, shape (samples, characters)
        spectrum : tensor of shape (samples, 80, frames)
        ends : tensor of shape (samples, frames)
            1 from the last frame on.
        """
        made, gates = self.decoder(self.encoder(text), padding, spectrum)
        rest = made
        for i, convolution in enumerate(self.postnet):
            rest = convolution(rest)
            rest = torch.tanh(rest) if i < len(self.postnet) - 1 else rest
            rest = functional.dropout(rest, 0.5, self.training)
        apart = functional.mse_loss(made, spectrum) + functional.mse_loss(made + rest, spectrum)
        return apart + functional.binary_cross_entropy_with_logits(gates, ends)


def tacotron2(frames: int = FRAMES, characters: int = CHARACTERS) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return Tacotron 2 and an example of so many frames and characters."""
    text = torch.zeros(1, characters)
    spectrum = torch.empty(1, MELS, frames)
    return Tacotron2(), (text.long(), text.bool(), spectrum, torch.empty(1, frames))
