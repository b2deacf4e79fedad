"""The place where ranks meet: keys and values over TCP, for those who know the secret.

Both sides prove that they know it before anything is said (HMAC-SHA256 over fresh nonces). A message is a
length and JSON; nothing is ever unpickled. The server listens on the address it is given and on no other.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from foreshard.errors import SpecError

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_STRANGERS = 64
HANDSHAKE_S = 5.0
ANSWER_S = 20.0
_NONCE_BYTES = 32
_BIND_S = 10.0
_ONCE_KEPT = 4096
_LOCATE_S = 0.5
_REFUSAL = b"refused".ljust(32, b"\0")


class Refused(SpecError):
    """The other side does not know the secret, or does not speak the protocol."""


def _exactly(link: socket.socket, count: int, until_s: float | None = None) -> bytes:
    """Return so many bytes; `until_s` bounds all of them together, however slowly they drip."""
    parts = bytearray()
    while len(parts) < count:
        if until_s is not None:
            link.settimeout(max(until_s - time.monotonic(), 1e-3))
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
    answer = _exactly(link, _NONCE_BYTES + 32, time.monotonic() + HANDSHAKE_S)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", nonce, theirs)):
        link.sendall(_REFUSAL)
        raise ConnectionError("wrong secret")
    link.sendall(_proof(secret, b"server", theirs, nonce))


def _introduce(link: socket.socket, secret: bytes) -> None:
    nonce = _exactly(link, _NONCE_BYTES)
    mine = os.urandom(_NONCE_BYTES)
    link.sendall(mine + _proof(secret, b"rank", nonce, mine))
    answer = _exactly(link, 32)
    if answer == _REFUSAL:  # said in so many words: a link that breaks may be a server that is coming back
        raise Refused(
            "refused by the rendezvous",
            key="secret",
            rule="All ranks of a run share one secret",
            fix="Give every host the same secret file",
        )
    if not hmac.compare_digest(answer, _proof(secret, b"server", mine, nonce)):
        raise Refused(
            "the rendezvous does not know the secret",
            key="secret",
            rule="All ranks of a run share one secret",
        )


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
        self,
        address: str,
        port: int,
        secret: bytes,
        answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ):
        if not secret:
            raise SpecError("the secret is empty", key="secret", rule="A run has a shared secret")
        self._secret, self._answer = secret, answer
        self._values: dict[str, bytes] = {}
        self._once: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._links: set[socket.socket] = set()
        self._boot = uuid.uuid4().hex
        self._socket = _listening(address, port)
        self.address, self.port = self._socket.getsockname()[:2]
        self._open = True
        threading.Thread(target=self._accept, daemon=True, name="store").start()

    def close(self) -> None:
        """Stop listening, and hang up on everybody."""
        self._open = False
        with self._changed:
            open_sockets = [self._socket, *self._links]
        for each in open_sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
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
                time.sleep(0.05)  # out of files, or a caller that hung up: others still want to come in
                continue
            if not self._strangers.acquire(blocking=False):
                link.close()  # so many callers that have not proved anything; a rank tries again
                continue
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                self._greet(link)
                with self._changed:
                    self._links.add(link)
                while True:
                    _say(link, self._answered(_hear(link)))
            except (OSError, ValueError, struct.error, RecursionError):
                return  # a stranger, or a rank that is gone; the supervisor notices the latter
            finally:
                with self._changed:
                    self._links.discard(link)

    def _greet(self, link: socket.socket) -> None:
        try:
            link.settimeout(HANDSHAKE_S)
            _admit(link, self._secret)
        finally:
            self._strangers.release()
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _answered(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer once: a question that is asked again because its answer was lost gets the same answer."""
        once = message.get("once")
        with self._changed:
            if isinstance(once, str) and once in self._once:
                return self._once[once]
        try:
            reply = self._reply(message)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return {"error": f"a question that makes no sense: {type(error).__name__}: {error}"}
        if once is not None:
            with self._changed:
                self._once[str(once)] = reply
                if len(self._once) > _ONCE_KEPT:
                    self._once.popitem(last=False)
        return reply

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
            there = self._changed.wait_for(lambda: all(k in self._values for k in keys), timeout_s)
            return {"value": there, "boot": self._boot}


def _listening(address: str, port: int) -> socket.socket:
    """Listen; for a while again and again if the port is taken, as by a connection of the server before."""
    until = time.monotonic() + _BIND_S
    while True:
        try:
            return socket.create_server((address, port), backlog=256)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


class _Line:
    """A connection that is closed with the thread it belongs to."""

    def __init__(self, link: socket.socket):
        self.link = link

    def __del__(self) -> None:
        self.link.close()


class Client:
    """Asks a StoreServer questions; each thread has a connection of its own, made again when it breaks.

    Parameters
    ----------
    address : (host, port)
    secret : bytes
    patience_s : float
        How long to try to connect: the server may be about to come back.
    locate : callable, optional
        Where the server is now; asked when it does not answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        patience_s: float = 20.0,
        locate: Callable[[], tuple[str, int] | None] = lambda: None,
    ):
        self.address, self._secret, self._patience_s = address, secret, patience_s
        self._locate, self._located_s = locate, 0.0
        self._local = threading.local()
        self._name = uuid.uuid4().hex
        self._asked = itertools.count()

    def once(self) -> str:
        """Return a name for a question that must be answered once, however often it is sent."""
        return f"{self._name}/{next(self._asked)}"

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
                self._look_elsewhere()
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"the rendezvous at {self.address} does not answer: {error}"
                    ) from error
                time.sleep(0.05)
                continue
            if "error" in reply:
                raise RuntimeError(str(reply["error"]))
            return reply

    def _look_elsewhere(self) -> None:
        now = time.monotonic()
        if now - self._located_s > _LOCATE_S:
            self._located_s = now
            self.address = self._locate() or self.address

    def _link(self) -> socket.socket:
        line: _Line | None = getattr(self._local, "line", None)
        if line is None:
            line = self._local.line = self._connected()
        return line.link

    def _connected(self) -> _Line:
        line = _Line(socket.create_connection(self.address, timeout=HANDSHAKE_S))
        if (
            line.link.getsockname() == line.link.getpeername()
        ):  # nobody listens: the kernel led us to ourselves
            raise ConnectionRefusedError("nobody listens")
        _introduce(line.link, self._secret)
        line.link.settimeout(ANSWER_S)
        line.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    def close(self) -> None:
        """Hang up, in this thread."""
        line: _Line | None = getattr(self._local, "line", None)
        if line is not None:
            line.link.close()
        self._drop()

    def _drop(self) -> None:
        self._local.line = None
