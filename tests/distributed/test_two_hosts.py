"""Two hosts, played by two network namespaces with a link between them and host names of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rehearsal import plan_of

from foreshard.runtime.checkpoint.format import load
from foreshard.runtime.job.job import load_job
from foreshard.runtime.membership.secret import make_secret
from foreshard.runtime.records.outcome import RunOutcome, outcome_of
from foreshard.runtime.trainer import Trainer

JOB = """
import time, torch
from torch import nn

def model():
    return [lambda: nn.Linear(4, 6), lambda: nn.Tanh(), lambda: nn.Linear(6, 4), lambda: nn.Linear(4, 1)]
def inputs(batch): return batch
def loss(output, batch): return (output.squeeze(-1) - batch.sum(1)).square().sum(), len(output)
def optimizer(params): return torch.optim.AdamW(params, lr=1e-2)

class Paced(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        time.sleep(PACE_S)
        return torch.sin(torch.arange(4) * (index + 1.0))

def dataset(): return Paced()
"""
PIPELINES = [
    {"share": 5, "micro_batch": 2, "stages": [([0], [[0, 1]]), ([1], [[1, 4]])]},
    {"share": 3, "micro_batch": 3, "stages": [([2], [[0, 3]]), ([3], [[3, 4]])]},
]
REPLICAS = [
    {"share": share, "micro_batch": 2, "stages": [([rank], [[0, 4]])]} for rank, share in enumerate((5, 3))
]
BATCH, PORT = 8, 29500


def lacks() -> str | None:
    """Return why this machine cannot play two hosts, found by trying."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if any(shutil.which(tool) is None for tool in ("ip", "unshare")):
        return "ip (iproute2) and unshare (util-linux) are needed"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


pytestmark = pytest.mark.skipif(lacks() is not None, reason=f"two hosts cannot be played here: {lacks()}")


class Hosts:
    """Two hosts on one network of their own."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.per_host = folder, folder / "run", 2
        self._spaces = [f"fsh{os.getpid()}-{host}" for host in range(2)]
        self._started: list[list[subprocess.Popen[bytes]]] = [[], []]

    def address(self, host: int) -> str:
        return f"10.79.0.{host + 1}"

    def __enter__(self) -> Hosts:
        for space in self._spaces:
            _ip("netns", "add", space)
        first, second = self._spaces
        _ip(
            "link", "add", "name", "e0", "netns", first, "type", "veth", "peer", "name", "e0", "netns", second
        )
        for host, space in enumerate(self._spaces):
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "e0")
            for device in ("lo", "e0"):
                _ip("-n", space, "link", "set", device, "up")
        return self

    def __exit__(self, *told: object) -> None:
        for host, space in enumerate(self._spaces):
            self.lose(host)
            subprocess.run(["ip", "netns", "del", space], check=False)

    def torchrun(self, host: int, *words: str) -> None:
        """Start the ranks of a host as the documentation says."""
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            str(host),
            "--nproc-per-node",
            str(self.per_host),
            "--master-addr",
            self.address(0),
            "--master-port",
            str(PORT),
            "--no-python",
            sys.executable,
            "-m",
            "foreshard",
            "run",
        ]
        self._start(host, [*torchrun, *words])

    def by_hand(self, host: int, *words: str) -> None:
        """Start them with what torchrun would have set."""
        size, count = len(self._spaces) * self.per_host, self.per_host
        for local in range(count):
            told = {
                "RANK": count * host + local,
                "LOCAL_RANK": local,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": PORT,
            }
            env = [f"{name}={value}" for name, value in told.items()]
            self._start(host, ["env", *env, sys.executable, "-m", "foreshard", "run", *words])

    def _start(self, host: int, words: list[str]) -> None:
        named = ["unshare", "--uts", "sh", "-c", f'hostname host{host} && exec "$@"', "host", *words]
        words = ["ip", "netns", "exec", self._spaces[host], *named]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"host{host}.txt").open("ab") as said:
            self._started[host].append(subprocess.Popen(words, stdout=said, stderr=said, env=env))

    def lose(self, host: int) -> None:
        """Kill everything that runs on a host."""
        told = subprocess.run(
            ["ip", "netns", "pids", self._spaces[host]], capture_output=True, text=True, check=False
        )
        for pid in map(int, told.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started[host]:
            process.wait()
        self._started[host] = []

    def ended(self) -> None:
        """Wait for both hosts."""
        codes = [process.wait(120) for started in self._started for process in started]
        assert not any(codes), self.said()

    def said(self) -> str:
        """Return what both hosts and the log of the rendezvous say."""
        files = [*self.folder.glob("host*.txt"), self.out / "supervisor.jsonl", *self.out.glob("logs/*")]
        return "\n".join(f"{file}:\n{file.read_text()}" for file in files if file.exists())


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as played:
        yield played


def prepared(hosts: Hosts, groups: Any, *, steps: int, pace_s: float = 0.0) -> list[str]:
    """Write job, plan and secret; return what `foreshard run` is told on every host."""
    hurry = hosts.folder / "hurry"
    pace = f"0.0 if __import__('os').path.exists({str(hurry)!r}) else {pace_s}"
    (hosts.folder / "job.py").write_text(JOB.replace("PACE_S", pace))
    (hosts.folder / "plan.json").write_text(json.dumps(plan_of(groups, global_batch=BATCH).to_dict()))
    secret = make_secret(hosts.folder / "secret")
    return list(
        map(
            str,
            [
                "--plan",
                hosts.folder / "plan.json",
                "--out",
                hosts.out,
                "--secret-file",
                secret,
                "--steps",
                steps,
                "--dtype",
                "fp64",
                "--checkpoint-every",
                steps,
                "--detect-s",
                "2.5",
                "--clip-norm",
                "1",
                hosts.folder / "job.py",
            ],
        )
    )


def awaited(hosts: Hosts, condition: Callable[[], Any], patience_s: float = 120.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, hosts.said()
        time.sleep(0.05)


def generations(hosts: Hosts) -> list[list[int]]:
    log = hosts.out / "supervisor.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line["ranks"] for line in lines if line["kind"] == "generation"]


def check(hosts: Hosts, steps: int) -> RunOutcome:
    """Check the loss of every step, the samples and the last parameters against one process alone."""
    from foreshard.runtime.trainer import Options

    job = load_job(str(hosts.folder / "job.py")).in_double()
    plan = plan_of([{"share": BATCH, "micro_batch": BATCH, "stages": [([0], [[0, 4]])]}], global_batch=BATCH)
    alone = Trainer(job, plan, options=Options(clip_norm=1.0))
    (hosts.folder / "hurry").touch()
    losses = [alone.train_step().loss for _ in range(steps)]
    lines = [json.loads(line) for line in (hosts.out / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss_metrics/global_avg_loss"] for line in lines}
    assert [found[step] for step in range(steps)] == pytest.approx(losses, rel=1e-9)
    tensors = load(hosts.out / "ckpt", steps)
    for layer, module in alone.state.modules.items():
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                tensors[f"layers.{layer}.{name}"], parameter.detach(), rtol=1e-9, atol=1e-12
            )
    outcome = outcome_of(hosts.out, global_batch=BATCH, steps=steps, restarts=0)
    assert (outcome.steps, outcome.lost, outcome.repeated, outcome.misread) == (steps, 0, 0, 0)
    return outcome


@pytest.mark.slow
def test_torchrun_on_two_hosts_trains_what_one_process_trains(hosts: Hosts) -> None:
    words = prepared(hosts, PIPELINES, steps=5)
    for host in range(2):
        hosts.torchrun(host, *words)
    hosts.ended()
    check(hosts, 5)
    assert generations(hosts) == [[0, 1, 2, 3]], "every rank reaches every other at once"


def test_the_first_host_is_lost_and_taken_back(hosts: Hosts) -> None:
    """Rank 1 trains on alone under a rendezvous of its own, with both again when the first host is back."""
    steps, hosts.per_host = 150, 1
    words = prepared(hosts, REPLICAS, steps=steps, pace_s=0.1)
    for host in range(2):
        hosts.by_hand(host, *words)
    metrics = hosts.out / "metrics.jsonl"
    awaited(hosts, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    hosts.lose(0)
    awaited(hosts, lambda: [1] in generations(hosts))
    hosts.by_hand(0, *words)
    awaited(hosts, lambda: generations(hosts)[-1] == [0, 1])
    (hosts.folder / "hurry").touch()
    hosts.ended()
    check(hosts, steps)
    told = json.loads((hosts.out / "rendezvous.json").read_text())
    assert (told["address"], told["term"]) == (hosts.address(1), 2)
