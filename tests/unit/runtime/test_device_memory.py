"""What a lab counts of a rank's memory, and what it says where that is more than the lab states."""

import pytest
import torch
from torch import nn

from foreshard.errors import InfeasibleError
from foreshard.runtime.device_memory import DeviceMemory
from foreshard.runtime.job.job import Job
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan_file import parse_plan

WIDTH, SAMPLES = 8, 4


def linear():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


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
