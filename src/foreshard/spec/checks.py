"""Rules that join a plan with its model and cluster: one function per rule."""

from __future__ import annotations

from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan

MODELLED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def check_plan(plan: Plan, model: Model, cluster: Cluster, *, file: str | None = None) -> None:
    """Raise SpecError at the first rule that the plan breaks on this model and cluster."""
    for rule in (
        _ranks_exist_once,
        _samples_once,
        _layers_once,
        _degrees_fit_ranks,
        _degrees_divide_model,
        _chunks_match,
        _schedules_known,
        _precision_supported,
        _sequence_divides,
        _one_vendor,
    ):
        rule(plan, model, cluster, file)


def _ranks_exist_once(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    seen: set[int] = set()
    for rank in plan.ranks:
        if rank >= cluster.num_devices:
            raise SpecError(
                f"rank {rank} is used, the cluster has {cluster.num_devices} devices",
                file=file, key="groups.stages.ranks", value=rank,
                rule=f"ranks go from 0 to {cluster.num_devices - 1}",
            )  # fmt: skip
        if rank in seen:
            raise SpecError(
                f"rank {rank} is used twice", file=file, key="groups.stages.ranks", value=rank,
                rule="every rank is at most in one place",
            )  # fmt: skip
        seen.add(rank)


def _samples_once(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    total = sum(group.share for group in plan.groups)
    if total != plan.global_batch:
        raise SpecError(
            f"shares sum to {total}, the global batch is {plan.global_batch}",
            file=file, key="groups.share", value=total, rule="every sample is taken once per step",
        )  # fmt: skip
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            if stage.rank_shares is None:
                continue
            key = f"groups[{g}].stages[{s}].rank_shares"
            if len(stage.rank_shares) != stage.inner_dp or sum(stage.rank_shares) != group.micro_batch:
                raise SpecError(
                    f"{list(stage.rank_shares)} does not split micro_batch {group.micro_batch} "
                    f"over {stage.inner_dp} ranks",
                    file=file, key=key, value=list(stage.rank_shares),
                    rule="rank_shares has one entry per inner data-parallel rank and sums to micro_batch",
                )  # fmt: skip


def _layers_once(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    last = model.num_layers + 2
    for g, group in enumerate(plan.groups):
        spans = [
            group.stages[s].layers[c]
            for c in range(max(len(stage.layers) for stage in group.stages))
            for s in range(len(group.stages))
            if c < len(group.stages[s].layers)
        ]
        reached = 0
        for start, stop in spans:
            if start != reached:
                what = f"layers {reached} to {start} are not covered" if start > reached else (
                    f"layer {start} is assigned twice or out of order"
                )
                raise SpecError(
                    what, file=file, key=f"groups[{g}].stages.layers", value=[start, stop],
                    rule="stages cover layers in order, chunk by chunk, each exactly once",
                )  # fmt: skip
            reached = stop
        if reached != last:
            raise SpecError(
                f"layers end at {reached}, {model.name} has layers 0 to {last - 1} "
                f"(embedding, {model.num_layers} blocks, head)",
                file=file, key=f"groups[{g}].stages.layers", value=reached,
                rule="stages cover every layer exactly once",
            )  # fmt: skip


def _degrees_fit_ranks(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            key = f"groups[{g}].stages[{s}]"
            if len(stage.ranks) % (stage.tp * stage.cp):
                raise SpecError(
                    f"tp {stage.tp} x cp {stage.cp} does not divide {len(stage.ranks)} ranks",
                    file=file, key=key, value=len(stage.ranks), rule="len(ranks) = tp x cp x inner dp",
                )  # fmt: skip
            if len(stage.ranks) % (stage.ep * stage.etp):
                raise SpecError(
                    f"ep {stage.ep} x etp {stage.etp} does not divide {len(stage.ranks)} ranks",
                    file=file, key=key, value=stage.ep, rule="etp x ep divides tp x cp x inner dp",
                )  # fmt: skip
            if stage.shard_size is not None and (stage.inner_dp * stage.cp) % stage.shard_size:
                raise SpecError(
                    f"shard_size {stage.shard_size} does not divide {stage.inner_dp * stage.cp} ranks",
                    file=file, key=f"{key}.shard_size", value=stage.shard_size,
                    rule="a shard group divides the data-parallel ranks",
                )  # fmt: skip


def _degrees_divide_model(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    kinds = [block for block, _ in model.block_kinds()]
    for group in plan.groups:
        for stage in group.stages:
            for block in kinds:
                if block.num_heads % stage.tp:
                    raise SpecError(
                        f"tp {stage.tp} does not divide {block.num_heads} attention heads",
                        file=file, key="--tp", value=stage.tp, rule="tp divides the attention heads",
                        fix=f"use a divisor of {block.num_heads}",
                    )  # fmt: skip
                if block.num_experts and block.num_experts % stage.ep:
                    raise SpecError(
                        f"ep {stage.ep} does not divide {block.num_experts} experts",
                        file=file, key="--ep", value=stage.ep, rule="ep divides the number of experts",
                        fix=f"use a divisor of {block.num_experts}",
                    )  # fmt: skip
            if stage.ep > 1 and not any(block.num_experts for block in kinds):
                raise SpecError(
                    f"ep {stage.ep} for {model.name}, which has no experts",
                    file=file, key="--ep", value=stage.ep, rule="ep > 1 needs a mixture-of-experts model",
                    fix="leave out ep",
                )  # fmt: skip


def _chunks_match(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    for g, group in enumerate(plan.groups):
        chunks = {len(stage.layers) for stage in group.stages}
        if len(chunks) > 1:
            raise SpecError(
                "stages of one group differ in virtual stages", file=file, key=f"groups[{g}].stages.layers",
                value=sorted(chunks), rule="every stage of a group has the same number of layer intervals",
            )  # fmt: skip
        if group.num_chunks > 1 and group.schedule != "interleaved":
            raise SpecError(
                f"{group.num_chunks} virtual stages with schedule {group.schedule}",
                file=file, key=f"groups[{g}].schedule", value=group.schedule,
                rule="only the interleaved schedule has virtual stages", fix="use interleaved",
            )  # fmt: skip
        _interleaving_divides(group, g, file)


def _interleaving_divides(group: Group, g: int, file: str | None) -> None:
    p, m = len(group.stages), group.num_micro_batches
    if group.schedule == "interleaved" and group.num_chunks > 1 and p > 1 and m % p:
        raise SpecError(
            f"{m} micro-batches on {p} interleaved stages", file=file, key=f"groups[{g}].share", value=m,
            rule="interleaving takes micro-batches in groups of pp, so pp divides their number",
            fix=f"use {max(1, m // p) * p} or {(m // p + 1) * p} micro-batches, or vpp 1",
        )  # fmt: skip


def _schedules_known(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    for g, group in enumerate(plan.groups):
        if group.schedule not in MODELLED_SCHEDULES:
            raise SpecError(
                f"schedule {group.schedule} is not modelled yet", file=file, key=f"groups[{g}].schedule",
                value=group.schedule, rule=f"modelled are {', '.join(MODELLED_SCHEDULES)}",
            )  # fmt: skip


def _precision_supported(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    for device in {cluster.device_of(rank).name: cluster.device_of(rank) for rank in plan.ranks}.values():
        device.peak(plan.precision)


def _sequence_divides(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    for group in plan.groups:
        for stage in group.stages:
            if plan.seq_len % stage.cp or (group.sp and plan.seq_len % (stage.cp * stage.tp)):
                raise SpecError(
                    f"sequence {plan.seq_len} does not divide over cp {stage.cp}"
                    + (f" x tp {stage.tp}" if group.sp else ""),
                    file=file, key="--seq", value=plan.seq_len, rule="cp (times tp with sp) divides the sequence",
                )  # fmt: skip


def _one_vendor(plan: Plan, model: Model, cluster: Cluster, file: str | None) -> None:
    vendors = {cluster.device_of(rank).vendor for rank in plan.ranks}
    if len(vendors) > 1:
        raise SpecError(
            f"devices of {' and '.join(sorted(vendors))} in one plan", file=file, key="groups.stages.ranks",
            value=", ".join(sorted(vendors)), rule="no collective library joins devices of two vendors",
            fix="use the devices of one vendor",
        )  # fmt: skip
