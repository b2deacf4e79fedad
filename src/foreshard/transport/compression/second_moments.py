"""Adam with second moments as they were: the updates that compressed gradients need.

What compression leaves out of a gradient arrives later, several steps' worth at once. Second moments see the
squares of these bursts, grow, and shrink every update. With the moments of the steps before, updates are
linear in the gradients again, so that what arrives late counts as much as if it had arrived in time.
"""

from __future__ import annotations

from typing import Any

import torch


class FrozenAdam:
    """Steps of an optimizer whose second moments do not change any more.

    It has the state of the optimizer, its learning rates, first moments and weight decay go on.

    Parameters
    ----------
    optimizer : torch.optim.Adam or torch.optim.AdamW
        That has made steps.
    steps : int
        After which the second moments have not changed.

    Source
    ------
    Tang et al. 2021, "1-bit Adam", algorithm 1: the variance after the warm-up is the preconditioner.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int):
        self._optimizer, self._steps = optimizer, steps
        self._roots: dict[torch.nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, rate, decay = self._optimizer.state[parameter], group["lr"], group["weight_decay"]
        (first, second), gradient = group["betas"], parameter.grad
        if parameter not in self._roots:
            taken = min(float(state["step"]), float(self._steps))
            root = (state["exp_avg_sq"] / (1.0 - second**taken)).sqrt_()
            self._roots[parameter] = root.add_(group["eps"])
        if group.get("maximize"):
            gradient = -gradient
        if group["decoupled_weight_decay"]:
            parameter.mul_(1.0 - rate * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1.0 - first)
        size = rate / (1.0 - first ** float(state["step"]))
        parameter.addcdiv_(state["exp_avg"], self._roots[parameter], value=-size)


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the momentum of SGD, or that of Adam beside frozen second moments; 0 for none and other kinds.

    Examples
    --------
    >>> momentum_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
    0.9
    """
    if has_second_moments(optimizer):
        found = {float(group["betas"][0]) for group in optimizer.param_groups}
    elif isinstance(optimizer, torch.optim.SGD):
        plain = not any(group["nesterov"] or group["dampening"] for group in optimizer.param_groups)
        found = {float(group["momentum"]) * plain for group in optimizer.param_groups}
    else:
        return 0.0
    return found.pop() if len(found) == 1 else 0.0


def has_second_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `FrozenAdam` makes the steps of an optimizer: Adam and AdamW, without amsgrad."""
    is_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
    return is_adam and not any(group["amsgrad"] for group in optimizer.param_groups)
