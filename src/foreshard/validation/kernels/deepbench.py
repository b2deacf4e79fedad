"""Convolutions and recurrent layers of DeepBench, priced as the operations of a traced module are.

The cells of a row of convolutions hold the times of its passes. A recurrent layer is several rows: one of how
many steps, then one for each pass. Products of the inputs of a recurrent layer are not timed
(CUDNN_SKIP_INPUT: the source counts the FLOPs of the states alone).

Source
------
DeepBench (baidu-research/DeepBench), results of training and inference on servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from foreshard.catalog.devices import resolve_device
from foreshard.errors import ExtraMissingError, SpecError
from foreshard.predict.measured.traced import device_operations_s
from foreshard.spec.device import Device
from foreshard.spec.traced_module import Operation

CONVOLUTIONS = ("W", "W (input - time)")
RECURRENT = "Recurrent Layers - "
STEPS = "Timesteps"
WAITING_S = 25e-6
"""Seconds that a step of a recurrent layer takes beyond its kernels by libraries of these sheets, fitted by
scripts/fit_layers.py on layers of 100 steps and more on V100. Later ones do not wait: kernels of an H200
(bench/device_recurrent.csv) follow each other, and GNMT's published speeds on V100 show no such wait.
"""
_PRECISIONS = {"FP32": "fp32", "FP16 ip, Mixed math": "fp16"}  # by the end of a sheet's name
_OTHER_PRECISIONS = {
    "Psuedo FP16": "values in 16 bit by 32-bit arithmetic, of which no kernel is priced",
    "Mixed Precision": "values in 8 bit, of which no kernel is priced",
}
_PASSES = {  # as rows and cells begin, in small letters: the first that fits
    "forward (msec)": ("forward",),
    "time forward": ("forward",),
    "wrt inputs": ("inputs",),
    "wrt parameters": ("weights",),
    "time backward wrt inputs": ("inputs",),
    "time backward wrt weights": ("weights",),
    "time backward": ("inputs", "weights"),
    "total time": ("forward", "inputs", "weights"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPass:
    """What a row states of a pass, or of several together.

    Attributes
    ----------
    row : int
        Its place.
    name : str
        Passes joined by a plus.
    operations : tuple of Operation
    samples, measured_s : float
    """

    row: int
    name: str
    operations: tuple[Operation, ...]
    samples: float
    measured_s: float


def device_of(name: str) -> Device:
    """Return a device as DeepBench names it, words joined by underscores."""
    return resolve_device(name.replace("_", " ").replace("NV ", ""))


def precision_of(sheet: str, section: str) -> str:
    """Return the precision of a sheet's rows.

    In the sheets of inference in "mixed precision" recurrent layers are in 32 bit: cuDNN has none in 8 bit.

    Raises
    ------
    SpecError
        For products of 8 bit, and of values in 16 bit by 32-bit arithmetic.
    """
    if sheet.endswith("Mixed Precision") and section.startswith(RECURRENT):
        return "fp32"
    found = next((name for end, name in _PRECISIONS.items() if sheet.endswith(end)), None)
    if found is None:
        said = next((why for word, why in _OTHER_PRECISIONS.items() if sheet.endswith(word)), None)
        raise SpecError(said or f"a sheet {sheet!r} states no precision")
    return found


def timed_passes(
    device: str, section: str, sheet: str, rows: Sequence[Mapping[str, str]]
) -> list[list[tuple[StatedPass, float]]]:
    """Return the passes that each row of a sheet states, each with its predicted seconds.

    Raises
    ------
    SpecError
        For a device or a precision that is not known, and without PyTorch.
    """
    on, precision = device_of(device), precision_of(sheet, section)
    if not on.supports(precision):
        raise SpecError(f"{on.name} has no {precision}")
    stated = stated_passes(section, precision, rows)
    found: list[list[tuple[StatedPass, float]]] = [[] for _ in rows]
    for each, predicted_s in zip(stated, passes_alone_s(stated, on, precision), strict=True):
        found[each.row].append((each, predicted_s))
    return found


def passes_alone_s(
    passes: Sequence[StatedPass], device: Device, precision: str, waiting_s: float = WAITING_S
) -> list[float]:
    """Return the seconds of passes that are timed by themselves with the libraries of these sheets."""
    seconds = [0.0] * len(passes)
    for samples in {each.samples for each in passes}:
        which = [i for i, each in enumerate(passes) if each.samples == samples]
        work = tuple(operation for i in which for operation in passes[i].operations)
        work_s = device_operations_s(
            work, samples, device=device, precision=precision, sustained=False, waiting_s=waiting_s
        )
        each_s = iter(work_s)
        for i in which:
            seconds[i] = float(sum(islice(each_s, len(passes[i].operations))))
    return seconds


def stated_passes(section: str, precision: str, rows: Sequence[Mapping[str, str]]) -> list[StatedPass]:
    """Return the passes that rows of a section state, with their operations.

    Raises
    ------
    ExtraMissingError
        Without PyTorch, which traces them.
    """
    read = _recurrent if section.startswith(RECURRENT) else _convolutions
    try:
        return list(read(section, precision, rows))
    except ModuleNotFoundError as error:
        what = f"convolutions and recurrent layers need {error.name}"
        raise ExtraMissingError(what, fix="pip install 'foreshard[run]'") from error


def _convolutions(section: str, precision: str, rows: Sequence[Mapping[str, str]]) -> Iterator[StatedPass]:
    from foreshard.profile.tracing.alone import convolution_passes

    for index, row in enumerate(rows):
        cells = _cells(row["params"])
        first_words = {name.split(" ")[0].lower(): value for name, value in cells.items()}
        known = {name.lower(): value for name, value in cells.items()} | first_words
        sides = (("h", "w"), ("r", "s"), ("pad_h", "pad_w"), ("vertical stride", "horizontal stride"))
        image, taps, padding, stride = ((int(known[a]), int(known[b])) for a, b in sides)
        passes = convolution_passes(int(known["c"]), image, int(known["k"]), taps, padding, stride, precision)
        yield from _stated(index, passes, float(known["n"]), cells)


def _recurrent(section: str, precision: str, rows: Sequence[Mapping[str, str]]) -> Iterator[StatedPass]:
    from foreshard.profile.tracing.alone import recurrent_passes

    steps = 0
    for index, row in enumerate(rows):
        if row["op_or_pass"] == STEPS:
            steps = int(float(row["time_ms"]))
            continue
        cells = _cells(row["params"])
        width = next(int(value) for name, value in cells.items() if re.match("hidden|input", name.lower()))
        kind = section.removeprefix(RECURRENT).lower()
        passes = recurrent_passes(kind, width, steps, precision)
        yield from _stated(index, passes, float(cells["N"]), {row["op_or_pass"]: row["time_ms"]})


def _stated(
    row: int, passes: Mapping[str, tuple[Operation, ...]], samples: float, cells: Mapping[str, str]
) -> Iterator[StatedPass]:
    """Yield the passes whose milliseconds are among cells."""
    for name, value in cells.items():
        names = next((found for begin, found in _PASSES.items() if name.lower().startswith(begin)), None)
        if names is not None and re.fullmatch(r"[\d.]+", value):
            yield StatedPass(
                row=row,
                name=" + ".join(names),
                operations=tuple(operation for one in names for operation in passes[one]),
                samples=samples,
                measured_s=float(value) * 1e-3,
            )


def _cells(params: str) -> dict[str, str]:
    """Return the cells of a row, which are joined by semicolons."""
    return {name.strip(): value for name, _, value in (part.partition("=") for part in params.split(";"))}
