"""The rendezvous in the form of a torch.distributed store."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from foreshard.runtime.membership.store import Client
from foreshard.runtime.membership.wire import PeerLost


class RankStore(dist.Store):
    """A store of torch.distributed, over which the members of a process group exchange addresses.

    Keep a reference while a group is being made: torch does not keep a Python store alive. A key is waited
    for until it is set, for `timeout_s`, or until it is `abandoned`: the rank that should set it is gone.
    """

    def __init__(
        self,
        client: Client,
        *,
        timeout_s: float = math.inf,
        abandoned: Callable[[], bool] = lambda: False,
    ):
        super().__init__()
        self._client, self._timeout_s, self._abandoned = client, timeout_s, abandoned

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._client.ask({"ask": "set", "key": key, "value": base64.b64encode(raw).decode()})

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it as `wait` does."""
        value = None
        while value is None:  # a rendezvous that is restarted in between gets its keys again
            self.wait([key])
            value = self._client.ask({"ask": "get", "key": key})["value"]
        return base64.b64decode(value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""
        question = {"ask": "add", "key": key, "value": amount, "once": self._client.once()}
        return int(self._client.ask(question)["value"])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._client.ask({"ask": "check", "keys": list(keys)})["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; raise `PeerLost` when they are not set in time, or a peer has left."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while True:
            left = min(until - time.monotonic(), 0.25)
            answer = self._client.ask({"ask": "wait", "keys": list(keys), "timeout_s": max(left, 0.0)})
            if answer["value"]:
                return
            if self._abandoned():
                raise PeerLost(f"a peer left while waiting for {', '.join(keys)}")
            if time.monotonic() >= until:
                raise PeerLost(f"waited {seconds:.0f} s for {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._client.ask({"ask": "delete", "key": key})["value"])

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._client.ask({"ask": "count"})["value"])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for keys."""
        self._timeout_s = timeout.total_seconds()
