"""Which units FSDP should gather, and how many of them ahead: choices predicted one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreshard.advise.request import Request
from foreshard.spec.plan import WHOLE_MODEL
from foreshard.spec.prediction import Prediction

FSDP1_DEPTHS, DEPTHS = (0, 1), (0, 1, 2, 3, 4)
_SAME = 1e-4  # of a step: the smaller memory decides


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitChoice:
    """A step with so many units gathered ahead, of so many blocks each."""

    prefetch: int
    wrap: int | str
    prediction: Prediction

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.prediction.step_time_s

    @property
    def exposed_s(self) -> float:
        """Seconds of the step in which weights and gradients move and nothing is computed, or less of it."""
        return self.prediction.time_breakdown_s["data_comm"]

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return self.prediction.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.prediction.memory.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAdvice:
    """All choices, the framework's own among them, and the best that fits memory (None: none does)."""

    choices: tuple[UnitChoice, ...]
    default: UnitChoice
    best: UnitChoice | None

    @property
    def fastest(self) -> UnitChoice:
        """The choice that would be the best one with more memory."""
        return best_of(self.choices)


def unit_advice(
    request: Request,
    *,
    prefetch: Iterable[int] | None = None,
    wrap: Iterable[int | str] | None = None,
) -> UnitAdvice:
    """Return the predictions of all choices of `prefetch` and `wrap`, and the best one.

    By default up to four units ahead (FSDP1: one), and units of 1, 2, 4, .. blocks and of the whole model.
    The framework's own choice, one block and one unit ahead, is always among them.

    Raises
    ------
    SpecError
        For a framework or a plan without such units, or a choice that FSDP does not take.
    """
    own = request.framework
    depths = (FSDP1_DEPTHS if own.fsdp == "fsdp1" else DEPTHS) if prefetch is None else tuple(prefetch)
    wraps = tuple(_wraps(request.model.num_layers)) if wrap is None else tuple(wrap)
    pairs = dict.fromkeys(
        [(own.prefetch, own.wrap)]
        + [(0 if unit == WHOLE_MODEL else depth, unit) for unit in wraps for depth in depths]
    )
    choices = tuple(_predicted(request, *pair) for pair in pairs)
    fitting = [choice for choice in choices if choice.fits]
    return UnitAdvice(choices=choices, default=choices[0], best=best_of(fitting) if fitting else None)


def best_of(choices: Iterable[UnitChoice]) -> UnitChoice:
    """Return the choice of the shortest step, of equal ones of least memory and then of fewest ahead."""
    choices = tuple(choices)
    least_s = min(choice.step_time_s for choice in choices)
    near = [choice for choice in choices if choice.step_time_s <= least_s * (1.0 + _SAME)]
    return min(near, key=lambda choice: (choice.peak_bytes, choice.prefetch, choice.step_time_s))


def _wraps(num_layers: int) -> Iterable[int | str]:
    blocks = 1
    while blocks < num_layers:
        yield blocks
        blocks *= 2
    yield WHOLE_MODEL


def _predicted(request: Request, prefetch: int, wrap: int | str) -> UnitChoice:
    chosen = request.with_choice("prefetch", prefetch).with_choice("wrap", wrap)
    return UnitChoice(prefetch=prefetch, wrap=wrap, prediction=chosen.predict())
