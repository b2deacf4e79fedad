"""What a lab counts of a rank's memory, and what it says where that is more than the lab states."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from foreshard.errors import InfeasibleError
from foreshard.runtime.device_memory import DeviceMemory
from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan_file import parse_plan

WIDTH, SAMPLES = 8, 4


def linear():
    """Return a layer with values of a generator of its own: ranks that are threads share torch's."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight.data = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return layer


def job():
    """Two layers of 8 x 8 weights without bias; Adam keeps two values of each and a count."""
    return Job(
        builders=[linear, lambda: nn.Sequential(nn.ReLU(), linear())],
        dataset=torch.arange(64.0).view(8, WIDTH),
        inputs=lambda batch: batch,
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-3),
    )


def trained(limit_bytes, steps=3):
    stages = [{"ranks": [0], "layers": [[0, 2]]}]
    group = {"share": SAMPLES, "micro_batch": SAMPLES, "stages": stages}
    plan = parse_plan({"global_batch": SAMPLES, "seq_len": 1, "precision": "fp32", "groups": [group]})
    memory = DeviceMemory(0, limit_bytes, "lab.toml")
    trainer = Trainer(job(), plan, within_memory=memory.within)
    for _ in range(steps):
        trainer.train_step()
    return trainer


WEIGHTS = 2 * WIDTH * WIDTH * 4
SAVED = 2 * SAMPLES * WIDTH * 4
"""The input of either layer; the output of the ReLU is the input of the second one."""
STATES = 4 * WEIGHTS + 2 * 4
"""Parameters, gradients, two values of Adam; a count of each parameter."""


def test_a_step_in_what_it_needs_changes_nothing():
    found, free = trained(STATES + SAVED), trained(1e12)
    for layer, module in found.state.modules.items():
        for mine, other in zip(module.parameters(), free.state.modules[layer].parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("limit", "steps", "said"),
    [
        (2 * WEIGHTS - 1, 1, "0 B saved"),
        (2 * WEIGHTS + SAVED - 1, 1, "0.2 KiB saved"),
        (STATES + SAVED - 1, 2, "0.2 KiB saved"),
    ],
)
def test_a_rank_that_needs_a_byte_more_is_named(limit, steps, said):
    """In the first step there are no optimizer states yet."""
    with pytest.raises(InfeasibleError, match="rank 0 holds") as error:
        trained(limit, steps)
    assert said in error.value.what
    assert (error.value.key, error.value.value, error.value.file) == ("ranks.memory", limit, "lab.toml")


def test_what_was_saved_is_free_after_the_backward():
    trained(2 * WEIGHTS + SAVED, 1)


PIPELINE = [{"ranks": [0], "layers": [[0, 1]]}, {"ranks": [1], "layers": [[1, 2]]}]


@pytest.mark.parametrize(
    "group",
    [
        {"micro_batch": 1, "schedule": "zb-h1", "stages": PIPELINE},
        {
            "micro_batch": 1,
            "schedule": "1f1b",
            "stages": [stage | {"recompute": "full"} for stage in PIPELINE],
        },
        {"micro_batch": 2, "stages": [{"ranks": [0, 1], "layers": [[0, 2]], "zero": 3}]},
    ],
    ids=["zb-h1", "recompute", "zero3"],
)
def test_counting_changes_no_loss_and_finds_all_free_after_the_step(group):
    """Backwards in halves, layers computed again and parameters that come and go."""
    groups = [group | {"share": SAMPLES}]
    plan = parse_plan({"global_batch": SAMPLES, "seq_len": 1, "precision": "fp32", "groups": groups})
    free = losses_of(plan)
    memories = {rank: DeviceMemory(rank, 1e12, "lab.toml") for rank in plan.ranks}
    counted = losses_of(plan, memories)
    assert counted == free and set(free) == set(plan.ranks)
    for memory in memories.values():
        assert memory.saved_bytes == 0 < memory.most_saved_bytes


def losses_of(plan, memories=None):
    """Return the losses of two steps by rank, the ranks being threads."""
    store, found = dist.HashStore(), {}

    def body(rank):
        surroundings = {} if memories is None else {"within_memory": memories[rank].within}
        membership = FixedMembership(store, rank, plan, plan.ranks, timeout_s=60)
        trainer = Trainer(job(), membership=membership, **surroundings)
        found[rank] = [trainer.train_step().loss for _ in range(2)]

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
