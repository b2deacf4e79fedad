"""The rendezvous: keys and values over TCP, and the questions that ranks and agents ask the supervisor.

The server listens on the address it is given and on no other; every connection is authenticated (`wire`).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import socket
import struct
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from foreshard.errors import SpecError
from foreshard.runtime.membership.wire import (
    HANDSHAKE_S,
    PeerLost,
    Refused,
    authenticate_client,
    authenticate_to_server,
    receive_message,
    send_message,
)

MAX_UNAUTHENTICATED = 64
"""Connections in the handshake at once; beyond it the oldest is closed: a rank takes milliseconds for it, and
strangers can neither use up threads nor keep ranks out."""
ANSWER_S = 20.0
"""Silence of the server after which a client reconnects; questions are answered in at most 5 s."""
_BIND_S = 10.0
"""How long a port may stay taken by connections of an earlier server."""
_ONCE_KEPT = 4096
"""Answers kept for questions that may be asked twice; a client asks one at a time."""
_LOCATE_S = 0.5
"""Least time between looks where the rendezvous is: a file that all hosts read."""


class StoreServer:
    """Keys and values, and other questions that its owner answers, in the asker's thread.

    Port 0 is any free one.
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
        self._handshakes: OrderedDict[socket.socket, None] = OrderedDict()
        self._links: set[socket.socket] = set()
        self._boot = uuid.uuid4().hex
        self._socket = _listen(address, port)
        self.address, self.port = self._socket.getsockname()[:2]
        self._open = True
        threading.Thread(target=self._accept, daemon=True, name="store").start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._open = False
        with self._changed:
            open_sockets = [self._socket, *self._links, *self._handshakes]
        for each in open_sockets:
            _shut(each)
        self._socket.close()

    def forget(self, prefix: str) -> None:
        """Drop the keys with a prefix."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def _accept(self) -> None:
        while self._open:
            try:
                link, _ = self._socket.accept()
            except OSError:
                time.sleep(0.05)  # out of file descriptors, or the caller has closed: accept the next
                continue
            with self._changed:
                self._handshakes[link] = None
                if len(self._handshakes) > MAX_UNAUTHENTICATED:
                    _shut(self._handshakes.popitem(last=False)[0])
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                self._authenticate(link)
                with self._changed:
                    self._links.add(link)
                while True:
                    send_message(link, {**self._answer_once(receive_message(link)), "boot": self._boot})
            except (OSError, ValueError, struct.error, RecursionError):
                return  # a stranger, or a rank that is gone: the supervisor misses its heartbeat
            finally:
                with self._changed:
                    self._links.discard(link)

    def _authenticate(self, link: socket.socket) -> None:
        try:
            link.settimeout(HANDSHAKE_S)
            authenticate_client(link, self._secret)
        finally:
            with self._changed:
                self._handshakes.pop(link, None)
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _answer_once(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer; a question that is repeated because its answer was lost gets the same answer."""
        once = message.get("once")
        with self._changed:
            if isinstance(once, str) and once in self._once:
                return self._once[once]
        try:
            reply = self._reply(message)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return {"error": f"malformed question: {type(error).__name__}: {error}"}
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
            self._set(key, str(total).encode())
        return {"value": total}

    def _wait(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        with self._changed:
            there = self._changed.wait_for(lambda: all(k in self._values for k in keys), timeout_s)
            return {"value": there}


def _shut(link: socket.socket) -> None:
    """End a connection: threads that wait on it wake up, and close it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _listen(address: str, port: int) -> socket.socket:
    """Listen; retry for a while if the port is taken, as by connections of an earlier server."""
    until = time.monotonic() + _BIND_S
    while True:
        try:
            return socket.create_server((address, port), backlog=256)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


class _Connection:
    """A socket that is closed with the thread it belongs to."""

    def __init__(self, link: socket.socket):
        self.link = link

    def __del__(self) -> None:
        self.link.close()


class Client:
    """Asks a StoreServer questions; each thread has its own connection, which is made again when it breaks.

    A server that was restarted has lost its keys: the next answer to any thread shows it, and the client sets
    again what it had set. It tries for `patience_s` to connect, since the server may be restarting; `locate`
    gives the present address of one that does not answer.
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
        self._set: dict[str, Mapping[str, Any]] = {}
        self._setting = threading.RLock()
        self._boot: str | None = None

    def once(self) -> str:
        """Return a name for a question that must take effect once, however often it is sent."""
        return f"{self._name}/{next(self._asked)}"

    def ask(self, message: Mapping[str, Any], *, patience_s: float | None = None) -> dict[str, Any]:
        """Return the answer.

        Raises `Refused` when the secret is wrong, `PeerLost` when the server does not answer, `RuntimeError`
        when it answers with an error.
        """
        if message["ask"] not in ("set", "delete"):
            return self._asked_until_answered(message, patience_s)
        with self._setting:
            self._set.pop(message["key"], None)
            if message["ask"] == "set":
                self._set[message["key"]] = message
            return self._asked_until_answered(message, patience_s)

    def forget(self, prefix: str) -> None:
        """Do not set keys with a prefix again: nobody asks for them any more."""
        with self._setting:
            self._set = {key: message for key, message in self._set.items() if not key.startswith(prefix)}

    def _asked_until_answered(self, message: Mapping[str, Any], patience_s: float | None) -> dict[str, Any]:
        until = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                reply = self._asked_once(message)
                self._set_again(reply.pop("boot", None))
            except Refused:
                raise
            except (OSError, ValueError) as error:
                self._local.connection = None
                self._look_elsewhere()
                if time.monotonic() > until:
                    raise PeerLost(f"the rendezvous at {self.address} does not answer: {error}") from error
                time.sleep(0.05)
                continue
            if "error" in reply:
                raise RuntimeError(str(reply["error"]))
            return reply

    def _asked_once(self, message: Mapping[str, Any]) -> dict[str, Any]:
        link = self._link()
        send_message(link, message)
        return receive_message(link)

    def _set_again(self, boot: str | None) -> None:
        """Set all keys of this client again if the server is another one than before."""
        if boot == self._boot:
            return
        with self._setting:
            for message in self._set.values() if self._boot is not None else ():
                self._asked_once(message)
            self._boot = boot

    def close(self) -> None:
        """Close this thread's connection."""
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.link.close()
        self._local.connection = None

    def _look_elsewhere(self) -> None:
        now = time.monotonic()
        if now - self._located_s > _LOCATE_S:
            self._located_s = now
            self.address = self._locate() or self.address

    def _link(self) -> socket.socket:
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        return connection.link

    def _connect(self) -> _Connection:
        connection = _Connection(socket.create_connection(self.address, timeout=HANDSHAKE_S))
        link = connection.link
        if link.getsockname() == link.getpeername():  # no server listens: TCP connected the socket to itself
            raise ConnectionRefusedError("no server listens")
        authenticate_to_server(link, self._secret)
        link.settimeout(ANSWER_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
