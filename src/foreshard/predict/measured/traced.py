"""Costs of a traced module by formulas, in the form of measured ones: a table of layers for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import KernelModel, kernel_model
from foreshard.catalog.stacks import attention_constants
from foreshard.catalog.training import TrainingConstants, training_constants
from foreshard.cost.elementwise import stream_s
from foreshard.cost.memory import optimizer_state_bytes
from foreshard.cost.operations import operations_s
from foreshard.cost.recurrences import RecurrentKernels, recurrence_kernels
from foreshard.errors import SpecError
from foreshard.predict.measured.costs import FREE, LayerCost, Line, MeasuredCosts, Shared, Sums
from foreshard.predict.measured.memory import counts_of
from foreshard.predict.tasks.host import operation_launch_s
from foreshard.predict.traits import launches_kernels, sm_cycles_per_s, update_bytes
from foreshard.spec.cluster import Cluster
from foreshard.spec.device import Device
from foreshard.spec.plan import Plan
from foreshard.spec.traced_module import Growth, Operation, Tied, TracedLayer, TracedModule, TracedPart
from foreshard.units import number_of

MASTER_BYTES = 4
"""Parameters, gradients and moments are kept in 32 bit."""
_CAST_BYTES = 6  # read in 32 bit, written in 16, before each use
_CUDNN_9 = ("hopper", "blackwell")  # whose convolutions are those of cuDNN 9, whatever was stated
_TAKEN_BY_CUDNN_9 = ("ampere", "ada", *_CUDNN_9)
"""What its kernels of convolutions run on; those of Volta and Turing were not compared."""
_WITHOUT_MATRIX_UNITS = ("kepler", "maxwell", "pascal")
_KEEPS_WEIGHTS, _KEEPING_PROCESSORS = ("ampere", "ada", "hopper", "blackwell"), 98  # of recurrent layers
_CHOOSING_ALGORITHMS = ("nvidia", "amd")
"""Vendors of libraries that choose among algorithms for convolutions in 32 bit (cuDNN, MIOpen)."""
_LANES = 128  # threads that a processor of NVIDIA issues an instruction of at once: four warps
BUCKET_BYTES = 25 * 2**20
"""Gradients that torch's DistributedDataParallel sums at once (bucket_cap_mb)."""

_WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved")
"""Schedules that run the backward of a layer in one."""
_LIBRARY_LAUNCH_S = 13e-6
"""Host seconds of each kernel that a library launches within one operation, as cuDNN does for a recurrence.

Source: bench/device_recurrent.csv, layers of 50 steps on a host that takes 16 to 18 us for an operation of
torch: 13.6 us a kernel forward and 11.5 backward in the median.
"""
_OF_LAYOUT = ("layout", "batch_norm")  # kinds of operations that images with channels last do not have
_NAMED_SHARE = 0.01  # of the work on a device, from which on it is named
_SHOWN = 3  # weights that stay whole, by name

_CLASSES = {
    **dict.fromkeys(("product", "convolution", "grouped"), "matmul"),
    "attention": "attention",
    "experts": "experts",
}
"""Classes of kernels by the kinds of operations; all others are bound by memory."""

EVERY_KERNEL = "kernels"
"""The term of all kernels of a device together."""
TERM_OF_KIND = {
    "product": "products",
    "experts": "products",
    "convolution": "convolutions",
    "grouped": "grouped_convolutions",
    "depthwise": "depthwise_convolutions",
    "recurrence": "recurrences",
    "attention": "attention",
    "batch_norm": "channel_norms",
    "stream": "streams",
    "layout": "layouts",
}
"""Terms that measured steps tell apart, by kinds of operations; parts of a step are others."""
KINDS = tuple(TERM_OF_KIND)
"""Kinds of operations."""

Price = Callable[..., np.ndarray]
"""Seconds of operations for a number of samples on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayerCost(LayerCost):
    """What a traced layer costs; it may keep and hand on more for every pair of samples, as `Growth` says."""

    saved_bytes_per_pair: float = 0.0
    boundary_bytes_per_pair: float = 0.0
    beside: Growth

    @property
    def step_bytes(self) -> Any:
        """Square roots of all second moments at once (torch 2.13 optim/adamw.py _multi_tensor_adamw)."""
        return self.parameter_bytes * (self.state_bytes >= 2 * self.parameter_bytes)

    def saved_bytes(self, samples: Any) -> Any:
        """Return the bytes kept of a micro-batch from forward to backward."""
        return samples * (self.saved_bytes_per_sample + samples * self.saved_bytes_per_pair)

    def beside_bytes(self, samples: Any) -> Any:
        """Return what the backward of a micro-batch holds at most beyond what was kept."""
        return self.beside.at(samples)

    def boundary_bytes(self, samples: Any) -> Any:
        """Return the bytes of a micro-batch that are handed to the next layer."""
        return samples * (self.boundary_bytes_per_sample + samples * self.boundary_bytes_per_pair)


def traced_costs(
    module: TracedModule,
    devices: Iterable[Device],
    *,
    micro_batches: Iterable[int],
    optimizer: str = "adamw",
    fidelity: str = "zero-shot",
    speeds: Mapping[str, float] | None = None,
    slower: Mapping[str, float] | None = None,
    priced: OperationPrices | None = None,
) -> MeasuredCosts:
    """Return what the layers of a traced module cost on each device.

    Parameters
    ----------
    module : TracedModule
    devices : iterable of Device
    micro_batches : iterable of int
        Samples that a rank takes at once. A layer's seconds are the line through the smallest and the
        largest, exact there; with one size, through that and its half.
    optimizer : str
    fidelity : {'zero-shot', 'datasheet'}
    speeds : mapping, optional
        Parts of the step and classes of kernels (`predict.tasks.kernels.KERNELS`) that are so many times as
        fast, infinity for free.
    slower : mapping, optional
        Terms (`TERM_OF_KIND` and parts of the step) that take so many times as long as by formulas.
    priced : OperationPrices, optional
        Of the same module, from one call to the next.

    Raises
    ------
    SpecError
        If a device has no rate for the module's precision.
    """
    devices, faster, longer = tuple(devices), dict(speeds or {}), dict(slower or {})
    prices = priced or OperationPrices()
    sizes = sorted({float(size) for size in micro_batches})
    few, many = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0])

    def tables_of(layers: Sequence[TracedLayer]) -> dict[str, tuple[LayerCost, ...]]:
        return {
            device.name: _table(
                module,
                layers,
                device,
                (few, many),
                optimizer,
                fidelity,
                partial(prices, factors=_factors(faster, longer)),
            )
            for device in devices
        }

    tables = tables_of(module.layers)
    split = {degree: part for degree, part in module.parts.items() if part.split}
    of_degree = {degree: tables_of(part.layers) for degree, part in split.items()}
    parts = {name: {degree: known[name] for degree, known in of_degree.items()} for name in tables}
    constants = TrainingConstants.ideal() if fidelity == "datasheet" else training_constants()
    return MeasuredCosts(
        layers=next(iter(tables.values())),
        tables=tables,
        slow=dict.fromkeys(tables, 1.0),
        spread=(1.0, 1.0),
        clock="formula",
        tokens_per_sample=1.0,
        path=module.source,
        model=module.name,
        precision=module.precision,
        largest=int(many),
        tied=_tied_bytes(module.tied),
        parts=parts | {"": parts[devices[0].name]},
        tied_parts={degree: _tied_bytes(part.tied) for degree, part in split.items()},
        bucket_bytes=BUCKET_BYTES,
        launch_s={device.name: _launches(module, device, constants, (few, many)) for device in devices},
        host_sharpness=constants.host_sharpness,
        reads_images=module.reads_images,
        trained=any(layer.backward for layer in module.layers),
        moved_share=_moved_share(module),
        copied_s={device.name: _copied_s(device, module, fidelity) for device in devices},
        contention=constants.fsdp_contention * all(map(launches_kernels, devices)),
        flops_per_sample=module.flops(many) / many,
        notes=(*module.assumptions, *_layout_notes(module, devices[0], many, fidelity, prices)),
        part_notes={degree: _part_notes(part) for degree, part in split.items()},
        speeds=faster,
        slower=longer,
    )


class OperationPrices:
    """`device_operations_s`, remembered by the operations of a layer."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray, tuple[Operation, ...]]] = {}

    def __call__(
        self,
        operations: tuple[Operation, ...],
        samples: float,
        *,
        device: Device,
        precision: str,
        fidelity: str,
        cudnn: int = 9,
        factors: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the seconds of operations, shape (operations,), times a factor for each of `KINDS`."""
        key = (id(operations), samples, device.name, precision, fidelity, cudnn)
        if key not in self._known:
            seconds = device_operations_s(
                operations, samples, device=device, precision=precision, fidelity=fidelity, cudnn=cudnn
            )
            kinds = np.array([KINDS.index(operation.kind) for operation in operations], dtype=int)
            self._known[key] = seconds, kinds, operations  # kept, so that no others get their id
        seconds, kinds, _ = self._known[key]
        return seconds if factors is None else seconds * factors[kinds]


def _factors(speeds: Mapping[str, float], slower: Mapping[str, float]) -> np.ndarray:
    """Return how many times as long operations of each of `KINDS` take, by their class and their term."""
    return np.array(
        [
            slower.get(EVERY_KERNEL, 1.0)
            * slower.get(term, 1.0)
            / min(speeds.get(_CLASSES.get(kind, "memory_bound"), 1.0), FREE)
            for kind, term in TERM_OF_KIND.items()
        ]
    )


def costs_under(
    module: TracedModule,
    cluster: Cluster,
    plan: Plan,
    *,
    fidelity: str = "zero-shot",
    speeds: Mapping[str, float] | None = None,
    slower: Mapping[str, float] | None = None,
    priced: OperationPrices | None = None,
) -> MeasuredCosts:
    """Return what the layers of a traced module cost on a cluster at the micro-batches of a plan.

    Options are those of `traced_costs`.

    Raises
    ------
    SpecError
        If the module was traced in another precision or without the plan's tensor parallelism, or the plan
        needs less than a whole layer.
    """
    check_precision(module, plan)
    check_degrees(module, plan)
    check_rules(plan)
    sizes = {
        count
        for group in plan.groups
        for stage in group.stages
        for samples in (min(group.micro_batch, group.share), group.share % group.micro_batch)  # the last
        for count in counts_of(stage, samples)
        if count
    }
    devices = [nodes.device for nodes in cluster.nodes]
    return traced_costs(
        module,
        devices,
        micro_batches=sizes,
        optimizer=plan.optimizer,
        fidelity=fidelity,
        speeds=speeds,
        slower=slower,
        priced=priced,
    )


def _moved_share(module: TracedModule) -> float:
    """Return bytes of a gradient of those of a parameter: 2 of 4 where a module is in 16 bit as a whole."""
    return 0.5 if module.casts_weights and module.precision in ("fp16", "bf16") else 1.0


def _copied_s(device: Device, module: TracedModule, fidelity: str) -> float:
    """Return the seconds of a byte that is copied into a bucket, or out of it, as a kernel of streams.

    torch's DistributedDataParallel does so unless it is asked for `gradient_as_bucket_view`.
    """
    kernels = kernel_model(device, module.precision, fidelity=fidelity)
    return 2.0 / float(kernels.stream_eff * kernels.memory_bytes_per_s)


def _layout_notes(
    module: TracedModule, device: Device, samples: float, fidelity: str, priced: OperationPrices
) -> tuple[str, ...]:
    """Return what images that lie channels first cost a module, where that is a share of its time."""
    passes = [operations for layer in module.layers for operations in (layer.forward, layer.backward)]
    of_layout = [op.kind in _OF_LAYOUT for operations in passes for op in operations]
    if not module.reads_images or not any(of_layout):
        return ()
    price = partial(priced, device=device, precision=module.precision, fidelity=fidelity, cudnn=module.cudnn)
    seconds = np.concatenate([price(operations, samples) for operations in passes if operations])
    share = seconds[of_layout].sum() / seconds.sum()
    if share < _NAMED_SHARE:
        return ()
    return (
        "images lie channels first, as the module's weights do: norms by channel and changes of layout for "
        f"convolutions take {100 * share:.0f} % of the work of {device.name}; those of a factory that "
        "returns module.to(memory_format=torch.channels_last) lie channels last",
    )


def _tied_bytes(tied: Tied) -> Shared:
    return tuple((layers, float(elements * MASTER_BYTES)) for layers, elements in tied)


def check_degrees(module: TracedModule, plan: Plan) -> None:
    """Raise SpecError for tensor parallelism that the module was not traced for, or that splits nothing."""
    for tp in sorted({stage.tp for group in plan.groups for stage in group.stages} - {1}):
        part = module.parts.get(tp)
        if part is None:
            raise SpecError(
                f"{module.name} was traced without tp {tp}",
                key="--tp",
                value=tp,
                rule="A trace splits a module by the degrees that it was asked for",
                fix=f"Trace it with degrees=[{tp}]",
            )
        if not part.split:
            shown = "; ".join(f"{name} ({why})" for name, why in list(part.whole.items())[:_SHOWN])
            raise SpecError(
                f"tp {tp} splits nothing of {module.name}",
                file=module.source,
                key="--tp",
                value=tp,
                rule="Split are pairs of products of which the second takes what the first makes, heads of "
                f"attention, tables and channels, by a degree that divides them{shown and f': {shown}'}",
                fix="Use --tp 1, or a degree that divides features, heads and channels",
            )


def check_precision(module: TracedModule, plan: Plan) -> None:
    """Raise SpecError for a plan in another precision than the module was traced in."""
    if plan.precision != module.precision:
        raise SpecError(
            f"a plan in {plan.precision} of a module traced in {module.precision}",
            key="--dtype",
            value=plan.precision,
            rule="Sizes and seconds of operations are those of the precision of the trace",
            fix=f"Trace it with precision={plan.precision!r}, or plan in {module.precision}",
        )


def check_rules(plan: Plan) -> None:
    """Raise SpecError for a choice that needs less than a whole layer, forward or backward."""
    rules = {stage.recompute for group in plan.groups for stage in group.stages}
    selective = sorted(rule for rule in rules if rule.startswith("selective"))
    if selective:
        rule = "Of a traced module whole layers of its chain run again"
        fix = "Use full, full:block:N, every-N or none"
        key, value = "--recompute", selective[0]
        raise SpecError(f"recompute {value} of a traced module", key=key, value=value, rule=rule, fix=fix)
    parted = [group.schedule for group in plan.groups if group.schedule not in _WHOLE_BACKWARD]
    if parted:
        rule = "It moves gradients of weights apart from those of inputs; a trace times a backward as one"
        key, value, fix = "--schedule", parted[0], f"Use one of {', '.join(_WHOLE_BACKWARD)}"
        raise SpecError(f"schedule {value} of a traced module", key=key, value=value, rule=rule, fix=fix)


def _part_notes(part: TracedPart) -> tuple[str, ...]:
    """Return what ranks share out of the module, and what each holds whole."""
    notes = [
        f"tensor parallelism: {number_of(len(part.split), 'parameter')} split by columns, rows, heads or "
        "channels as found in the trace, each sum over ranks made where it is needed, none overlapped"
    ]
    if part.whole:
        shown = [f"{name} ({why})" for name, why in list(part.whole.items())[:_SHOWN]]
        more = f" and {len(part.whole) - _SHOWN} more" if len(part.whole) > _SHOWN else ""
        notes.append(f"whole on every rank: {', '.join(shown)}{more}")
    return tuple(notes)


def _table(
    module: TracedModule,
    layers: Sequence[TracedLayer],
    device: Device,
    sizes: tuple[float, float],
    optimizer: str,
    fidelity: str,
    price: Price,
) -> tuple[LayerCost, ...]:
    if not device.supports(module.precision):
        known = ", ".join(device.peak_flops_per_s)
        raise SpecError(
            f"{device.name} has no {module.precision}",
            key="--dtype",
            value=module.precision,
            rule=f"It has {known}",
            fix="Name one of them",
        )
    kernels = kernel_model(device, module.precision, fidelity=fidelity)
    whole = partial(price, device=device, precision=module.precision, fidelity=fidelity, cudnn=module.cudnn)
    return tuple(_layer(layer, module, kernels, whole, sizes, optimizer) for layer in layers)


def _launches(
    module: TracedModule, device: Device, constants: TrainingConstants, sizes: tuple[float, float]
) -> tuple[tuple[Line, Line], ...]:
    """Return host seconds of each layer, forward and backward; layouts change within an operation.

    They are lines through two micro-batches: whether one kernel runs a recurrence is up to the samples.
    """
    forward_s, backward_s = operation_launch_s(constants, device)
    library = _recurrent_kernels(device, module.precision)

    def launched_s(operations: tuple[Operation, ...], samples: float, each_s: float) -> float:
        """Return the seconds of operations, and of kernels that a library launches within one."""
        within = [operation for operation in operations if operation.name.startswith("recurrent")]
        kernels = sum(recurrence_kernels(operation, samples, library) for operation in within)
        launched = sum(operation.kind != "layout" for operation in operations) - len(within) + bool(within)
        return launched * each_s + kernels * min(each_s, _LIBRARY_LAUNCH_S)

    def line(operations: tuple[Operation, ...], each_s: float) -> Line:
        few, many = (launched_s(operations, size, each_s) for size in sizes)
        more = (many - few) / (sizes[1] - sizes[0])
        return many - more * sizes[1], more

    return tuple(
        (line(layer.forward, forward_s), line(layer.backward, backward_s)) for layer in module.layers
    )


def _recurrent_kernels(device: Device, precision: str, waiting_s: float = 0.0) -> RecurrentKernels:
    """Return how cuDNN, or AMD's library, runs recurrent layers."""
    narrow = precision == "fp16"
    later = device.arch in _KEEPS_WEIGHTS and device.num_sms >= _KEEPING_PROCESSORS
    return RecurrentKernels(
        volta=narrow and device.arch == "volta",
        later=narrow and later,
        full_tiles=device.vendor == "nvidia",
        waiting_s=waiting_s,
    )


def device_operations_s(
    operations: tuple[Operation, ...],
    samples: float,
    *,
    device: Device,
    precision: str,
    fidelity: str = "zero-shot",
    sustained: bool = True,
    waiting_s: float = 0.0,
    cudnn: int = 9,
) -> np.ndarray:
    """Return the seconds of operations on a device, shape (operations,).

    `sustained` is that of `kernel_model`: whether the device is busy all the time, as in training.
    `waiting_s` is that of `RecurrentKernels`: 0 for today's libraries.
    Products in 32 bit run as torch lets them by default: convolutions may take TF32, products may not.
    Source: PyTorch, "CUDA semantics", TensorFloat-32.
    """
    wide = "fp32" if device.supports("fp32") else precision
    vector = float(device.peak(wide))
    attention = attention_constants(load_framework("ddp"), device)
    model = partial(kernel_model, device, attention=attention, fidelity=fidelity, sustained=sustained)
    outside = model(wide)
    issued_per_s = _LANES * sm_cycles_per_s(device) if device.vendor == "nvidia" else 0.0
    found = np.zeros(len(operations))
    of_precision: dict[str, list[int]] = {}
    for i, operation in enumerate(operations):
        of_precision.setdefault(_precision_of(operation, device, precision), []).append(i)
    for name, which in of_precision.items():
        units = name != "fp32" and device.arch not in _WITHOUT_MATRIX_UNITS
        units = units and launches_kernels(device)  # a compiler lays tensors out as its units read them
        kernels = model(name)
        found[which] = operations_s(
            [operations[i] for i in which],
            samples,
            kernels,
            vector,
            outside=kernels if name == "fp32" and device.vendor in _CHOOSING_ALGORITHMS else outside,
            matrix_units=units,
            issued_per_s=issued_per_s,
            processors=device.num_sms,
            cudnn_9=device.arch in (_TAKEN_BY_CUDNN_9 if cudnn >= 9 else _CUDNN_9),
            recurrent=_recurrent_kernels(device, name, waiting_s),
        )
    return found


def _precision_of(operation: Operation, device: Device, precision: str) -> str:
    """Return what an operation is priced in: the module's precision, but for products in 32 bit."""
    if not operation.wide or precision not in ("fp16", "bf16"):
        return precision
    narrower = "fp32" if operation.kind in ("product", "experts") else "tf32"
    return next((name for name in (narrower, "fp32") if device.supports(name)), precision)


def _layer(
    layer: TracedLayer,
    module: TracedModule,
    kernels: KernelModel,
    price: Price,
    sizes: tuple[float, float],
    optimizer: str,
) -> LayerCost:
    narrow = module.casts_weights and module.precision in ("fp16", "bf16")
    cast_s = float(stream_s(narrow * _CAST_BYTES * (layer.parameters + layer.frozen), kernels))
    forward_s, backward_s = (
        _line(operations, price, sizes) for operations in (layer.forward, layer.backward)
    )
    own = layer.parameters * MASTER_BYTES
    state = layer.parameters * optimizer_state_bytes(optimizer)
    updated = update_bytes(load_framework("ddp"), optimizer)  # torch's own, over lists of tensors
    return TracedLayerCost(
        forward_s=(forward_s[0] + cast_s, forward_s[1]),
        backward_s=backward_s,
        backward_input_s=backward_s,
        optimizer_s=float(stream_s(layer.parameters * updated, kernels)),
        parameter_bytes=own,
        state_bytes=state,
        saved_bytes_per_sample=layer.saved_bytes.each,
        saved_bytes_per_pair=layer.saved_bytes.square,
        boundary_bytes_per_sample=layer.boundary_bytes.each,
        boundary_bytes_per_pair=layer.boundary_bytes.square,
        beside=layer.beside_bytes,
        # beside them what forward keeps of any batch: copies of weights in 16 bit, masks
        frozen_bytes=(layer.frozen + layer.buffers) * module.weight_bytes + max(0.0, layer.saved_bytes.fixed),
        sums_forward=_sums(layer.sums_forward, sizes[1]),
        sums_backward=_sums(layer.sums_backward, sizes[1]),
        summed_bytes=_moved_share(module) * layer.unsummed * MASTER_BYTES,
        splits_boundary=layer.splits_boundary,
    )


def _sums(sums: Sequence[Growth], samples: float) -> Sums:
    """Return each sum over ranks as bytes a sample, exact at the larger micro-batch."""
    return tuple((size.at(samples) / samples, 1.0) for size in sums)


def _line(operations: tuple[Operation, ...], price: Price, sizes: tuple[float, float]) -> Line:
    """Return (fixed seconds, seconds per sample) through the times of two micro-batches."""
    if not operations:
        return 0.0, 0.0
    few, many = (float(np.sum(price(operations, size))) for size in sizes)
    each = (many - few) / (sizes[1] - sizes[0])
    if each * sizes[0] > few:  # the line through the larger one and none
        each = many / sizes[1]
    return max(many - each * sizes[1], 0.0), each
