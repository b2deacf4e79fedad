"""The factor on the loss that keeps gradients in half precision from vanishing.

Small gradients are zero in fp16, large ones infinite. The loss is multiplied before the backward, gradients
are divided after the sum. A step whose gradient is not finite updates nothing and halves the factor; many
good steps double it. All ranks see one norm, so all have one factor.

Source
------
Micikevicius et al. 2018, mixed precision training; defaults of torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_EXPONENT = 16  # torch.amp.GradScaler's init_scale of 2**16
GROWTH_STEPS = 2000  # its growth_interval
_LARGEST, _LEAST = 2.0**32, 2.0**-64
"""Bounds that keep the factor finite in fp32, whatever a job's gradients do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A power of two, how many good steps it has seen, and how many in a row were skipped since."""

    value: float
    good_steps: int = 0
    skipped: int = 0

    def after(self, square_norm: float) -> LossScale:
        """Return the factor of the next step.

        Examples
        --------
        >>> LossScale(value=8.0).after(float("inf")).value, LossScale(value=8.0).after(1.0)
        (4.0, LossScale(value=8.0, good_steps=1, skipped=0))
        """
        if not math.isfinite(square_norm):
            return LossScale(value=max(self.value / 2, _LEAST), skipped=self.skipped + 1)
        if self.good_steps + 1 < GROWTH_STEPS:
            return LossScale(value=self.value, good_steps=self.good_steps + 1)
        return LossScale(value=min(self.value * 2, _LARGEST))

    def to_json(self) -> list[float]:
        """Return it as JSON holds it."""
        return [self.value, self.good_steps, self.skipped]


def first_scale(tokens: int) -> LossScale:
    """Return the factor of the first step: 2**16 on the mean loss, so that much less on a sum over tokens.

    Examples
    --------
    >>> first_scale(1024).value
    64.0
    """
    return LossScale(value=2.0 ** (FIRST_EXPONENT - math.ceil(math.log2(max(tokens, 1)))))


def parse_scale(data: Sequence[float] | None) -> LossScale | None:
    """Return a factor from JSON, or None where there is none."""
    if data is None:
        return None
    value, good_steps, skipped = data
    return LossScale(value=value, good_steps=int(good_steps), skipped=int(skipped))
