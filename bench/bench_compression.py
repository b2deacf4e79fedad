"""Losses of DistributedDataParallel with compressed gradients, beside those with whole ones.

Two ranks over gloo train the example's GPT with AdamW; the hook of each method takes the place of DDP's
all-reduce (`transport.compression.registry.ddp_hook`). Samples, first values and dropout are the same in
every run. The first fifth of the steps is a warm-up, as in 1-bit Adam: gradients are summed whole, and
second moments stay as they are at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GPT_WIDTH", "64")
os.environ.setdefault("GPT_BLOCKS", "2")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "jobs"))
RANKS, BATCH, RATE, MOMENTUM = 2, 16, 2e-3, 0.9
FROZEN = "none, frozen"
"""Whole sums with the second moments of the warm-up: what freezing them does by itself."""
METHODS = ("none", FROZEN, "powersgd:4", "topk:0.05", "topk:0.1", "onebit", "int8", "fp8")
WARM = 5
"""Steps of the run for each step of its warm-up."""
LAST = 20
"""Steps whose mean loss is compared."""


def train(rank: int, folder: str, method: str, steps: int) -> None:
    """Train as one rank, and write the mean losses of both."""
    import gpt_job

    from foreshard.transport.compression.compressor import WarmUp
    from foreshard.transport.compression.registry import ddp_hook
    from foreshard.transport.compression.second_moments import FrozenAdam

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{method}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[build() for build in gpt_job.model()]))
    freezes, warm_up = method != "none", WarmUp(steps // WARM, momentum=MOMENTUM)
    if method not in ("none", FROZEN):
        model.register_comm_hook(*ddp_hook(method, dist.group.WORLD, warm_up))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(MOMENTUM, 0.999))
    frozen = FrozenAdam(optimizer, warm_up.steps)
    data, losses, own = gpt_job.dataset(), [], BATCH // RANKS
    for step in range(steps):
        batch = torch.stack([data[(step * BATCH + rank * own + i) % len(data)] for i in range(own)])
        total, count = gpt_job.loss(model(gpt_job.inputs(batch)), batch)
        optimizer.zero_grad()
        (total / count).backward()
        (frozen if freezes and warm_up.is_over else optimizer).step()
        warm_up.step += 1
        loss = (total / count / RANKS).detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
    if rank == 0:
        Path(folder, f"{method}.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Print the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps
    at = [steps * part // 6 for part in range(1, 6)]
    print(f"| method | {' | '.join(f'step {step}' for step in at)} | last {LAST} | against none |")
    print("|---" * (len(at) + 3) + "|")
    whole = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            mp.spawn(train, (folder, method, steps), RANKS)
            losses = json.loads(Path(folder, f"{method}.json").read_text())
            last = mean(losses[-LAST:])
            whole = whole or last
            shown = " | ".join(f"{losses[step]:.3f}" for step in at)
            print(f"| {method} | {shown} | {last:.4f} | {last / whole - 1.0:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
