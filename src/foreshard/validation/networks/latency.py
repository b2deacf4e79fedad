"""Networks of words in 32 bit, timed by NeuSight: a forward, or a forward with its backward.

A pass alone is priced by the same kernels and host as a step. Networks over several devices are trained by
Megatron, which accelerate calls, and priced as a step.

Source
------
sitar-lab/NeuSight, scripts/asplos/summary/summary.csv.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_evidence
from foreshard.errors import InfeasibleError, SpecError
from foreshard.predict.interval import traced_intervals
from foreshard.predict.measured.traced_step import pass_seconds, plan_of, predict_traced
from foreshard.profile.networks.language.hugging_face import DEPTHS, trace_hugging_face
from foreshard.spec.device import Device
from foreshard.spec.traced_module import TracedModule
from foreshard.validation.collective_cases import TimedCase, reason_of
from foreshard.validation.tables import MeasuredTable

_ONE_DIE = {"AMD_Instinct_MI250": "mi250-gcd"}  # PyTorch sees each of the two dies as a device
_PRECISION = "fp32"


def device_of(name: str) -> Device:
    """Return a device as NeuSight names it, words joined by underscores."""
    return resolve_device(_ONE_DIE.get(name, name.replace("_", " ")))


def latency_cases(table: MeasuredTable) -> list[TimedCase]:
    """Return one case for each row of a table of latencies."""
    return [_case(row) for row in table.rows]


def _case(row: Mapping[str, str]) -> TimedCase:
    measured_s = None
    try:
        measured_s = _time(row)
        return _predicted(row, measured_s)
    except (SpecError, InfeasibleError) as error:
        return TimedCase(
            measured_s=measured_s, reason=reason_of(error) if isinstance(error, SpecError) else str(error)
        )
    except KeyError as error:
        return TimedCase(measured_s=measured_s, reason=f"no column {error.args[0]}")
    except (ValueError, ArithmeticError) as error:
        return TimedCase(measured_s=measured_s, reason=f"a cell is not what its column says: {error}")


def _time(row: Mapping[str, str]) -> float:
    seconds = float(row["measured_e2e_ms"]) * 1e-3
    if not 0.0 < seconds < float("inf"):
        raise SpecError("no time stated")
    return seconds


def _predicted(row: Mapping[str, str], measured_s: float) -> TimedCase:
    name, option, count = row["model"], row["option"], int(row["num_gpus"])
    if name not in DEPTHS:
        raise SpecError(f"{name}: its definition is not published with the times")
    if option == "fusion":
        raise SpecError("compiled: fused kernels are not those of the operations")
    if row["mode"] not in ("inf", "train"):
        raise SpecError(f"mode {row['mode']} is neither a forward nor a training")
    device, batch, training = device_of(row["device"]), int(row["batch"]), row["mode"] == "train"
    if min(batch, count) < 1:
        raise SpecError("no whole number of samples on each device")
    if option or count > 1:
        return _trained_together(row, device, batch, measured_s)
    module = _traced(name, int(row["seq_len"]), training, ())
    predicted_s = pass_seconds(module, device, batch)[training]
    evidence = kernel_evidence(device, _PRECISION)
    ends = traced_intervals(predicted_s, evidence=evidence, num_devices=1, reads_images=False)
    return TimedCase(measured_s=measured_s, predicted_s=predicted_s, intervals_s=ends, evidence=evidence)


def _trained_together(row: Mapping[str, str], device: Device, batch: int, measured_s: float) -> TimedCase:
    """Return the case of a step on several devices of a node: `dp4`, `tp4`, `pp4_2` of two micro-batches."""
    count = int(row["num_gpus"])
    said = re.fullmatch(r"(dp|tp|pp)(\d+)(?:_(\d+))?", row["option"])
    if said is None or int(said[2]) != count or row["mode"] != "train":
        raise SpecError(f"option {row['option']!r} on {count} devices is none that NeuSight describes")
    way, parts = said[1], int(said[3] or (count if said[1] == "dp" else 1))
    module = _traced(row["model"], int(row["seq_len"]), True, (count,) if way == "tp" else ())
    cluster = load_cluster(f"1x{count}x{device.name}")
    asked = {way: count, "micro_batch": max(1, batch // parts), "global_batch": batch}
    made = predict_traced(module, cluster, plan_of(module, cluster, asked))
    return TimedCase(
        measured_s=measured_s,
        predicted_s=made.step_time_s,
        intervals_s=made.step_time_intervals_s,
        evidence=made.evidence,
    )


@cache
def _traced(name: str, seq_len: int, training: bool, degrees: tuple[int, ...]) -> TracedModule:
    return trace_hugging_face(name, seq_len, training=training, degrees=degrees)
