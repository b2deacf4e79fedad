"""What starts ranks says what is wrong with the folder it starts them in."""

import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from foreshard.errors import ForeshardError, Terminated
from foreshard.runtime.membership.agent import Agent, RankProcess
from foreshard.runtime.membership.processes import may_fork, start_supervisor
from foreshard.runtime.membership.supervisor import Supervisor
from foreshard.runtime.run_settings import FINISHED, RunSettings
from foreshard.spec.plan_file import parse_plan

PLAN = parse_plan(
    {
        "global_batch": 2,
        "seq_len": 8,
        "groups": [
            {"share": 2, "stages": [{"ranks": [0], "layers": [[0, 2]]}]},
        ],
    }
)


def test_a_rank_that_is_started_again_in_a_folder_that_is_gone_ends_the_run_by_name(tmp_path):
    out = tmp_path / "removed"
    agent = Agent(
        out=out,
        plan=PLAN,
        work=RunSettings(job="job.py", out=str(out), steps=1),
        ranks=[0],
        expected=[0],
        secret_file=tmp_path / "secret",
    )
    before = len(os.listdir("/proc/self/fd"))
    for start in (lambda: agent._spawn(0), agent._spawn_supervisor):
        with pytest.raises(ForeshardError, match="folder of the run is gone"):
            start()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_starts_a_run_does_not_load_torch():
    """The ranks load it, at the same time: a run would begin two seconds later."""
    words = "import sys, foreshard.runtime.launch, foreshard.lab.lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0


def test_a_supervisor_is_started_by_a_process_of_many_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        process, port = start_supervisor([tmp_path / "no run"], tmp_path / "log")
        process.kill()
        process.wait()
        assert port is None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_cannot_be_started_again_leaves_the_run_to_end_by_name(tmp_path):
    """Its pipe was closed twice: `Bad file descriptor` was all that was said of a folder that is gone."""
    out, secret = tmp_path / "removed", tmp_path / "secret"
    work = RunSettings(job="job.py", out=str(out), steps=1)
    agent = Agent(out=out, plan=PLAN, work=work, ranks=[0], expected=[0], secret_file=secret)
    reading, writing = os.pipe()
    with subprocess.Popen(["true"]) as ended:
        agent._ranks[0] = RankProcess(process=ended, report_fd=reading, restart_at_s=0.0)
    os.close(writing)
    with pytest.raises(ForeshardError, match="folder of the run is gone"):
        agent._poll()
    agent.stop()
    with pytest.raises(OSError):
        os.fstat(reading)


@pytest.mark.parametrize("save_last", [True, False])
@pytest.mark.parametrize(
    ("sent", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_sigterm_that_ends_a_run_at_once_is_no_ctrl_c(tmp_path, save_last, sent, raised):
    """The second one is, and the first where no checkpoint is wanted; schedulers read 143 as theirs."""
    work = RunSettings(job="job.py", out=str(tmp_path), steps=1, save_last=save_last)
    secret = tmp_path / "secret"
    agent = Agent(out=tmp_path, plan=PLAN, work=work, ranks=[0], expected=[0], secret_file=secret)
    with pytest.raises(KeyboardInterrupt) as found, agent._ending_on_signals():
        for times in range(2):
            assert agent.stopped_by == times * sent
            os.kill(os.getpid(), sent)
    assert found.type is raised and agent.stopped_by == save_last * sent


@pytest.mark.parametrize(("code", "is_done"), [(0, False), (1, False), (FINISHED, True)])
def test_a_rank_whose_job_ends_the_process_has_not_finished(tmp_path, code, is_done):
    """Not by `os._exit(0)` either: a run of one rank was over after no step, others went on without it."""
    work = RunSettings(job="job.py", out=str(tmp_path), steps=1)
    secret = tmp_path / "secret"
    agent = Agent(out=tmp_path, plan=PLAN, work=work, ranks=[0], expected=[0], secret_file=secret)
    with subprocess.Popen(["true"]) as process:
        rank = RankProcess(process=process, report_fd=-1)
        agent._ended(0, rank, code)
    assert rank.done == is_done and (rank.restart_at_s is None) == is_done
    assert agent._died == ([] if is_done else [(0, process.pid, f"exit code {code}")])


def test_a_run_that_another_host_ends_has_stopped_for_all(tmp_path):
    """The one that reports took the samples of the steps after for lost, an error of foreshard's own."""
    supervisor = Supervisor(tmp_path, PLAN, [0], detect_s=2.0)
    work, secret = RunSettings(job="job.py", out=str(tmp_path), steps=1), tmp_path / "secret"
    asked, other = (
        Agent(out=tmp_path, plan=PLAN, work=work, ranks=[], expected=[0], secret_file=secret)
        for _ in range(2)
    )
    for agent in (asked, other):
        agent._client = SimpleNamespace(
            ask=lambda question, patience_s: supervisor.answer(question), close=int
        )
    with asked._ending_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    for agent in (asked, other):
        agent._contact_supervisor()
    assert asked.is_stopping and other.is_stopping
    with other._ending_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun sends one to every agent: it is no second one


def test_ranks_that_may_use_a_gpu_are_no_forks(monkeypatch):
    """Libraries may have asked its driver for devices while they were loaded."""
    monkeypatch.setattr(sys, "platform", "linux")
    for exists in (False, True):
        monkeypatch.setattr(os.path, "exists", lambda path, exists=exists: exists)
        assert {device for device in ("auto", "cpu", "cuda") if may_fork(device)} == (
            {"cpu"} if exists else {"auto", "cpu", "cuda"}
        )
