"""Steps to a target over the global batch: published curves, a law of language models, and a user's own file.

A batch B needs ``min_samples * (1 + B / critical_batch)`` samples: ``min_samples`` is what small batches
need, and at the critical batch twice as many are needed in twice the fewest steps (McCandlish et al. 2018,
arXiv 1812.06162, section 2.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError, unknown
from foreshard.spec.codec import Range, Size, decode, parse_toml, read_text

LANGUAGE_MODEL = "kaplan-lm"
"""Name of the law of language models, given as ``kaplan-lm:LOSS``."""
_KEY = "--to-target"
_MAX_BATCH = 2**31
# Without measured batches: from where the batch costs 3 % more samples to where it saves 11 % of the steps.
_RANGE = (1 / 32, 8.0)

Positive = Annotated[float, Range(1e-9, 1e30)]
Batch = Annotated[float, Range(1, _MAX_BATCH)]
Text = Annotated[str, Size(1, 300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """One run to the target: its batch, and its samples or its steps."""

    batch: Batch
    samples: Positive | None = None
    steps: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file or an entry of the catalog: measured batches, or the two constants of the law."""

    target: Text
    source: Text
    samples_of: Annotated[int, Range(1, 2**31)] | None = None
    points: tuple[MeasuredBatch, ...] = field(default=())
    min_samples: Positive | None = None
    critical_batch: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCurve:
    """Samples to a target as a function of the global batch."""

    name: str
    target: str
    source: str
    min_samples: float  # samples that small batches need
    critical_batch: float  # samples of the batch that needs twice as many
    samples_of: int | None = None  # tokens of a counted sample; None where samples are no sequences
    batches: tuple[float, float]  # least and greatest batch that the curve is known for
    worst_error: float | None = None  # greatest relative error of the law at the measured batches
    notes: tuple[str, ...] = ()

    def samples(self, batch: float) -> float:
        """Return the samples that a global batch needs."""
        return self.min_samples * (1.0 + batch / self.critical_batch)

    def steps(self, batch: int) -> int:
        """Return the whole steps that a global batch needs.

        Examples
        --------
        >>> curve = TargetCurve(
        ...     name="", target="", source="", min_samples=6000.0, critical_batch=60.0, batches=(1.0, 99.0)
        ... )
        >>> curve.steps(60), curve.steps(120)
        (200, 150)
        """
        return max(1, math.ceil(self.samples(batch) / batch * (1.0 - 1e-12)))

    def knows(self, batch: float) -> bool:
        """Return whether a batch is within those that the curve is known for."""
        low, high = self.batches
        return low <= batch <= high

    def for_sequences(self, seq_len: int | None) -> TargetCurve:
        """Return the curve of samples of another length, equal in tokens; without a length with a note."""
        if self.samples_of is None or seq_len == self.samples_of:
            return self
        if seq_len is None:
            each = f"the curve counts samples of {self.samples_of} tokens; a sample of this model is one"
            return replace(self, notes=(*self.notes, each))
        ratio = self.samples_of / seq_len
        low, high = self.batches
        note = f"the curve counts samples of {self.samples_of} tokens; equal tokens in samples of {seq_len}"
        return replace(
            self,
            min_samples=self.min_samples * ratio,
            critical_batch=self.critical_batch * ratio,
            samples_of=seq_len,
            batches=(low * ratio, high * ratio),
            notes=self.notes if self.samples_of == 1 else (*self.notes, note),
        )

    def candidates(self) -> tuple[int, ...]:
        """Return the batches to search: powers of two that the curve is known for, and its measured ends."""
        low, high = max(1, math.ceil(self.batches[0])), min(_MAX_BATCH, math.floor(self.batches[1]))
        powers = {2**i for i in range(math.ceil(math.log2(low)), max(0, high).bit_length())}
        ends = {low, max(low, high)} if self.worst_error is not None or not powers else set()
        return tuple(sorted(powers | ends))


def task_names() -> tuple[str, ...]:
    """Return the tasks of the catalog."""
    return (*shipped("targets.toml"), f"{LANGUAGE_MODEL}:LOSS")


def load_target(text: str, *, parameters: float | None = None) -> TargetCurve:
    """Return the curve that a task of the catalog, ``kaplan-lm:LOSS`` or a TOML file names.

    Parameters
    ----------
    text : str
    parameters : float, optional
        Parameters of the blocks of the model, for the law of language models.

    Raises
    ------
    SpecError
        For an unknown task, a loss that the model does not reach, a file that cannot be read, or points that
        the law does not describe.
    """
    if text.endswith(".toml") or "/" in text:
        data = parse_toml(read_text(text, max_bytes=2**20), file=text)
        return curve_of(decode(TargetFile, data, file=text), name=Path(text).stem, file=text)
    name, colon, loss = text.partition(":")
    if name == LANGUAGE_MODEL:
        return _language_model(text, loss, parameters)
    known = shipped("targets.toml")
    if colon or name not in known:
        rule = "Tasks are"
        raise unknown("task", text, task_names(), key=_KEY, rule=rule, otherwise="Or give a file (.toml)")
    return curve_of(decode(TargetFile, known[name]), name=name)


def curve_of(stated: TargetFile, *, name: str, file: str | None = None) -> TargetCurve:
    """Return the curve of measured batches, or of stated constants."""
    constants = (stated.min_samples, stated.critical_batch)
    if bool(stated.points) == any(value is not None for value in constants) or constants.count(None) == 1:
        raise SpecError(
            "neither points nor constants, or both",
            file=file,
            key="points",
            rule="A target has points, or min_samples and critical_batch",
            fix="Write it like points = [{batch = 256, steps = 9000}, {batch = 1024, steps = 3000}]",
        )
    known = {"name": name, "target": stated.target, "source": stated.source, "samples_of": stated.samples_of}
    if not stated.points:
        assert stated.min_samples is not None and stated.critical_batch is not None
        low, high = (stated.critical_batch * factor for factor in _RANGE)
        return TargetCurve(
            **known,  # type: ignore[arg-type]
            min_samples=stated.min_samples,
            critical_batch=stated.critical_batch,
            batches=(max(1.0, low), max(1.0, high)),
        )
    pairs = [_pair(point, index, file) for index, point in enumerate(stated.points)]
    batches, samples = (np.array(column) for column in zip(*pairs, strict=True))
    least, critical = _fitted(batches, samples, file)
    errors = least * (1.0 + batches / critical) / samples - 1.0
    return TargetCurve(
        **known,  # type: ignore[arg-type]
        min_samples=least,
        critical_batch=critical,
        batches=(float(batches.min()), float(batches.max())),
        worst_error=float(np.abs(errors).max()),
    )


def _pair(point: MeasuredBatch, index: int, file: str | None) -> tuple[float, float]:
    if (point.samples is None) == (point.steps is None):
        raise SpecError(
            "a point with neither samples nor steps, or with both",
            file=file,
            key=f"points[{index}]",
            rule="A point has batch, and either samples or steps",
            fix="Write it like {batch = 256, steps = 9000}",
        )
    return point.batch, point.samples if point.samples is not None else point.batch * float(point.steps or 0)


def _fitted(batches: np.ndarray, samples: np.ndarray, file: str | None) -> tuple[float, float]:
    """Return the two constants that make the sum of squared relative errors least."""
    if len(set(batches.tolist())) < 2:
        rule = "The law has two constants"
        fix = "Give at least two different batches"
        raise SpecError("points of one batch alone", file=file, key="points", rule=rule, fix=fix)
    least, slope = np.linalg.lstsq(
        np.stack([1.0 / samples, batches / samples], 1), np.ones_like(samples), rcond=None
    )[0]
    if least <= 0 or slope <= 1e-12 * least / batches.max():
        what = "the points have no critical batch"
        rule = "Samples to the target grow with the batch, and less than in proportion"
        fix = "Give larger batches too, or min_samples and critical_batch"
        raise SpecError(what, file=file, key="points", rule=rule, fix=fix)
    return float(least), float(least / slope)


# Kaplan et al. 2020 (arXiv 2001.08361): table 3, fits of L(N, S), and equation 1.4, of the critical batch.
_PARAMETERS, _PARAMETER_POWER = 6.5e13, 0.077
_STEPS, _STEP_POWER = 2.1e3, 0.76
_BATCH_TOKENS, _BATCH_POWER = 2.1e8, 0.21


def _language_model(text: str, loss: str, parameters: float | None) -> TargetCurve:
    """Return the curve of a dense Transformer to a loss on WebText2, in tokens."""
    try:
        target = float(loss)
    except ValueError:
        target = math.nan
    if not 0.0 < target < 20.0:
        rule, fix = "A loss is a number of nats per token", f"Write it like {LANGUAGE_MODEL}:2.8"
        raise SpecError(f"{loss or 'no loss'!r} is no loss", key=_KEY, value=text, rule=rule, fix=fix)
    if parameters is None:
        rule, fix = "The law is of language models", "Name another task, or give a file (.toml)"
        raise SpecError(f"{text} for a model without tokens", key=_KEY, value=text, rule=rule, fix=fix)
    floor = (_PARAMETERS / parameters) ** _PARAMETER_POWER
    if target <= floor:
        what = f"a model of {parameters:.3g} parameters does not reach loss {target:g}"
        rule = "The loss of a size of model has a least value"
        fix = f"Ask for more than {floor:.3f}, or take a larger model"
        raise SpecError(what, key=_KEY, value=text, rule=rule, fix=fix)
    least_steps = _STEPS / (target - floor) ** (1.0 / _STEP_POWER)
    critical = _BATCH_TOKENS / target ** (1.0 / _BATCH_POWER)
    low, high = (critical * factor for factor in _RANGE)
    return TargetCurve(
        name=text,
        target=f"loss {target:g} on WebText2, a Transformer of {parameters:.3g} parameters in its blocks",
        source="Kaplan et al. 2020, arXiv 2001.08361, table 3 and equation 1.4",
        min_samples=least_steps * critical,
        critical_batch=critical,
        samples_of=1,
        batches=(low, high),
        notes=("the law was fitted to models of up to 1.5e9 parameters with a vocabulary of 50,257",),
    )
