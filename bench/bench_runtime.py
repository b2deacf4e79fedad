"""`foreshard run` against plain torch loops on even plans, and the runtime against the ideal of its plan.

Two ranks train the same small GPT for the same samples with the same optimizer, gradient norm and clipping:
the command as users start it, with all its records, then the loop that a user would write with
DistributedDataParallel, FSDP2 or torch.distributed.pipelining, and again. Both note each step in the job's
`lr(step)`: wall time, processor time and peak memory of the rank. One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

JOBS = Path(__file__).parents[1] / "examples" / "jobs"
sys.path.insert(0, str(JOBS))
RANKS, BATCH, MICRO, CLIP_NORM = 2, 32, 4, 1.0
WARM = 4
"""Steps that are not counted: memory is touched and code loaded in them."""
LOOPS = {"replicas": "DDP", "sharded": "FSDP2", "pipeline": "torch.distributed.pipelining"}
MIB = 2**20
MARKED_JOB = '''
"""The example's GPT, which notes every step of a rank."""
import os, resource, sys, time
sys.path.insert(0, {jobs!r})
from gpt_job import *
RANK = os.environ.get("FORESHARD_RANK") or os.environ["RANK"]
MARKS = open(os.environ["BENCH_MARKS"] + "-" + RANK, "w")

def lr(step):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(time.perf_counter(), time.process_time(), peak, file=MARKS, flush=True)
    return 1.0
'''


def even(kind: str, layers: int):
    """The even plan of two replicas, or of two stages."""
    from foreshard.spec.plan_file import parse_plan

    half = layers // 2
    if kind == "pipeline":
        groups = [
            {
                "share": BATCH,
                "micro_batch": MICRO,
                "stages": [{"ranks": [0], "layers": [[0, half]]}, {"ranks": [1], "layers": [[half, layers]]}],
            }
        ]
    elif kind == "sharded":
        groups = [
            {
                "share": BATCH,
                "micro_batch": BATCH,
                "zero": 3,
                "stages": [{"ranks": [0, 1], "layers": [[0, layers]]}],
            }
        ]
    else:
        groups = [
            {
                "share": BATCH // 2,
                "micro_batch": BATCH // 2,
                "stages": [{"ranks": [r], "layers": [[0, layers]]}],
            }
            for r in range(RANKS)
        ]
    return parse_plan({"global_batch": BATCH, "seq_len": 64, "precision": "fp32", "groups": groups})


Norm = Callable[[list[nn.Parameter]], Any]


def batches(rank: int, count: int, step: int) -> Tensor:
    """The samples of a step, collated."""
    import gpt_job

    data = gpt_job.dataset()
    return torch.stack([data[(step * BATCH + rank * count + i) % len(data)] for i in range(count)])


def replicas(rank: int, *, sharded: bool) -> tuple[nn.Module, Callable[[int], float], Norm]:
    """DistributedDataParallel or FSDP2: module, forward and backward, and the clipped gradient's norm."""
    import gpt_job

    torch.manual_seed(0)
    model = nn.Sequential(*[build() for build in gpt_job.model()])
    wrapped: Any
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=True)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def passes(step: int) -> float:
        batch = batches(rank, BATCH // RANKS, step)
        total, count = gpt_job.loss(wrapped(gpt_job.inputs(batch)), batch)
        (total / count).backward()
        return float(total.detach()) / count / RANKS

    def clipped(parameters: list[nn.Parameter]) -> Any:
        return nn.utils.clip_grad_norm_(parameters, CLIP_NORM)

    return wrapped, passes, clipped


def pipelined(rank: int) -> tuple[nn.Module, Callable[[int], float], Norm]:
    """The same of torch.distributed.pipelining's 1F1B on two stages."""
    import gpt_job
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    layers = [build() for build in gpt_job.model()]
    half = len(layers) // 2
    module = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    del layers
    schedule = Schedule1F1B(
        PipelineStage(module, rank, RANKS, torch.device("cpu")),
        BATCH // MICRO,
        loss_fn=lambda out, batch: gpt_job.loss(out, batch)[0] / (BATCH * gpt_job.SEQUENCE),
        scale_grads=False,
    )

    def passes(step: int) -> float:
        batch, losses = batches(0, BATCH, step), []
        if rank == 0:
            schedule.step(gpt_job.inputs(batch))
        else:
            schedule.step(target=batch, losses=losses)
        return float(sum(loss.detach() for loss in losses))

    def clipped(parameters: list[nn.Parameter]) -> Any:
        grads = [p.grad for p in parameters if p.grad is not None]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, square.sqrt())
        return square.sqrt()

    return module, passes, clipped


def loop_main(rank: int, folder: str, kind: str, steps: int) -> None:
    """Train as a rank of a plain torch loop that prints loss and norm."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    import job

    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    module, passes, clipped = (
        pipelined(rank) if kind == "pipeline" else replicas(rank, sharded=kind == "sharded")
    )
    parameters = list(module.parameters())
    optimizer = job.optimizer(parameters)
    with Path(folder, f"loop-{rank}.log").open("a") as log:
        for step in range(steps):
            optimizer.zero_grad()
            loss = torch.tensor(passes(step))
            norm = clipped(parameters)
            dist.all_reduce(loss)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            print(step, float(loss), float(norm), file=log, flush=True)
            job.lr(step)
            optimizer.step()
    dist.barrier()
    os._exit(0)


@dataclass
class Measured:
    """Of one process: seconds and processor seconds of its steps, and its peak memory."""

    step_s: list[float]
    work_s: list[float]
    peak_mib: float


def measured(folder: Path, name: str) -> list[Measured]:
    """What the ranks of a program have noted."""
    found = []
    for rank in range(RANKS):
        lines = [line.split() for line in Path(folder, f"{name}-{rank}").read_text().splitlines()]
        at = [(float(wall), float(work)) for wall, work, _ in lines][WARM - 1 :]
        pairs = list(pairwise(at))
        step_s, work_s = ([after[i] - before[i] for before, after in pairs] for i in (0, 1))
        found.append(Measured(step_s, work_s, int(lines[-1][2]) * 1024 / MIB))
    return found


def run_command(folder: Path, kind: str, steps: int) -> list[Measured]:
    """Train by `foreshard run` with everything that is on by default."""
    words = f"run {folder}/job.py --plan {folder}/{kind}.json --local {RANKS} --out {folder}/run"
    environment = {**os.environ, "BENCH_MARKS": str(folder / "command")}
    command = [sys.executable, "-m", "foreshard", *words.split(), "--steps", str(steps)]
    subprocess.run(
        [*command, "--clip-norm", str(CLIP_NORM)], check=True, capture_output=True, env=environment
    )
    shutil.rmtree(folder / "run")
    return measured(folder, "command")


def run_loop(folder: Path, kind: str, steps: int) -> list[Measured]:
    """Train by torch."""
    os.environ["BENCH_MARKS"] = str(folder / "loop")
    (folder / "store").unlink(missing_ok=True)
    mp.spawn(loop_main, (str(folder), kind, steps), RANKS)
    return measured(folder, "loop")


def compare(kind: str, pairs: int, steps: int) -> None:
    """Print the ratios of the command over the loop, of pairs that follow each other, in turned order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(MARKED_JOB.format(jobs=str(JOBS)))
        import gpt_job

        (folder / f"{kind}.json").write_text(json.dumps(even(kind, gpt_job.BLOCKS + 2).to_dict()))
        rows = []
        for turn in range(pairs):
            programs = [run_command, run_loop] if turn % 2 == 0 else [run_loop, run_command]
            both = {program: program(folder, kind, steps) for program in programs}
            rows.append((both[run_command], both[run_loop]))

    def ratio(name: str, value: Callable[[list[Measured]], float], unit: float) -> str:
        ours, torchs = ([value(row[i]) for row in rows] for i in (0, 1))
        ratios = [a / b for a, b in zip(ours, torchs, strict=True)]
        each = ", ".join(f"{r:.3f}" for r in ratios)
        mine, other = statistics.median(ours) * unit, statistics.median(torchs) * unit
        values = f"{mine:.0f} against {other:.0f}"
        return f"  {name}: {values}, ratio {statistics.median(ratios):.3f} (pairs {each})"

    def work_s(rank: Measured) -> float:
        return statistics.median(rank.work_s)

    print(f"{kind}: foreshard run against {LOOPS[kind]}, {pairs} pairs of {steps - WARM} steps")
    print(ratio("median step, ms", lambda ranks: statistics.median(ranks[0].step_s), 1e3))
    print(ratio("processor time of a step, both ranks, ms", lambda ranks: sum(map(work_s, ranks)), 1e3))
    print(ratio("peak memory of the larger rank, MiB", lambda ranks: max(r.peak_mib for r in ranks), 1.0))


def overhead(store, rank: int, rounds: int) -> tuple[float, float]:
    """Processor time of this rank's thread in a step over that of the actions in it, and the part of it
    that writing down when each action began and ended takes; medians.
    """
    from foreshard.runtime.engine.clock import VirtualClock
    from foreshard.runtime.job.job import load_job
    from foreshard.runtime.membership.fixed_membership import FixedMembership
    from foreshard.runtime.records.trace_recorder import TraceRecorder
    from foreshard.runtime.trainer import Trainer

    job, spent = load_job(str(Path(__file__).parents[1] / "examples" / "jobs" / "gpt_job.py")), [0.0]
    timeline, marking = TraceRecorder(rank), [0.0]
    plan = even("pipeline", job.num_layers)

    class Counting(VirtualClock):
        def end(self, action: str, samples: int, layers: int) -> None:
            spent[0] += time.thread_time() - self._began_s
            super().end(action, samples, layers)

    def mark(*given) -> None:
        began = time.thread_time()
        timeline.add(*given)
        marking[0] += time.thread_time() - began

    trainer = Trainer(
        job,
        membership=FixedMembership(dist.PrefixStore("overhead", store), rank, plan, range(RANKS)),
        clock=Counting(lambda a, b: (1e9, 5e-5)),
        on_action=mark,
    )
    timeline.begin_step(0, plan, 0.0)
    ratios, marks = [], []
    for _ in range(rounds + 3):
        spent[0], marking[0], began = 0.0, 0.0, time.thread_time()
        trainer.train_step()
        step_s = time.thread_time() - began
        ratios.append(step_s / spent[0])
        marks.append(marking[0] / step_s)
    return statistics.median(ratios[3:]), statistics.median(marks[3:])


def recut(store, rank: int, rounds: int) -> tuple[float, float]:
    """Seconds of a change of cuts that moves a quarter of the layers, and of a step, medians."""
    from foreshard.runtime.job.job import load_job
    from foreshard.runtime.membership.fixed_membership import FixedMembership
    from foreshard.runtime.trainer import Trainer
    from foreshard.spec.online import Command
    from foreshard.spec.plan_file import parse_plan

    job = load_job(str(Path(__file__).parents[1] / "examples" / "jobs" / "gpt_job.py"))
    plan, changes, steps = even("pipeline", job.num_layers).to_dict(), [], []
    plans = []
    for cut in (job.num_layers // 2, job.num_layers // 4):
        first, second = plan["groups"][0]["stages"]
        first["layers"], second["layers"] = [[0, cut]], [[cut, job.num_layers]]
        plans.append(parse_plan(plan))
    trainer = Trainer(
        job,
        membership=FixedMembership(dist.PrefixStore("recut", store), rank, plans[0], range(RANKS)),
        on_event=lambda kind, text, **facts: changes.append(facts["wall_s"]) if kind == "adopted" else None,
    )
    trainer.train_step()
    for turn in range(rounds):
        if rank == 0:
            trainer.propose(Command(kind="re-cut", plan=plans[1 - turn % 2], reason="bench"))
        trainer.train_step()
        steps.append(trainer.train_step().time_s)
    return statistics.median(changes[1:]), statistics.median(steps[1:])


def runtime_main(rank: int, folder: str, rounds: int) -> None:
    """Measure what the runtime adds to its own actions, and a change of cuts."""
    torch.set_num_threads(1)
    file = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", file), rank=rank, world_size=RANKS)
    found = torch.tensor([*overhead(file, rank, rounds), *recut(file, rank, 10)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found.tolist()))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Print the ratios, and what the runtime adds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--rounds", type=int, default=20, help="steps in which the runtime's own part is measured"
    )
    parser.add_argument("--kinds", nargs="*", default=[*LOOPS], choices=LOOPS)
    args = parser.parse_args()
    os.environ.setdefault("GPT_WIDTH", "256")
    print(f"two ranks, GPT of width {os.environ['GPT_WIDTH']}, {BATCH} samples a step")
    for kind in args.kinds:
        compare(kind, args.pairs, args.steps)
    if not args.rounds:
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(runtime_main, (folder, args.rounds), RANKS)
        over, marks, change_s, step_s = json.loads(Path(folder, "found.json").read_text())
    print(f"processor time of a step over that of its actions, worse of two ranks: {over:.3f}")
    print(f"of it to record when each action began and ended: {100 * marks:.3f} %")
    spent = f"{1e3 * change_s:.1f} ms, {change_s / step_s:.2f} of a step"
    print(f"re-cut that moves a quarter of the layers: {spent}")


if __name__ == "__main__":
    main()
