"""Starts a run from the options of `foreshard run`: all ranks on this machine, or one rank under torchrun."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreshard.errors import ForeshardError, SpecError
from foreshard.profile.address import interface_address, own_address
from foreshard.runtime.checkpoint.folders import steps_in
from foreshard.runtime.emulation import Emulation
from foreshard.runtime.gradient_sums import check_order, check_sums, check_warm_up, gradient_sums
from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.leader_failover import running_rendezvous
from foreshard.runtime.membership.processes import die_with_parent
from foreshard.runtime.membership.secret import VARIABLE, awaited_secret, checked_secret, make_secret
from foreshard.runtime.membership.supervisor_state import has_run, reopen
from foreshard.runtime.records.outcome import RunOutcome, is_finished, outcome_of, steps_done
from foreshard.runtime.records.trace_recorder import merge
from foreshard.runtime.run_settings import RunSettings
from foreshard.runtime.stage_messages import check_stage_messages
from foreshard.runtime.state.layout import check_runnable
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan

Watch = Callable[[Path], None]
MAX_STARTS = 4
"""Of one rank, where neither a number nor a rate is given."""


def launch(
    job: str,
    plan_file: str,
    *,
    local: int | None,
    steps: int,
    out: str,
    seed: int = 0,
    resume: bool = False,
    interface: str | None = None,
    port: int = 0,
    secret_file: str | None = None,
    max_starts: int | None = None,
    max_starts_per_hour: int | None = None,
    device: str = "auto",
    tensorboard: bool = False,
    wandb: bool = False,
    trace: str | None = None,
    progress: Watch | None = None,
    emulation: Emulation | None = None,
    policy: str = "static",
    budgets: Sequence[str] = (),
    cluster: str | None = None,
    costs: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    collectives: str | None = None,
    compress: str | None = None,
    bucket_bytes: float | None = None,
    bucket_order: str | None = None,
    stage_messages: str | None = None,
    **settings: Any,
) -> RunOutcome | None:
    """Train and return the outcome; None on ranks of torchrun other than the first.

    `settings` are further fields of `RunSettings`.

    Raises
    ------
    SpecError
        For a plan that does not fit the ranks, or an error in the job.
    """
    if not Path(job).is_file():
        raise SpecError(
            "no such file",
            file=job,
            key="JOB.py",
            rule="The job is a Python file",
            fix="See examples/jobs/gpt_job.py",
        )
    plan, interface = load_plan(plan_file), interface_address(interface)
    if dtype is not None:  # in double precision the job's layers are built as such: autocast stays off
        plan = replace(plan, precision="fp32" if dtype == "fp64" else dtype)
    check_runnable(plan, file=plan_file)
    ranks, test_bed = local if local is not None else of_torchrun("WORLD_SIZE"), emulation or Emulation()
    _check_ranks(plan, ranks, "--local" if local is not None else "WORLD_SIZE")
    folder = Path(out).resolve()
    named = {"cluster": cluster, "costs": costs, "model": model}
    options = _policy_options(policy, budgets, named, test_bed)
    if options is not None:
        from foreshard.runtime.adaptive.controller_config import config_of

        config = config_of(options, plan, test_bed.cluster, steps=steps, out=folder)
        _check_ranks(plan, config.cluster.num_devices, "--cluster")
        config.check()
    # a torchrun that restarts all agents means the run to continue
    resume = resume or of_torchrun("TORCHELASTIC_RESTART_COUNT", 0) > 0
    sums = gradient_sums(plan, collectives, compress, bucket_bytes, file=plan_file)
    resumes = resume and bool(steps_in(folder / "ckpt"))
    check_sums(plan, sums, virtual=test_bed.is_virtual, resumes=resumes)
    check_warm_up(sums, settings.get("compress_after", 0))
    check_order(plan, sums, bucket_order)
    check_stage_messages(plan, stage_messages, virtual=test_bed.is_virtual)
    if resume:
        if is_finished(folder, steps):
            return outcome_of(folder, global_batch=plan.global_batch, steps=steps, restarts=0)
        _check_resumed(folder, plan, seed)
    if local is not None:
        _open(folder, resume, plan, ranks)
    work = RunSettings(
        job=str(Path(job).resolve()),
        out=str(folder),
        steps=steps,
        seed=seed,
        resume=resume,
        emulated=test_bed.file,
        interface=interface,
        device=device if emulation is None else "cpu",
        trackers=tuple(name for name, on in (("tensorboard", tensorboard), ("wandb", wandb)) if on),
        trace=trace is not None,
        double=dtype == "fp64",
        collectives=_of_ranks(collectives),
        compress=compress,
        bucket_bytes=None if bucket_bytes is None else int(bucket_bytes),
        bucket_order=_of_ranks(bucket_order),
        stage_messages=_of_ranks(stage_messages),
        **settings,
        policy=options,
    )
    with _writing_in(folder):
        if local is not None:
            agent = _local(plan, work, local, port, test_bed)
        else:
            agent = _under_torchrun(plan, work, port, secret_file, test_bed)
    agent.max_starts = max_starts or (MAX_STARTS if max_starts_per_hour is None else sys.maxsize)
    agent.max_starts_per_hour = max_starts_per_hour
    watches = [watch for watch in (progress, test_bed.watch) if watch is not None]

    def watch_all() -> None:
        for watch in watches:
            watch(folder / "metrics.jsonl")

    with _writing_in(folder):
        restarts = agent.run(watch_all)
    if not agent.supervises:
        return None
    if trace is not None:
        merge(sorted((folder / "trace").glob("rank-*.json.gz")), trace)
    if agent.is_stopping:
        steps = steps_done(folder)
    found = outcome_of(folder, global_batch=plan.global_batch, steps=steps, restarts=restarts)
    return replace(found, stopped_by=agent.stopped_by)


@contextlib.contextmanager
def _writing_in(folder: Path) -> Iterator[None]:
    """Name the folder of the run where the disk has no room: such an error names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise ForeshardError(
            f"cannot write: {error.strerror}",
            file=error.filename or str(folder),
            rule="A run keeps its plan, secret and addresses in its folder",
            fix="Make room there, and start again (with --resume if it has trained)",
        ) from None


def _check_resumed(folder: Path, plan: Plan, seed: int) -> None:
    """Check that a run goes on with the samples of its checkpoint; ranks check the dataset."""
    from foreshard.runtime.checkpoint.format import read_meta
    from foreshard.runtime.checkpoint.saving import check_same_samples

    for step in steps_in(folder / "ckpt"):
        with contextlib.suppress(SpecError):  # damaged: ranks use the one before
            meta = read_meta(folder / "ckpt", step)
            break
    else:
        return
    check_same_samples(meta, plan.global_batch, seed, None, file=str(folder))


def _policy_options(
    policy: str, budgets: Sequence[str], named: Mapping[str, str | None], test_bed: Emulation
) -> dict[str, Any] | None:
    """Return the options from which ranks build the policy, or None for a plan that stays.

    `named` are its cluster, costs and model, by name or file.
    """
    if policy == "static":
        if budgets:
            raise SpecError(
                "a budget without a controller",
                key="--budget",
                value=budgets[0],
                rule="Budgets are kept by a policy",
                fix="Add --policy lyapunov",
            )
        return None
    if named["cluster"] is None and test_bed.cluster is None:
        raise SpecError(
            f"--policy {policy} without a cluster",
            key="--policy",
            value=policy,
            rule="A policy starts from the devices, links and prices of the ranks",
            fix="Add --cluster CLUSTER, or --lab LAB.toml",
        )
    absolute = {  # of files; names of the catalog stay as they are
        key: str(Path(name).resolve()) if name is not None and Path(name).exists() else name
        for key, name in named.items()
    }
    return {"policy": policy, "budgets": list(budgets), **absolute}


def _of_ranks(name: str | None) -> str | None:
    """Return what ranks read, wherever they start: a name as it is, a file by its absolute path."""
    is_file = name is not None and name.lower().endswith(".json")
    return str(Path(name).resolve()) if name is not None and is_file else name


def _local(plan: Plan, work: RunSettings, local: int, port: int, test_bed: Emulation) -> Agent:
    secret = make_secret(Path(work.out) / "secret")
    address = test_bed.address or work.interface or "127.0.0.1"
    return Agent(
        out=Path(work.out),
        plan=plan,
        work=replace(work, interface=address),
        ranks=range(local),
        expected=range(local) if test_bed.expected is None else test_bed.expected,
        secret_file=secret,
        address=address,
        port=port,
        command=test_bed.command,
        worker=test_bed.worker,
        local_ranks=local,
    )


def _under_torchrun(
    plan: Plan, work: RunSettings, port: int, secret_file: str | None, test_bed: Emulation
) -> Agent:
    """Return the agent of one rank of torchrun.

    The rank is a child of torchrun's process, so that torchrun does not see its death and restart all ranks.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # not where a shell set the rest: runs outlive their shells
        die_with_parent()
    rank, size = of_torchrun("RANK"), of_torchrun("WORLD_SIZE")
    several_hosts = size > of_torchrun("LOCAL_WORLD_SIZE", size)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    secret = _torchrun_secret(Path(work.out) / "secret", secret_file, rank, several_hosts)
    own = work.interface or _address_towards(master, several_hosts)
    running = running_rendezvous(Path(work.out), secret.read_bytes().strip()) if rank == 0 else None
    if running is None:
        _open(Path(work.out), work.resume, plan, size)
    address = master if work.interface is None or rank else work.interface
    return Agent(
        out=Path(work.out),
        plan=plan,
        work=replace(work, interface=own),
        ranks=[rank],
        expected=range(size),
        secret_file=secret,
        address=address if running is None else running.address,
        port=running.port if running else port or of_torchrun("MASTER_PORT", 29500) + 1,
        supervises=rank == 0 and running is None,  # else another host has the run, and this rank joins it
        own=own,
        takeover_s=max(2 * work.detect_s, 5.0),
        worker=test_bed.worker,
        local_rank=of_torchrun("LOCAL_RANK", 0),
        local_ranks=of_torchrun("LOCAL_WORLD_SIZE", 1),
    )


def of_torchrun(name: str, default: int | None = None) -> int:
    """Return a number that torchrun leaves in the environment.

    Raises
    ------
    SpecError
        If it is not a whole number, or not set where there is no default.
    """
    given = os.environ.get(name, "" if default is None else str(default))
    if not given.isdecimal():
        raise SpecError(
            "not set" if name not in os.environ else f"not a number: {given!r}",
            key=name,
            value=os.environ.get(name),
            rule="A whole number from 0, as torchrun sets it",
            fix="Start with torchrun, or with --local N on this machine alone",
        )
    return int(given)


def _torchrun_secret(shared: Path, secret_file: str | None, rank: int, several_hosts: bool) -> Path:
    """Return the file with the run's secret: the given one, or one that rank 0 makes in the run's folder."""
    if secret_file is not None:
        return checked_secret(Path(secret_file), "--secret-file")
    in_environment = VARIABLE in os.environ
    if several_hosts and not in_environment:
        raise SpecError(
            "no shared secret",
            key="--secret-file",
            rule="Ranks of several hosts share a secret",
            fix="Copy one file to every host and name it with --secret-file, or set FORESHARD_SECRET",
        )
    return make_secret(shared) if rank == 0 or in_environment else awaited_secret(shared)


def _address_towards(master: str, several_hosts: bool) -> str:
    """Return this host's address on the way to the first; its own name may resolve to a loopback one."""
    try:
        own = own_address(master)
    except OSError as error:
        raise SpecError(
            f"no route to {master}: {error.strerror}",
            key="MASTER_ADDR",
            value=master,
            rule="Hosts reach the first one, where ranks meet",
            fix="Give torchrun an address of the first host, and --interface where a host has several",
        ) from None
    if several_hosts and own.startswith("127."):
        raise SpecError(
            f"{master} is a loopback address",
            key="MASTER_ADDR",
            value=master,
            rule="Ranks of several hosts meet on an address that all of them reach",
            fix="Give torchrun the first host's address on the network, or name it with --interface there",
        )
    return own


def _check_ranks(plan: Plan, ranks: int, key: str) -> None:
    most = max(plan.ranks)
    if most >= ranks:
        raise SpecError(
            f"the plan uses rank {most}, there are {ranks} ranks",
            key=key,
            value=ranks,
            rule="Ranks are 0 to N - 1",
            fix=f"Start {most + 1} ranks",
        )


def _open(folder: Path, resume: bool, plan: Plan, ranks: int) -> None:
    """Make the run's folder, or prepare it for a run that is resumed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # not bad input
            raise
        raise SpecError(
            f"cannot write: {error.strerror}",
            file=str(folder),
            key="--out",
            rule="A run has a folder of its own",
            fix="Give a writable path",
        ) from None
    if of_torchrun("RANK", 0) or not has_run(folder):
        return
    if not resume:
        raise SpecError(
            "holds a run already",
            file=str(folder),
            key="--out",
            rule="A run has a folder of its own",
            fix="Add --resume to continue from its latest checkpoint, or name another folder",
        )
    reopen(folder, plan, list(range(ranks)))
