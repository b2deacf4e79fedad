"""A rank's side of the rendezvous: its generation, process groups, heartbeat."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from foreshard.runtime.membership.fixed_membership import Generation
from foreshard.runtime.membership.rank_store import RankStore
from foreshard.runtime.membership.store import Client
from foreshard.spec.plan_file import parse_plan

BOUNDARY = "boundary"
"""Reason of a rank that leaves a generation in step with all others."""
_PATIENCE_S = 120.0
_LAST_PATIENCE_S = 30.0
_LOOK_S = 0.1


DEVICE_GROUPS = ("forward", "backward", "sync", "stage", "tensor")
"""Groups that carry tensors of the device; votes, clocks, shapes and migrations go from host to host."""


class Membership:
    """A rank among others under a supervisor.

    Parameters
    ----------
    address : (host, port)
        Of the rendezvous.
    rank : int
    secret : bytes
    timeout_s : float
        After which a peer that says nothing is an error; the detection bound of a stalled peer.
    interface : str, optional
        Address of this host that peers connect to.
    backend : {'gloo', 'nccl'}
    resume : bool
        Go on from the latest checkpoint in the first generation.
    beat_s : float
        Between heartbeats.
    locate : callable, optional
        Where the rendezvous is now, asked when it does not answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        secret: bytes,
        *,
        timeout_s: float = 30.0,
        interface: str | None = None,
        backend: str = "gloo",
        resume: bool = False,
        beat_s: float = 0.5,
        locate: Callable[[], tuple[str, int] | None] = lambda: None,
    ):
        self.rank, self.client = rank, Client(address, secret, patience_s=_PATIENCE_S, locate=locate)
        self.store: dist.Store = RankStore(self.client, timeout_s=timeout_s, abandoned=self._abandoned)
        self._timeout_s, self._interface, self._backend = timeout_s, interface, backend
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}
        self._me = {"rank": rank, "pid": os.getpid()}
        self._number, self._broken_number = -1, -1
        self._wanted = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._beat, args=(beat_s,), daemon=True, name="heartbeat").start()
        self.generation = self._next(-1, "", resume=resume)

    def group(self, ranks: tuple[int, ...], name: str) -> Any:
        """Return the process group of some ranks in this generation.

        All of them must ask, and in one order if they ask for several.

        Raises
        ------
        RuntimeError
            When one of them does not come in time.
        """
        key = (tuple(ranks), name)
        if key not in self._groups:
            where = f"g{self.generation.number}/{name}/{'-'.join(map(str, ranks))}"
            store = dist.PrefixStore(where, self.store)
            self._groups[key] = self._unless_abandoned(lambda: self._made(store, list(ranks), name))
        return self._groups[key]

    def _unless_abandoned(self, make: Callable[[], Any]) -> Any:
        """Return what is made in a thread, or give up: gloo tries a peer that is gone five timeouts long."""
        made: list[Any] = []
        faults: list[BaseException] = []

        def body() -> None:
            try:
                made.append(make())
            except BaseException as error:  # raised where it is waited for
                faults.append(error.with_traceback(None))

        thread = threading.Thread(target=body, daemon=True, name="connecting")
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and self._abandoned():
                raise RuntimeError("a peer left while ranks were connecting")
        if faults:
            raise faults.pop()
        return made.pop()

    def _made(self, store: dist.Store, ranks: list[int], name: str) -> Any:
        place, timeout = ranks.index(self.rank), timedelta(seconds=self._timeout_s)
        if self._backend == "nccl" and name in DEVICE_GROUPS:
            chosen = dist.ProcessGroupNCCL.Options()
            chosen._timeout = timeout
            return dist.ProcessGroupNCCL(store, place, len(ranks), chosen)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=self._interface)
            if self._interface
            else dist.ProcessGroupGloo.create_default_device()
        ]
        return dist.ProcessGroupGloo(store, place, len(ranks), options)

    def next_generation(self, reason: str) -> Generation:
        """Leave all groups, wait for the next generation with this rank in it, and return it.

        Raises
        ------
        RuntimeError
            When the supervisor does not come back.
        SystemExit
            When the others have done all steps without this rank.
        """
        if reason != BOUNDARY:
            self._drop_groups()  # peers that wait for this rank learn by it that it has left
        self.generation = self._next(self.generation.number, reason)
        self._drop_groups()  # at a boundary only now: a peer may still be receiving what ended the step
        return self.generation

    def _next(self, after: int, reason: str, *, resume: bool = False) -> Generation:
        question = {"ask": "join", "after": after, "reason": reason[:300], "timeout_s": 5.0, **self._me}
        while True:
            told = self.client.ask(question)
            if told["over"]:
                self._done.set()
                raise SystemExit(0)
            found = told["generation"]
            if found is not None:
                self._broken_number, self._number = -1, found["number"]
                self._wanted.clear()
                return Generation(
                    number=found["number"],
                    plan=parse_plan(found["plan"]),
                    ranks=tuple(found["ranks"]),
                    resume=resume,
                    pids={int(rank): int(pid) for rank, pid in found["pids"].items()},
                )

    def _drop_groups(self) -> None:
        """Close all groups, each in a thread of its own.

        Closing one waits for what is under way in it, which may wait for a peer that waits for another of
        this rank's groups to be closed.
        """
        groups, self._groups = list(self._groups.values()), {}
        while groups:
            threading.Thread(target=_close, args=([groups.pop()],), daemon=True, name="closing").start()

    def wanted(self) -> bool:
        """Return whether somebody waits at the door."""
        return self._wanted.is_set()

    def _abandoned(self) -> bool:
        """Return whether a peer has left this generation: keys that it should set do not come."""
        return self._broken_number == self._number

    def report(self, kind: str, **facts: Any) -> None:
        """Tell the supervisor's log; a supervisor that is away misses it."""
        with contextlib.suppress(RuntimeError):
            self.client.ask({"ask": "report", "kind": kind, "facts": facts}, patience_s=0.0)

    def plan_adopted(self, plan: dict[str, Any]) -> None:
        """Tell the supervisor what later generations are made from."""
        self.client.ask({"ask": "plan", "plan": plan})

    def finish(self) -> bool:
        """Return whether all are done; if not, a peer needs this rank: adopt the next generation."""
        while True:
            try:
                told = self.client.ask({"ask": "finished", **self._me}, patience_s=_LAST_PATIENCE_S)
            except RuntimeError:
                told = {"end": True}  # no supervisor comes back: the others were done, or their host is lost
            if told["end"]:
                self._done.set()
                self._drop_groups()
                return True
            if told["back"]:
                return False

    def _beat(self, every_s: float) -> None:
        agent = int(os.environ.get("FORESHARD_AGENT", "0"))
        child = agent == os.getppid()
        while not self._done.wait(every_s):
            if child and os.getppid() != agent:
                os._exit(1)  # nobody looks after this rank any more
            number = self._number
            try:
                told = self.client.ask({"ask": "beat", "number": number, **self._me}, patience_s=0.0)
            except RuntimeError:
                continue  # the supervisor comes back
            if told["number"] == number == self._number:
                if told["wanted"]:
                    self._wanted.set()
                if told["broken"]:
                    self._broken_number = number


def _close(groups: list[Any]) -> None:
    """Close a group and let go of it: gloo closes its connections when nothing holds the group."""
    with contextlib.suppress(RuntimeError):  # the peers are gone already
        groups.pop().abort()
