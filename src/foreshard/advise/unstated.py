"""Defaults that a request took, as sentences for the assumptions of its prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from foreshard.spec.plan import Plan

if TYPE_CHECKING:
    from foreshard.advise.request import Request


SPLIT_EVENLY = (
    "the cluster mixes devices and flags split the work evenly: every stage and rank takes the same "
    "share, the fast wait for the slow; a plan file (--plan) can give groups their own shares"
)


def unstated(request: Request, plan: Plan) -> tuple[str, ...]:
    """Return the defaults that shaped the plan, and what its options leave as it is."""
    return (*_defaults(request, plan), *_left_alone(request, plan))


def _defaults(request: Request, plan: Plan) -> Iterator[str]:
    """Yield the defaults of a run stated by flags; a plan file states everything."""
    if request.plan is not None:
        return
    choices = request.choices
    if choices.get("seq_len") is None:
        yield f"sequence {plan.seq_len}, not stated (--seq): that of the model"
    if choices.get("global_batch") is None:
        yield f"global batch {plan.global_batch}, not stated (--global-batch): dp x pp in whole micro-batches"
    if choices.get("zero") is None:
        level = plan.groups[0].stages[0].zero
        yield f"zero {level}, not stated (--zero): the default of {plan.framework}"
    if len({node.device.name for node in request.cluster.nodes}) > 1:
        yield SPLIT_EVENLY


def _left_alone(request: Request, plan: Plan) -> Iterator[str]:
    if not any(block.num_experts for block, _ in request.model.block_kinds()):
        return
    if any(stage.tp > 1 and stage.etp == 1 for group in plan.groups for stage in group.stages):
        yield "experts are not cut over tp (etp 1)"
