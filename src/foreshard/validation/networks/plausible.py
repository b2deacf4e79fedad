"""Which published speeds others beside them contradict: those do not measure what their rows say."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.validation.networks.predicted import traced_of
from foreshard.validation.networks.recipes import WORDS
from foreshard.validation.networks.run import MEASURED_FRAMEWORK, NetworkRun

SUPERLINEAR = 1.05  # N devices are more than so many times N as fast as one: not what a row says
SAME_SPEED = 1.05
"""A row in 16 bit that is not so many times as fast as the one beside it is not what it says."""


def contradicted(runs: Sequence[NetworkRun]) -> dict[NetworkRun, str]:
    """Return the runs of a table that it contradicts itself, with why.

    Runs on several nodes and of other frameworks are compared with none.
    """
    alike = [run for run in runs if run.nodes == 1 and run.framework == MEASURED_FRAMEWORK]
    words = [run for run in alike if run.network in WORDS]
    odd = _media([run for run in alike if run.network not in WORDS]) | superlinear(words)
    return _shorter([run for run in runs if run.network in WORDS and run not in odd]) | odd


def _media(runs: Sequence[NetworkRun]) -> dict[NetworkRun, str]:
    speeds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for run in runs:
        speeds[(*run.case, run.num_devices)].append(run.samples_per_s)
    fast = {
        tuple(case)
        for (*case, count), found in speeds.items()
        if median(found) > SUPERLINEAR * count * max(speeds.get((*case, 1), [math.inf]))
    }
    odd = {}
    for run in runs:
        source, name, device, precision, _ = run.case
        beside = [
            median(found)
            for wide in ("tf32", "fp32")
            for layout in ("nchw", "nhwc")
            if (found := speeds.get((source, name, device, wide, layout, run.num_devices)))
        ]
        if precision == "fp16" and beside and run.samples_per_s < SAME_SPEED * max(beside):
            odd[run] = f"{name} on {device} no faster in 16 bit than in 32"
        elif run.case in fast:
            odd[run] = f"{name} on {device} faster by devices than devices are more"
    return odd


def superlinear(runs: Sequence[NetworkRun]) -> dict[NetworkRun, str]:
    """Return the runs that are faster by devices than devices are more, by over 5 %.

    Each is compared with the median of one device of the same case and batch. Lambda's logs have such where a
    run ends before the steps that its speed is counted by.
    """
    alone: dict[Any, list[float]] = defaultdict(list)
    for run in runs:
        if run.num_devices == 1:
            alone[run.case, run.batch].append(run.samples_per_s)
    return {
        run: f"{run.network} faster by devices than devices are more"
        for run in runs
        if run.num_devices > 1
        and (run.case, run.batch) in alone
        and run.samples_per_s > SUPERLINEAR * run.num_devices * median(alone[run.case, run.batch])
    }


def _shorter(runs: Sequence[NetworkRun]) -> dict[NetworkRun, str]:
    """Return the runs of networks of words that some run has shorter sentences of than it states."""
    shorter = {(run.source, run.framework, run.network) for run in runs if _beyond_peak(run)}
    return {
        run: f"{run.network} beyond the peak of a device at the stated length"
        for run in runs
        if (run.source, run.framework, run.network) in shorter
    }


def _beyond_peak(run: NetworkRun) -> bool:
    """Return whether a network of words would compute more at a run's speed than the devices' peak.

    Then it does not compute what its stated length says: sentences are shorter, and not filled up. What
    cannot be predicted is not compared.
    """
    each = run.samples_per_s / run.num_devices
    try:
        return traced_of(run).flops(1) * each > resolve_device(run.device).peak(run.precision)
    except SpecError:
        return False
