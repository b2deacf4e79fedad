"""What all plans of one run share, and the numbers that engines take of it: of devices, ranks and models.

Plans as objects (`predict.batch`), plans as columns (`predict.analytical.table`) and stages that the mixed
planner offers (`planner.pricing`) all become arrays through a `RunSetup`. Each brings its own columns of
degrees; what follows from them follows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from foreshard.catalog.kernels import KernelModel, Tables, kernel_model
from foreshard.catalog.stacks import attention_constants, attention_on
from foreshard.cost.memory import CHANNELS, StageLoad, optimizer_state_bytes, table_state_bytes
from foreshard.cost.memory_activations import Recompute
from foreshard.graph.shapes import RankShape
from foreshard.predict.traits import Traits, traits_of
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model, kept_wide
from foreshard.spec.plan import LOW_PRECISIONS

T = TypeVar("T")
_WIDE = ("fp32", "tf32")
_OF_RANK = (
    *("micro_batch", "seq_len", "tp", "cp", "ep", "etp", "zero", "sp"),
    *("offload_optimizer", "offload_activations"),
)
"""Fields of a load that are those of the rank."""
_NVLINK_BYTES_PER_S = 25e9  # one link, one direction, NVLink 2 to 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Numbers of one group of a plan: how many micro-batches, stages, chunks."""

    num_micro_batches: Any  # a short last one counts as a fraction
    num_stages: Any
    num_chunks: Any
    zero_bubble: Any
    all_forward: Any  # 1 when all forwards come before the backwards
    ends_cross: Any  # 1 when its first and its last stage are in different link domains
    num_devices: Any  # of the whole plan
    hidden: Any
    vocab: Any
    head_rows: Any
    head_frozen: Any
    heads: Any
    tied: Any
    by_order: Any = 0.0  # 1 + place in `BY_ORDER` of a schedule whose longest path is that through its order


def as_priced(model: Model, framework: Framework, precision: str) -> Model:
    """Return the model with the products that a framework's recipe keeps in 16 bit beside narrower ones."""
    groups = tuple(filter(None, framework.wide_groups.split("+")))
    if precision not in LOW_PRECISIONS or not (framework.wide_first or framework.wide_last or groups):
        return model
    return kept_wide(model, framework.wide_first, framework.wide_last, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The model and how it is trained, whatever the plan."""

    model: Model
    framework: Framework
    precision: str
    seq_len: int
    optimizer: str = "adamw"
    # what is hidden otherwise than the framework does by default
    comm: Mapping[str, bool] = field(default_factory=dict)
    fidelity: str = "zero-shot"
    costs: str | Tables = "auto"

    def hides(self, name: str) -> bool:
        """Return whether an option of communication is on, whatever the ZeRO level."""
        return bool(self.comm.get(name, getattr(self.framework, name)))

    @property
    def fabric_options(self) -> dict[str, Any]:
        """Return what links and networks are priced by, as `comm.fabric` takes it."""
        tables = None if isinstance(self.costs, str) else self.costs
        return {
            "nccl": "old" if self.framework.nccl == "old" else "2.2x",  # whose constants hold
            "fidelity": self.fidelity,
            "collectives": self.framework.collectives,
            "tables": tables,
        }

    def kernels(self, device: Device) -> KernelModel:
        """Return the kernel constants of a device."""
        attention = attention_constants(self.framework, device)
        return _kernel_model(device, self.precision, attention, self.fidelity, self.costs)

    def traits(self, device: Device, zero: Any) -> Traits:
        """Return what the framework does on a device at a ZeRO level, or at each of several."""
        return traits_of(
            self.framework,
            device,
            zero=zero,
            optimizer=self.optimizer,
            comm=self.comm,
            precision=self.precision,
        )

    def rank(self, *, tp: Any, ep: Any, etp: Any, **given: Any) -> RankShape:
        """Return how ranks execute layers; fields as in `RankShape`, floats or arrays that broadcast.

        Sizes that the run fixes are not given. Without `copies` there is one group, without offloads none.
        Strides that are not given are those of ranks that follow each other: tp fastest, then cp, then dp.
        """
        low, four = self.precision in LOW_PRECISIONS, self.precision == "nvfp4"
        defaults = {
            "copies": 1.0,
            "offload_optimizer": 0.0,
            "offload_activations": 0.0,
            "paired": 0.0,
            "tp_stride": 1.0,
            "cp_stride": tp,
            "ep_stride": etp,
            "etp_stride": 1.0,
            "sync_stride": tp,
            "expert_stride": ep * etp,
            "own_stride": tp,
            "own_expert_stride": ep * etp,
        }
        return RankShape(
            tp=tp,
            ep=ep,
            etp=etp,
            seq_len=float(self.seq_len),
            low=float(low),
            four_bit=float(four),
            matrix_bytes=0.5 if four else 1.0 if low else self.element_bytes,
            element_bytes=self.element_bytes,
            **(defaults | given),
        )

    def as_moved(self, rank: RankShape, traits: Traits, num_stages: Any) -> tuple[RankShape, Traits]:
        """Return rank and traits by what moves when, where that is not what the ZeRO level says.

        Units that a pipeline holds move as by level 1: each gathered ahead of its first forward of the step,
        gradients reduced behind the last backward. FSDP at level 2 gathers units for every micro-batch, as at
        level 3, but not again for the backward.

        Source
        ------
        torch 2.13 distributed/pipelining/stage.py backward_maybe_with_nosync, schedules.py REDUCE_GRAD (every
        unit reduced after the last backward); torchtitan b5bcd76 distributed/fsdp.py; torch
        distributed/fsdp/_fully_shard/_fully_shard.py (weights are freed after the backward even without
        reshard_after_forward; the root's default is not to reshard), fully_sharded_data_parallel.py
        SHARD_GRAD_OP, _runtime_utils.py _post_forward (the root keeps its weights).
        """
        zero, framework = np.asarray(rank.zero), self.framework
        if framework.fsdp not in ("fsdp1", "fsdp2") or not np.count_nonzero(zero >= 2):
            return rank, traits
        held = framework.pipeline_holds_units * (zero >= 2) * (np.asarray(num_stages) > 1)
        level = np.where(held > 0, 1.0, np.where(zero == 2, 3.0, zero))
        # A whole model is gathered before anything can be computed, and as the root it is not freed between
        # forward and backward; with no unit ahead every collective runs in turn with computation.
        whole = framework.wrap == 0
        ahead = float(framework.prefetch > 0 and not whole)

        def where_held(value: Any, otherwise: Any) -> Any:
            return np.where(held > 0, value, otherwise)[()]

        return replace(rank, zero=level[()]), replace(
            traits,
            regathers=((1.0 - (zero == 2)) * (1.0 - whole))[()],
            grad_overlap=where_held(0.0, traits.grad_overlap * ahead),
            param_gather_overlap=where_held(1.0, traits.param_gather_overlap),
            bucket_elements=where_held(1.0, traits.bucket_elements),  # a unit each
            holds_units=where_held(1.0, 0.0),
        )

    @property
    def element_bytes(self) -> float:
        """Return the bytes of an activation between layers."""
        return 4.0 if self.precision in _WIDE else 2.0

    def pipeline(self, **numbers: Any) -> Pipeline:
        """Return a pipeline of the model; its own numbers are given, those of the ends are the model's."""
        model = self.model
        return Pipeline(
            hidden=float(model.hidden),
            vocab=float(model.vocab),
            head_rows=float(model.head_rows),
            head_frozen=float(model.head_frozen),
            heads=1.0 + model.num_next_token * (1.0 + 2.0 * model.hidden / max(1, model.vocab)),
            tied=float(model.tied_embeddings),
            **numbers,
        )

    def load(
        self,
        rank: RankShape,
        *,
        counts: Sequence[Any],
        has_embedding: Any,
        has_head: Any,
        in_flight: Any,
        num_micro_batches: Any,
        num_stages: Any,
        devices: Sequence[Device],
        recompute: Recompute,
    ) -> StageLoad:
        """Return what ranks hold, from how they execute layers.

        `counts` are the layers of each kind of block, `in_flight` the micro-batches whose activations each
        layer holds at the peak, `devices` those of the rows, or the one of all.
        """
        unfused = np.array([attention_on(self.framework, device) == "unfused" for device in devices])
        model, precision = self.model, self.precision
        blocks = [block for block, _ in model.block_kinds()]
        vocab_unit = self.framework.vocab_multiple * rank.tp
        return StageLoad(
            kinds=tuple(zip(blocks, counts, strict=True)),
            has_embedding=has_embedding,
            has_head=has_head,
            hidden=model.hidden,
            vocab=np.ceil(model.vocab / vocab_unit) * vocab_unit,
            tied=float(model.tied_embeddings),
            in_flight=in_flight,
            num_micro_batches=num_micro_batches,
            num_stages=num_stages,
            channels=np.array([float(nccl_channels(device)) for device in devices]),
            unfused=1.0 * unfused,
            **{name: getattr(rank, name) for name in _OF_RANK},
            dp=rank.dp * rank.cp,
            expert_dp=np.maximum(1.0, rank.dp * rank.cp * rank.tp / (rank.ep * rank.etp)),
            shard_size=rank.shard,
            activation_bytes_per_element=self.element_bytes,
            fp8=float(precision in ("fp8", "mxfp8")),
            fp4=float(precision == "nvfp4"),
            recompute=recompute,
            grad_overlap=1.0 * self.comm.get("grad_overlap", self.framework.hides("grad_overlap", rank.zero)),
            tp_overlap=1.0 * self.hides("tp_overlap"),
            bucket_bytes=float(self.framework.bucket_bytes),
            prefetch=float(self.framework.prefetch),
            wrap=float(self.framework.wrap),
            state_bytes=optimizer_state_bytes(self.optimizer, self.framework.moment_bytes),
            table_state_bytes=table_state_bytes(self.optimizer, self.framework.moment_bytes),
            outer_params=model.learned_positions * model.hidden * np.asarray(has_embedding, float),
            embedding_trainable=float(not model.embedding_frozen),
            head_trainable=float(not model.head_frozen),
        )


@lru_cache(maxsize=256)
def _kernel_model(
    device: Device, precision: str, attention: str, fidelity: str, costs: str | Tables
) -> KernelModel:
    return kernel_model(device, precision, attention=attention, fidelity=fidelity, costs=costs)


def nccl_channels(device: Device) -> int:
    """Return the NCCL channels of a collective: two per NVLink up to 24, two without.

    Source
    ------
    nccl#964 (24 on A100 with its 12 links of 25 GB/s); later links are faster, the bound holds there.
    """
    return max(2, min(CHANNELS, round(2 * device.link_bytes_per_s / _NVLINK_BYTES_PER_S)))


def stacked(items: Sequence[Any], cls: type[T]) -> T:
    """Return `cls` with array fields, from a list of its objects or from lists [pipeline][stage] of them.

    Fields have shape (objects,) or (stages, pipelines).

    Examples
    --------
    >>> from foreshard.graph.shapes import NO_LAYER, LayerShape
    >>> stacked([[NO_LAYER, NO_LAYER], [NO_LAYER, NO_LAYER], [NO_LAYER, NO_LAYER]], LayerShape).hidden.shape
    (2, 3)
    """
    rows = items if items and isinstance(items[0], list) else [[item] for item in items]
    distinct = {id(item): item for row in rows for item in row}
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    table = [[getattr(item, name) for name in names] for item in distinct.values()]
    try:
        values = np.array(table, dtype=np.float64)
    except TypeError:  # a field that is no number: a measured table
        values = np.array(table, dtype=object)
    place = {key: i for i, key in enumerate(distinct)}
    where = np.array([[place[id(item)] for item in row] for row in rows]).T
    columns = list(values.T[:, where if rows is items else where[0]])
    if values.dtype == object:
        columns = [_numeric(column) for column in columns]
    return cls(**dict(zip(names, columns, strict=True)))


def _numeric(column: np.ndarray) -> np.ndarray:
    """Return a column of numbers as such, any other as it is."""
    try:
        return column.astype(np.float64)
    except TypeError:
        return column
