"""The network of a published speed, traced as it was trained, and the prediction of its step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.errors import InfeasibleError, SpecError
from foreshard.predict.measured.traced_step import plan_of, predict_traced
from foreshard.profile.networks.traced_network import trace_network
from foreshard.spec.prediction import Prediction
from foreshard.spec.traced_module import TracedModule
from foreshard.validation.networks.run import NetworkRun

Key = tuple[str, int | None, str, bool, bool, tuple[tuple[str, Any], ...]]
"""What a network is traced for: its name, side, precision, channels last, training, and changed arguments."""
_TOLD_EVERY_S = 30.0
_WORTH_WORKERS = 16  # networks; each worker takes seconds to begin
_predictions: dict[NetworkRun, Prediction] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """How networks of a table are traced and predicted ahead.

    Attributes
    ----------
    workers : int
        Processes; more than one imports the program that asks in each of them (`multiprocessing`, spawn).
    told : callable, optional
        Is given a line about every half minute.
    most : int, optional
        Networks of a table that are traced, spread evenly over their names; all unless given.
    """

    workers: int = 1
    told: Callable[[str], None] | None = None
    most: int | None = None


def predict_ahead(runs: Iterable[NetworkRun], tracing: Tracing) -> None:
    """Predict runs, each network traced once; those that cannot be say why when they are asked for."""
    groups: dict[Key, list[NetworkRun]] = {}
    for run in dict.fromkeys(map(_unmeasured, runs)):
        if run not in _predictions:
            groups.setdefault(_key(run), []).append(run)
    try:
        _keep(groups, tracing)
    except BrokenProcessPool:  # one was out of memory, or could not import the program that asks
        if tracing.told:
            tracing.told("a worker ended early: what is left is predicted by one process")


def _keep(groups: Mapping[Key, list[NetworkRun]], tracing: Tracing) -> None:
    """Keep the predictions of runs, grouped by network."""
    last_s = time.monotonic()
    with ExitStack() as stack:
        made: Iterator[Mapping[NetworkRun, Prediction]] = map(_predict_group, groups.values())
        if tracing.workers > 1 and len(groups) >= _WORTH_WORKERS:
            spawned = ProcessPoolExecutor(min(tracing.workers, len(groups)), get_context("spawn"))
            made = stack.enter_context(spawned).map(_predict_group, groups.values())
        for number, found in enumerate(made, start=1):
            _predictions.update(found)
            if tracing.told and time.monotonic() - last_s > _TOLD_EVERY_S:
                tracing.told(f"predicted {number} of {len(groups)} networks")
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
    return replace(_traced(_key(run)), cudnn=run.cudnn)


def predicted(run: NetworkRun) -> Prediction:
    """Return the prediction of a step of a run, whatever it was measured at; errors as of `traced_of`."""
    run = _unmeasured(run)
    if run not in _predictions:
        _predictions[run] = _predicted(run)
    return _predictions[run]


def _predicted(run: NetworkRun) -> Prediction:
    if not run.sums:  # each device is as fast as one alone
        run = replace(run, num_devices=1, nodes=1)
    module = traced_of(run)
    cluster = load_cluster(f"{run.nodes}x{run.num_devices // run.nodes}x{run.device}")
    if run.through_host:
        nodes = (replace(group, nvlink_domain=1, pcie="host") for group in cluster.nodes)
        cluster = replace(cluster, nodes=tuple(nodes))
    asked = {"micro_batch": run.batch, "global_batch": run.global_batch, "optimizer": run.optimizer}
    return predict_traced(module, cluster, plan_of(module, cluster, asked))


def _predict_group(runs: list[NetworkRun]) -> dict[NetworkRun, Prediction]:
    """Return the predictions of runs of one network, but those that fail."""
    found = {}
    for run in runs:
        with suppress(SpecError, InfeasibleError):
            found[run] = _predicted(run)
    return found


def _unmeasured(run: NetworkRun) -> NetworkRun:
    return replace(run, samples_per_s=1.0)


def _key(run: NetworkRun) -> Key:
    return run.network, run.side, run.precision, run.layout == "nhwc", run.training, run.changed


def _traced(key: Key) -> TracedModule:
    name, side, precision, channels_last, training, changed = key
    asked: dict[str, Any] = {"side": side, "precision": precision, "training": training}
    return trace_network(name, channels_last=channels_last, **asked, **dict(changed))
