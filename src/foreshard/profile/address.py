"""The address of this host that others reach it on."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of ioctl(2)."""


def interface_address(name: str | None) -> str | None:
    """Return the address of a network interface of this host by its name, and other texts as they are."""
    if name is None or name not in {own for _, own in socket.if_nameindex()}:
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return name


def own_address(towards: str) -> str:
    """Return the address by which hosts on the way to another one reach this one; nothing is sent.

    The host's own name would not do: it often stands for the loopback. That there is no way is an OSError.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
