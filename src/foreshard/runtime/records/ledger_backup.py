"""Lines that a rank cannot write, kept by the rendezvous too: they outlive a rank that waits for its disk."""

from __future__ import annotations

import base64
import contextlib

from foreshard.runtime.membership.store import Client

_PATIENCE_S = 1.0


class LedgerBackup:
    """Copies of a rank's lines that wait for a disk.

    What the rendezvous does not take in a second is only in the rank's memory.

    Parameters
    ----------
    client : Client
    rank : int
    """

    def __init__(self, client: Client, rank: int):
        self._client, self._where = client, f"spare/{rank}"
        self._kept: list[int] = []

    def keep(self, data: bytes) -> None:
        """Keep a line."""
        with contextlib.suppress(RuntimeError):
            count = self._client.ask(
                {"ask": "add", "key": f"{self._where}/count", "value": 1, "once": self._client.once()},
                patience_s=_PATIENCE_S,
            )["value"]
            value = base64.b64encode(data).decode()
            self._client.ask(
                {"ask": "set", "key": f"{self._where}/{count}", "value": value}, patience_s=_PATIENCE_S
            )
            self._kept.append(int(count))

    def clear(self) -> None:
        """Forget what was kept: it is on disk."""
        with contextlib.suppress(RuntimeError):
            while self._kept:
                self._client.ask(
                    {"ask": "delete", "key": f"{self._where}/{self._kept[-1]}"}, patience_s=_PATIENCE_S
                )
                self._kept.pop()

    def left(self) -> list[bytes]:
        """Return what a process of this rank has left behind, oldest first; `clear` forgets it."""
        found = []
        with contextlib.suppress(RuntimeError):
            count = self._get("count")
            for number in range(1, int(count or b"0") + 1):
                data = self._get(str(number))
                if data is not None:
                    self._kept.append(number)
                    found.append(data)
        return found

    def _get(self, name: str) -> bytes | None:
        told = self._client.ask({"ask": "get", "key": f"{self._where}/{name}"}, patience_s=_PATIENCE_S)
        return None if told["value"] is None else base64.b64decode(told["value"])
