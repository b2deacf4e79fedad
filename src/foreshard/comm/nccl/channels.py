"""NCCL's search for channels: how many parallel rings or trees fit into the links, and how fast each may be.

NCCL routes channels of equal speed over the links of a node until none fits, and tries slower speeds until
more channels no longer gain. Links of a node are taken as equal and reachable from every device (a switch),
network cards as one pool; then the routing has a closed form, checked against search results that NCCL logged
(docs/derivations/nccl.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf

from foreshard.comm.nccl.constants import GIGA, limit

_STOP = 0.49  # NCCL tries no speed below this share of the best one found
_ROUNDING = 1e-6  # NCCL rounds what is left of a link to MB/s
# Channels are doubled when one carries at least so much; of devices after 8.0 only few or fast channels are.
_DOUBLE_FROM = 25.0 * GIGA
_FAST = 50.0 * GIGA
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLinks:
    """What channels run over: the links of one device and the network cards of its node."""

    ranks: int  # in one node (or NVLink domain across nodes)
    device_bytes_per_s: float  # all links of a device, one direction; infinite for one rank in a node
    cards: int  # network cards of the ranks; 0 when nothing leaves the node
    card_bytes_per_s: float
    speeds: tuple[float, ...]  # of a channel, fastest first

    def on_cards(self, speed: float) -> int:
        """Return how many channels of a speed the network cards carry."""
        if not self.cards:
            return limit("channels")
        return self.cards * floor(self.card_bytes_per_s / speed + _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels of one pattern: how many, and bytes/s of each inside a node and between nodes."""

    count: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float


def ring_channels(links: ChannelLinks, capability: int) -> Channels:
    """Return the rings that fit, doubled at half the speed where NCCL does so."""
    most, count, best, total = limit("channels") // 2, 0, 0.0, _inside(links)
    for speed in links.speeds:
        if count and speed <= _STOP * best:
            break
        fits = min(most, floor(min(total / speed, most) + _ROUNDING), links.on_cards(speed))
        if fits * speed > count * best:
            count, best = fits, speed
        if count == most or count * best >= total:
            break
    if not count:
        count, best = 1, links.speeds[-1]
    if _doubles(count, best, capability):
        doubled = min(2 * count, most)
        count, best = doubled, best / -(-doubled // count)
    return Channels(count=count, intra_bytes_per_s=best, inter_bytes_per_s=best)


def _inside(links: ChannelLinks) -> float:
    """Return the bytes/s that channels may have together: one that leaves a node does so from one device.

    That device's link inside the node is free for another channel, which leaves at another device.
    """
    if links.cards and links.ranks > 1:
        return links.device_bytes_per_s * links.ranks / (links.ranks - 1)
    return links.device_bytes_per_s


def _doubles(count: int, speed: float, capability: int) -> bool:
    """Return whether every ring is made two of half the speed."""
    return speed >= _DOUBLE_FROM and not (capability > 80 and speed < _FAST and count > _FEW)


def tree_channels(links: ChannelLinks, ring: Channels) -> Channels:
    """Return as many trees as rings, of the fastest speed that links and cards carry, then faster inside.

    The ends of a chain use their links once, which leaves room inside.
    """
    total = links.device_bytes_per_s * links.ranks / (links.ranks - 1) if links.ranks > 1 else inf
    inside = [speed for speed in links.speeds if speed * ring.count <= total * (1.0 + _ROUNDING)]
    fits = (speed for speed in inside if links.on_cards(speed) >= ring.count)
    inter = next(fits, ring.inter_bytes_per_s)
    intra = inter
    for speed in reversed(inside):
        if speed > intra and intra < 2.0 * inter:
            intra = speed
    return Channels(count=ring.count, intra_bytes_per_s=intra, inter_bytes_per_s=inter)


def switch_channels(links: ChannelLinks) -> Channels:
    """Return the channels that reduce in the switch: each has a head that pulls from all devices.

    A device carries every channel once, the one it heads twice. One head per device if possible.
    """
    most, count, intra = min(limit("nvls_ranks_per_node"), links.ranks), 0, 0.0
    for speed in links.speeds:
        if count and speed <= _STOP * intra:
            break
        heads = floor(links.device_bytes_per_s / speed + _ROUNDING) - 1
        fits = max(0, min(most, heads, links.on_cards(speed)))
        if not links.cards and fits < most:
            continue  # on one node NCCL wants all devices as heads
        if fits > count or fits * speed > count * intra:
            count, intra = fits, speed
        if count == most:
            break
    return Channels(count=count, intra_bytes_per_s=intra, inter_bytes_per_s=_raised(links, count, intra))


def _raised(links: ChannelLinks, count: int, intra: float) -> float:
    """Return the speed between nodes, raised as long as the network cards carry it."""
    inter = intra
    for speed in sorted(speed for speed in links.speeds if speed > intra):
        if inter >= 2.0 * intra or links.on_cards(speed) < count:
            break
        inter = speed
    return inter
