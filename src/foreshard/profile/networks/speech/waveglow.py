"""WaveGlow: Prenger, Valle, Catanzaro 2018 (arXiv 1811.00002).

The shapes are those of NVIDIA's DeepLearningExamples, which Lambda's benchmark runs: twelve steps of flow
with 512 channels, on 8,000 samples of sound, about a third of a second at 22,050 Hz.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

MELS = 80
_GROUP = 8  # samples of sound that are channels of one position
_FLOWS, _LAYERS = 12, 8
_EARLY_EVERY, _EARLY = 4, 2  # flows after which so many channels are done
_HOP, _WINDOW = 256, 1024  # samples of a frame of the spectrum, and of its window


def _convolution(inside: int, outside: int, kernel: int = 1, dilation: int = 1) -> nn.Module:
    padding = dilation * (kernel - 1) // 2
    made: nn.Module = weight_norm(nn.Conv1d(inside, outside, kernel, dilation=dilation, padding=padding))
    return made


class _Wavenet(nn.Module):
    """Scale and shift of one half of the channels, from the other half and the spectrum."""

    def __init__(self, half: int, channels: int) -> None:
        super().__init__()
        wide, last = 2 * channels, _LAYERS - 1
        self.channels = channels
        self.start = _convolution(half, channels)
        self.dilated = nn.ModuleList(_convolution(channels, wide, 3, 2**layer) for layer in range(_LAYERS))
        self.spectra = nn.ModuleList(_convolution(MELS * _GROUP, wide) for _ in range(_LAYERS))
        self.out = nn.ModuleList(
            _convolution(channels, channels if layer == last else wide) for layer in range(_LAYERS)
        )
        self.end = nn.Conv1d(channels, 2 * half, 1)

    def forward(self, half: Tensor, spectrum: Tensor) -> Tensor:
        """Return shift and scale, each of the shape of `half`."""
        carried = self.start(half)
        skipped: Tensor | float = 0.0
        for dilated, of_spectrum, out in zip(self.dilated, self.spectra, self.out, strict=True):
            wide = dilated(carried) + of_spectrum(spectrum)
            gated = torch.tanh(wide[:, : self.channels]) * torch.sigmoid(wide[:, self.channels :])
            made = out(gated)
            if made.shape[1] > self.channels:
                carried = carried + made[:, : self.channels]
            skipped = skipped + made[:, -self.channels :]
        out_of_end: Tensor = self.end(skipped)
        return out_of_end


class WaveGlow(nn.Module):
    """Turns sound into noise step by step, each of them invertible, and measures how likely that noise is."""

    def __init__(self, channels: int = 512) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose1d(MELS, MELS, _WINDOW, _HOP)
        left = [_GROUP - flow // _EARLY_EVERY * _EARLY for flow in range(_FLOWS)]
        self.mixes = nn.ModuleList(nn.Conv1d(count, count, 1, bias=False) for count in left)
        self.wavenets = nn.ModuleList(_Wavenet(count // 2, channels) for count in left)

    def forward(self, spectrum: Tensor, sound: Tensor) -> Tensor:
        """Return the negative log-likelihood of sound, a sample of it.

        Parameters
        ----------
        spectrum : tensor of shape (samples, 80, frames)
        sound : tensor of shape (samples, length)
        """
        samples, length = sound.shape
        positions = length // _GROUP
        stretched = self.upsample(spectrum)[:, :, :length]
        stretched = stretched.unflatten(2, (positions, _GROUP)).permute(0, 1, 3, 2)
        stretched = stretched.reshape(samples, MELS * _GROUP, positions)
        left = sound.unflatten(1, (positions, _GROUP)).transpose(1, 2)
        done: list[Tensor] = []
        likely = torch.zeros(())
        mixes: Any = self.mixes
        for flow, (mix, wavenet) in enumerate(zip(mixes, self.wavenets, strict=True)):
            if flow and flow % _EARLY_EVERY == 0:
                done.append(left[:, :_EARLY])
                left = left[:, _EARLY:]
            likely = likely + samples * positions * torch.logdet(mix.weight.squeeze(2).float())
            left = mix(left)
            given, changed = left.chunk(2, 1)
            shift, scale = wavenet(given, stretched).chunk(2, 1)
            changed = torch.exp(scale) * changed + shift
            likely = likely + scale.float().sum()
            left = torch.cat([given, changed], 1)
        noise = torch.cat([*done, left], 1).float()
        return (noise.square().sum() / 2 - likely) / noise.numel()


def waveglow(length: int = 8_000) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return WaveGlow and an example of `length` samples of sound."""
    frames = length // _HOP + 1
    return WaveGlow(), (torch.empty(1, MELS, frames), torch.empty(1, length))
