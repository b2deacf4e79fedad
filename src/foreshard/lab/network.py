"""A lab that the machine enforces: a network namespace per host, links of a rate, portions of the cores.

Every host's namespace has one link to a bridge in a namespace of its own. A token bucket at both ends of
the link gives it the lab's rate in both directions. Ranks of one host reach each other by its loopback.
Control groups cap the processor time of a rank at its portion of a core where ranks are not equally fast,
since a cap, unlike weights, also holds while other ranks wait; weights keep the ratios where others take so
much that the caps are not reached. Only root may do this. Nothing outside the namespaces and groups of this
lab is touched, and all of them are gone when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from foreshard.errors import ForeshardError, SpecError
from foreshard.lab.lab import Lab

_NAMES = Path("/run/netns")
_GROUPS_V1, _GROUPS_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_NET = 0x40000000
"""CLONE_NEWNET of setns(2)."""
_SUBNET = "10.77.0"
_MAX_RANKS = 200
"""The subnet has 254 addresses, the last of which is that of the rendezvous."""
_BURST_S, _MIN_BURST_BYTES = 4e-3, 64 * 1024
"""A bucket holds what passes in a tick of the kernel, and the largest packet that the stack hands over."""
_QUEUE_MS = 50
"""How long a packet may wait for the bucket before it is dropped."""
_PERIOD_US, _MIN_QUOTA_US = 20_000, 1_000
"""A rank that has used its portion of a period pauses to its end; the kernel takes quotas from 1 ms."""
_USED = 0.8
"""Portion of all cores that the ranks get together, so that each can have its own at any time."""
_MAX_LATENCY_S = 1e-3
"""Of a link that is stated: nothing makes delays, and what the links have by themselves is below."""
_count = itertools.count()


class LabNetwork:
    """The namespaces and control groups of a lab of the wall clock, from `with` to its end.

    The rendezvous listens at `address`; a rank of slow factor 1 has `unit_cores` of a core.
    """

    def __init__(self, lab: Lab):
        _check(lab)
        self.lab = lab
        self.address = f"{_SUBNET}.254"
        self.unit_cores = unit_cores(lab, len(os.sched_getaffinity(0)))
        self._name = f"fs{os.getpid()}x{next(_count)}"
        self._ranks = range(len(lab.slow))
        self._hosts = sorted(set(map(lab.host_of, self._ranks)))
        self._groups: dict[int, Path] = {}
        self._told: dict[Any, Any] = {}
        self._home: int | None = None
        self._read = 0

    def __enter__(self) -> LabNetwork:
        remove_stale()
        try:
            self._build()
            self.apply(0)
            self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            _enter_namespace(os.open(_NAMES / self._hub, os.O_RDONLY))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._home is not None:
            _enter_namespace(self._home)
            self._home = None
        for group in self._groups.values():
            _remove_group(group)
        if self._groups:
            _remove_group(next(iter(self._groups.values())).parent)
        self._groups.clear()
        for space in (self._hub, *map(self._space, self._hosts)):
            if (_NAMES / space).exists():
                _call("ip", "netns", "del", space)

    @property
    def _hub(self) -> str:
        return f"{self._name}-hub"

    def _space(self, host: int) -> str:
        return f"{self._name}-h{host}"

    def address_of(self, host: int) -> str:
        """Return the address of a host."""
        return f"{_SUBNET}.{host + 1}"

    def command(self, rank: int) -> list[str]:
        """Return the words that put a process in the place of a rank."""
        host = self.lab.host_of(rank)
        interface = f"FORESHARD_INTERFACE={self.address_of(host)}"
        words = ["ip", "netns", "exec", self._space(host), "env", interface]
        if rank not in self._groups:
            return words
        return ["sh", "-c", f'echo $$ > {self._groups[rank]}/cgroup.procs && exec "$@"', "lab", *words]

    def follow(self, metrics: Path) -> None:
        """Make the changes of the step after the last that the metrics tell of."""
        if not self.lab.changes or not metrics.exists():
            return
        with metrics.open() as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind("\n") + 1]
        self._read += len(whole.encode())
        if whole:
            self.apply(json.loads(whole.splitlines()[-1])["step"] + 1)

    def apply(self, step: int) -> None:
        """Give links and processors what the lab says of a step; what is as it was is left alone."""
        for host in self._hosts:
            ranks = [rank for rank in self._ranks if self.lab.host_of(rank) == host]
            rate = min(self.lab.link_at(step, rank, rank)[0] for rank in ranks)
            if self._told.get(("rate", host)) != rate:
                for space, device in ((self._space(host), "eth0"), (self._hub, f"v{host}")):
                    _call("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *_bucket(rate))
                self._told["rate", host] = rate
        for rank in self._ranks:
            slow = self.lab.slow_at(step, rank)
            if not self.lab.is_even and self._told.get(("slow", rank)) != slow:
                _cap(self._groups[rank], self.unit_cores / slow)
                _weigh(self._groups[rank], self.unit_cores / slow)
                self._told["slow", rank] = slow

    def _build(self) -> None:
        _call("ip", "netns", "add", self._hub)
        _call("ip", "-n", self._hub, "link", "set", "lo", "up")
        _call("ip", "-n", self._hub, "link", "add", "name", "bridge", "type", "bridge")
        _call("ip", "-n", self._hub, "address", "add", f"{self.address}/24", "dev", "bridge")
        _call("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for host in self._hosts:
            self._plug(host)
        for rank in self._ranks:
            self._groups[rank] = _make_group(self._name, rank)
        _weigh(self._groups[0].parent, float(len(self._ranks)))

    def _plug(self, host: int) -> None:
        space, end = self._space(host), f"v{host}"
        _call("ip", "netns", "add", space)
        peer = ("peer", "name", "eth0", "netns", space)
        _call("ip", "link", "add", "name", end, "netns", self._hub, "type", "veth", *peer)
        _call("ip", "-n", self._hub, "link", "set", end, "master", "bridge", "up")
        _call("ip", "-n", space, "address", "add", f"{self.address_of(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _call("ip", "-n", space, "link", "set", device, "up")


def missing() -> str | None:
    """Return what this machine lacks for a lab in the wall clock, found by trying; None when it has all."""
    if os.geteuid() != 0:
        return "only root makes network namespaces and control groups"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool!r} (iproute2) is not installed"
    name = f"fs{os.getpid()}x{next(_count)}-try"
    try:
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
        _call("ip", "-n", name, "link", "add", "name", "c", "type", "bridge")
        _call("tc", "-n", name, "qdisc", "replace", "dev", "a", "root", *_bucket(1e6))
        group = _make_group(name, 0)
        _cap(group, 0.5)
        _remove_group(group)
        _remove_group(group.parent)
    except (ForeshardError, OSError) as error:
        return f"the kernel refused: {error}"
    finally:
        if (_NAMES / name).exists():
            _call("ip", "netns", "del", name)
    return None


def unit_cores(lab: Lab, cores: int) -> float:
    """Return what a rank of slow factor 1 gets of a core.

    All ranks together get four fifths of the cores at the lab's fastest moment, none more than one core: each
    has its portion whatever the others do, and the ratios are the lab's.
    """
    steps = {0, *(change.at_step for change in lab.changes)}
    ranks = range(len(lab.slow))
    speeds = [[1.0 / lab.slow_at(step, rank) for rank in ranks] for step in steps]
    most = max(sum(of_step) for of_step in speeds)
    fastest = max(max(of_step) for of_step in speeds)
    return min(_USED * cores / most, 1.0 / fastest)


def remove_stale() -> None:
    """Remove what labs left behind whose process was killed."""
    for place in _NAMES.glob("fs*x*-*") if _NAMES.exists() else ():
        if not _lives(place.name):
            _call("ip", "netns", "del", place.name)
    for top in (_GROUPS_V1, _GROUPS_V2):
        for group in top.glob("foreshard-fs*x*"):
            if not _lives(group.name.removeprefix("foreshard-")):
                for inner in group.iterdir():
                    if inner.is_dir():
                        _remove_group(inner)
                _remove_group(group)


def _check(lab: Lab) -> None:
    if lab.clock != "wall":
        rule = "Only the wall clock is slowed by the machine"
        raise SpecError(f"clock {lab.clock!r} needs no namespaces", key="clock", value=lab.clock, rule=rule)
    if len(lab.slow) > _MAX_RANKS:
        rule = f"A lab in the wall clock has up to {_MAX_RANKS}"
        raise SpecError(f"{len(lab.slow)} ranks", key="ranks", value=len(lab.slow), rule=rule)
    latencies = [lab.latency_s, *(c.latency for c in lab.changes if c.latency is not None)]
    if max(latencies) > _MAX_LATENCY_S:
        what = f"a latency of {max(latencies):g} s"
        rule = "Links in the wall clock have a rate and a latency of about 0.1 ms; delays are not made"
        fix = 'Use clock = "cpu" for delays, or leave the latency out'
        raise SpecError(what, key="network.latency", value=max(latencies), rule=rule, fix=fix)


def _bucket(bytes_per_s: float) -> list[str]:
    """Return a token bucket as tc writes it; its numbers are bits per second and bytes."""
    burst = max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
    return ["tbf", "rate", f"{round(bytes_per_s * 8)}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]


def _make_group(name: str, rank: int) -> Path:
    """Make the control group of a rank, of version 1 or 2, whichever rules the processor here."""
    top = _GROUPS_V1 if (_GROUPS_V1 / "cpu.cfs_quota_us").exists() else _GROUPS_V2
    group = top / f"foreshard-{name}" / f"r{rank}"
    group.parent.mkdir(exist_ok=True)
    if top == _GROUPS_V2:
        (group.parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir(exist_ok=True)
    return group


def _cap(group: Path, cores: float) -> None:
    """Limit a group to so many cores: the quota of a period is at least what the kernel takes."""
    period_us = max(_PERIOD_US, round(_MIN_QUOTA_US / cores))
    quota_us = max(_MIN_QUOTA_US, round(cores * period_us))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        return
    (group / "cpu.cfs_quota_us").write_text("-1")
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _weigh(group: Path, weight: float) -> None:
    """Give a group a weight against its neighbours, 1 being that of a process."""
    if (group / "cpu.weight").exists():
        (group / "cpu.weight").write_text(str(min(10_000, max(1, round(100 * weight)))))
        return
    (group / "cpu.shares").write_text(str(max(2, round(1024 * weight))))


def _remove_group(group: Path) -> None:
    """Remove an empty control group; its last process may still be on its way out."""
    for _ in range(100):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def _lives(name: str) -> bool:
    pid = name.removeprefix("fs").partition("x")[0]
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()


def _enter_namespace(handle: int) -> None:
    """Move this thread, and what it starts from now on, to a network namespace, and close its handle."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(handle, _NET) != 0:
            code = ctypes.get_errno()
            raise ForeshardError(f"cannot enter the namespace: {os.strerror(code)}", key="setns")
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def _call(*words: str) -> None:
    """Run a program of iproute2, or raise with what it says."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise ForeshardError(f"{' '.join(words)}: {done.stderr.strip()}", key=words[0])
