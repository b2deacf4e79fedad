"""Learned kernel constants: what a device's datasheet says of kernels that were never timed on it.

A ridge regression on four figures of the datasheet gives the achieved share of each peak; regression trees
(`cost.learned`) then correct the formula's time by shape. Both are fitted by ``scripts/fit_learned.py`` on
published kernel timings and judged on devices left out of the fit; ``data/learned_kernels.json`` holds the
regressions and the errors, ``data/learned_trees.npz`` the trees. Docs: docs/cost_sources.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from foreshard.catalog.devices import memory_type
from foreshard.catalog.shipped import shipped

if TYPE_CHECKING:
    from foreshard.spec.device import Device

NATIVE_ATTENTION = {"hopper": "fa3", "blackwell": "cudnn", "rubin": "cudnn"}
"""Attention kernel that libraries run on an architecture; fa2 on the others."""
_RANGE = 1.3  # beyond the trained devices by at most this factor in a figure of the datasheet
_MIN_SMS = 10  # fewer, larger cores are no GPU: Gaudi, TPU, Trainium


def learned_kernels() -> Mapping[str, Any]:
    """Return the shipped regressions: nominal constants, weights by kind, trained range, errors left out."""
    table: Mapping[str, Any] = shipped("learned_kernels.json")
    return table


def datasheet_features(device: Device, precision: str) -> tuple[float, float, float] | None:
    """Return (log W per TFLOP/s, year, GDDR memory) of a device; None where the datasheet lacks one.

    Power per FLOP/s says how far the clock falls under load, and grew less with each year's process; GDDR
    takes its share of the board's power.
    """
    kind = memory_type(device)
    known = device.tdp_w > 0 and device.year > 0 and device.num_sms >= _MIN_SMS and kind
    if not known or not device.supports(precision):
        return None
    watts = device.tdp_w / (device.peak(precision) / 1e12)
    return math.log(watts), (device.year - 2020) / 4.0, float(kind.startswith("gddr"))


def learned_share(kind: str, device: Device, precision: str, **flags: float) -> float | None:
    """Return the achieved share of the peak that the regression of a kind gives a device.

    None where the device is outside what the regression was trained on.
    """
    features = datasheet_features(device, precision)
    if features is None:
        return None
    fit = learned_kernels()["regressions"][kind]
    if device.vendor not in fit["vendors"]:  # libraries differ more than datasheets do
        return None
    low, high = fit["log_watts_range"]
    if not low - math.log(_RANGE) <= features[0] <= high + math.log(_RANGE):
        return None
    return share_of(fit, (*features, *flags.values()))


def share_of(fit: Mapping[str, Any], features: tuple[float, ...]) -> float:
    """Return the share of a regression at features in the order of its weights."""
    moved = zip(features, fit["mean"], fit["scale"], fit["weights"], strict=True)
    return math.exp(fit["intercept"] + sum((x - mean) / scale * w for x, mean, scale, w in moved))


@cache
def fitted_devices() -> frozenset[str]:
    """Return the devices that any constant of the formula was fitted on."""
    constants = shipped("kernel_constants.json")
    sections = [*constants["gemm"].values(), *constants["attention"].values()]
    sections += [constants["stream"], constants["grouped"]]
    return frozenset(name for section in sections for name in section["devices"])


def learned_constants(
    device: Device, precision: str, attention: str, kinds: frozenset[str]
) -> dict[str, float]:
    """Return the fields of `KernelModel` that learned costs set, of the kinds asked for; others are left out.

    Only 16 bit has learned curves: too few devices were timed in narrower precisions and TF32, and on devices
    left out the formula is the better one for kernels that stream memory and for whole networks in fp32.
    """
    nominal = learned_kernels()["nominal"]
    found: dict[str, float] = {}
    sixteen = precision in ("fp16", "bf16")
    share = None
    if sixteen and "gemm_16bit" in kinds:
        share = learned_share("gemm_16bit", device, precision, single=0.0)
    if share is not None:
        found |= {f"gemm_{name}": value for name, value in nominal["gemm"].items()}
        found |= {f"gemm16_{name}": nominal["gemm"][name] for name in ("k0", "split_k", "sag")}
        found |= {"gemm_eff": share, "gemm16_eff": share}
        found["gemm_learned"] = found["gemm16_learned"] = 1.0
        if "grouped" in kinds:
            found |= {"grouped_eff": 1.0, "grouped_learned": 1.0}
    serving = float(attention == "trtllm")
    native = attention in ("fa3", "cudnn", "sdpa") or attention == NATIVE_ATTENTION.get(device.arch, "fa2")
    if "attention" in kinds and sixteen and (native or serving):
        share = learned_share("attention", device, precision, serving=serving)
        if share is not None:
            found |= {f"attn_{name}": value for name, value in nominal["attention"].items()}
            found |= {"attn_fwd_eff": share, "attn_learned": 1.0 + serving}
    return found
