"""Kernel constants of a device: how far each kind of kernel stays below the datasheet, and why we know.

The constants are fitted by ``scripts/fit_kernels.py`` on published kernel measurements and shipped in
``data/kernel_constants.json`` with their source. A device without measurements takes the curve of its
architecture, then the generic one; nothing falls back silently, :func:`kernel_evidence` says which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.spec.device import Device

ATTENTION_KERNELS = ("fa1", "fa2", "fa3", "cudnn", "te")
FIDELITIES = ("datasheet", "zero-shot")

# Which peak the matrix products of a training precision use; block-scaled formats share their base rate.
MATRIX_PEAK = {
    "fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16",
    "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "fp4": "fp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """What one device achieves, for one precision of its matrix products.

    Every field is a float, or an ndarray that broadcasts to the rows of a batch (see :meth:`stack`).
    `gemm_*` is the curve of the matrix precision, `gemm16_*` that of 16 bit, in which the head and
    attention run when the matrix precision is narrower; the two are equal otherwise.
    """

    peak_flops_per_s: Any
    bf16_peak_flops_per_s: Any
    memory_bytes_per_s: Any
    num_sms: Any
    gemm_eff: Any
    """Share of the peak inside a full wave of the largest tile."""
    gemm_k0: Any
    """Length of k that prologue and epilogue of a tile are worth."""
    gemm_wave: Any
    """0: waves may be partial; 1: the last wave costs a whole one."""
    gemm_tile_penalty: Any
    """Exponent of the loss of tiles smaller than 256 x 128."""
    gemm_launch_s: Any
    gemm_memory_eff: Any
    gemm16_eff: Any
    gemm16_k0: Any
    attn_fwd_eff: Any
    """Share of the 16-bit peak of flash attention on long sequences."""
    attn_s0: Any
    """Sequence length at which flash attention reaches half of `attn_fwd_eff`."""
    attn_bwd_ratio: Any
    """Backward efficiency over forward efficiency."""
    attn_launch_s: Any
    stream_eff: Any
    """Achievable share of the memory bandwidth in elementwise kernels."""
    stream_launch_s: Any
    grouped_eff: Any
    """Speed of a grouped matrix product over one batched product of equal shape."""

    @classmethod
    def stack(cls, models: Sequence[KernelModel]) -> KernelModel:
        """Return one model whose fields are arrays of shape (len(models),)."""
        return cls(
            **{f.name: np.array([getattr(m, f.name) for m in models], dtype=np.float64) for f in fields(cls)}
        )

    def take(self, index: Any) -> KernelModel:
        """Return the model with every field of a stacked model gathered at `index`."""
        return type(self)(**{f.name: np.asarray(getattr(self, f.name))[index] for f in fields(self)})


@cache
def kernel_constants() -> dict[str, Any]:
    """Return the shipped constants: section -> device, architecture or ``generic`` -> values."""
    path = Path(__file__).parent / "data" / "kernel_constants.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _find(section: dict[str, Any], device: Device) -> tuple[dict[str, float], str]:
    """Return the entry of the device, else of its architecture, else the generic one, and which it was."""
    if device.name in section["devices"]:
        return section["devices"][device.name], "fitted"
    arch = device.arch.lower()
    if arch in section["architectures"]:
        return section["architectures"][arch], "architecture"
    return section["generic"], "datasheet"


def kernel_evidence(device: Device, precision: str) -> str:
    """Return what the matrix-product curve rests on.

    Returns
    -------
    str
        ``fitted`` on kernels of this device, ``architecture`` on others of its architecture, or
        ``datasheet``: no measurement of the architecture, generic shares of the datasheet values.
    """
    _matrix_peak(device, precision)
    return _find(kernel_constants()["gemm"][_curve(precision)], device)[1]


def _curve(precision: str) -> str:
    peak = MATRIX_PEAK[precision]
    return peak if peak in ("fp32", "fp8", "fp4") else "16bit"


def _matrix_peak(device: Device, precision: str) -> float:
    if precision not in MATRIX_PEAK:
        raise SpecError(
            f"unknown precision {precision!r}", key="precision", value=precision,
            rule=f"one of {', '.join(MATRIX_PEAK)}",
        )  # fmt: skip
    return float(device.peak(MATRIX_PEAK[precision]))


def _sixteen_bit_peak(device: Device) -> float:
    """Return the best 16-bit rate, or the fp32 rate of devices older than 16-bit arithmetic."""
    peaks = device.peak_flops_per_s
    return float(peaks.get("bf16") or peaks.get("fp16") or peaks["fp32"])


def kernel_model(
    device: Device, precision: str, *, attention: str = "fa2", fidelity: str = "zero-shot"
) -> KernelModel:
    """Return the kernel constants of a device for matrix products in `precision`.

    Parameters
    ----------
    device : Device
    precision : str
        fp32, tf32, fp16, bf16, fp8, mxfp8 or nvfp4; the device must have a peak for it.
    attention : str
        Flash attention kernel: fa1, fa2, fa3, cudnn or te.
    fidelity : str
        ``datasheet`` uses no fitted constant: every kernel runs at the datasheet rates.

    Source
    ------
    ``docs/derivations/kernels.md``; fitted by ``scripts/fit_kernels.py``.
    """
    if attention not in ATTENTION_KERNELS:
        raise SpecError(
            f"unknown attention kernel {attention!r}", key="attention", value=attention,
            rule=f"one of {', '.join(ATTENTION_KERNELS)}",
        )  # fmt: skip
    if fidelity not in FIDELITIES:
        raise SpecError(
            f"unknown fidelity {fidelity!r}", key="fidelity", value=fidelity,
            rule=f"one of {', '.join(FIDELITIES)}",
        )  # fmt: skip
    rates = {
        "peak_flops_per_s": _matrix_peak(device, precision),
        "bf16_peak_flops_per_s": _sixteen_bit_peak(device),
        "memory_bytes_per_s": float(device.memory_bytes_per_s),
        "num_sms": float(device.num_sms or 1),
    }
    if fidelity == "datasheet":
        return KernelModel(**rates, **_IDEAL)
    constants = kernel_constants()
    gemm = _find(constants["gemm"][_curve(precision)], device)[0]
    gemm16 = _find(constants["gemm"]["16bit"], device)[0]
    flash = _find(constants["attention"][attention], device)[0]
    stream = _find(constants["stream"], device)[0]
    grouped = _find(constants["grouped"], device)[0]
    return KernelModel(
        **rates,
        gemm_eff=gemm["eff"],
        gemm_k0=gemm["k0"],
        gemm_wave=gemm["wave"],
        gemm_tile_penalty=gemm["tile_penalty"],
        gemm_launch_s=gemm["launch_s"],
        gemm_memory_eff=gemm["memory_eff"],
        gemm16_eff=gemm16["eff"],
        gemm16_k0=gemm16["k0"],
        attn_fwd_eff=flash["fwd_eff"],
        attn_s0=flash["s0"],
        attn_bwd_ratio=flash["bwd_ratio"],
        attn_launch_s=flash["launch_s"],
        stream_eff=stream["eff"],
        stream_launch_s=stream["launch_s"],
        grouped_eff=grouped["eff"],
    )


_IDEAL = {
    "gemm_eff": 1.0, "gemm_k0": 0.0, "gemm_wave": 0.0, "gemm_tile_penalty": 0.0, "gemm_launch_s": 0.0,
    "gemm_memory_eff": 1.0, "gemm16_eff": 1.0, "gemm16_k0": 0.0, "attn_fwd_eff": 1.0, "attn_s0": 0.0,
    "attn_bwd_ratio": 1.0, "attn_launch_s": 0.0, "stream_eff": 1.0, "stream_launch_s": 0.0,
    "grouped_eff": 1.0,
}  # fmt: skip
