"""Where the rendezvous is, and which host takes it over when its host is lost.

A file in the run's folder, which all hosts reach, has the address and a term that only rises. An agent that
gets no answer for long enough claims the next term, which only one agent can; it starts a supervisor that
continues from the decisions on disk. A supervisor that finds a later term than its own ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from foreshard.runtime.membership.store import Client
from foreshard.runtime.membership.supervisor_state import write_json

_ANSWERS_S = 2.0
"""How long a rendezvous may take to say whether its run is under way; one that is gone never answers."""
_FILE = "rendezvous.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address where ranks meet, and how many hosts have had the rendezvous (`term`).

    Port 0 means that the run was ended: no host takes it over.
    """

    address: str
    port: int
    term: int


def read_rendezvous(folder: Path) -> Rendezvous | None:
    """Return the rendezvous of a run; None if there is none that can be read."""
    try:
        data = json.loads((folder / _FILE).read_text())
        return Rendezvous(address=str(data["address"]), port=int(data["port"]), term=int(data["term"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def rendezvous_address(folder: Path) -> tuple[str, int] | None:
    """Return address and port of a run's rendezvous, unless the run was ended."""
    rendezvous = read_rendezvous(folder)
    return (rendezvous.address, rendezvous.port) if rendezvous is not None and rendezvous.port else None


def current_term(folder: Path) -> int:
    """Return the term; 0 before the first."""
    rendezvous = read_rendezvous(folder)
    return 0 if rendezvous is None else rendezvous.term


def running_rendezvous(folder: Path, secret: bytes) -> Rendezvous | None:
    """Return the rendezvous of a run under way; None if it does not answer, or all steps are done.

    A server that has another secret is an error.
    """
    rendezvous = read_rendezvous(folder)
    if rendezvous is None or not rendezvous.port:
        return None
    client = Client((rendezvous.address, rendezvous.port), secret)
    try:
        return None if client.ask({"ask": "state"}, patience_s=_ANSWERS_S)["over"] else rendezvous
    except (RuntimeError, OSError):
        return None
    finally:
        client.close()


def announce(folder: Path, rendezvous: Rendezvous) -> None:
    """Publish the rendezvous of a run."""
    write_json(folder / _FILE, asdict(rendezvous))


def claim_term(folder: Path, term: int) -> bool:
    """Return whether the caller gets a term: the first who asks does."""
    try:
        os.close(os.open(folder / f"rendezvous-{term}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    for old in folder.glob("rendezvous-*.claim"):
        number = old.stem.rpartition("-")[2]
        if number.isdigit() and int(number) < term - 1:
            with contextlib.suppress(OSError):
                old.unlink()
    return True
