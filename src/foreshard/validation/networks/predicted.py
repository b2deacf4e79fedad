"""The network of a published speed, traced as it was trained, and the prediction of its step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.predict.measured.traced_step import plan_of, predict_traced
from foreshard.profile.networks.traced_network import trace_network
from foreshard.spec.prediction import Prediction
from foreshard.spec.traced_module import TracedModule
from foreshard.validation.networks.run import NetworkRun


def traced_of(run: NetworkRun) -> TracedModule:
    """Return the network of a run as it was trained.

    Raises
    ------
    ExtraMissingError
        Without torch, or a library that makes the network.
    """
    return _traced(run.network, run.side, run.precision, run.layout == "nhwc", run.changed)


def predicted(run: NetworkRun) -> Prediction:
    """Return the prediction of a run, whatever it was measured at."""
    return _predicted(replace(run, samples_per_s=1.0))


@cache
def _predicted(run: NetworkRun) -> Prediction:
    module = traced_of(run)
    cluster = load_cluster(f"1x{run.num_devices}x{run.device}")
    asked = {"micro_batch": run.batch, "global_batch": run.global_batch, "optimizer": run.optimizer}
    return predict_traced(module, cluster, plan_of(module, cluster, asked))


@cache
def _traced(
    name: str, side: int | None, precision: str, channels_last: bool, changed: tuple[tuple[str, Any], ...]
) -> TracedModule:
    return trace_network(
        name, side=side, precision=precision, channels_last=channels_last, changed=dict(changed)
    )
