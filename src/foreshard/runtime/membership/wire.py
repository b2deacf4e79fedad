"""Authenticated JSON messages over TCP.

Both sides prove that they know the run's secret (HMAC-SHA256 over fresh nonces) before any message. A message
is its length and JSON; nothing is ever unpickled. torch's TCPStore has no authentication.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from foreshard.errors import SpecError

MAX_MESSAGE_BYTES = 16 * 2**20
"""Bounds what a peer can make this process allocate; the largest message is a status of all shards."""
HANDSHAKE_S = 5.0
"""How long a connection and the proofs of both sides may take: a stranger holds a thread no longer."""
_NONCE_BYTES, _PROOF_BYTES = 32, 32
"""A proof is as long as SHA-256 makes it, and a nonce too: it never comes twice."""
_REFUSAL = b"refused".ljust(_PROOF_BYTES, b"\0")


class PeerLost(RuntimeError):
    """Another rank, or the rendezvous, cannot be reached: a rank leaves its generation for the next one."""


class Refused(SpecError):
    """The other side does not know the secret, or does not speak the protocol."""


def send_message(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message."""
    text = json.dumps(message).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes, at most {MAX_MESSAGE_BYTES}")
    link.sendall(struct.pack("!I", len(text)) + text)


def receive_message(link: socket.socket) -> dict[str, Any]:
    """Receive a message."""
    (size,) = struct.unpack("!I", _receive(link, 4))
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES}")
    message = json.loads(_receive(link, size))
    if not isinstance(message, dict):
        raise ConnectionError("a message is a JSON object")
    return message


def authenticate_client(link: socket.socket, secret: bytes) -> None:
    """Do the server's side of the handshake: nothing is revealed to a client without the secret."""
    nonce = os.urandom(_NONCE_BYTES)
    link.sendall(nonce)
    answer = _receive(link, _NONCE_BYTES + _PROOF_BYTES, time.monotonic() + HANDSHAKE_S)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", nonce, theirs)):
        link.sendall(_REFUSAL)
        raise ConnectionError("wrong secret")
    link.sendall(_proof(secret, b"server", theirs, nonce))


def authenticate_to_server(link: socket.socket, secret: bytes) -> None:
    """Do the client's side of the handshake; raise `Refused` when a side does not know the other's secret."""
    nonce = _receive(link, _NONCE_BYTES)
    mine = os.urandom(_NONCE_BYTES)
    link.sendall(mine + _proof(secret, b"rank", nonce, mine))
    answer = _receive(link, _PROOF_BYTES)
    rule = "All ranks of a run share one secret"
    if answer == _REFUSAL:  # explicit: a link that breaks may be a server that is being restarted
        fix = "Give every host the same secret file"
        raise Refused("refused by the rendezvous", key="secret", rule=rule, fix=fix)
    if not hmac.compare_digest(answer, _proof(secret, b"server", mine, nonce)):
        raise Refused("the rendezvous does not know the secret", key="secret", rule=rule)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _receive(link: socket.socket, count: int, until_s: float | None = None) -> bytes:
    """Return so many bytes; `until_s` bounds the time of all of them together, however slowly they come."""
    parts = bytearray()
    while len(parts) < count:
        if until_s is not None:
            link.settimeout(max(until_s - time.monotonic(), 1e-3))
        part = link.recv(min(count - len(parts), 65536))
        if not part:
            raise ConnectionError("closed by the other side")
        parts += part
    return bytes(parts)
