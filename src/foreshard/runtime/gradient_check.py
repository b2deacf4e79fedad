"""Compares the gradients of a plan with those of a single process, for a job and plan of your own.

The ranks are threads of this process; the runtime, the collectives and the messages are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.state.shard_keys import ParameterKey
from foreshard.runtime.state.slices import SliceCut, parse_name
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan import Group, Plan, Stage

_TIMEOUT_S = 120.0
"""After which a comparison whose ranks wait for each other has failed."""
Gradients = dict[ParameterKey, torch.Tensor]


def single_rank_plan(plan: Plan, num_layers: int) -> Plan:
    """Return the same training on one rank, all samples of a step together."""
    stage = Stage(ranks=(0,), layers=((0, num_layers),), zero=0)
    whole = Group(share=plan.global_batch, stages=(stage,), micro_batch=plan.global_batch, schedule="1f1b")
    return replace(plan, groups=(whole,))


def gradients(job: Job, plan: Plan) -> Gradients:
    """Return the gradients of the first step under a plan, by layer and name.

    Raises
    ------
    RuntimeError
        When a rank fails or does not end.
    """
    store, failed = dist.HashStore(), list[Exception]()
    found: Gradients = {}
    cuts: dict[ParameterKey, SliceCut] = {}

    def body(rank: int) -> None:
        try:
            membership = FixedMembership(store, rank, plan, plan.ranks, timeout_s=_TIMEOUT_S)
            trainer = Trainer(job, membership=membership)
            trainer.train_step()
            for bucket in trainer.state.buckets:
                found.update((key, part.clone()) for key, part in bucket.named())
            cuts.update(trainer.parameters.cuts)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if failed or any(thread.is_alive() for thread in threads):
        raise RuntimeError(f"a rank failed: {failed[0] if failed else 'it did not end'}")
    return joined(found, cuts)


def joined(found: Gradients, cuts: Mapping[ParameterKey, SliceCut]) -> Gradients:
    """Return tensors with the slices of each put together."""
    made: Gradients = {}
    slices: dict[ParameterKey, dict[int, torch.Tensor]] = {}
    for (layer, name), tensor in found.items():
        whole, index, num = parse_name(name)
        if num == 1:
            made[layer, name] = tensor
        else:
            slices.setdefault((layer, whole), {})[index] = tensor
    return made | {
        key: cuts[key].joined([parts[index] for index in sorted(parts)]) for key, parts in slices.items()
    }


def gradient_error(job: Job, plan: Plan) -> float:
    """Return the largest error of a layer's gradient, relative to its norm in the single process.

    The gradient of a layer is taken as one vector: gradients of single biases and norms are small differences
    of large sums, so two orders of summation differ there by more than 1e-6 in any framework.
    """
    wanted, found = gradients(job, single_rank_plan(plan, job.num_layers)), gradients(job, plan)
    if set(wanted) != set(found):
        raise RuntimeError("the plan trains other parameters than one process")
    return max(
        _norm([found[key] - wanted[key] for key in keys]) / max(_norm([wanted[key] for key in keys]), 1e-30)
        for keys in ([key for key in wanted if key[0] == layer] for layer in {layer for layer, _ in wanted})
    )


def _norm(parts: list[torch.Tensor]) -> float:
    return float(sum(part.double().square().sum() for part in parts)) ** 0.5
