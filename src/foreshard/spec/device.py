"""Device: what one accelerator can do, as its datasheet and its driver state it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foreshard.errors import SpecError
from foreshard.spec.plan import PRECISIONS

# The peak that bounds the matrix products of a training precision.
_PEAK_OF = {"mxfp8": "fp8", "nvfp4": "fp4"}
# Block-scaled formats need hardware scaling, not only the narrow type: OCP MX in Blackwell and CDNA4,
# NVFP4 in NVIDIA's Blackwell and Rubin only.
_MX_ARCHS = ("blackwell", "rubin", "cdna4")
_NVFP4_ARCHS = ("blackwell", "rubin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as a framework sees it."""

    name: str  # canonical lower-case name, with form and memory where it matters
    # lower case: ``nvidia``, ``hopper``, ``sxm``
    vendor: str = "unknown"
    arch: str = "unknown"
    form: str = "custom"
    year: int = 0
    # dense peaks by type: fp64 fp32 tf32 fp16 bf16 fp8 fp4 int8. A missing key means not supported or not
    # published. With tensor cores, the matrix rate
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: float  # datasheet memory; "80 GB" there is 80 GiB
    capacity_bytes: float  # what the driver reports to a process where known, else `memory_bytes`
    memory_bytes_per_s: float = 0.0
    num_sms: int = 0  # streaming multiprocessors, compute units or cores; 0 when not published
    # boost clock and last private cache; 0 when not published
    clock_hz: float = 0.0
    l2_bytes: float = 0.0
    link: str = ""  # name of the device-to-device link, empty when none
    link_bytes_per_s: float = 0.0  # per device, one direction, all links together; 0 when none
    # one direction to the host; board power. 0 when not published
    pcie_bytes_per_s: float = 0.0
    tdp_w: float = 0.0
    source: str
    # false when the values were recalled from a datasheet and not checked against a second source
    verified: bool = True
    notes: str = ""

    def __repr__(self) -> str:
        """Return name, memory, bandwidth and peaks on one line."""
        peaks = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in self.peak_flops_per_s.items() if rate)
        sizes = f"{self.capacity_bytes / 2**30:.3g} GiB at {self.memory_bytes_per_s / 1e12:g} TB/s"
        return f"<Device {self.name}: {sizes}; TFLOP/s {peaks}>"

    @property
    def sums_at_half_rate(self) -> bool:
        """Whether matrix units run at half their rate where they sum in 32 bit, as training asks for.

        Integers then have four times the peak of 16 bit in place of twice. Source: NVIDIA, GA102, Ada and RTX
        Blackwell whitepapers, peak tensor TFLOPS with FP16 and with FP32 accumulate, of GeForce.
        """
        rates = self.peak_flops_per_s
        return self.vendor == "nvidia" and rates.get("int8", 0.0) > 3.0 * rates.get("fp16", float("inf"))

    def supports(self, precision: str) -> bool:
        """Return whether the device multiplies matrices in a training precision in hardware."""
        if precision == "mxfp8" and self.arch not in _MX_ARCHS:
            return False
        if precision == "nvfp4" and (self.vendor != "nvidia" or self.arch not in _NVFP4_ARCHS):
            return False
        return precision in PRECISIONS and _PEAK_OF.get(precision, precision) in self.peak_flops_per_s

    def peak(self, precision: str) -> float:
        """Return the dense peak of matrix products in a training precision.

        Raises
        ------
        SpecError
            If the device lacks that precision; the fix names what it has.
        """
        if not self.supports(precision):
            has = ", ".join(name for name in PRECISIONS if self.supports(name)) or "no known precision"
            what = f"{self.name} has no {precision}"
            rule = "The precision of the matrix products must be one the device computes in hardware"
            raise SpecError(what, key="precision", value=precision, rule=rule, fix=f"Use one of: {has}")
        return self.peak_flops_per_s[_PEAK_OF.get(precision, precision)]
