"""Processes that a fork server starts are as if started by themselves, and end with it."""

import os
import signal
import subprocess
import sys

import pytest

from foreshard.runtime.fork_server import ForkServer
from foreshard.runtime.run_settings import PARENT, REPORT_FD

RANK = f"""
import os, signal, sys, time
def start():
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [signal.SIG_IGN] * 2
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    print("log of", os.environ["RANK"], flush=True)
    os.write(int(os.environ[{REPORT_FD!r}]), os.environ[{PARENT!r}].encode())
    if os.environ["RANK"] == "endless":
        time.sleep(600)
    if os.environ["RANK"] == "wrong":
        raise ValueError("no such thing")
    sys.exit(int(os.environ["RANK"]))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts a rank and returns its process and what it reports, and the server."""
    (tmp_path / "rank_of_test.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with (tmp_path / "log").open("ab") as log:
        server = ForkServer(["rank_of_test"], {"RANK": "none"}, log)

    def start(rank):
        reading, writing = os.pipe()
        with (tmp_path / f"log-{rank}").open("ab") as log, os.fdopen(reading, "rb", buffering=0) as report:
            process = server.start({"RANK": rank}, log.fileno(), writing)
            os.close(writing)
            return process, report.read(20)

    yield start, server
    server.close()


def test_each_has_its_own_environment_log_pipe_and_end(start, tmp_path):
    start, server = start
    found = {rank: start(rank) for rank in ("7", "0", "wrong")}
    assert {rank: process.wait(60) for rank, (process, _) in found.items()} == {"7": 7, "0": 0, "wrong": 1}
    assert {report for _, report in found.values()} == {str(server._process.pid).encode()}
    assert (tmp_path / "log-7").read_text() == "log of 7\n"
    assert "ValueError: no such thing" in (tmp_path / "log-wrong").read_text()
    assert (tmp_path / "log").read_text() == ""


def test_one_is_killed_or_stopped_by_a_signal_while_the_others_run(start):
    start, server = start
    (first, _), (second, _) = start("endless"), start("endless")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP):
        os.kill(server._process.pid, number)
    os.kill(first.pid, signal.SIGUSR1)
    server.wake()
    assert first.wait(60) == -signal.SIGUSR1 and second.poll() is None and server.is_running
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.01)
    second.kill()
    assert second.wait(60) == -signal.SIGKILL and second.poll() == -signal.SIGKILL
    first.kill()  # has ended: its number may be another's


def test_they_end_with_the_server_and_that_is_their_exit_code(start):
    start, server = start
    process, _ = start("endless")
    os.kill(server._process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL and not server.is_running
    again, _ = start("7")
    assert again.poll() == -signal.SIGKILL
    until = subprocess.run(["tail", f"--pid={process.pid}", "-f", os.devnull], timeout=60, check=True)
    assert until.returncode == 0


def test_a_module_that_does_not_load_is_a_rank_that_ended(tmp_path):
    with (tmp_path / "log").open("ab") as log:
        server = ForkServer(["no_such_module"], {}, log)
        process = server.start({}, log.fileno(), log.fileno())
    assert process.wait(60) == 1 and "no_such_module" in (tmp_path / "log").read_text()
    server.close()


def test_it_ends_with_the_process_that_made_it(tmp_path):
    (tmp_path / "rank_of_test.py").write_text(RANK)
    words = (
        "import os; from foreshard.runtime.fork_server import ForkServer\n"
        f"log = open({os.devnull!r}, 'ab')\n"
        "server = ForkServer(['rank_of_test'], {}, log)\n"
        "process = server.start({'RANK': 'endless'}, log.fileno(), log.fileno())\n"
        "print(server._process.pid, process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    said = subprocess.run(
        [sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=False
    )
    numbers = said.stdout.splitlines()[-1].split()
    for number in numbers:
        subprocess.run(["tail", f"--pid={number}", "-f", os.devnull], timeout=60, check=True)
    assert len(numbers) == 2
