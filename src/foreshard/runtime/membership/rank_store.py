"""The rendezvous as a store of torch.distributed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from foreshard.runtime.membership.store import Client


class RankStore(dist.Store):
    """The store as torch.distributed knows it, for process groups to find each other.

    Keep it as long as a group is being made: torch does not keep a store of Python's alive.

    Parameters
    ----------
    client : Client
    timeout_s : float
        How long a key is waited for.
    abandoned : callable, optional
        Whether to stop waiting: who should set keys is gone.
    """

    def __init__(
        self, client: Client, *, timeout_s: float = 30.0, abandoned: Callable[[], bool] = lambda: False
    ):
        super().__init__()
        self._client, self._timeout_s, self._abandoned = client, timeout_s, abandoned

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._client.ask({"ask": "set", "key": key, "value": base64.b64encode(raw).decode()})

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it.

        Raises
        ------
        RuntimeError
            When it does not come in time.
        """
        self.wait([key])
        value = self._client.ask({"ask": "get", "key": key})["value"]
        return base64.b64decode(value or "")

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""
        told = {"ask": "add", "key": key, "value": amount, "once": self._client.once()}
        return int(self._client.ask(told)["value"])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has a value; return what it has now."""
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        new = desired.encode() if isinstance(desired, str) else bytes(desired)
        told = {
            "ask": "swap",
            "key": key,
            "old": base64.b64encode(old).decode(),
            "value": base64.b64encode(new).decode(),
            "once": self._client.once(),
        }
        return base64.b64decode(self._client.ask(told)["value"])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._client.ask({"ask": "check", "keys": list(keys)})["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises
        ------
        RuntimeError
            When they do not come in time, or do not come any more: a peer has left, or the rendezvous was
            started again and has lost them.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until, boot = time.monotonic() + seconds, None
        while True:
            left = min(until - time.monotonic(), 0.25)
            told = self._client.ask({"ask": "wait", "keys": list(keys), "timeout_s": max(left, 0.0)})
            if told["value"]:
                return
            if self._abandoned():
                raise RuntimeError(f"a peer left while waiting for {', '.join(keys)}")
            if boot not in (None, told["boot"]):
                raise RuntimeError(f"the rendezvous was started again while waiting for {', '.join(keys)}")
            boot = told["boot"]
            if time.monotonic() >= until:
                raise RuntimeError(f"waited {seconds:.0f} s for {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._client.ask({"ask": "delete", "key": key})["value"])

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._client.ask({"ask": "count"})["value"])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long keys are waited for."""
        self._timeout_s = timeout.total_seconds()
