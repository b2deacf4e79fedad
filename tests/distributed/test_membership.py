"""Ranks as processes under a supervisor: killed, stopped, back again, left without it for a while."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

import pytest
from member import work

from foreshard.runtime.membership.store import Client, StoreServer
from foreshard.runtime.membership.supervisor import Supervisor
from foreshard.spec.plan_file import parse_plan

SECRET = b"of this test only"
DETECT_S, TIMEOUT_S, PATIENCE_S = 1.5, 20.0, 60.0
PLAN = parse_plan(
    {
        "global_batch": 3,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [{"share": 1, "stages": [{"ranks": [rank], "layers": [[0, 8]]}]} for rank in range(3)],
    }
)


class Host:
    """Three ranks, their supervisor in this process, and what an agent does."""

    def __init__(self, folder):
        self.folder, self.made, self.told = folder, multiprocessing.get_context("forkserver"), []
        self.made.set_forkserver_preload(
            ["foreshard.runtime.membership.member"]
        )  # torch is loaded once for all ranks
        self.pipes, self.ranks, self.port, self.since = {}, {}, 0, 0
        self.open = True
        self.start_supervisor()
        self.client = Client(("127.0.0.1", self.port), SECRET)
        for rank in range(3):
            self.start(rank)
        self.threads = [threading.Thread(target=body) for body in (self._watch, self._tend)]
        for thread in self.threads:
            thread.start()

    def start_supervisor(self):
        self.supervisor = Supervisor(self.folder, PLAN, [0, 1, 2], detect_s=DETECT_S)
        self.server = StoreServer("127.0.0.1", self.port, SECRET, self.supervisor.answer)
        self.supervisor.server, self.port = self.server, self.server.port

    def start(self, rank):
        self.since = len(self.told)
        heard, told = self.made.Pipe(duplex=False)  # one each: who is killed may hold the lock of a queue
        self.ranks[rank] = self.made.Process(target=work, args=(rank, self.port, SECRET, told))
        self.ranks[rank].start()
        told.close()
        if rank in self.pipes:
            self.pipes[rank].close()
        self.pipes[rank] = heard

    def kill(self, rank, number=signal.SIGKILL):
        self.since = len(self.told)
        os.kill(self.ranks[rank].pid, number)
        return time.monotonic()

    def wait_for(self, matches, count=1):
        """Return what so many ranks have told that matches since something was done to them."""
        found, until = (
            [line for line in self.told[self.since :] if matches(line)],
            time.monotonic() + PATIENCE_S,
        )
        while len(found) < count:
            ready = multiprocessing.connection.wait(self.pipes.values(), timeout=0.2)
            assert ready or time.monotonic() < until, f"{len(found)} of {count}; told: {self.told[-12:]}"
            for line in filter(None, map(self._line, ready)):
                self.told.append(line)
                if matches(line):
                    found.append(line)
        return found

    def _line(self, pipe):
        try:
            return pipe.recv()
        except (EOFError, OSError):
            rank = next(rank for rank, each in self.pipes.items() if each is pipe)
            self.pipes.pop(rank).close()
            return None

    def sums(self, ranks):
        """Wait until these and no others sum together."""
        wanted = tuple(ranks)
        found = self.wait_for(lambda line: line[1] == "sum" and line[3][1] == wanted, len(wanted))
        assert {total for *_, (_, _, total) in found} == {float(len(wanted))}
        return max(number for *_, (number, _, _) in found)

    def _watch(self):
        while self.open:
            time.sleep(0.05)
            self.supervisor.watch()

    def _tend(self):
        told = set()
        while self.open:
            time.sleep(0.05)
            died = [
                [rank, process.pid, "dead"]
                for rank, process in list(self.ranks.items())
                if process.exitcode is not None and process.pid not in told
            ]
            try:
                answer = self.client.ask({"ask": "agent", "ranks": [0, 1, 2], "died": died}, patience_s=0.0)
            except RuntimeError:
                continue
            told |= {pid for _, pid, _ in died}
            for rank in answer["kill"]:
                self.ranks[int(rank)].kill()

    def close(self):
        self.open = False
        for thread in self.threads:
            thread.join()
        for process in self.ranks.values():
            process.kill()
            process.join(5)
            process.close()
        self.server.close()
        for pipe in self.pipes.values():
            pipe.close()


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()


def faults_after(host, when_s, ranks):
    """Return after what time each of these ranks had its error."""
    found = host.wait_for(lambda line: line[1] == "fault" and line[0] in ranks, len(ranks))
    return max(at for _, _, at, _ in found) - when_s


def test_a_killed_rank_a_stopped_rank_and_a_killed_supervisor(host):
    first = host.sums([0, 1, 2])

    killed_s = host.kill(2)
    assert faults_after(host, killed_s, [0, 1]) < 5.0  # 0.15 s on a quiet machine; the timeout would be 20 s
    assert host.sums([0, 1]) > first

    host.start(2)  # comes back, is let in at a boundary: nobody has an error
    host.sums([0, 1, 2])
    assert not [line for line in host.told[host.since :] if line[1] == "fault"]

    stopped_s = host.kill(1, signal.SIGSTOP)
    took_s = faults_after(host, stopped_s, [0, 2])
    assert DETECT_S * 0.5 < took_s < TIMEOUT_S * 0.5
    host.sums([0, 2])
    assert host.ranks[1].exitcode == -signal.SIGKILL  # it cannot wake up into a run that went on without it

    host.server.close()
    host.start_supervisor()
    host.start(1)
    number = host.sums([0, 1, 2])  # ranks have found it again, and what it had decided
    assert number > first + 2


def test_ranks_killed_while_they_rebuild(host):
    host.sums([0, 1, 2])
    host.kill(2)
    host.wait_for(lambda line: line[1] == "fault")
    host.kill(1)
    last = host.sums([0])
    for rank in (1, 2):
        host.start(rank)
    assert host.sums([0, 1, 2]) > last
    numbers = [what[0] for rank, kind, _, what in host.told if kind == "sum" and rank == 0]
    assert numbers == sorted(numbers)
