"""`foreshard comm buckets MODEL CLUSTER`: which gradient buckets or units of FSDP to set; what they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import numpy as np

from foreshard import quantity
from foreshard.cli.comm.inputs import MEASURED_HELP, measured_collectives
from foreshard.cli.options.answer import give
from foreshard.cli.options.request import micro_batch, precision, seq_len
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Count, FrameworkLabel, Level, Several, Word, Wrap
from foreshard.comm.fusion.rules import DDP_CAP_MIB, MIB
from foreshard.errors import InfeasibleError, SpecError
from foreshard.report.screen import Box, Screen, Table, table
from foreshard.spec.plan import MAX_UNITS

if TYPE_CHECKING:
    from foreshard.advise.request import Request
    from foreshard.cli.comm.inputs import MeasuredCollectives
    from foreshard.comm.fusion.advice import BucketAdvice, FusionPlan
    from foreshard.predict.gradients import BackwardPass

_WIDTH = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_ROWS = 24  # of the list of buckets on a screen; JSON has all
_LITTLE = 0.005  # of a step: less than what runs of one configuration differ by


@verb_command("buckets")
@click.argument("model", metavar="MODEL")
@click.argument("cluster", metavar="CLUSTER")
@click.option("--dp", type=Count(), help="Data-parallel replicas (default: what tp leaves).")
@click.option("--tp", type=Count(), help="Tensor-parallel degree.")
@micro_batch
@click.option("--global-batch", type=Count(), help="Samples per step (default dp x micro-batch).")
@seq_len
@click.option("--recompute", metavar="RULE", help="As predict takes it.")
@click.option(
    "--zero",
    type=Level(),
    default=0,
    help="0 (default): buckets of DDP; 2 or 3: units of FSDP, gathered for each pass or for both.",
)
@click.option(
    "--framework", type=FrameworkLabel(), help="With --zero 2 or 3: whose FSDP (default torchtitan)."
)
@click.option(
    "--prefetch", type=Several(Count(0, MAX_UNITS)), help="Units ahead to compare, as 1,2 (default 0 to 4)."
)
@click.option(
    "--wrap",
    type=Several(Wrap()),
    help="Blocks of a unit to compare, as 1,4,model (default 1, 2, 4, .., model).",
)
@precision
@click.option(
    "--gradients", type=Word(*_WIDTH), help="Type of the gradients that DDP reduces (default fp32)."
)
@click.option("--costs", metavar="FILE", help=MEASURED_HELP)
def command(
    model: str,
    cluster: str,
    zero: int,
    gradients: str | None,
    costs: str | None,
    framework: str | None,
    prefetch: tuple[int, ...] | None,
    wrap: tuple[int | str, ...] | None,
    **choices: Any,
) -> None:
    """Find which buckets of DDP, or units of FSDP, to set for training MODEL on CLUSTER.

    The backward of the last micro-batch makes gradients; a bucket is reduced when it is full. Large buckets
    start late, small ones pay more start-ups. Shown are the best bucket_cap_mb, what it saves against the
    default of 25 MiB, and the exact optimum, which torch 2.13 takes as bucket_cap_mb_list.

    With --zero 2 or 3 weights are gathered unit by unit. More units ahead and larger ones hide more or start
    less often, and take memory: each choice is predicted as a step, and the best that fits is named.

    \b
    foreshard comm buckets gpt2 4x8xa100-sxm-80gb --micro-batch 8
    foreshard comm buckets bert-large 2x8xa100-sxm-40gb@100Gb/s --gradients bf16 --json
    foreshard comm buckets gpt2 8xh100-sxm --costs all_reduce.log
    foreshard comm buckets llama3-8b 4x8xh100-sxm@400Gb/s --zero 3 --seq 4096
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api
    from foreshard.cli.comm import fsdp_units
    from foreshard.comm.fusion.advice import bucket_advice
    from foreshard.comm.fusion.priority import best_partition
    from foreshard.predict.gradients import backward_pass

    where = api.load_cluster(cluster)
    units = {"--framework": framework, "--prefetch": prefetch, "--wrap": wrap}
    _check_beside(zero, units, {"--gradients": gradients, "--costs": costs})
    if zero >= 2:
        choices |= {"zero": zero, "framework": framework or "torchtitan"}
        asked = api.request(api.load_model(model), where, **choices)
        _check_fsdp(asked)
        fits = fsdp_units.answer(asked, prefetch, wrap)
        if not fits:
            click.get_current_context().exit(InfeasibleError.exit_code)
        return
    gradients = gradients or "fp32"
    measured = None if costs is None else measured_collectives(costs, where, "all-reduce")
    if measured is not None:
        choices["costs"] = measured.tables
    request = api.request(api.load_model(model), where, zero=0, **choices)
    made = backward_pass(
        request.model, request.cluster, request.to_plan(), _WIDTH[gradients], costs=request.costs
    )
    if made.num_replicas < 2:
        raise _one_replica(made.num_replicas)
    advice = bucket_advice(made.gradients, made.reduce_s)
    partition, period = best_partition(made.layers, made.reduce_s)
    busy = sum(layer.forward_s + layer.backward_s for layer in made.layers)
    priority = {"partition_bytes": int(partition), "exposed_s": max(0.0, period - busy)}
    notes = [*_notes_of_measured(measured, advice, made), *_notes(request, advice, made)]
    data = _object(request, advice, made, notes) | {"priority": priority}
    give(data, lambda: _screen(request, advice, made, priority, notes))


def _check_beside(zero: int, units: dict[str, Any], buckets: dict[str, Any]) -> None:
    """Refuse options of units with DDP, those of buckets with FSDP, and level 1, which is neither."""
    if zero == 1:
        what = "zero 1 has neither buckets of DDP nor units of FSDP"
        rule = "Level 0 is DDP, 2 and 3 are FSDP"
        fix = "Give 0, 2 or 3; foreshard predict --buckets auto takes level 1"
        raise SpecError(what, key="--zero", value=zero, rule=rule, fix=fix)
    others, fix = (buckets, "Leave it out") if zero else (units, "Add --zero 3, or leave it out")
    for key, value in others.items():
        if value is not None:
            rule = "Weights are gathered in units at level 2 and 3, gradients reduced in buckets at 0"
            raise SpecError(f"{key} with --zero {zero}", key=key, value=value, rule=rule, fix=fix)


def _one_replica(replicas: int) -> SpecError:
    return SpecError(
        "one replica reduces nothing",
        key="--dp",
        value=replicas,
        rule="Gradients are reduced over at least two replicas",
        fix="Give --dp 2 or more, or a cluster of more devices",
    )


def _check_fsdp(request: Request) -> None:
    """Refuse frameworks without FSDP of PyTorch, and a replica by itself."""
    framework = request.framework
    if framework.fsdp not in ("fsdp1", "fsdp2") or framework.memory == "xla":
        what = f"{framework.label} has no units of FSDP to choose"
        rule = "Units are chosen of PyTorch's FSDP"
        fix = "Use torchtitan or hf (FSDP2), composer or fms-fsdp (FSDP1)"
        raise SpecError(what, key="--framework", value=framework.label, rule=rule, fix=fix)
    replicas = sum(group.stages[0].inner_dp for group in request.to_plan().groups)
    if replicas < 2:
        raise _one_replica(replicas)


def _cap(plan: FusionPlan) -> int:
    """Return what bucket_cap_mb is under a plan of DDP."""
    return DDP_CAP_MIB if plan.cap_mib is None else plan.cap_mib


def _object(request: Request, advice: BucketAdvice, made: BackwardPass, notes: list[str]) -> dict[str, Any]:
    rules = [advice.default, advice.best_cap, advice.optimum, *advice.others]
    return {
        "schema_version": 1,
        "model": request.model.name,
        "cluster": request.cluster.name,
        "dp": made.num_replicas,
        "gradient_bytes": int(made.gradients.num_bytes.sum()),
        "backward_s": made.gradients.backward_s,
        "bucket_cap_mb": _cap(advice.best_cap),
        "exposed_s": advice.best_cap.exposed_s,
        "default_exposed_s": advice.default.exposed_s,
        "saved_s": advice.saved_s,
        "saved_fraction": _saved(advice, made),
        "buckets": _buckets(advice.best_cap, made),
        "optimum": {
            "exposed_s": advice.optimum.exposed_s,
            "bucket_cap_mb_list": [bucket.num_bytes / MIB for bucket in advice.optimum.times],
        },
        "rules": [
            {"rule": plan.rule, "buckets": len(plan.times), "exposed_s": plan.exposed_s}
            for plan in dict.fromkeys(rules)
        ],
        "notes": notes,
    }


def _saved(advice: BucketAdvice, made: BackwardPass) -> float:
    """Return what the best cap saves of the last backward with its reduction."""
    return advice.saved_s / (made.gradients.backward_s + advice.default.exposed_s)


def _buckets(plan: FusionPlan, made: BackwardPass) -> list[dict[str, Any]]:
    names = made.gradients.names
    return [
        {
            "bytes": int(bucket.num_bytes),
            "first": names[bucket.start],
            "last": names[bucket.stop - 1],
            "tensors": bucket.stop - bucket.start,
            "ready_s": bucket.ready_s,
            "start_s": bucket.start_s,
            "end_s": bucket.end_s,
        }
        for bucket in plan.times
    ]


def _notes_of_measured(
    measured: MeasuredCollectives | None, advice: BucketAdvice, made: BackwardPass
) -> list[str]:
    """Return which reductions of the buckets shown a file of measured times has."""
    if measured is None:
        return []
    sizes = np.array([bucket.num_bytes for bucket in advice.best_cap.times])
    covered = int(np.count_nonzero(made.is_measured(sizes)))
    if not covered:
        covers = "a table is of devices, collectives and ranks of one domain, and of its sizes"
        return [
            f"{measured.path} has the all-reduce of no bucket over {made.num_replicas} replicas: {covers}. "
            "Reductions take the time of the closed form."
        ]
    slower = quantity.percent(made.slowdown - 1.0)
    notes = [
        f"Of {len(sizes)} buckets, {measured.path} has the all-reduce of {covered}, which inside a training "
        f"step takes {slower} longer. Other sizes take the time of the closed form times what it is off by "
        "at the nearest measured size."
    ]
    if not measured.is_named:
        notes.append(f"{measured.path} does not say which collective ran: it is taken to be an all-reduce.")
    return notes


def _notes(request: Request, advice: BucketAdvice, made: BackwardPass) -> list[str]:
    """Return what the answer rests on, in sentences."""
    notes = [
        "Times are those of the last backward of a step; gradients of a layer are spread over it by size.",
        "A reduction does not slow the backward beside it here.",
    ]
    if advice.best_cap is advice.default:
        notes.insert(0, "No cap is better than the default: leave bucket_cap_mb unset.")
    elif _saved(advice, made) < _LITTLE:
        notes.insert(0, "The saving is less than two runs differ by: the default is as good.")
    if not request.predict().memory.fits:
        notes.append("This run does not fit the memory of its devices: DDP keeps whole replicas.")
    return notes


def _screen(
    request: Request, advice: BucketAdvice, made: BackwardPass, priority: dict[str, Any], notes: list[str]
) -> Screen:
    size = quantity.size(float(made.gradients.num_bytes.sum()))
    names = f"{request.model.name} on {request.cluster.name}"
    header = f"{names}: {size} of gradients over {made.num_replicas} replicas"
    share = quantity.percent(_saved(advice, made))
    saved = f"{quantity.seconds(advice.saved_s)}, {share} of backward and reduction"
    boxes = (
        Box(title="bucket_cap_mb", value=str(_cap(advice.best_cap)), note="MiB, for DistributedDataParallel"),
        Box(title="saves", value=saved, note="against the default of 25"),
        Box(title="backward", value=quantity.seconds(made.gradients.backward_s)),
        Box(title="exposed after it", value=quantity.seconds(advice.best_cap.exposed_s)),
    )
    return Screen(
        header=(header,),
        boxes=boxes,
        tables=(_rules(advice, priority), _listing(advice.best_cap, made)),
        notes=tuple(notes),
    )


def _rules(advice: BucketAdvice, priority: dict[str, Any]) -> Table:
    plans = dict.fromkeys((advice.default, advice.best_cap, advice.optimum, *advice.others))
    rows: list[tuple[object, ...]] = [
        (
            "ddp, default" if plan is advice.default else plan.rule,
            len(plan.times),
            quantity.size(max(bucket.num_bytes for bucket in plan.times)),
            quantity.seconds(plan.exposed_s),
        )
        for plan in plans
    ]
    largest = max(bucket.num_bytes for bucket in advice.others[-1].times)
    whole = priority["partition_bytes"] >= largest
    cut = "whole gradients" if whole else f"{quantity.size(priority['partition_bytes'])} partitions"
    rows.append((f"priority, {cut}", None, None, quantity.seconds(priority["exposed_s"])))
    title = "Exposed after the backward (by priority: in the backward and the next forward)"
    return table(title, ("rule", ">buckets", ">largest", ">exposed"), rows)


def _listing(plan: FusionPlan, made: BackwardPass) -> Table:
    """Return the buckets in order, in the middle shortened."""
    names = made.gradients.names
    rows: list[tuple[object, ...]] = [
        (
            number,
            quantity.size(bucket.num_bytes),
            f"{names[bucket.start]} .. {names[bucket.stop - 1]}",
            quantity.seconds(bucket.ready_s),
            quantity.seconds(bucket.start_s),
            quantity.seconds(bucket.end_s),
        )
        for number, bucket in enumerate(plan.times)
    ]
    if len(rows) > _ROWS:
        left = f"... {len(rows) - _ROWS} more ..."
        rows = [*rows[: _ROWS // 2], ("", "", left, "", "", ""), *rows[-(_ROWS // 2) :]]
    columns = (">#", ">size", "gradients", ">ready", ">start", ">end")
    return table("Buckets in the order of the backward", columns, rows)
