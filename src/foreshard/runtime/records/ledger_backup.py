"""Copies of ledger lines that wait for a disk, at the rendezvous: they survive the death of the rank."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from foreshard.runtime.membership.store import Client

_PATIENCE_S = 1.0
"""A step waits at most so long for a copy; a line without one is only in the rank's memory."""


class LedgerBackup:
    """Copies of a rank's waiting lines, under numbered keys of the rendezvous store."""

    def __init__(self, client: Client, rank: int):
        self._client, self._prefix = client, f"ledger/{rank}"
        self._count, self._kept = 0, list[int]()

    def keep(self, data: bytes) -> None:
        """Keep a line."""
        with contextlib.suppress(RuntimeError):
            number = self._count + 1
            for key, value in ((str(number), data), ("count", str(number).encode())):
                self._ask("set", key, value=base64.b64encode(value).decode())
            self._count = number
            self._kept.append(number)

    def clear(self) -> None:
        """Delete the kept lines: they are on disk."""
        with contextlib.suppress(RuntimeError):
            while self._kept:
                self._ask("delete", str(self._kept[-1]))
                self._kept.pop()

    def left(self) -> list[bytes]:
        """Return the lines that an earlier process of this rank kept, oldest first; `clear` deletes them."""
        found = []
        with contextlib.suppress(RuntimeError):
            count = self._ask("get", "count")
            self._count = int(base64.b64decode(count)) if count else 0
            for number in range(1, self._count + 1):
                data = self._ask("get", str(number))
                if data is not None:
                    self._kept.append(number)
                    found.append(base64.b64decode(data))
        return found

    def _ask(self, ask: str, key: str, **more: str) -> Any:
        question = {"ask": ask, "key": f"{self._prefix}/{key}", **more}
        return self._client.ask(question, patience_s=_PATIENCE_S).get("value")
