"""Costs of layers and links: measured on the user's own machines, or priced by formulas (`traced`).

A layer's forward and backward take on a measured device what was timed at a size, between sizes what the line
between them says; without timed sizes `fixed + per_sample * samples` seconds. A device that is stated to be
slower takes `slow` times that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np

from foreshard.comm.collectives import all_gather_s, all_reduce_s, send_s
from foreshard.comm.fabric import fabric_between
from foreshard.errors import SpecError
from foreshard.predict.measured.links import MeasuredLinks
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import Range, Size, invalid, load_written
from foreshard.spec.plan import PRECISIONS

Number = Annotated[float, Range(0.0)]
FREE = 1e12
"""How many times as fast what is free is: not infinitely, so that passes keep their proportions."""
Line = tuple[Number, Number]
"""(fixed seconds, seconds per sample)."""
Sums = tuple[tuple[Number, Number], ...]
"""(bytes per sample, which part of a ring) of each sum over the ranks that compute a layer together."""
Shared = tuple[tuple[tuple[int, ...], float], ...]
"""(layers that share a parameter, its bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What a layer costs on the measured device."""

    # `backward_input_s` is the part of the backward that the layer before waits for
    forward_s: Line
    backward_s: Line
    backward_input_s: Line
    optimizer_s: Number
    # trainable parameters (their gradients take as much), optimizer's states
    parameter_bytes: Number
    state_bytes: Number
    # kept from forward to backward; handed to the next layer
    saved_bytes_per_sample: Number
    boundary_bytes_per_sample: Number
    frozen_bytes: Number = 0.0
    # seconds at the sizes that were timed, in rising order; the lines above are fitted to them
    timed_sizes: tuple[int, ...] = ()
    timed_forward_s: tuple[Number, ...] = ()
    timed_backward_s: tuple[Number, ...] = ()
    timed_backward_input_s: tuple[Number, ...] = ()
    # of a rank's part of a layer
    sums_forward: Sums = ()
    sums_backward: Sums = ()
    # of it: bytes of gradients that ranks sum though each holds the parameter whole; whether each hands on
    # a part of what the layer makes
    summed_bytes: Number = 0.0
    splits_boundary: bool = False

    @property
    def step_bytes(self) -> Number:
        """Temporaries of the optimizer's step: none worth counting where it updates tensor by tensor."""
        return 0.0

    def saved_bytes(self, samples: Any) -> Any:
        """Return the bytes kept from forward to backward for samples, a number or an array."""
        return samples * self.saved_bytes_per_sample

    def beside_bytes(self, samples: Any) -> Any:
        """Return what the backward of a micro-batch holds at most beyond what was kept: not measured."""
        return 0.0 * samples

    def boundary_bytes(self, samples: Any) -> Any:
        """Return the bytes of a micro-batch that are handed to the next layer."""
        return samples * self.boundary_bytes_per_sample


class LayerSums:
    """Numbers of layers summed over intervals [start, stop): differences of running sums."""

    def __init__(self, layers: Sequence[LayerCost]):
        self._layers = layers
        self._upto: dict[str, np.ndarray] = {}

    def upto(self, name: str) -> np.ndarray:
        """Return the sums of a number over the first layers, shape (layers + 1,) or (layers + 1, sizes)."""
        if name not in self._upto:
            values = np.array([getattr(layer, name) for layer in self._layers])
            self._upto[name] = np.concatenate((np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)))
        return self._upto[name]

    def upto_seconds(self, name: str, samples: Any) -> np.ndarray:
        """Return the seconds of the first layers for samples, shape (layers + 1, *samples)."""
        sizes = self._layers[0].timed_sizes
        if not sizes:
            fixed, each = np.moveaxis(self.upto(name), -1, 0)
            return fixed.reshape(-1, *(1,) * np.ndim(samples)) + np.multiply.outer(each, samples)
        return between_sizes(samples, sizes, self.upto(f"timed_{name}"))

    def seconds(self, name: str, span: tuple[int, int], samples: Any) -> Any:
        """Return the seconds of the layers of an interval for samples, a number or an array."""
        upto = self.upto_seconds(name, samples)
        return upto[span[1]] - upto[span[0]]


def between_sizes(samples: Any, sizes: Sequence[int], timed_s: np.ndarray) -> np.ndarray:
    """Return seconds for samples from those at some sizes, which `timed_s` has along its last axis.

    Between two sizes they are those of the line through both, beyond the last those of the last line. Fewer
    samples than the first take as long a sample.

    Examples
    --------
    >>> between_sizes([1, 2, 4, 6, 16], (2, 4, 8), np.array([3.0, 5.0, 8.0])).tolist()
    [1.5, 3.0, 5.0, 6.5, 14.0]
    """
    known, given = np.array([0, *sizes], dtype=float), np.asarray(samples, dtype=float)
    timed_s = np.concatenate((np.zeros((*timed_s.shape[:-1], 1)), timed_s), axis=-1)
    slopes = np.maximum(np.diff(timed_s) / np.diff(known), 0.0)
    place = np.clip(np.searchsorted(known, given, side="left") - 1, 0, len(sizes) - 1)
    return np.asarray(timed_s[..., place] + slopes[..., place] * (given - known[place]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs of one model's layers on each device: timed there, or priced by formulas (clock 'formula')."""

    layers: tuple[LayerCost, ...]  # on the device that was measured first
    # mapping of device name to factor: how many times as long the work takes there; 1 for a measured device
    slow: Mapping[str, float]
    # 5th and 95th percentile of a step over its prediction: the noise of the machine
    spread: tuple[float, float]
    clock: str  # what the seconds are of (cpu, wall)
    tokens_per_sample: float
    path: str
    links: MeasuredLinks = field(default_factory=MeasuredLinks)  # what is not in them the cluster says
    # mapping of device name to tuple of LayerCost: devices that were measured themselves; `slow` refers to
    # `layers` for all others
    tables: Mapping[str, tuple[LayerCost, ...]] = field(default_factory=dict)
    model: str = ""
    machine: str = ""
    precision: str = "fp32"  # that layers computed in
    largest: int = 8  # samples of the largest micro-batch that was timed
    tied: Shared = ()  # parameters that several layers share: each of the layers counts it in its own bytes
    # mapping of device name to mapping of degree to tuple of LayerCost: a rank's part of the layers where so
    # many compute them together; '' for those without a table
    parts: Mapping[str, Mapping[int, tuple[LayerCost, ...]]] = field(default_factory=dict)
    # mapping of degree to what layers share of a rank's part, as `tied`
    tied_parts: Mapping[int, Shared] = field(default_factory=dict)
    # gradients that are summed at once while the backward goes on; 0: all together after it, as `run` does
    bucket_bytes: float = 0.0
    # mapping of device name to host seconds of launching each layer's operations, forward and backward, as
    # lines over the samples, beside the device's seconds; measured seconds hold them, and devices with
    # compiled steps have none
    launch_s: Mapping[str, tuple[tuple[Line, Line], ...]] = field(default_factory=dict)
    host_sharpness: float = 1.0  # how host and device time join: `predict.tasks.host.joined_s`
    # of a traced module, which intervals go by: whether it reads images, and has a backward
    reads_images: bool = False
    trained: bool = True
    # bytes of a parameter that ZeRO 3 gathers, and of its gradient that ranks sum, of those that are kept
    moved_share: float = 1.0
    copied_s: Mapping[str, float] = field(default_factory=dict)  # per byte of a bucket, in or out, by device
    contention: float = 0.0  # what a second of collectives slows the work beside it by
    flops_per_sample: float = 0.0  # of forward and backward; 0: not known
    notes: tuple[str, ...] = ()  # of how the costs were made
    part_notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # and of the parts, by degree
    # mapping of part of a step to how many times as fast it is: a question of what if
    speeds: Mapping[str, float] = field(default_factory=dict)
    # mapping of term to how many times as long as by formulas it takes, by measured steps
    slower: Mapping[str, float] = field(default_factory=dict)
    _sums: dict[tuple[str, int], LayerSums] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    @property
    def by_formula(self) -> bool:
        """Whether the seconds were computed from shapes rather than measured."""
        return self.clock == "formula"

    def speed(self, part: str) -> float:
        """Return how many times as fast as by formulas a part of the step is: 1 as it is."""
        return min(self.speeds.get(part, 1.0), FREE) / self.slower.get(part, 1.0)

    def slow_of(self, device: str) -> float:
        """Return how slow a device is."""
        if device not in self.slow:
            raise SpecError(
                f"no measured costs of {device!r}",
                file=self.path,
                key="devices",
                value=device,
                rule=f"Measured are {', '.join(sorted(self.slow))}",
                fix="Profile that device, or give the lab to calibrate",
            )
        return self.slow[device]

    def layers_on(self, device: str, tp: int = 1) -> tuple[LayerCost, ...]:
        """Return the layers as measured on a device, or on the one that `slow_of` it refers to."""
        if tp == 1:
            return self.tables.get(device, self.layers)
        known = self.parts.get(device if device in self.tables else "", {})
        if tp not in known:
            raise SpecError(
                f"layers that {tp} ranks compute together were not measured",
                file=self.path,
                key="groups.stages.tp",
                value=tp,
                rule=f"{'Traced' if self.by_formula else 'Measured'} are {', '.join(map(str, (1, *known)))}",
                fix=f"{'Trace' if self.by_formula else 'Profile'} again with --tp {tp}, or plan without",
            )
        return known[tp]

    def sums(self, device: str, tp: int = 1) -> LayerSums:
        """Return the sums over layers of a device's table, or of a rank's part of it, before `slow_of`."""
        key = (device if device in self.tables else "", tp)
        if key not in self._sums:
            self._sums[key] = LayerSums(self.layers_on(device, tp))
        return self._sums[key]

    def split_bytes(self, layer: int, tp: int) -> float:
        """Return the trained bytes of a layer that so many ranks share out; the rest each holds whole."""
        whole, part = self.layers[layer].parameter_bytes, self.layers_on("", tp)[layer].parameter_bytes
        return (whole - part) * tp / (tp - 1)

    def gradients(self, tp: int = 1) -> list[tuple[tuple[int, ...], float]]:
        """Return (layers, bytes) of a rank's gradients: of each layer alone, then those that layers share."""
        own = [self.moved_share * layer.parameter_bytes for layer in self.layers_on("", tp)]
        tied = tuple((layers, self.moved_share * size) for layers, size in self._tied(tp))
        for layers, size in tied:
            for layer in layers:
                own[layer] -= size
        return [*(((layer,), size) for layer, size in enumerate(own)), *tied]

    def _tied(self, tp: int) -> Shared:
        return self.tied_parts.get(tp, self.tied)

    def held(
        self, name: str, starts: np.ndarray, stops: np.ndarray, tp: int = 1, device: str = ""
    ) -> np.ndarray:
        """Return a number summed over the layers of stages, of a parameter that they share once.

        Parameters
        ----------
        name : str
            A number of a layer that goes with its trained parameters.
        starts, stops : ndarray of int, shape (stages, chunks)
            The layers of each stage: [start, stop) of each of its chunks.
        tp : int
        device : str
            Whose table is summed.

        Returns
        -------
        ndarray, shape (stages,)
        """
        upto, table = self.sums(device, tp).upto(name), self.layers_on(device, tp)
        found = np.asarray((upto[stops] - upto[starts]).sum(-1))
        for sharing, size in self._tied(tp):
            is_held = np.array([((starts <= layer) & (layer < stops)).any(-1) for layer in sharing])
            is_again = is_held & (is_held.cumsum(axis=0) > 1)
            shared = [getattr(table[i], name) * size / table[i].parameter_bytes for i in sharing]
            found = found - shared @ is_again
        return found

    def work_s(self, device: str, span: tuple[int, int], name: str, samples: Any, tp: int = 1) -> Any:
        """Return the seconds that a device needs for samples on layers [start, stop), or its part of them."""
        return self.slow_of(device) * self.sums(device, tp).seconds(name, span, samples)

    def launches_s(self, device: str, samples: float) -> np.ndarray:
        """Return host seconds of the launches of the first layers, forward and backward; (layers + 1, 2)."""
        lines = np.array(self.launch_s.get(device) or np.zeros((len(self.layers), 2, 2)), dtype=float)
        each = lines @ np.array([1.0, samples])
        return np.concatenate((np.zeros((1, 2)), np.cumsum(each, axis=0)))

    def optimizer_s(self, device: str, layers: Iterable[int], tp: int = 1) -> float:
        """Return the seconds that a device needs to update layers, or its part of them."""
        places = list(layers)
        if self.by_formula:
            starts = np.array([places])
            seconds = self.held("optimizer_s", starts, starts + 1, tp, device).item()
        else:  # timed layers are updated as they were timed, each with all that it holds
            table = self.layers_on(device, tp)
            seconds = sum(table[layer].optimizer_s for layer in places)
        return self.slow_of(device) * float(seconds) / self.speed("optimizer")

    def message_s(
        self, cluster: Cluster, source: int, target: int, num_bytes: Any, senders: int | None = None
    ) -> Any:
        """Return the seconds of a message between two ranks; `num_bytes` is a number or an array.

        Costs by formulas let so many `senders` share the NICs of a node, or all of its devices (None).
        """
        measured = self.links.between(apart=_apart(cluster, (source, target)))
        if measured is not None:
            return measured.message_s(num_bytes)
        if self.by_formula:
            fabric = fabric_between(cluster, (source, target), senders=senders)
            return send_s(num_bytes, _apart(cluster, (source, target)), fabric)
        rate, latency_s = _stated(cluster, source, target)
        return latency_s + num_bytes / rate

    def ring_s(self, cluster: Cluster, owners: Sequence[int], num_bytes: Any) -> Any:
        """Return the seconds of an all-reduce: a ring over the slowest link (Thakur et al. 2005).

        With costs by formulas it is the closed form of the collective library.
        """
        m = len(owners)
        if m < 2:
            return 0.0 * num_bytes
        measured = self.links.between(apart=_apart(cluster, owners))
        if measured is not None:
            return measured.ring_s(m, num_bytes)
        if self.by_formula:
            stride = min(b - a for a, b in pairwise(sorted(owners)))
            return all_reduce_s(num_bytes, m, stride, fabric_between(cluster, owners))
        links = [_stated(cluster, a, b) for a, b in zip(owners, (*owners[1:], owners[0]), strict=True)]
        rate, latency_s = min(r for r, _ in links), max(wait for _, wait in links)
        return 2 * (m - 1) * latency_s + 2 * (m - 1) / m * num_bytes / rate

    def gather_s(self, cluster: Cluster, owners: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all: half of a ring."""
        if not self.by_formula:
            return 0.5 * float(self.ring_s(cluster, owners, num_bytes))
        stride = min(b - a for a, b in pairwise(sorted(owners)))
        return float(all_gather_s(num_bytes, len(owners), stride, fabric_between(cluster, owners)))


def _apart(cluster: Cluster, ranks: Sequence[int]) -> bool:
    return len({cluster.node_of(rank) for rank in ranks}) > 1


def _stated(cluster: Cluster, source: int, target: int) -> Line:
    """Return the cluster's own (bytes/s, latency in seconds) between two ranks."""
    a, b = cluster.node_group_of(source), cluster.node_group_of(target)
    return min(a.nic_bytes_per_s, b.nic_bytes_per_s), max(a.nic_latency_s, b.nic_latency_s)


Layers = Annotated[tuple[LayerCost, ...], Size(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedLayers:
    """Layers that share a parameter, and its bytes."""

    layers: tuple[Annotated[int, Range(0)], ...]
    bytes: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsFile:
    """The file that `foreshard calibrate` writes, as far as predictions need it."""

    kind: Literal["measured costs"]
    schema_version: Literal[1]
    layers: Layers
    devices: Mapping[str, Annotated[float, Range(1e-9, 1e9)]]
    spread: tuple[Number, Number]
    clock: Literal["cpu", "wall", "table"]
    tokens_per_sample: Annotated[float, Range(1e-9)]
    samples: Annotated[tuple[Annotated[int, Range(1)], ...], Size(1)]
    links: MeasuredLinks | None = None
    tables: Mapping[str, Layers] = field(default_factory=dict)
    tensor: Mapping[str, Mapping[str, Layers]] = field(default_factory=dict)
    tied: tuple[TiedLayers, ...] = ()
    model: str = ""
    machine: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


def load_costs(path: str) -> MeasuredCosts:
    """Return measured costs from the file that `foreshard calibrate` writes.

    Raises
    ------
    SpecError
        For what is no such file, naming file and key.
    """
    fix = "Make it with foreshard profile and foreshard calibrate"
    file, _ = load_written(CostsFile, path, key="--costs", fix=fix)
    for name, table in file.tables.items():
        if len(table) != len(file.layers):
            rule = f"A table has the {len(file.layers)} layers of the model"
            raise invalid(len(table), rule, key=f"tables.{name}", fix=fix, file=path)
    for layer in (*file.layers, *(row for table in file.tables.values() for row in table)):
        _check_sizes(layer, path, fix)
    if file.spread[0] > file.spread[1]:
        rule = "It is the least and the largest step over the predicted one"
        raise invalid(list(file.spread), rule, key="spread", fix=fix, file=path)
    check_tied(file.tied, len(file.layers), path, fix)
    precision = file.fingerprint.get("precision", "fp32")
    if precision not in PRECISIONS:
        rule = f"It is one of {', '.join(PRECISIONS)}"
        raise invalid(precision, rule, key="fingerprint.precision", fix=fix, file=path)
    return MeasuredCosts(
        layers=file.layers,
        tables=file.tables,
        slow=file.devices,
        spread=file.spread,
        clock=file.clock,
        tokens_per_sample=file.tokens_per_sample,
        path=path,
        links=file.links or MeasuredLinks(),
        model=file.model,
        machine=file.machine,
        precision=precision,
        largest=max(file.samples),
        tied=tuple((tie.layers, tie.bytes) for tie in file.tied),
        parts={
            name: {int(degree): rows for degree, rows in by_degree.items()}
            for name, by_degree in file.tensor.items()
        },
    )


def check_tied(tied: Sequence[TiedLayers], num_layers: int, path: str, fix: str) -> None:
    """Raise for tied layers that a model of so many layers lacks."""
    for place, tie in enumerate(tied):
        if max(tie.layers, default=0) >= num_layers:
            rule = f"Layers are 0 to {num_layers - 1}"
            raise invalid(list(tie.layers), rule, key=f"tied[{place}].layers", fix=fix, file=path)


def _check_sizes(layer: LayerCost, path: str, fix: str) -> None:
    """Raise for seconds without sizes, or sizes that do not rise."""
    sizes = layer.timed_sizes
    if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
        rule = "Sizes are 1 or more, and rise"
        raise invalid(list(sizes), rule, key="layers.timed_sizes", fix=fix, file=path)
    for name in ("timed_forward_s", "timed_backward_s", "timed_backward_input_s"):
        if len(getattr(layer, name)) != len(sizes):
            rule = f"A layer has seconds for each of its {len(sizes)} timed sizes"
            raise invalid(len(getattr(layer, name)), rule, key=f"layers.{name}", fix=fix, file=path)
