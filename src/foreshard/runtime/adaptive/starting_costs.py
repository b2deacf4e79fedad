"""What a policy starts from: seconds and bytes of layers on every rank, and how well they are known.

Measured costs are taken as they are. Where they are missing the prediction of the model on the cluster takes
their place; for a job that is no model of the catalog, all layers and all ranks are taken to be alike. The
speeds of ranks that were not measured are then learned from the first steps of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.nominal import cluster_state, predicted_chain
from foreshard.control.slots import Chain, State
from foreshard.errors import SpecError
from foreshard.planner.request import checked_request
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.runtime.adaptive.pass_times import PassTimes
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import OF_FRAMEWORK, Plan

_STATES_PER_PARAMETER = 4.0
"""Bytes of a layer's state over those of its parameters in an unknown job: gradients and two moments."""


@dataclass(frozen=True, kw_only=True)
class StartingCosts:
    """Layers and ranks as they are known before the first step.

    Seconds are those of `passes`; `sizes` is there for its bytes. `cluster` has links, prices and power as
    stated. The speed of `unmeasured` ranks is to be learned from the first steps. All layers count alike
    unless it `knows_layers`.
    """

    passes: PassTimes
    sizes: Chain
    cluster: State
    unmeasured: frozenset[int] = frozenset()
    knows_layers: bool = True

    @property
    def state(self) -> State:
        """Return the cluster with the speeds that its ranks start with."""
        return replace(self.cluster, speed=self.passes.speed)

    def chain(self, size: int) -> Chain:
        """Return the layers for micro-batches of a size."""
        return replace(self.sizes, layer_s=self.passes.layer_s(size))

    def learned(self, measured: Mapping[int, float]) -> StartingCosts:
        """Return the costs with unmeasured ranks at the speeds of the first steps, of the ranks that worked.

        Where no rank had measured costs, the seconds of layers are scaled too, so that the fastest rank has
        speed 1. Ranks that were idle are taken to be off their stated speed by as much as the median rank.
        """
        speed = self.passes.speed.copy()
        usual = float(np.median([seen / speed[rank] for rank, seen in measured.items()] or [1.0]))
        for rank in self.unmeasured:
            speed[rank] = measured.get(rank, usual * float(speed[rank]))
        passes = replace(self.passes, speed=speed)
        if len(self.unmeasured) == len(speed):
            scale = float(speed.max())
            passes = replace(passes, pass_s=passes.pass_s / scale, speed=speed / scale)
        return replace(self, passes=passes, unmeasured=frozenset())


def starting_costs(
    plan: Plan,
    cluster: Cluster,
    *,
    costs: MeasuredCosts | None = None,
    model: Model | None = None,
    parameter_bytes: Sequence[float] | None = None,
) -> StartingCosts:
    """Return what is known of a job on a cluster; costs and model have as many layers as the plan.

    Costs are of all devices of the cluster, or of some. The prediction of a model of the catalog stands in
    for what was not measured. A job with neither is known by the bytes of each layer's parameters.
    """
    layers = plan.groups[0].num_layers
    ranks = range(cluster.num_devices)
    known = frozenset(rank for rank in ranks if costs and cluster.device_of(rank).name in costs.slow)
    state, _ = cluster_state(cluster)
    predicted = None if model is None else _predicted(plan, cluster, model)
    if costs is not None and known:
        _check_layers(layers, len(costs.layers), costs.path)
        passes = PassTimes.measured(costs, cluster)
        if predicted is not None:
            passes = _with_predicted(passes, predicted, known)
        return StartingCosts(
            passes=passes,
            sizes=_measured_sizes(costs, cluster),
            cluster=state,
            unmeasured=frozenset(ranks) - known,
        )
    if predicted is not None:
        _check_layers(layers, predicted.num_layers, model.name if model else "")
    sizes = predicted or _unknown_sizes(layers, cluster, parameter_bytes or (0.0,) * layers)
    return StartingCosts(
        passes=PassTimes(sizes=(1,), pass_s=sizes.layer_s[:, :, None], speed=np.ones(len(sizes.layer_s))),
        sizes=sizes,
        cluster=state,
        unmeasured=frozenset(ranks),
        knows_layers=predicted is not None,
    )


def _check_layers(layers: int, known: int, source: str) -> None:
    if layers != known:
        raise SpecError(
            f"the plan splits {layers} layers, {source} has {known}",
            key="groups.stages.layers",
            value=layers,
            rule="Costs and model are those of the job",
            fix="Name the costs or the model of this job, or leave them out",
        )


def _predicted(plan: Plan, cluster: Cluster, model: Model) -> Chain:
    request = checked_request(
        model,
        cluster,
        global_batch=plan.global_batch,
        seq_len=plan.seq_len,
        precision=plan.precision,
        optimizer=plan.optimizer,
        framework=plan.framework,
        **{name: getattr(plan, name) for name in OF_FRAMEWORK},
    )
    return predicted_chain(request, max(group.micro_batch for group in plan.groups))


def _with_predicted(passes: PassTimes, predicted: Chain, known: frozenset[int]) -> PassTimes:
    """Return passes with unmeasured ranks as much slower or faster than measured ones as is predicted."""
    whole_s, first = predicted.before_s[:, -1], min(known)
    speed = passes.speed.copy()
    for rank in set(range(len(speed))) - known:
        speed[rank] = speed[first] * whole_s[first] / whole_s[rank]
    return replace(passes, speed=speed)


def _measured_sizes(costs: MeasuredCosts, cluster: Cluster) -> Chain:
    count, layers = cluster.num_devices, costs.layers
    return Chain(
        layer_s=np.zeros((count, len(layers))),
        boundary_bytes=np.array([2 * layer.boundary_bytes_per_sample for layer in layers[:-1]]),
        sync_bytes=np.array([layer.parameter_bytes for layer in layers]),
        state_bytes=np.array(
            [2 * layer.parameter_bytes + layer.frozen_bytes + layer.state_bytes for layer in layers]
        ),
        saved_bytes=np.array([layer.saved_bytes_per_sample for layer in layers]),
        memory_bytes=_memory(cluster),
    )


def _unknown_sizes(layers: int, cluster: Cluster, parameter_bytes: Sequence[float]) -> Chain:
    """Return layers that all take equal seconds; messages between them and activations are not known: 0."""
    sync = np.array(parameter_bytes, float)
    return Chain(
        layer_s=np.full((cluster.num_devices, layers), 1.0 / layers),
        boundary_bytes=np.zeros(layers - 1),
        sync_bytes=sync,
        state_bytes=_STATES_PER_PARAMETER * sync,
        saved_bytes=np.zeros(layers),
        memory_bytes=_memory(cluster),
    )


def _memory(cluster: Cluster) -> np.ndarray:
    return np.array([cluster.device_of(rank).capacity_bytes for rank in range(cluster.num_devices)])
