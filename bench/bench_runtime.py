"""The runtime against torch's own on even plans, and against the ideal of its plan; ratios of one run.

Two ranks train the same small GPT for the same samples: two replicas against DistributedDataParallel and
FSDP2, two stages against torch.distributed.pipelining. Rounds alternate, so that other load on the machine
affects all alike; each number is a median of rounds. Wall time; one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "jobs"))
RANKS, BATCH, MICRO = 2, 32, 4


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


def ours(kind: str, store, rank: int):
    """A step of the runtime under an even plan."""
    from foreshard.runtime.job.job import load_job
    from foreshard.runtime.membership.fixed_membership import FixedMembership
    from foreshard.runtime.trainer import Trainer

    job = load_job(str(Path(__file__).parents[1] / "examples" / "jobs" / "gpt_job.py"))
    plan = even(kind, job.num_layers)
    membership = FixedMembership(dist.PrefixStore(f"ours/{kind}", store), rank, plan, range(RANKS))
    trainer = Trainer(job, membership=membership)
    return trainer.train_step


def batches(rank: int, count: int):
    """The samples of a step, collated."""
    import gpt_job

    data = gpt_job.dataset()
    return torch.stack([data[(rank * count + i) % len(data)] for i in range(count)])


def replicas(rank: int, *, sharded: bool):
    """A step of DistributedDataParallel or of FSDP2, on the same model and samples, reading data as we do."""
    import gpt_job

    torch.manual_seed(0)
    model = nn.Sequential(*[build() for build in gpt_job.model()])
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=True)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = gpt_job.optimizer(wrapped.parameters())

    def step() -> None:
        batch = batches(rank, BATCH // RANKS)
        optimizer.zero_grad()
        total, count = gpt_job.loss(wrapped(gpt_job.inputs(batch)), batch)
        (total / count).backward()
        optimizer.step()

    return step


def pipelined(rank: int):
    """A step of torch.distributed.pipelining's 1F1B on two stages."""
    import gpt_job
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    layers = [build() for build in gpt_job.model()]
    half = len(layers) // 2
    module = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        BATCH // MICRO,
        loss_fn=lambda out, batch: gpt_job.loss(out, batch)[0] / (BATCH * 64),
        scale_grads=False,
    )
    optimizer = gpt_job.optimizer(module.parameters())

    def step() -> None:
        batch = batches(0, BATCH)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(gpt_job.inputs(batch))
        else:
            schedule.step(target=batch)
        optimizer.step()

    return step


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


def rank_main(rank: int, folder: str, rounds: int) -> None:
    """Time all in turn."""
    torch.set_num_threads(1)
    file = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", file), rank=rank, world_size=RANKS)
    steps = {
        "replicas": ours("replicas", file, rank),
        "DDP": replicas(rank, sharded=False),
        "sharded": ours("sharded", file, rank),
        "FSDP2": replicas(rank, sharded=True),
        "pipeline": ours("pipeline", file, rank),
        "torch.distributed.pipelining": pipelined(rank),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if turn >= 3:
                times[name].append(time.perf_counter() - began)
    extra = torch.tensor([*overhead(file, rank, rounds), *recut(file, rank, 10)])
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({"times": times, "extra": extra.tolist()}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Print a line per pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    os.environ.setdefault("GPT_WIDTH", "256")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, args.rounds), RANKS)
        measured = json.loads(Path(folder, "times.json").read_text())
    times = measured["times"]
    width = os.environ["GPT_WIDTH"]
    print(f"two ranks, GPT of width {width}, {BATCH} samples a step, {args.rounds} rounds, wall time")
    for mine, other in (
        ("replicas", "DDP"),
        ("sharded", "FSDP2"),
        ("pipeline", "torch.distributed.pipelining"),
    ):
        ratios = [a / b for a, b in zip(times[mine], times[other], strict=True)]
        mine_s, other_s = statistics.median(times[mine]), statistics.median(times[other])
        print(
            f"{mine:9} {1e3 * mine_s:7.1f} ms, {other} {1e3 * other_s:7.1f} ms: "
            f"ratio of medians {mine_s / other_s:.3f}, "
            f"median of paired ratios {statistics.median(ratios):.3f}"
        )
    over, marks, change_s, step_s = measured["extra"]
    print(f"processor time of a step over that of its actions, worse of two ranks: {over:.3f}")
    print(f"of it to record when each action began and ended: {100 * marks:.3f} %")
    spent = f"{1e3 * change_s:.1f} ms, {change_s / step_s:.2f} of a step"
    print(f"re-cut that moves a quarter of the layers: {spent}")


if __name__ == "__main__":
    main()
