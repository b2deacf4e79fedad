"""Ranks as threads of one process: the real runtime over gloo, without the cost of starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.trainer import Options, Trainer
from foreshard.spec.online import Command
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan


def plan_of(
    groups: Sequence[Mapping[str, Any]], *, global_batch: int, precision: str = "fp32", **defaults: Any
) -> Plan:
    """A plan from short notation: groups of {share, micro_batch, stages: [(ranks, [[lo, hi], ...]), ...]}."""
    told = []
    for group in groups:
        stages = []
        for ranks, layers, *more in group["stages"]:
            stages.append({"ranks": list(ranks), "layers": layers, **(more[0] if more else {})})
        told.append({**group, "stages": stages})
    return parse_plan(
        {
            "global_batch": global_batch,
            "seq_len": 8,
            "precision": precision,
            "defaults": defaults,
            "groups": told,
        }
    )


def rehearse(
    job: Job,
    plan: Plan,
    *,
    steps: int,
    changes: Mapping[int, Plan] | None = None,
    ranks: Sequence[int] | None = None,
    resume: bool = False,
    after: Callable[[Trainer], Any] = lambda trainer: None,
    membership: type[FixedMembership] = FixedMembership,
    **more: Any,
) -> dict[int, Any]:
    """Train `steps` steps on threads; `changes` are plans proposed before the given steps.

    Returns, by rank, (losses, what `after` returned).
    """
    ranks = sorted(ranks or plan.ranks)
    store = dist.HashStore()
    found: dict[int, Any] = {}
    failed: list[BaseException] = []

    def body(rank: int) -> None:
        trainer = None
        try:
            found_by = membership(store, rank, plan, ranks, timeout_s=30, resume=resume)
            trainer = Trainer(
                job, membership=found_by, **{k: v() if callable(v) else v for k, v in more.items()}
            )
            losses = []
            for step in range(steps):
                if changes and step in changes and rank == ranks[0]:
                    trainer.propose(Command(kind="re-cut", plan=changes[step], reason="asked"))
                losses.append(trainer.train_step().loss)
            found[rank] = (losses, after(trainer))
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            stop_reading(trainer)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    torch.set_num_threads(before)
    if failed:
        raise failed[0]
    return found


def stop_reading(trainer: Trainer | None) -> None:
    """End the thread that reads ahead: it would seed the process's generators while the next test draws."""
    if trainer is not None and trainer._feed is not None:
        trainer._feed.close()


def values(trainer: Trainer) -> dict[tuple[int, str], torch.Tensor]:
    """Every parameter that a rank holds; of a sharded stage the rest is with others."""
    return {
        (layer, name): p.detach().clone()
        for layer, module in trainer.state.modules.items()
        for name, p in module.named_parameters()
        if p.untyped_storage().size()
    }


def gradients(trainer: Trainer) -> dict[tuple[int, str], torch.Tensor]:
    """Every gradient that a rank holds, of the mean loss."""
    return {key: part.clone() for bucket in trainer.state.buckets for key, part in bucket.named()}


def worst_error(found: Mapping[int, Any], reference: Mapping[Any, torch.Tensor]) -> float:
    """The largest difference between any rank's tensor and the reference, in norms of the latter."""
    return max(
        float((tensor - reference[key]).norm() / reference[key].norm().clamp_min(1e-30))
        for _, tensors in found.values()
        for key, tensor in tensors.items()
    )


__all__ = ["Options", "gradients", "plan_of", "rehearse", "stop_reading", "values", "worst_error"]
