"""The address of this host that others reach it on."""

from __future__ import annotations

import socket


def own_address(towards: str) -> str:
    """Return the address by which hosts on the way to another one reach this one; nothing is sent.

    The host's own name would not do: it often stands for the loopback. That there is no way is an OSError.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
