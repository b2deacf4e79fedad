"""A published speed of a network, as one row of a table states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEASURED_FRAMEWORK = "PyTorch"
"""Whose kernels predictions are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRun:
    """A network, how it ran, and how fast.

    Attributes
    ----------
    source : str
        The benchmark.
    network : str
        As `profile.networks.catalog.network_name` returns it.
    device : str
        Of the catalog.
    layout : str
        Of images; for other networks the samples that a device takes at once.
    batch, accumulated : int
        Samples that a device takes at once, and how often before it updates.
    samples_per_s : float
        Of all devices.
    side : int, optional
        Of a classifier's images, pixels.
    changed : tuple of (str, object)
        Arguments of the network in place of its own.
    nodes : int
        That share the devices evenly.
    framework : str
        Whose kernels ran.
    cudnn : int
        Release of NVIDIA's library of convolutions.
    training : bool
        Whether it was trained, or ran forward alone.
    sums : bool
        Whether devices sum their gradients, or each trains by itself.
    through_host : bool
        Whether devices of a node meet through the host's memory alone.
    """

    source: str
    network: str
    device: str
    precision: str
    layout: str
    num_devices: int
    batch: int
    samples_per_s: float
    side: int | None = None
    accumulated: int = 1
    optimizer: str = "sgd"
    changed: tuple[tuple[str, Any], ...] = ()
    nodes: int = 1
    framework: str = MEASURED_FRAMEWORK
    cudnn: int = 8
    training: bool = True
    sums: bool = True
    through_host: bool = False

    @property
    def case(self) -> tuple[str, ...]:
        """What repeated measurements share."""
        return self.source, self.network, self.device, self.precision, self.layout

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.batch * self.accumulated * self.num_devices

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.global_batch / self.samples_per_s
