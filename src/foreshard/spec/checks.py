"""Rules that join a plan with its model and cluster: one function per rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foreshard.errors import SpecError
from foreshard.spec.block import Block
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import one_of, whole
from foreshard.spec.layout import divisors
from foreshard.spec.model import Model
from foreshard.spec.plan import (
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    Group,
    Plan,
    Stage,
    check_recompute,
)
from foreshard.units import number_of

MODELLED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def check_plan(plan: Plan, model: Model, cluster: Cluster, *, file: str | None = None) -> None:
    """Raise SpecError at the first rule that the plan breaks on this model and cluster.

    Parameters
    ----------
    plan, model, cluster
    file : str, optional
        Where the plan was read; the error then names the key in the file, else the flag.
    """
    case = _Case(plan=plan, model=model, cluster=cluster, file=file)
    for rule in (
        _options_known,
        _ranks_exist,
        _ranks_once,
        _samples_once,
        _rank_shares_split,
        _layers_in_order,
        _layers_of_model,
        _degrees_fit_ranks,
        _shards_divide,
        _tensor_divides_model,
        _experts_divide_model,
        _chunks_match,
        _interleaving_divides,
        _precision_supported,
        _sequence_divides,
        _one_vendor,
    ):
        rule(case)


def check_cut(plan: Plan, model: Model, *, file: str | None = None) -> None:
    """Raise SpecError where the plan does not cut this model, whatever the cluster."""
    case = _Case(plan=plan, model=model, cluster=Cluster(name="", nodes=()), file=file)
    for rule in (_layers_in_order, _layers_of_model, _tensor_divides_model, _experts_divide_model):
        rule(case)


def check_structure(plan: Plan, *, file: str | None = None) -> None:
    """Raise SpecError at the first rule that the plan breaks whatever the model and cluster are."""
    case = _PlanCase(plan=plan, file=file)
    for rule in (
        _ranks_once,
        _samples_once,
        _rank_shares_split,
        _chunks_match,
        _layers_in_order,
        _layers_agree,
    ):
        rule(case)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanCase:
    """A plan, and how to name what breaks a rule."""

    plan: Plan
    file: str | None

    def stages(self) -> Iterator[tuple[str, Group, Stage]]:
        """Yield every stage with its key in the plan file."""
        for g, group in enumerate(self.plan.groups):
            for s, stage in enumerate(group.stages):
                yield f"groups[{g}].stages[{s}]", group, stage

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yield every group with its key in the plan file."""
        for g, group in enumerate(self.plan.groups):
            yield f"groups[{g}]", group

    def key(self, where: str, name: str, flag: str | None = None) -> str:
        """Return the flag where the plan came from flags, else the key in the file."""
        if self.file is None:
            return f"--{flag or name}"
        return f"{where}.{name}" if where else name

    def error(self, what: str, key: str, value: object, rule: str, fix: str) -> SpecError:
        """Return the error of a broken rule."""
        return SpecError(what, file=self.file, key=key, value=value, rule=rule, fix=fix)

    def must_divide(self, where: str, name: str, degree: int, count: int, what: str) -> None:
        """Raise unless a degree of a stage divides a count of the model."""
        if count % degree:
            raise self.error(
                f"{name} {degree} does not divide {count} {what}",
                self.key(where, name),
                degree,
                f"{name} divides the number of {what}",
                f"Use a divisor of {count}: {divisors(count)}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case(_PlanCase):
    """A plan and what it must fit."""

    model: Model
    cluster: Cluster

    def kinds(self) -> list[Block]:
        """Return the distinct blocks of the model."""
        return [block for block, _ in self.model.block_kinds()]


def _options_known(case: _Case) -> None:
    plan, file = case.plan, case.file
    one_of(plan.precision, PRECISIONS, key=case.key("", "precision", "dtype"), file=file)
    one_of(plan.optimizer, OPTIMIZERS, key=case.key("", "optimizer"), file=file)
    for where, group in case.groups():
        one_of(group.schedule, SCHEDULES, key=case.key(where, "schedule"), file=file)
        if group.schedule not in MODELLED_SCHEDULES:
            raise case.error(
                f"schedule {group.schedule} is not modelled yet",
                case.key(where, "schedule"),
                group.schedule,
                f"Modelled are {', '.join(MODELLED_SCHEDULES)}",
                f"Use {MODELLED_SCHEDULES[-1]}",
            )
        whole(group.micro_batch, key=case.key(where, "micro_batch", "micro-batch"), file=file)
    for where, _, stage in case.stages():
        whole(stage.zero, 0, 3, key=case.key(where, "zero"), file=file)
        one_of(stage.offload, OFFLOADS, key=case.key(where, "offload"), file=file)
        check_recompute(stage.recompute, key=case.key(where, "recompute"), file=file)


def _ranks_exist(case: _Case) -> None:
    count = case.cluster.num_devices
    for where, _, stage in case.stages():
        for rank in stage.ranks:
            if not 0 <= rank < count:
                raise case.error(
                    f"rank {rank} is used, the cluster has {number_of(count, 'device')}",
                    f"{where}.ranks",
                    rank,
                    f"Ranks go from 0 to {count - 1}",
                    f"Name ranks below {count}, or use a larger cluster",
                )


def _ranks_once(case: _PlanCase) -> None:
    seen: dict[int, str] = {}
    for where, _, stage in case.stages():
        for rank in stage.ranks:
            if rank in seen:
                raise case.error(
                    f"rank {rank} is used twice, first in {seen[rank]}",
                    f"{where}.ranks",
                    rank,
                    "Every rank is at most in one place",
                    f"Leave rank {rank} out of one of the two",
                )
            seen[rank] = where


def _samples_once(case: _PlanCase) -> None:
    total = sum(group.share for group in case.plan.groups)
    if total != case.plan.global_batch:
        raise case.error(
            f"shares sum to {total}, the global batch is {case.plan.global_batch}",
            "groups.share",
            total,
            "Every sample is taken once per step",
            f"Make the shares sum to {case.plan.global_batch}",
        )


def _rank_shares_split(case: _PlanCase) -> None:
    for where, group, stage in case.stages():
        shares = stage.rank_shares
        if shares is None:
            continue
        if len(shares) * stage.tp * stage.cp != len(stage.ranks) or sum(shares) != group.micro_batch:
            raise case.error(
                f"{list(shares)} does not split micro_batch {group.micro_batch} over {stage.inner_dp} ranks",
                f"{where}.rank_shares",
                ", ".join(map(str, shares)),
                "rank_shares has one entry per inner data-parallel rank and sums to micro_batch",
                f"Give {stage.inner_dp} numbers that sum to {group.micro_batch}",
            )


_LAYERS_RULE = "Stages cover every layer in order, chunk by chunk, each exactly once"


def _layers_in_order(case: _PlanCase) -> None:
    rule = _LAYERS_RULE
    for where, group in case.groups():
        reached = 0
        for s, (start, stop) in _spans(group):
            key = f"{where}.stages[{s}].layers"
            if start != reached:
                gap = f"layers {reached} to {start - 1} are not covered"
                again = f"layer {start} is assigned twice or out of order"
                raise case.error(
                    gap if start > reached else again,
                    key,
                    f"[{start}, {stop}]",
                    rule,
                    f"Start the interval at {reached}",
                )
            reached = stop


def _layers_of_model(case: _Case) -> None:
    last = case.model.num_layers + 2
    for where, group in case.groups():
        reached = _last_layer(group)
        if reached != last:
            raise case.error(
                f"layers end at {reached}, {case.model.name} has layers 0 to {last - 1} "
                f"(embedding, {case.model.num_layers} blocks, head)",
                f"{where}.stages.layers",
                reached,
                _LAYERS_RULE,
                f"End the last interval at {last}",
            )


def _layers_agree(case: _PlanCase) -> None:
    last = _last_layer(case.plan.groups[0])
    for where, group in case.groups():
        reached = _last_layer(group)
        if reached != last:
            raise case.error(
                f"layers end at {reached}, those of groups[0] at {last}",
                f"{where}.stages.layers",
                reached,
                "Every group holds every layer",
                f"End the last interval at {last}",
            )


def _last_layer(group: Group) -> int:
    return max(stop for _, (_, stop) in _spans(group))


def _spans(group: Group) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (stage, interval) in the order in which a sample passes them."""
    for chunk in range(max(len(stage.layers) for stage in group.stages)):
        for s, stage in enumerate(group.stages):
            if chunk < len(stage.layers):
                yield s, stage.layers[chunk]


def _degrees_fit_ranks(case: _Case) -> None:
    for where, _, stage in case.stages():
        count = len(stage.ranks)
        if count % (stage.tp * stage.cp):
            raise case.error(
                f"tp {stage.tp} x cp {stage.cp} does not divide {count} ranks",
                case.key(where, "tp"),
                stage.tp,
                "len(ranks) = tp x cp x inner dp",
                f"Choose tp x cp that divides {count}",
            )
        if count % (stage.ep * stage.etp):
            raise case.error(
                f"ep {stage.ep} x etp {stage.etp} does not divide {count} ranks",
                case.key(where, "ep"),
                stage.ep,
                "etp x ep divides tp x cp x inner dp",
                f"Choose ep x etp that divides {count}",
            )


def _shards_divide(case: _Case) -> None:
    for where, _, stage in case.stages():
        if stage.shard_size is None:
            continue
        key, replicas = case.key(where, "shard_size", "shard-size"), stage.inner_dp * stage.cp
        whole(stage.shard_size, key=key, name="shard_size", file=case.file)
        if replicas % stage.shard_size:
            raise case.error(
                f"shard_size {stage.shard_size} does not divide {replicas} ranks",
                key,
                stage.shard_size,
                "A shard group divides the data-parallel ranks, inner dp x cp",
                f"Use a divisor of {replicas}",
            )


def _tensor_divides_model(case: _Case) -> None:
    for where, _, stage in case.stages():
        for block in case.kinds():
            case.must_divide(where, "tp", stage.tp, block.num_heads, "attention heads")
            case.must_divide(where, "tp", stage.tp, block.ffn, "feed-forward channels")
            case.must_divide(where, "tp", stage.tp, block.shared_ffn, "channels of shared experts")


def _experts_divide_model(case: _Case) -> None:
    kinds = [block for block in case.kinds() if block.num_experts]
    for where, _, stage in case.stages():
        for name, degree in (("ep", stage.ep), ("etp", stage.etp)):
            if degree > 1 and not kinds:
                raise case.error(
                    f"{name} {degree} for {case.model.name}, which has no experts",
                    case.key(where, name),
                    degree,
                    f"{name} > 1 needs a mixture-of-experts model",
                    f"Leave out {name}",
                )
        for block in kinds:
            case.must_divide(where, "ep", stage.ep, block.num_experts, "experts")
            case.must_divide(where, "etp", stage.etp, block.expert_ffn, "channels of an expert")


def _chunks_match(case: _PlanCase) -> None:
    for where, group in case.groups():
        chunks = sorted({len(stage.layers) for stage in group.stages})
        if len(chunks) > 1:
            raise case.error(
                "stages of one group differ in virtual stages",
                f"{where}.stages.layers",
                str(chunks),
                "Every stage of a group has the same number of layer intervals",
                f"Give each stage {chunks[-1]} intervals",
            )
        if group.num_chunks > 1 and group.schedule != "interleaved":
            raise case.error(
                f"{group.num_chunks} virtual stages with schedule {group.schedule}",
                case.key(where, "schedule"),
                group.schedule,
                "Only the interleaved schedule has virtual stages",
                "Use interleaved",
            )


def _interleaving_divides(case: _Case) -> None:
    for where, group in case.groups():
        p, m = len(group.stages), group.num_micro_batches
        if group.num_chunks > 1 and p > 1 and m % p:
            raise case.error(
                f"{m} micro-batches on {p} interleaved stages",
                case.key(where, "share", "global-batch"),
                m,
                "Interleaving takes micro-batches in groups of pp, so pp divides their number",
                f"Use {max(1, m // p) * p} or {(m // p + 1) * p} micro-batches, or vpp 1",
            )


def _precision_supported(case: _Case) -> None:
    precision = case.plan.precision
    for device in {case.cluster.device_of(rank) for rank in case.plan.ranks}:
        if not device.supports(precision):
            has = [name for name in PRECISIONS if device.supports(name)]
            raise case.error(
                f"{device.name} has no {precision}",
                case.key("", "precision", "dtype"),
                precision,
                "The device computes matrix products of the precision in hardware",
                f"Use one of: {', '.join(has)}" if has else "Use another device",
            )


def _sequence_divides(case: _Case) -> None:
    seq_len = case.plan.seq_len
    for _, group, stage in case.stages():
        parts = stage.cp * (stage.tp if group.sp else 1)
        if seq_len % parts:
            what = f"cp {stage.cp}" + (f" x tp {stage.tp}" if group.sp else "")
            raise case.error(
                f"sequence {seq_len} does not divide over {what}",
                case.key("", "seq_len", "seq"),
                seq_len,
                "cp (times tp with sp) divides the sequence",
                f"Use a multiple of {parts}",
            )


def _one_vendor(case: _Case) -> None:
    vendors = sorted({case.cluster.device_of(rank).vendor for rank in case.plan.ranks})
    if len(vendors) > 1:
        raise case.error(
            f"devices of {' and '.join(vendors)} in one plan",
            "groups.stages.ranks",
            ", ".join(vendors),
            "No collective library joins devices of two vendors",
            "Use the devices of one vendor",
        )
