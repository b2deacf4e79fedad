"""A rank's side of the rendezvous: its generation, process groups, heartbeat."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foreshard.runtime.membership.fixed_membership import Generation, GroupMembership
from foreshard.runtime.membership.peer_group import communicating
from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.membership.rank_store import RankStore
from foreshard.runtime.membership.store import Client
from foreshard.runtime.membership.wire import PeerLost
from foreshard.runtime.run_settings import HANGS, PARENT
from foreshard.spec.plan_file import parse_plan

BOUNDARY = "boundary"
"""Reason of a rank that leaves a generation together with all others, at the end of a step."""
_PATIENCE_S = 120.0
"""How long a rank waits for a supervisor that is being restarted or moved to another host."""
_LAST_PATIENCE_S = 30.0
"""The same after the last step, when nothing can be lost any more."""
_POLL_S = 0.1
"""Between looks whether a peer has left while ranks connect."""
_GROUP_TIMEOUT = timedelta(days=365)
"""After which gloo and NCCL give up by themselves; the membership ends waits in vain long before."""
DEVICE_GROUPS = ("forward", "backward", "sync", "stage", "tensor")
"""Groups that carry tensors of the device; votes, clocks, shapes and migrations use host memory."""


class Membership(GroupMembership):
    """A rank among others under a supervisor.

    If `progress` is given and shows that the process hangs, its stack is written to stderr, the line of `job`
    that hangs is named, and the process ends. Peers connect to `interface`, an address of this host; to
    `device` by NCCL where every rank has an accelerator to itself. `resume` continues from the latest
    checkpoint in the first generation. `locate` gives the present address of a rendezvous that does not
    answer.
    """

    store: dist.Store

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        secret: bytes,
        *,
        progress: Progress | None = None,
        job: str | None = None,
        interface: str | None = None,
        device: torch.device | None = None,
        resume: bool = False,
        beat_s: float = 0.5,
        locate: Callable[[], tuple[str, int] | None] = lambda: None,
    ):
        self.client = Client(address, secret, patience_s=_PATIENCE_S, locate=locate)
        super().__init__(rank, RankStore(self.client, abandoned=self._abandoned), progress)
        self._watched, self._job = progress is not None, job
        self._interface, self._device = interface, device
        self._owns_devices: tuple[int, bool] | None = None
        self._me = {"rank": rank, "pid": os.getpid()}
        self._number, self._broken_number, self._unconnected = -1, -1, False
        # held while what a heartbeat said of a generation is acted on: its groups, not those of the next one
        self._turning = threading.Lock()
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._done = threading.Event()
        self.progress.turn_to("joining")
        if self._watched:
            self.progress.arm()
            # apart from heartbeats: a supervisor that does not answer them must not end a rank
            threading.Thread(target=self._watch, args=(beat_s,), daemon=True, name="progress").start()
        threading.Thread(target=self._beat, args=(beat_s,), daemon=True, name="heartbeat").start()
        self.generation = self._next(-1, "", resume=resume)

    def _connect(self, store: dist.Store, ranks: tuple[int, ...], name: str) -> Any:
        # here: only this thread notes that it waits
        on_device = name.partition("-")[0] in DEVICE_GROUPS and self.owns_devices()
        try:
            with self.progress.waiting(ranks):
                return self._unless_abandoned(lambda: self._make(store, ranks, on_device))
        except PeerLost:
            self._unconnected = not self._abandoned()
            raise

    def owns_devices(self) -> bool:
        """Return whether every rank of the generation has an accelerator to itself."""
        number, ranks = self.generation.number, self.generation.ranks
        if self._owns_devices is None or self._owns_devices[0] != number:
            store = dist.PrefixStore(f"g{number}/own-device", self.store)
            store.set(str(self.rank), "1" if self._device is not None else "0")
            with communicating(), self.progress.waiting(ranks):
                self._owns_devices = number, all(store.get(str(rank)) == b"1" for rank in ranks)
        return self._owns_devices[1]

    def _unless_abandoned(self, make: Callable[[], Any]) -> Any:
        """Run a call in a thread, and give up if a peer leaves: gloo would try it for five timeouts."""
        made: list[Any] = []
        faults: list[BaseException] = []

        def body() -> None:
            try:
                with communicating():
                    made.append(make())
            except BaseException as error:  # raised below, in the thread that waits
                faults.append(error.with_traceback(None))

        thread = threading.Thread(target=body, daemon=True, name="connecting")
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            if thread.is_alive() and self._abandoned():
                raise PeerLost("a peer left while ranks were connecting")
        if faults:
            raise faults.pop()
        return made.pop()

    def _make(self, store: dist.Store, ranks: tuple[int, ...], on_device: bool) -> Any:
        place = ranks.index(self.rank)
        if on_device:
            return _nccl(store, place, len(ranks), self._device)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _GROUP_TIMEOUT
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=self._interface)
            if self._interface
            else dist.ProcessGroupGloo.create_default_device()
        ]
        return dist.ProcessGroupGloo(store, place, len(ranks), options)

    def next_generation(self, reason: str) -> Generation:
        """Leave all groups, wait for the next generation that has this rank, and return it.

        Raises `PeerLost` when the supervisor does not come back, `SystemExit` when the others have done all
        steps.
        """
        if reason != BOUNDARY:
            self._drop_groups()  # closed connections show peers that this rank has left
        self.generation = self._next(self.generation.number, reason)
        self._drop_groups()  # at a boundary only now: a peer may still receive the last messages
        return self.generation

    def _next(self, after: int, reason: str, *, resume: bool = False) -> Generation:
        question = {"ask": "join", "after": after, "reason": reason[:300], "timeout_s": 5.0, **self._me}
        question["unconnected"], self._unconnected = self._unconnected, False
        with self.progress.waiting():
            answer = self.client.ask(question)
            while answer["generation"] is None and not answer["over"]:
                answer = self.client.ask(question)
        if answer["over"]:
            self._done.set()
            raise SystemExit(0)
        found = answer["generation"]
        self.client.forget("g")  # keys of generations before
        with self._turning:
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

        Closing a group waits for its pending operations, which may wait for a peer that waits for another
        of this rank's groups to close.
        """
        groups, self._groups = list(self._groups.values()), {}
        while groups:
            backend = groups.pop().backend
            threading.Thread(target=_close, args=([backend],), daemon=True, name="closing").start()
            del backend

    def _abort_device_groups(self) -> None:
        """End the kernels that wait for a peer that has left: the host waits for the device without limit.

        The step cannot be committed: its vote needs all ranks of the generation, over gloo.
        """
        for (_, name), group in list(self._groups.items()):
            if group.uses_nccl:
                backend = [group.backend]
                threading.Thread(target=_close, args=(backend,), daemon=True, name=f"aborting {name}").start()

    def wanted(self) -> bool:
        """Return whether another rank waits to join."""
        return self._wanted.is_set()

    def stopping(self) -> bool:
        """Return whether the run is to end after the step, with a checkpoint."""
        return self._stopping.is_set()

    def _abandoned(self) -> bool:
        """Return whether a peer has left this generation: it will not set keys that others wait for."""
        return self._broken_number == self._number

    def plan_adopted(self, plan: dict[str, Any]) -> None:
        """Give the supervisor the plan from which it makes those of later generations."""
        self.client.ask({"ask": "plan", "plan": plan})

    def finish(self) -> bool:
        """Return whether all ranks are done; if not, a peer needs this rank: adopt the next generation."""
        while True:
            try:
                with self.progress.waiting():
                    answer = self.client.ask({"ask": "finished", **self._me}, patience_s=_LAST_PATIENCE_S)
            except PeerLost:
                answer = {"end": True}  # the supervisor is gone for good: all were done, or its host is lost
            if answer["end"]:
                self._done.set()
                self._drop_groups()
                return True
            if answer["back"]:
                return False

    def _beat(self, every_s: float) -> None:
        parent = int(os.environ.get(PARENT, "0"))
        child = parent == os.getppid()
        while not self._done.wait(every_s):
            if child and os.getppid() != parent:
                os._exit(1)  # nothing would end or restart this rank
            number = self._number
            beat = {"ask": "beat", "number": number, **self._me, **self.progress.to_dict()}
            try:
                answer = self.client.ask(beat, patience_s=0.0)
            except PeerLost:
                continue  # the supervisor is being restarted
            self.progress.learned(answer["longest_s"])
            if answer["stop"]:
                self._stopping.set()
            with self._turning:
                if number == self._number:
                    self._heed(answer, number)

    def _watch(self, every_s: float) -> None:
        """End this process if it hangs."""
        while not self._done.wait(every_s):
            self._end_if_hanging(every_s)
        faulthandler.cancel_dump_traceback_later()

    def _heed(self, answer: dict[str, Any], number: int) -> None:
        """Act on what the supervisor answers a heartbeat in a generation."""
        left_behind = answer["number"] > number  # the others have begun another one without this rank
        if answer["wanted"]:
            self._wanted.set()
        if answer["broken"] or answer["stuck"] or left_behind:
            self._broken_number = number
            self._abort_device_groups()
        if answer["stuck"] or left_behind:
            for group in list(self._groups.values()):
                group.cut()

    def _end_if_hanging(self, every_s: float) -> None:
        """End this process if it hangs, with the stacks of all threads on stderr and a word to the others."""
        where = self.progress.hang(self._job)
        if where is None:
            self.progress.arm(2 * every_s)
            return
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        with contextlib.suppress(RuntimeError):
            self.client.ask({"ask": "hangs", "where": where, **self._me}, patience_s=2.0)
        os._exit(HANGS)


def _nccl(store: dist.Store, place: int, size: int, device: Any) -> Any:
    """Return a connected group of NCCL.

    Its operations have no limit of time: a peer that is gone is found out by the supervisor, upon which the
    group is aborted and the kernels that wait for the peer end. torch's watchdog must not end the process.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _GROUP_TIMEOUT
    group = dist.ProcessGroupNCCL(store, place, size, options)
    group.eager_connect_single_device(device)
    return group


def _close(groups: list[Any]) -> None:
    """Close a group and drop the last reference to it: then gloo closes its connections."""
    with contextlib.suppress(RuntimeError):  # peers may be gone already
        groups.pop().abort()
