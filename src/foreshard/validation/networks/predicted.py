"""The network of a published speed, traced as it was trained, and the prediction of its step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.errors import SpecError
from foreshard.predict.measured.traced_step import plan_of, predict_traced
from foreshard.profile.networks.traced_network import trace_network
from foreshard.spec.prediction import Prediction
from foreshard.spec.traced_module import TracedModule
from foreshard.validation.networks.run import NetworkRun

Key = tuple[str, int | None, str, bool, tuple[tuple[str, Any], ...]]
"""What a network is traced for: its name, side, precision, channels last, and changed arguments."""
_TOLD_EVERY_S = 30.0
_WORTH_WORKERS = 16  # networks; each worker takes seconds to begin
_traces: dict[Key, TracedModule] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """How networks of a table are traced ahead.

    Attributes
    ----------
    workers : int
        Processes; more than one imports the program that asks in each of them (`multiprocessing`, spawn).
    told : callable, optional
        Is given a line about every half minute.
    """

    workers: int = 1
    told: Callable[[str], None] | None = None


def trace_ahead(runs: Iterable[NetworkRun], tracing: Tracing) -> None:
    """Trace the networks of runs; those that cannot be traced say why when they are predicted."""
    keys = [key for key in dict.fromkeys(map(_key, runs)) if key not in _traces]
    last_s = time.monotonic()
    with ExitStack() as stack:
        made: Iterator[TracedModule | None] = map(_trace_or_none, keys)
        if tracing.workers > 1 and len(keys) >= _WORTH_WORKERS:
            spawned = ProcessPoolExecutor(min(tracing.workers, len(keys)), get_context("spawn"))
            made = stack.enter_context(spawned).map(_trace_or_none, keys)
        for number, (key, module) in enumerate(zip(keys, made, strict=True), start=1):
            if module is not None:
                _traces[key] = module
            if tracing.told and time.monotonic() - last_s > _TOLD_EVERY_S:
                tracing.told(f"traced {number} of {len(keys)} networks")
                last_s = time.monotonic()


def traced_of(run: NetworkRun) -> TracedModule:
    """Return the network of a run as it was trained.

    Raises
    ------
    ExtraMissingError
        Without torch, or a library that makes the network.
    SpecError
        For a network that cannot be made or traced.
    """
    key = _key(run)
    if key not in _traces:
        _traces[key] = _trace(key)
    return _traces[key]


def predicted(run: NetworkRun) -> Prediction:
    """Return the prediction of a run, whatever it was measured at."""
    return _predicted(replace(run, samples_per_s=1.0))


@cache
def _predicted(run: NetworkRun) -> Prediction:
    module = traced_of(run)
    cluster = load_cluster(f"{run.nodes}x{run.num_devices // run.nodes}x{run.device}")
    asked = {"micro_batch": run.batch, "global_batch": run.global_batch, "optimizer": run.optimizer}
    return predict_traced(module, cluster, plan_of(module, cluster, asked))


def _key(run: NetworkRun) -> Key:
    return run.network, run.side, run.precision, run.layout == "nhwc", run.changed


def _trace(key: Key) -> TracedModule:
    name, side, precision, channels_last, changed = key
    return trace_network(
        name, side=side, precision=precision, channels_last=channels_last, changed=dict(changed)
    )


def _trace_or_none(key: Key) -> TracedModule | None:
    try:
        return _trace(key)
    except SpecError:
        return None
