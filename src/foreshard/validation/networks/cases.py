"""Tables of networks as cases: what each row measured, what is predicted for it, or why nothing is."""

from __future__ import annotations

from collections.abc import Mapping

from foreshard.catalog.devices import resolve_device
from foreshard.errors import InfeasibleError, SpecError
from foreshard.predict.interval import traced_intervals
from foreshard.spec.prediction import Prediction
from foreshard.validation.collective_cases import TimedCase, reason_of
from foreshard.validation.networks.latency import latency_cases
from foreshard.validation.networks.plausible import contradicted
from foreshard.validation.networks.predicted import Tracing, predict_ahead, predicted, traced_of
from foreshard.validation.networks.run import MEASURED_FRAMEWORK, NetworkRun
from foreshard.validation.networks.tables import run_of
from foreshard.validation.tables import MeasuredTable

TUNED = "MLPerf"
"""Source of runs whose submitters fuse kernels by hand."""
FUSED_BY_HAND = "kernels fused by submitters"
"""What predictions of MLPerf's runs rest on beside kernels: none of the stock framework's."""
OTHER_FRAMEWORK = "framework not measured"
"""What predictions of other frameworks rest on; intervals are those of a device that was not measured."""


def network_cases(table: MeasuredTable, tracing: Tracing | None = None) -> list[TimedCase]:
    """Return one case for each row of a table of networks."""
    if table.layout == "model-latency":
        return latency_cases(table)
    tracing = tracing or Tracing()
    read = [_read(table, index) for index in range(len(table.rows))]
    if tracing.most is not None:
        read = _of_networks(read, tracing.most)
    runs = [run for run in read if isinstance(run, NetworkRun)]
    predict_ahead(runs, tracing)
    odd = contradicted(runs)
    return [run if isinstance(run, TimedCase) else _case(run, odd.get(run)) for run in read]


def _read(table: MeasuredTable, index: int) -> NetworkRun | TimedCase:
    """Return the run of a row, or the case of a row that states none."""
    try:
        return run_of(table.layout, table.rows[index])
    except SpecError as error:
        return TimedCase(measured_s=None, reason=reason_of(error))


def _of_networks(read: list[NetworkRun | TimedCase], most: int) -> list[NetworkRun | TimedCase]:
    """Return the runs of so many networks, spread evenly over their names, and cases of the others."""
    names = sorted({run.network for run in read if isinstance(run, NetworkRun)})
    count = min(most, len(names))
    taken = {names[place * len(names) // count] for place in range(count)}
    reason = f"not among the {most} networks that were asked for, of {len(names)}"
    return [
        _skipped(run, reason) if isinstance(run, NetworkRun) and run.network not in taken else run
        for run in read
    ]


def _skipped(run: NetworkRun, reason: str) -> TimedCase:
    return TimedCase(measured_s=run.step_s, reason=reason)


def _case(run: NetworkRun, odd: str | None) -> TimedCase:
    if odd is not None:
        return _skipped(run, odd)
    try:
        made = predicted(run)
        ends, evidence = _interval(run, made)
    except (InfeasibleError, SpecError) as error:
        return _skipped(run, reason_of(error) if isinstance(error, SpecError) else str(error))
    return TimedCase(measured_s=run.step_s, predicted_s=made.step_time_s, intervals_s=ends, evidence=evidence)


def _interval(run: NetworkRun, made: Prediction) -> tuple[Mapping[float, tuple[float, float]], str]:
    """Return the intervals of a run's step by level, and what its prediction rests on.

    A step whose kernels were fused by hand is no faster than its FLOPs at the devices' peak, and no slower
    than the stock framework may be.
    """
    module = traced_of(run)
    if run.source == TUNED:
        peak_s = run.accumulated * module.flops(run.batch) / resolve_device(run.device).peak(run.precision)
        stock = made.step_time_intervals_s
        return {level: (min(peak_s, low), high) for level, (low, high) in stock.items()}, FUSED_BY_HAND
    if run.framework == MEASURED_FRAMEWORK:
        return made.step_time_intervals_s, made.evidence
    ends = traced_intervals(
        made.step_time_s, evidence="datasheet", num_devices=run.num_devices, reads_images=module.reads_images
    )
    return ends, OTHER_FRAMEWORK
