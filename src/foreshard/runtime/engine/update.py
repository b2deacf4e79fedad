"""The update that ends a step: summed gradients divided once, clipped by their true norm, and stepped."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.loss_scale import LossScale, first_scale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.user_code import user_code
from foreshard.runtime.run_settings import Options
from foreshard.runtime.state.rank_state import RankState
from foreshard.spec.plan import Plan
from foreshard.transport.compression.second_moments import FrozenAdam, has_second_moments, momentum_of


def _summed_in(flat: torch.Tensor) -> torch.dtype:
    """Return the type to sum squares in: of half precision they leave the range."""
    return flat.dtype if flat.dtype.itemsize >= 4 else torch.float32


_SUMMED = 2**18
"""Elements summed in single precision: 1e-5 off on a processor, where 50 million are 0.8 % off."""


class Update:
    """Updates the parameters that a rank is responsible for.

    `scale` is the factor on the loss, where half precision needs one.
    """

    def __init__(self, job: Job, options: Options, clock: Clock):
        self._job, self._options, self._clock = job, options, clock
        self._base_lr: list[float] = []
        self._frozen: tuple[torch.optim.Optimizer, FrozenAdam] | None = None
        self.scale: LossScale | None = None

    @property
    def factor(self) -> float:
        """Factor on losses before the backward."""
        return 1.0 if self.scale is None else self.scale.value

    def arrange(self, state: RankState, plan: Plan) -> None:
        """Take over a new optimizer and the precision of a plan."""
        scaled = plan.precision == "fp16"
        self.scale = (self.scale or first_scale(plan.tokens)) if scaled else None
        groups = state.optimizer.param_groups if state.optimizer is not None else []
        self._base_lr = [group["lr"] for group in groups]

    def _stepped(self, optimizer: torch.optim.Optimizer, step: int) -> torch.optim.Optimizer | FrozenAdam:
        """Return what makes the step: the optimizer, or Adam as it was when compression began."""
        after = self._options.compress_after
        if self._options.compress is None or not 0 < after <= step or not has_second_moments(optimizer):
            return optimizer
        if self._frozen is None or self._frozen[0] is not optimizer:
            self._frozen = optimizer, FrozenAdam(optimizer, after)
        return self._frozen[1]

    def momentum(self, state: RankState) -> float:
        """Return the momentum of the optimizer of this rank; 0 where gradients are clipped by their norm.

        What a sum with momentum shows the optimizer has another norm than the gradient.
        """
        if state.optimizer is None or self._options.clip_norm is not None:
            return 0.0
        return momentum_of(state.optimizer)

    def square_norm(self, state: RankState) -> float:
        """Return the squares of the gradients of which this rank is the first owner, or 0 if unused."""
        options = self._options
        if options.clip_norm is None and not options.track_norm and self.scale is None:
            return 0.0
        mine = [b.flat for b in state.buckets if b.owners[0] == state.rank]
        norms = [n for flat in mine for n in torch._foreach_norm(flat.split(_SUMMED), dtype=_summed_in(flat))]
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    def apply(self, state: RankState, vote: Vote, step: int, on_skip: Callable[[str], None]) -> float | None:
        """Update by the vote of a step, and return the norm of the mean gradient if it was asked for.

        `on_skip` is called with the reason when the step updates nothing.
        """
        if not vote.count:
            on_skip("the loss counted nothing in this step: nothing updated")
            return None
        scale, norm = 1.0 / vote.count, None
        if self.scale is not None:
            scale /= self.scale.value
            self.scale = self.scale.after(vote.square_norm)
            if not math.isfinite(vote.square_norm):
                on_skip(f"gradient not finite: nothing updated, loss scale {self.scale.value:g}")
                return None
        if self._options.clip_norm is not None or self._options.track_norm:
            norm = vote.square_norm**0.5 * scale
        if norm is not None and self._options.clip_norm is not None and norm > self._options.clip_norm:
            scale *= self._options.clip_norm / (norm + 1e-6)
        self._clock.begin()
        for bucket in state.buckets:
            bucket.flat.mul_(scale)
            bucket.copy_back()
        if state.optimizer is not None:
            if self._job.lr is not None:
                factor = self._job.lr(step)
                for group, base in zip(state.optimizer.param_groups, self._base_lr, strict=True):
                    group["lr"] = base * factor
            with user_code("optimizer", self._job.path):
                self._stepped(state.optimizer, step).step()
        self._clock.end("optimizer", 0, len(state.modules))
        return norm
