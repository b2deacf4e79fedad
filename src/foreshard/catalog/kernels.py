"""Kernel constants of a device: how far each kind of kernel stays below the datasheet, and why we know.

The constants are fitted by ``scripts/fit_kernels.py`` on published kernel measurements and shipped in
``data/kernel_constants.json`` with their source. A device without measurements takes the curve of its
architecture, then the generic one; nothing falls back silently, :func:`kernel_evidence` says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from foreshard.catalog.learned import fitted_devices, learned_constants, learned_kernels
from foreshard.catalog.shipped import shipped
from foreshard.errors import unknown

if TYPE_CHECKING:
    from foreshard.spec.device import Device

ATTENTION_KERNELS = ("fa1", "fa2", "fa3", "cudnn", "sdpa", "trtllm")
FIDELITIES = ("datasheet", "zero-shot")
COSTS = ("auto", "formula", "learned")

# Curve of the matrix products of a training precision; block-scaled formats share that of their width.
_CURVE = {
    "fp32": "fp32",
    "tf32": "16bit",
    "fp16": "16bit",
    "bf16": "16bit",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}


class Tables(Protocol):
    """Measured tables of kernels (`cost.tables.KernelTables`)."""

    def of(self, device: Device, precision: str, wide: str) -> dict[str, Any]:
        """Return the tables of a device as fields of `KernelModel`."""
        ...

    def collectives(self, device: Device) -> dict[str, Any]:
        """Return the tables of a device as fields of `comm.fabric.Fabric`."""
        ...

    def __hash__(self) -> int:
        """Return the hash: tables are themselves."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """What one device achieves, for one precision of its matrix products.

    Every field is a float, or an ndarray that broadcasts to the rows of a batch; a `*_table` is 0 or a table.
    `gemm_*` is the curve of the matrix precision. Attention and the head run in 16 bit beside 8 or 4-bit
    matrices: `bf16_peak_flops_per_s` and `gemm16_*`; beside wider ones the two are equal.
    """

    peak_flops_per_s: Any
    bf16_peak_flops_per_s: Any
    memory_bytes_per_s: Any
    num_sms: Any
    gemm_eff: Any
    """Share of the peak in the main loop of the largest tile."""
    gemm_k0: Any
    """Length of k that prologue and epilogue of a tile are worth."""
    gemm_split_k: Any
    """Length of k beyond which idle processors share one tile."""
    gemm_tile_penalty: Any
    """Exponent of the loss of tiles smaller than 128 x 256."""
    gemm_sag: Any
    """Extra time share of long products, as the clock falls to the power limit."""
    gemm_memory_eff: Any
    """Achievable share of the memory bandwidth in matrix products."""
    gemm_exposed: Any
    """Share of the shorter of computing and moving that the longer does not hide."""
    gemm_launch_s: Any
    gemm16_eff: Any
    gemm16_k0: Any
    gemm16_split_k: Any
    attn_fwd_eff: Any
    """Share of the 16-bit peak of flash attention forward, long sequences, head dimension 128."""
    attn_s0: Any
    """Causal sequence length that the fixed cost of a query row is worth."""
    attn_tail: Any
    """Longest query tiles that run after the processors have begun to idle."""
    attn_d0: Any
    """Head dimensions that the exponential of a score is worth."""
    attn_bwd_ratio: Any
    """Backward efficiency over forward efficiency."""
    attn_bwd_fixed: Any
    """Fixed cost of a query row in the backward over that in the forward."""
    attn_launch_s: Any
    stream_eff: Any
    """Achievable share of the memory bandwidth in elementwise kernels."""
    stream_launch_s: Any
    grouped_eff: Any
    """Speed of a grouped matrix product over one batched product of equal shape."""
    gemm_learned: Any = 0.0
    """1 where trees correct matrix products (`cost.learned`), 0 where nothing does; the same below."""
    gemm16_learned: Any = 0.0
    attn_learned: Any = 0.0
    """0 none, 1 kernels of training libraries, 2 those of TensorRT-LLM."""
    grouped_learned: Any = 0.0
    gemm_table: Any = 0.0
    """Measured table of products (`cost.tables`), 0 without one; the same in 16 bit and of others below."""
    gemm16_table: Any = 0.0
    attn_table: Any = 0.0
    attn_back_table: Any = 0.0
    grouped_table: Any = 0.0
    stream_table: Any = 0.0
    gemm_slower: Any = 1.0
    """Times as long as alone that products take in a step, where a table gives their time alone."""
    gemm16_slower: Any = 1.0


def kernel_constants() -> dict[str, Any]:
    """Return the shipped constants: section -> device, architecture or ``generic`` -> values."""
    table: dict[str, Any] = shipped("kernel_constants.json")
    return table


def _find(section: dict[str, Any], device: Device) -> tuple[dict[str, float], str]:
    """Return the entry of the device, else of its architecture, else the generic one, and which it was."""
    if device.name in section["devices"]:
        return section["devices"][device.name], "fitted"
    arch = kernel_constants()["curve_of"].get(device.name, device.arch)
    if arch in section["architectures"]:
        return section["architectures"][arch], "architecture"
    return section["generic"], "datasheet"


def kernel_evidence(device: Device, precision: str) -> str:
    """Return what the matrix-product curve rests on.

    ``fitted`` on kernels of this device, ``architecture`` on others of its architecture, or ``datasheet``: no
    measurement of the architecture, generic shares of the datasheet values.
    """
    _check("precision", precision, tuple(_CURVE))
    return _find(kernel_constants()["gemm"][_CURVE[precision]], device)[1]


def keeps_rate(device: Device, precision: str) -> bool:
    """Return whether neither load nor collectives slow matrix products.

    A TPU has a fixed clock and links that move data on their own; what slows its 8-bit products is not known
    (docs/derivations/step.md).
    """
    return device.arch == "tpu" and not _is_narrow(precision)


def _is_narrow(precision: str) -> bool:
    return _CURVE[precision] in ("fp8", "fp4")


def _wide(device: Device, precision: str) -> str:
    """Return the precision of attention and the head: that of the matrices, 16 bit beside narrower."""
    if _is_narrow(precision):
        return "bf16" if device.supports("bf16") else "fp16"
    return precision


def kernel_model(
    device: Device,
    precision: str,
    *,
    attention: str = "fa2",
    fidelity: str = "zero-shot",
    sustained: bool = True,
    costs: str | Tables = "formula",
) -> KernelModel:
    """Return the kernel constants of a device for matrix products in `precision`.

    Parameters
    ----------
    device : Device
    precision : str
        fp32, tf32, fp16, bf16, fp8, mxfp8 or nvfp4; the device must have a peak for it.
    attention : str
        Flash attention kernel: fa1, fa2, fa3, cudnn, sdpa (cuDNN of the releases that torch takes it from),
        or trtllm (prefill of TensorRT-LLM).
    fidelity : str
        ``datasheet`` uses no fitted constant: every kernel runs at the datasheet rates.
    sustained : bool
        True: the device is busy all the time, as in training, and every product runs at the clock the
        power limit allows, at most at the one that the datasheet's peak is stated for: cards run above
        their boost clock for a while only. False: a kernel timed alone, which slows down only when it is
        long.
    costs : str or Tables
        formula; learned: the kinds of kernels in which learned costs are better on devices left out, formula
        for the others; auto: the same, but the formula alone on a device that any of its constants was
        fitted on; measured tables: for the products that they cover, and auto for the rest.

    Raises
    ------
    SpecError
        If the device has no peak for the precision, or a name is unknown.

    Source
    ------
    ``docs/derivations/kernels.md``; fitted by ``scripts/fit_kernels.py``.
    """
    _check("precision", precision, tuple(_CURVE))
    _check("attention", attention, ATTENTION_KERNELS)
    _check("fidelity", fidelity, FIDELITIES)
    tables = None if isinstance(costs, str) else costs
    costs = costs if isinstance(costs, str) else "auto"
    _check("costs", costs, COSTS)
    rates = {
        "peak_flops_per_s": float(device.peak(precision)),
        "bf16_peak_flops_per_s": float(device.peak(_wide(device, precision))),
        "memory_bytes_per_s": float(device.memory_bytes_per_s),
        "num_sms": float(device.num_sms or 1),
    }
    if fidelity == "datasheet":
        return KernelModel(**rates, **_IDEAL)
    values = _fitted(device, precision, attention)
    if costs != "formula":
        values |= learned_constants(device, precision, attention, learned_kinds(device, costs))
    if tables is not None:
        values |= tables.of(device, precision, _wide(device, precision))
    if keeps_rate(device, precision):
        values["gemm_sag"] = 0.0
    elif sustained:
        for curve in ("gemm", "gemm16"):
            kept = values[f"{curve}_eff"] / (1.0 + values[f"{curve}_sag"])
            values[f"{curve}_eff"] = min(kept, 1.0)
        values["gemm_sag"] = 0.0
    del values["gemm16_sag"]
    return KernelModel(**rates, **values)


def learned_kinds(device: Device, costs: str) -> frozenset[str]:
    """Return the kinds of kernels that a cost source takes from learned curves, where a device has them."""
    if costs == "formula" or (costs == "auto" and device.name in fitted_devices()):
        return frozenset()
    return frozenset(learned_kernels()["preferred"])


def _fitted(device: Device, precision: str, attention: str) -> dict[str, float]:
    """Return every fitted field of the device."""
    constants = kernel_constants()
    gemm, gemm16 = (_curve(device, name) for name in (precision, _wide(device, precision)))
    values = {f"gemm_{name}": value for name, value in gemm.items()}
    values |= {f"gemm16_{name}": gemm16[name] for name in ("eff", "k0", "split_k", "sag")}
    values |= {f"attn_{name}": v for name, v in _find(constants["attention"][attention], device)[0].items()}
    values.setdefault("attn_bwd_fixed", 1.0)
    values |= {f"stream_{name}": v for name, v in _find(constants["stream"], device)[0].items()}
    values |= {f"grouped_{name}": v for name, v in _find(constants["grouped"], device)[0].items()}
    return values


def _curve(device: Device, precision: str) -> dict[str, float]:
    """Return the curve of matrix products; in TF32 that of 16 bit, at another share of the peak."""
    constants = kernel_constants()
    found, evidence = _find(constants["gemm"][_CURVE[precision]], device)
    if evidence != "fitted" and device.sums_at_half_rate and precision != "fp32":
        found = at_half_rate(found)
    share = constants["tf32_over_16bit"].get(device.arch, 1.0) if precision == "tf32" else 1.0
    return found | {"eff": found["eff"] * share}


def at_half_rate(curve: Mapping[str, float]) -> dict[str, float]:
    """Return the curve of matrix units that run at half the rate of those it was fitted on.

    What feeds them keeps up with twice their rate, the prologue of a tile takes as long, and power is left to
    hold the clock (docs/derivations/kernels.md, section 2).
    """
    eff = min(1.0, 2.0 * curve["eff"])
    return {**curve, "eff": eff, "k0": curve["k0"] * eff / (2.0 * curve["eff"]), "sag": 0.0}


def _check(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown(key, value, known, key=key, rule="One of")


_IDEAL = {f.name: 0.0 for f in fields(KernelModel)[4:]} | {
    "gemm_eff": 1.0,
    "gemm_split_k": 1e30,
    "gemm_memory_eff": 1.0,
    "gemm16_eff": 1.0,
    "gemm16_split_k": 1e30,
    "attn_fwd_eff": 1.0,
    "attn_bwd_ratio": 1.0,
    "attn_bwd_fixed": 1.0,
    "stream_eff": 1.0,
    "grouped_eff": 1.0,
}
