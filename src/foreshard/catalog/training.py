"""Constants of training steps: what kernels and collectives alone do not show.

Each is a physical quantity with a range; `scripts/fit_training.py` fits them on the measured runs named in
``data/training_constants.json``, once on all of them and once for each family left out. `foreshard calibrate
--steps` moves a few of them to measured steps of a cluster (`Calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError, unknown
from foreshard.spec.codec import Range, Size, load_written

HOST_CLASSES = ("megatron-2020", "megatron-deepspeed", "megatron-core", "eager", "compiled")
# Terms that are no factor on a time: none of them is 0, not 1.
_NOT_FACTORS = ("gemm_power", "jitter", "fsdp_contention", "step_fixed", "step_per_layer")


def _term(start: float, low: float, high: float, meaning: str) -> Any:
    return field(default=start, metadata={"low": low, "high": high, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConstants:
    """One value per physical term; metadata holds the range a fit may use and what the term means."""

    gemm_derate: float = _term(1.16, 1.0, 1.6, "16-bit matrix products in training over isolated ones")
    gemm_derate_hopper: float = _term(1.0, 0.8, 1.4, "further factor on Hopper, whose clocks fall under load")
    gemm_derate_blackwell: float = _term(1.0, 0.8, 1.4, "further factor on Blackwell")
    # Above 1 a kernel that reaches more alone would be slower in a step.
    gemm_power: float = _term(0.5, 0.0, 1.0, "slowdown per share of power a FLOP lacks against an H100-SXM")
    gemm_derate_8bit: float = _term(1.0, 0.7, 1.6, "8-bit matrix products in training over isolated ones")
    gemm_derate_4bit: float = _term(0.8, 0.3, 1.6, "4-bit matrix products in training over isolated ones")
    flash_forward: float = _term(1.15, 0.8, 1.8, "flash attention forward in training over isolated")
    flash_backward: float = _term(1.15, 0.8, 1.8, "flash attention backward in training over isolated")
    flash_blackwell: float = _term(1.0, 0.5, 1.4, "further factor of flash attention on Blackwell")
    unfused: float = _term(1.0, 0.5, 2.0, "attention as separate kernels in training over isolated")
    eager_traffic: float = _term(1.3, 0.5, 3.0, "elementwise traffic of eager kernels over ideal fusion")
    fused_traffic: float = _term(1.0, 0.4, 2.0, "elementwise traffic of fused kernels over ideal fusion")
    cast_traffic: float = _term(1.3, 0.0, 3.0, "8-bit cast traffic over its least bytes")
    cast_blocks: float = _term(1.3, 0.0, 4.0, "the same where every block of elements has its own scale")
    grad_accumulate: float = _term(1.9, 0.0, 3.0, "traffic of fp32 gradient accumulation over read and write")
    grad_product: float = _term(1.1, 1.0, 1.6, "weight-gradient products that add into fp32 over plain ones")
    loss_traffic: float = _term(1.0, 0.3, 3.0, "traffic of the loss over its kernels' operands")
    tensor_comm: float = _term(1.0, 0.7, 1.6, "tensor-parallel collectives in training over isolated")
    tensor_hidden: float = _term(0.85, 0.3, 1.0, "share of tensor-parallel time hidden when overlap is on")
    pipeline_comm: float = _term(1.0, 0.4, 2.5, "stage-to-stage messages in training over isolated")
    data_comm: float = _term(1.1, 0.7, 2.0, "gradient collectives in training over isolated")
    fsdp_contention: float = _term(0.35, 0.0, 0.6, "slowdown per second of overlapped gather or scatter")
    expert_comm: float = _term(1.2, 0.7, 3.0, "expert all-to-all in training over isolated")
    expert_hidden: float = _term(0.5, 0.0, 1.0, "share of expert all-to-all hidden when overlap is on")
    expert_imbalance: float = _term(1.15, 1.0, 2.0, "routed tokens of the fullest rank over the mean")
    expert_products: float = _term(1.0, 0.8, 2.0, "grouped products beyond other products, over isolated")
    expert_fast: float = _term(1.0, 0.5, 1.5, "deduplicating dispatch over an all-to-all of its bytes")
    host_megatron_2020: float = _term(500e-6, 100e-6, 900e-6, "host seconds of a layer forward, 2020 code")
    host_megatron_deepspeed: float = _term(800e-6, 500e-6, 1200e-6, "host seconds of a layer forward")
    host_megatron_core: float = _term(700e-6, 100e-6, 2500e-6, "host seconds of a layer forward")
    host_eager: float = _term(600e-6, 100e-6, 1200e-6, "host seconds of a layer forward, eager PyTorch")
    host_compiled: float = _term(150e-6, 20e-6, 400e-6, "host seconds of a layer forward, compiled")
    host_micro_batch: float = _term(1e-3, 0.0, 6e-3, "host seconds of a chunk's pass outside its layers")
    host_backward: float = _term(1.15, 0.8, 2.5, "host time of a backward over a forward")
    host_tensor: float = _term(0.05, 0.0, 0.2, "share more host time with tensor parallelism")
    host_arm: float = _term(1.4, 1.0, 2.5, "host time on Arm hosts (Grace) over x86")
    host_softmax: float = _term(470e-6, 0.0, 900e-6, "host seconds more per layer when softmax is not fused")
    graph_share: float = _term(0.7, 0.2, 1.0, "share of host launches that partial CUDA graphs remove")
    host_expert: float = _term(150e-6, 0.0, 400e-6, "host seconds per local expert of a layer pass, looped")
    host_moe: float = _term(600e-6, 0.0, 3000e-6, "host seconds more of a mixture-of-experts layer pass")
    step_fixed: float = _term(5e-3, 0.0, 20e-3, "seconds of a step outside layers: clipping, logging, sync")
    step_per_layer: float = _term(0.3e-3, 0.0, 1e-3, "seconds of the optimizer per layer on the rank")
    jitter: float = _term(0.006, 0.0, 0.02, "slowdown per doubling of devices beyond 8")
    host_sharpness: float = _term(4.0, 2.0, 6.0, "exponent that joins device and host time")

    @classmethod
    def ideal(cls) -> TrainingConstants:
        """Return the constants that correct nothing: isolated kernels, no host, all overlap granted."""
        values = {f.name: 1.0 for f in fields(cls)}
        for name in values:
            if name.startswith("host_") or name in _NOT_FACTORS:
                values[name] = 0.0
        return cls(**{**values, "host_sharpness": 6.0, "host_arm": 1.0})


def term_metadata() -> Mapping[str, Mapping[str, Any]]:
    """Return low, high and meaning of every constant."""
    return {f.name: f.metadata for f in fields(TrainingConstants)}


@cache
def training_constants(exclude: str | None = None) -> TrainingConstants:
    """Return the shipped constants, or those fitted without one family."""
    data = shipped("training_constants.json")
    if exclude is None:
        return TrainingConstants(**data["all"])
    if exclude not in data["without"]:
        families = sorted(data["without"])
        rule = "Constants are fitted without"
        raise unknown("family", exclude, families, key="--exclude-calibration", rule=rule)
    return TrainingConstants(**data["without"][exclude])


CALIBRATED = "calibrated constants"
"""`kind` of the file that `foreshard calibrate --steps` writes."""
Positive = Annotated[float, Range(1e-9, 1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTerm:
    """A group of constants, the factor that measured steps moved it by, and its 90 % interval."""

    name: str
    factor: Positive
    interval: Annotated[tuple[Positive, ...], Size(2, 2)]
    identified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants moved to measured steps of a cluster: of models of layers, or of traced modules.

    constants : of models of layers, empty where steps of traced modules were measured
    slower : of traced modules, how many times as long as by formulas each term takes; else empty
    residuals : log(measured / predicted) of each step by constants fitted to the others
    points : of each step, what `predict.interval.features_of` or `traced_features` compares by
    """

    kind: Literal["calibrated constants"]
    schema_version: Literal[1]
    terms: tuple[MovedTerm, ...]
    devices: Annotated[tuple[str, ...], Size(1)]
    frameworks: Annotated[tuple[str, ...], Size(1)]
    residuals: Annotated[tuple[float, ...], Size(1)]
    points: Annotated[tuple[tuple[float, ...], ...], Size(1)]
    constants: Mapping[str, Annotated[float, Range(0.0, 1e9)]] = field(default_factory=dict)
    slower: Mapping[str, Positive] = field(default_factory=dict)
    path: str = ""

    @property
    def training(self) -> TrainingConstants:
        """Return the constants that price a step of a model of layers.

        Raises
        ------
        SpecError
            If the file is of steps of traced modules.
        """
        if not self.constants:
            raise self._of_others("traced modules", "models of layers")
        return TrainingConstants(**self.constants)

    @property
    def of_operations(self) -> Mapping[str, float]:
        """Return how many times as long as by formulas each term of a traced module takes.

        Raises
        ------
        SpecError
            If the file is of steps of models of layers.
        """
        if not self.slower:
            raise self._of_others("models of layers", "traced modules")
        return self.slower

    def _of_others(self, measured: str, asked: str) -> SpecError:
        return SpecError(
            f"constants of steps of {measured}",
            file=self.path or None,
            key="--costs",
            value=self.path,
            rule=f"Steps of {asked} calibrate what prices {asked}",
            fix="Calibrate on steps of these, or leave out --costs",
        )


def load_calibration(path: str) -> Calibration:
    """Return the constants of a file that ``foreshard calibrate --steps`` writes.

    Raises
    ------
    SpecError
        For what is no such file, naming file and key.
    """
    fix = "Make it with foreshard calibrate --steps"
    made, _ = load_written(Calibration, path, key="--costs", fix=fix)
    wanted = {f.name for f in fields(TrainingConstants)}
    odd = sorted(wanted ^ set(made.constants))
    if odd and (made.constants or not made.slower):
        rule = "The file holds every constant of this release, and no other"
        what = f"{odd[0]} is {'missing' if odd[0] in wanted else 'unknown'}"
        raise SpecError(what, file=path, key=f"constants.{odd[0]}", rule=rule, fix=fix)
    if len(made.points) != len(made.residuals):
        what = f"{len(made.points)} points of {len(made.residuals)} steps"
        raise SpecError(what, file=path, key="points", rule="Each step has one", fix=fix)
    return replace(made, path=path)
