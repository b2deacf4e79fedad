"""Where the rendezvous is, and who hosts it when its host is lost.

The run's folder, which all hosts reach, says where: an address and a term that only rises. When nobody
answers there for long enough an agent claims the next term, which one can; it starts a supervisor that goes
on from what the one before had decided. A supervisor that finds a later term than its own ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from foreshard.runtime.membership.store import Client

_ANSWERS_S = 2.0
_FILE = "rendezvous.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where ranks meet.

    Attributes
    ----------
    address : str
    port : int
        0 when the run was ended: nobody is to host it any more.
    term : int
        How often the rendezvous has been given a host.
    """

    address: str
    port: int
    term: int


def place_of(folder: Path) -> Place | None:
    """Return where the ranks of a run meet; None if nobody has said so in a way that can be read."""
    try:
        told = json.loads((folder / _FILE).read_text())
        return Place(address=str(told["address"]), port=int(told["port"]), term=int(told["term"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def located(folder: Path) -> tuple[str, int] | None:
    """Return the address and port where the ranks of a run meet, if it goes on."""
    place = place_of(folder)
    return (place.address, place.port) if place is not None and place.port else None


def goes_on(folder: Path, secret: bytes) -> Place | None:
    """Return where a run that is under way meets; None if nobody answers there, or all its steps are done.

    Raises
    ------
    SpecError
        When who answers has another secret.
    """
    place = place_of(folder)
    if place is None or not place.port:
        return None
    client = Client((place.address, place.port), secret)
    try:
        return None if client.ask({"ask": "state"}, patience_s=_ANSWERS_S)["over"] else place
    except (RuntimeError, OSError):
        return None
    finally:
        client.close()


def term_of(folder: Path) -> int:
    """Return the term; 0 before the first."""
    place = place_of(folder)
    return 0 if place is None else place.term


def announce(folder: Path, place: Place) -> None:
    """Say where ranks meet; a reader finds the old or the new, never a part."""
    new = folder / f"{_FILE}.{os.getpid()}"
    with new.open("w") as file:
        json.dump(asdict(place), file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _FILE)


def claim(folder: Path, term: int) -> bool:
    """Return whether a term is the caller's: the first who asks for it has it."""
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
