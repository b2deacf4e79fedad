"""A stated run on a cluster as a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreshard.advise.request import Request, flag_of
from foreshard.catalog.frameworks import load_framework
from foreshard.errors import SpecError
from foreshard.interop.importers.stated_run import StatedRun
from foreshard.spec.checks import check_plan
from foreshard.spec.cluster import Cluster
from foreshard.spec.degrees import spans_of
from foreshard.spec.model import Model
from foreshard.spec.plan import TURNING, Plan


def plan_of(
    run: StatedRun, model: Model, cluster: Cluster, stated: Mapping[str, Any], file: str
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of a run, and notes on what was assumed.

    Parameters
    ----------
    run : StatedRun
    model, cluster
    stated : Mapping[str, Any]
        Degrees and options that the caller states; they replace those of the file.
    file : str
        Named in errors.

    Raises
    ------
    SpecError
        When the run does not fit the model or the cluster.
    """
    choices = {**run.choices, **stated}
    choices["framework"] = load_framework(choices["framework"]).label  # a plan is of one release
    if not any(block.shared_ffn for block, _ in model.block_kinds()):
        choices.pop("shared_overlap", None)  # Megatron takes the flag, which then hides nothing
    if "precision" in stated and stated["precision"] != "fp8":
        choices.pop("narrow_gather", None)  # a switch of the precision that was replaced
    _same_sizes(run, model, cluster, file)
    choices |= _batches(run, choices, stated, cluster, file)
    if run.shard_instances > 1 and "shard_size" not in choices:
        choices["shard_size"] = _replicas(choices, cluster) // run.shard_instances
    try:
        plan = Request(model=model, cluster=cluster, choices=choices).to_plan()
        if run.block_counts is not None and not {"pp", "vpp"} & set(stated):
            plan = _recut(plan, run.block_counts, model, file)
        check_plan(plan, model, cluster)
    except SpecError as error:
        _name_keys(error, {name: key for name, key in run.keys.items() if name not in stated}, file)
        raise
    missing = [name for name in run.unstated if name not in choices]
    if missing:
        flags = ", ".join(map(flag_of, missing))
        return plan, (f"The file does not state {flags}: defaults of predict were taken.", *run.notes)
    return plan, run.notes


def _name_keys(error: SpecError, keys: Mapping[str, str], file: str) -> None:
    """Let an error about options that the file states name the file and its keys."""
    flags = {flag_of(name): key for name, key in keys.items()}
    found = [flags[flag] for flag in (error.key or "").split("/") if flag in flags]
    if error.file is None and found:
        error.file, error.key = file, "/".join(found)


def _same_sizes(run: StatedRun, model: Model, cluster: Cluster, file: str) -> None:
    if run.num_blocks not in (None, model.num_layers):
        what = f"the file trains {run.num_blocks} blocks, {model.name} has {model.num_layers}"
        fix = "Give the model that the file trains"
        raise SpecError(what, file=file, key="MODEL", value=model.name, rule="Both name one model", fix=fix)
    if run.num_devices not in (None, cluster.num_devices):
        what = f"the file runs on {run.num_devices} devices, the cluster has {cluster.num_devices}"
        fix = "Give the cluster that the file runs on"
        raise SpecError(
            what, file=file, key="CLUSTER", value=cluster.num_devices, rule="Both name one cluster", fix=fix
        )


def _replicas(choices: Mapping[str, Any], cluster: Cluster) -> int:
    """Return the ranks that hold the same part of the model: dp x cp."""
    return int(cluster.num_devices // (choices.get("tp", 1) * choices.get("pp", 1)))


def _batches(
    run: StatedRun, choices: Mapping[str, Any], stated: Mapping[str, Any], cluster: Cluster, file: str
) -> dict[str, int]:
    """Return micro-batch and global batch, each from the other where the file states passes."""
    passes = run.passes
    if passes is None or {"micro_batch", "global_batch"} <= set(stated):
        return {}
    ranks = _replicas(choices, cluster) // choices.get("cp", 1)
    micro, total = choices.get("micro_batch"), choices.get("global_batch")
    if micro is None and total is not None and total % (passes * ranks) == 0:
        return {"micro_batch": total // (passes * ranks)}
    if total is None:
        return {"global_batch": (micro or 1) * passes * ranks}
    if total == (micro or 0) * passes * ranks or set(stated) & {"micro_batch", "global_batch"}:
        return {}
    what = (
        f"{micro or '?'} samples x {passes} passes x {ranks} data-parallel ranks are not a batch of {total}"
    )
    fix = "Give the cluster that the file runs on, or --micro-batch and --global-batch"
    rule = "A global batch is micro-batch x accumulation steps x data-parallel ranks"
    raise SpecError(what, file=file, key="CLUSTER", value=total, rule=rule, fix=fix)


def _recut(plan: Plan, counts: tuple[int, ...], model: Model, file: str) -> Plan:
    if sum(counts) != model.num_layers:
        what = f"the parts of the pipeline hold {sum(counts)} blocks, {model.name} has {model.num_layers}"
        fix = "Give the model that the file trains"
        raise SpecError(what, file=file, key="MODEL", value=model.name, rule="Every block once", fix=fix)
    (group,) = plan.groups
    spans = spans_of(counts, len(group.stages), turning=group.schedule in TURNING)
    stages = tuple(replace(stage, layers=tuple(cut)) for stage, cut in zip(group.stages, spans, strict=True))
    return replace(plan, groups=(replace(group, stages=stages),))
