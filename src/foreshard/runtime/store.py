"""The place where ranks meet: keys and values over TCP, for those who know the secret.

Both sides prove that they know it before anything is said (HMAC-SHA256 over fresh nonces). A message is a length
and JSON; nothing is ever unpickled. The server listens on the address it is given and on no other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from foreshard.errors import SpecError

MAX_MESSAGE_BYTES = 16 * 2**20
HANDSHAKE_S = 5.0
_NONCE_BYTES = 32


class Refused(SpecError):
    """The other side does not know the secret, or does not speak the protocol."""


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(min(count - len(parts), 65536))
        if not part:
            raise ConnectionError("closed by the other side")
        parts += part
    return bytes(parts)


def _say(link: socket.socket, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes, at most {MAX_MESSAGE_BYTES}")
    link.sendall(struct.pack("!I", len(text)) + text)


def _hear(link: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("!I", _exactly(link, 4))
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES}")
    message = json.loads(_exactly(link, size))
    if not isinstance(message, dict):
        raise ConnectionError("a message is a JSON object")
    return message


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _admit(link: socket.socket, secret: bytes) -> None:
    """Server's side of the handshake: nothing is told to who does not prove the secret."""
    nonce = os.urandom(_NONCE_BYTES)
    link.sendall(nonce)
    answer = _exactly(link, _NONCE_BYTES + 32)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", nonce, theirs)):
        raise ConnectionError("wrong secret")
    link.sendall(_proof(secret, b"server", theirs, nonce))


def _introduce(link: socket.socket, secret: bytes) -> None:
    nonce = _exactly(link, _NONCE_BYTES)
    mine = os.urandom(_NONCE_BYTES)
    link.sendall(mine + _proof(secret, b"rank", nonce, mine))
    try:
        answer = _exactly(link, 32)
    except ConnectionError:
        raise Refused("refused by the rendezvous", key="secret", rule="all ranks of a run share one secret",
                      fix="Give every host the same secret file") from None  # fmt: skip
    if not hmac.compare_digest(answer, _proof(secret, b"server", mine, nonce)):
        raise Refused("the rendezvous does not know the secret", key="secret",
                      rule="all ranks of a run share one secret")  # fmt: skip


class StoreServer:
    """Keys and values, and whatever other questions its owner answers.

    Parameters
    ----------
    address : str
        Of the interface to listen on.
    port : int
        0 for any free one.
    secret : bytes
    answer : callable of a message, optional
        Answers questions other than those about keys; runs in the asker's thread.
    """

    def __init__(
        self, address: str, port: int, secret: bytes,
        answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ):  # fmt: skip
        if not secret:
            raise SpecError("the secret is empty", key="secret", rule="a run has a shared secret")
        self._secret, self._answer = secret, answer
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._socket = socket.create_server((address, port), backlog=256)
        self.address, self.port = self._socket.getsockname()[:2]
        self._open = True
        threading.Thread(target=self._accept, daemon=True, name="store").start()

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self._socket.close()

    def forget(self, prefix: str) -> None:
        """Drop the keys that begin so."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def _accept(self) -> None:
        while self._open:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                link.settimeout(HANDSHAKE_S)
                _admit(link, self._secret)
                link.settimeout(None)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    _say(link, self._reply(_hear(link)))
            except (OSError, ValueError, struct.error):
                return  # a stranger, or a rank that is gone; the supervisor notices the latter

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        ask, key = message.get("ask"), message.get("key", "")
        if ask == "set":
            return self._set(key, base64.b64decode(message["value"]))
        if ask == "add":
            return self._add(key, int(message["value"]))
        if ask == "swap":
            return self._swap(key, base64.b64decode(message["old"]), base64.b64decode(message["value"]))
        if ask == "get":
            return {"value": None if (v := self._values.get(key)) is None else base64.b64encode(v).decode()}
        if ask == "check":
            return {"value": all(k in self._values for k in message["keys"])}
        if ask == "wait":
            return self._wait(message["keys"], float(message["timeout_s"]))
        if ask == "delete":
            with self._changed:
                return {"value": self._values.pop(key, None) is not None}
        if ask == "count":
            return {"value": len(self._values)}
        if self._answer is not None:
            return self._answer(message)
        return {"error": f"unknown question {ask!r}"}

    def _set(self, key: str, value: bytes) -> dict[str, Any]:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return {}

    def _add(self, key: str, amount: int) -> dict[str, Any]:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
        return {"value": total}

    def _swap(self, key: str, old: bytes, new: bytes) -> dict[str, Any]:
        with self._changed:
            if self._values.get(key, b"") == old:
                self._values[key] = new
                self._changed.notify_all()
            return {"value": base64.b64encode(self._values.get(key, old)).decode()}

    def _wait(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        with self._changed:
            return {"value": self._changed.wait_for(lambda: all(k in self._values for k in keys), timeout_s)}


class Client:
    """Asks a StoreServer questions; each thread has a connection of its own, made again when it breaks.

    Parameters
    ----------
    address : (host, port)
    secret : bytes
    patience_s : float
        How long to try to connect: the server may be about to come back.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, *, patience_s: float = 20.0):
        self.address, self._secret, self._patience_s = address, secret, patience_s
        self._local = threading.local()

    def ask(self, message: Mapping[str, Any], *, patience_s: float | None = None) -> dict[str, Any]:
        """Return the answer.

        Raises
        ------
        Refused
            When the secret is wrong.
        RuntimeError
            When nobody answers.
        """
        until = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                link = self._link()
                _say(link, message)
                reply = _hear(link)
            except Refused:
                raise
            except (OSError, ValueError) as error:
                self._drop()
                if time.monotonic() > until:
                    raise RuntimeError(f"the rendezvous at {self.address} does not answer: {error}") from error
                time.sleep(0.05)
                continue
            if "error" in reply:
                raise RuntimeError(str(reply["error"]))
            return reply

    def _link(self) -> socket.socket:
        link = getattr(self._local, "link", None)
        if link is None:
            link = socket.create_connection(self.address, timeout=HANDSHAKE_S)
            _introduce(link, self._secret)
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.link = link
        return link

    def _drop(self) -> None:
        link = getattr(self._local, "link", None)
        if link is not None:
            link.close()
            self._local.link = None
