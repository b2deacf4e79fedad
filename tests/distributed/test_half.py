"""Training in fp16: the loss is scaled, gradients are those of single precision, overflows are skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import gradients, rehearse, values, worst_error
from small_jobs import gpt
from small_plans import ALONE, PLANS

from foreshard.runtime.engine.loss_scale import GROWTH_STEPS, LossScale, first_scale
from foreshard.runtime.trainer import Options, Trainer


def half(name: str) -> Any:
    return replace(PLANS[name], precision="fp16")


def scale_of(trainer: Trainer) -> list[float]:
    assert trainer.update.scale is not None
    return trainer.update.scale.to_json()


@pytest.mark.parametrize(
    "name", ["two uneven pipelines", "three stages, zb-h1", "uneven data in both stages, zero 2"]
)
def test_gradients_are_those_of_single_precision_but_for_rounding(name: str) -> None:
    reference = rehearse(gpt(), ALONE, steps=1, after=gradients)[0][1]
    found = rehearse(gpt(), half(name), steps=1, after=gradients, ranks=range(4))
    assert 1e-5 < worst_error(found, reference) < 5e-3


def shrunk(factor: float) -> Any:
    """The job with a loss so small that gradients vanish in fp16, or so large that they overflow."""
    job = gpt()
    plain = job.loss
    job.loss = lambda output, batch: (plain(output, batch)[0] * factor, plain(output, batch)[1])
    return job


def test_small_gradients_do_not_vanish() -> None:
    """A loss so small that without a scale most gradients would be nothing."""
    reference = rehearse(shrunk(2.0**-24), ALONE, steps=1, after=gradients)[0][1]
    found = rehearse(shrunk(2.0**-24), half("four stages"), steps=1, after=gradients)
    lost = rehearse(
        shrunk(2.0**-24 / first_scale(12 * 8).value), half("four stages"), steps=1, after=gradients
    )
    assert worst_error(found, reference) < 0.02
    unscaled = {key: t / first_scale(12 * 8).value for key, t in reference.items()}
    assert worst_error(lost, unscaled) > 0.1, "or the test says nothing"


def test_an_overflow_updates_nothing_anywhere_and_halves_the_scale() -> None:
    first = first_scale(12 * 8).value
    job = gpt()
    start = {(n, name): p.detach() for n in range(8) for name, p in job.layer(n).named_parameters()}
    found = rehearse(
        shrunk(2.0**20), half("two uneven pipelines"), steps=2, after=lambda t: (values(t), scale_of(t))
    )
    assert {tuple(scale) for _, (_, scale) in found.values()} == {(first / 4, 0, 2)}
    assert all(torch.equal(t, start[key]) for _, (held, _) in found.values() for key, t in held.items())
    later = rehearse(
        shrunk(2.0**20), half("two uneven pipelines"), steps=24, after=lambda t: (values(t), scale_of(t))
    )
    assert {tuple(scale) for _, (_, scale) in later.values()} == {tuple(later[0][1][1])}
    assert later[0][1][1][1] > 0, "steps are good again"
    assert not all(torch.equal(t, start[key]) for key, t in later[0][1][0].items())


def test_the_scale_goes_with_a_change_of_plan_and_a_checkpoint(tmp_path: Path) -> None:
    """And how many steps in a row were skipped: the 20th ends a run, whatever it went through before."""
    more = {
        "options": Options(checkpoint_every=2),
        "checkpoints": tmp_path,
        "ranks": range(4),
        "after": scale_of,
    }
    first = rehearse(
        shrunk(2.0**20), half("two uneven pipelines"), steps=4, changes={1: half("four stages")}, **more
    )
    again = rehearse(shrunk(2.0**20), half("uneven replicas"), steps=1, resume=True, **more)
    assert {tuple(scale) for _, scale in first.values()} == {(first_scale(12 * 8).value / 16, 0, 4)}
    assert {tuple(scale) for _, scale in again.values()} == {(first_scale(12 * 8).value / 32, 0, 5)}


def test_many_good_steps_double_the_scale() -> None:
    scale = LossScale(value=4.0)
    for _ in range(GROWTH_STEPS):
        assert scale.value == 4.0
        scale = scale.after(1.0)
    assert scale == LossScale(value=8.0)
    assert scale.after(float("nan")) == LossScale(value=4.0, skipped=1)
    assert scale.after(float("nan")).after(1.0).skipped == 0
